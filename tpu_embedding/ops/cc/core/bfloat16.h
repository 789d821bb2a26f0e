// How rows of bfloat16 are rounded.

#ifndef TPU_EMBEDDING_OPS_CC_CORE_BFLOAT16_H_
#define TPU_EMBEDDING_OPS_CC_CORE_BFLOAT16_H_

#include <cstdint>

namespace tpu_embedding {

// What the random bits of one table in one step come from, beside row and
// column.
struct Rounding {
  uint64_t seed = 0;
  uint64_t step = 0;  // the updates that came before
  // Row r of a part of a table is row first_row + r * row_step of the table.
  int64_t first_row = 0;
  int64_t row_step = 1;
};

}  // namespace tpu_embedding

#endif  // TPU_EMBEDDING_OPS_CC_CORE_BFLOAT16_H_
