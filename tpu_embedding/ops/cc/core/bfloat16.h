// Rows of bfloat16: to floats, and back with stochastic rounding.

#ifndef TPU_EMBEDDING_OPS_CC_CORE_BFLOAT16_H_
#define TPU_EMBEDDING_OPS_CC_CORE_BFLOAT16_H_

#include <cstdint>

#include "core/element.h"

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

// out[d] = row[d] for d < dim.
void ExpandRow(const BFloat16* row, int64_t dim, float* out);

// out[d] is one of the two bfloat16 around values[d]: the farther from 0 with a
// probability that grows by 2^-16 with each step of the lower 16 bits. What a
// bfloat16 can hold stays as it is; what is finite stays finite; a NaN stays
// one.
//
// 16 random bits are added to the lower half of the float32, which is then cut
// off. They are those of Threefry4x32-20 (Salmon et al., "Parallel random
// numbers: as easy as 1, 2, 3", SC 2011) with
//   key     seed (low word, high word), step (low word, high word)
//   counter 8 * (d / 64) + d / 2 % 8, row, 0, 0
// of whose four words d takes number d / 16 % 4: the lower half where d is
// even, else the upper. So eight blocks side by side, word by word, are the
// bits of 64 columns. It adds, rotates and xors words of 32 bits, which every
// CPU does on many at once; the multiplications of Philox took twice as long.
void RoundRow(const float* values, int64_t dim, const Rounding& rounding,
              int64_t row, BFloat16* out);

}  // namespace tpu_embedding

#endif  // TPU_EMBEDDING_OPS_CC_CORE_BFLOAT16_H_
