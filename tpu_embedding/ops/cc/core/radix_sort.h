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
// cover four million rows.
constexpr int kRadixBits = 11;
constexpr int64_t kRadixSize = int64_t{1} << kRadixBits;

// Sorts by `key`, all keys being below `bound`; equal keys keep their order.
template <class Word>
void RadixSort(uint64_t bound, Buffer<KeyedEntry<Word>>* entries) {
  const int64_t size = entries->size();
  Buffer<KeyedEntry<Word>> scratch(size);
  std::vector<int64_t> place(kRadixSize);
  for (int shift = 0; shift < 64 && (bound - 1) >> shift != 0 && bound != 0;
       shift += kRadixBits) {
    std::fill(place.begin(), place.end(), 0);
    const auto digit = [shift](const KeyedEntry<Word>& e) {
      return static_cast<int64_t>((uint64_t{e.key} >> shift) &
                                  (kRadixSize - 1));
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
