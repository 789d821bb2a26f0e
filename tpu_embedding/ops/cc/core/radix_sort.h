// Stable sort of entries by row: least significant digit first.

#ifndef TPU_EMBEDDING_OPS_CC_CORE_RADIX_SORT_H_
#define TPU_EMBEDDING_OPS_CC_CORE_RADIX_SORT_H_

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
  const int bits = BitsBelow(bound);
  if (size < 2 || bits == 0) return;
  const int passes = (bits + kMaxRadixBits - 1) / kMaxRadixBits;
  const int width = (bits + passes - 1) / passes;
  const uint64_t mask = (uint64_t{1} << width) - 1;
  // The digits of all passes are counted at once: one read of the entries.
  std::vector<Word> counts(size_t(passes) << width);
  const KeyedEntry<Word>* from = entries->data();
  for (int64_t i = 0; i < size; ++i) {
    uint64_t key = from[i].key;
    for (int pass = 0; pass < passes; ++pass, key >>= width) {
      ++counts[(size_t(pass) << width) + (key & mask)];
    }
  }
  Buffer<KeyedEntry<Word>> scratch(size);
  for (int pass = 0; pass < passes; ++pass) {
    Word* const place = counts.data() + (size_t(pass) << width);
    Word next = 0;
    for (uint64_t digit = 0; digit <= mask; ++digit) {
      next += std::exchange(place[digit], next);
    }
    from = entries->data();
    KeyedEntry<Word>* const to = scratch.data();
    const int shift = pass * width;
    for (int64_t i = 0; i < size; ++i) {
      to[place[(uint64_t{from[i].key} >> shift) & mask]++] = from[i];
    }
    std::swap(*entries, scratch);
  }
}

}  // namespace tpu_embedding

#endif  // TPU_EMBEDDING_OPS_CC_CORE_RADIX_SORT_H_
