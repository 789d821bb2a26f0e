// How rows are rounded.

#ifndef TPU_EMBEDDING_OPS_CC_CORE_BFLOAT16_H_
#define TPU_EMBEDDING_OPS_CC_CORE_BFLOAT16_H_

#include <cstdint>

#include "core/id_map.h"

namespace tpu_embedding {

// What the random bits of one table in one step depend on, besides the column
// and the lower 32 bits of the row number.
struct Rounding {
  uint64_t seed = 0;
  uint64_t step = 0;  // the updates that came before
  // Row r of a part of a table is row first_row + r * row_step of the table.
  int64_t first_row = 0;
  int64_t row_step = 1;
  const int64_t* ids = nullptr;  // of the rows of a growing table

  // Returns the number of a row: in a growing table a hash of its id.
  int64_t NumberOf(int64_t row) const {
    return ids ? NumberOfId(ids[row]) : first_row + row * row_step;
  }
  static int64_t NumberOfId(int64_t id) {
    return MixBits(static_cast<uint64_t>(id));
  }
};

}  // namespace tpu_embedding

#endif  // TPU_EMBEDDING_OPS_CC_CORE_BFLOAT16_H_
