#include "core/bfloat16.h"

#include "core/bfloat16-inl.h"
#include "core/simd.h"

namespace tpu_embedding {

void ExpandRow(const BFloat16* row, int64_t dim, float* out) {
  RunOnThisCpu<ExpandBody>(row, dim, out);
}

void RoundRow(const float* values, int64_t dim, const Rounding& rounding,
              int64_t row, BFloat16* out) {
  RunOnThisCpu<RoundBody>(values, dim, rounding, row, out);
}

}  // namespace tpu_embedding
