// Finds which entries name the same row.

#ifndef TPU_EMBEDDING_OPS_CC_CORE_DISTINCT_H_
#define TPU_EMBEDDING_OPS_CC_CORE_DISTINCT_H_

#include <algorithm>
#include <cstdint>

#include "core/buffer.h"

namespace tpu_embedding {

// Finds the first place of each distinct row, which is where it is read into.
class FirstPlaces {
 public:
  // Forgets all rows, and makes room for `count` places.
  void Start(int64_t count) {
    int64_t size = 16;
    while (size < 2 * count) size *= 2;
    places_.Resize(size);
    std::fill_n(places_.data(), size, -1);
  }
  // Returns the first place of the row `rows[place]`: `place` if it is new.
  template <class Rows>
  int64_t Of(const Rows& rows, int32_t place) {
    const uint64_t mask = places_.size() - 1;
    const uint64_t hash = rows[place] * uint64_t{0x9E3779B97F4A7C15};
    for (uint64_t i = hash >> 32;; ++i) {
      int32_t& found = places_[i & mask];
      if (found < 0) found = place;
      if (rows[found] == rows[place]) return found;
    }
  }

 private:
  Buffer<int32_t> places_;
};

}  // namespace tpu_embedding

#endif  // TPU_EMBEDDING_OPS_CC_CORE_DISTINCT_H_
