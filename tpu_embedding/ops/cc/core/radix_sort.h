// Stable sort of entries by row: least significant digit first.

#ifndef TPU_EMBEDDING_OPS_CC_CORE_RADIX_SORT_H_
#define TPU_EMBEDDING_OPS_CC_CORE_RADIX_SORT_H_

#include <algorithm>
#include <cstdint>
#include <utility>
#include <vector>

#include "core/buffer.h"

namespace tpu_embedding {

template <class Word>
struct KeyedEntry {
  Word key;
  Word entry;
};

// Eleven bits: 2048 counters stay in the first-level cache, and two passes
// cover four million rows. Fewer where the passes share the bits of the key:
// three passes over 26 bits take nine each.
constexpr int kMaxRadixBits = 11;

inline int BitsBelow(uint64_t bound) {
  return bound <= 1 ? 0 : 64 - __builtin_clzll(bound - 1);
}

// Sorts by `key`, all keys being below `bound`; equal keys keep their order.
template <class Word>
void RadixSort(uint64_t bound, Buffer<KeyedEntry<Word>>* entries) {
  const int64_t size = entries->size();
  if (size < 2) return;
  Buffer<KeyedEntry<Word>> scratch(size);
  const int bits = BitsBelow(bound);
  const int passes = (bits + kMaxRadixBits - 1) / kMaxRadixBits;
  const int width = passes ? (bits + passes - 1) / passes : 0;
  const uint64_t mask = (uint64_t{1} << width) - 1;
  std::vector<int64_t> place(size_t{1} << width);
  for (int pass = 0; pass < passes; ++pass) {
    std::fill(place.begin(), place.end(), 0);
    const auto digit = [shift = pass * width, mask](const auto& entry) {
      return static_cast<int64_t>((uint64_t{entry.key} >> shift) & mask);
    };
    for (int64_t i = 0; i < size; ++i) ++place[digit((*entries)[i])];
    int64_t next = 0;
    for (int64_t& p : place) next += std::exchange(p, next);
    for (int64_t i = 0; i < size; ++i) {
      scratch[place[digit((*entries)[i])]++] = (*entries)[i];
    }
    std::swap(*entries, scratch);
  }
}

}  // namespace tpu_embedding

#endif  // TPU_EMBEDDING_OPS_CC_CORE_RADIX_SORT_H_
