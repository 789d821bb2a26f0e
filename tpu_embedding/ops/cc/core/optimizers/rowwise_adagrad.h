// a += mean(g^2); w -= rate * g / sqrt(a), with one accumulator for a row.
// Slot: accumulators [num_rows, 1]. No hyperparameters.

#ifndef TPU_EMBEDDING_OPS_CC_CORE_OPTIMIZERS_ROWWISE_ADAGRAD_H_
#define TPU_EMBEDDING_OPS_CC_CORE_OPTIMIZERS_ROWWISE_ADAGRAD_H_

#include <cmath>
#include <cstdint>

#include "core/simd.h"
#include "core/update.h"
#include "core/weighted_sum-inl.h"

namespace tpu_embedding {

class RowwiseAdagrad {
 public:
  static constexpr const char* kName = "rowwise_adagrad";
  static constexpr int kNumSlots = 1;
  static constexpr bool kSlotsPerRow = true;
  static constexpr int kNumHyperparameters = 0;

  explicit RowwiseAdagrad(const RuleArguments& arguments)
      : rate_(arguments.rate) {}

  TPU_EMBEDDING_INLINE void Apply(const float* __restrict g,
                                  float* __restrict w, float* const* slots,
                                  int64_t dim) const {
    float& a = slots[0][0];
    a += SumOfSquares(g, dim) / static_cast<float>(dim);
    if (a <= 0.0f) return;
    const float root = std::sqrt(a);
    for (int64_t d = 0; d < dim; ++d) w[d] -= rate_ * g[d] / root;
  }

 private:
  const float rate_;
};

}  // namespace tpu_embedding

#endif  // TPU_EMBEDDING_OPS_CC_CORE_OPTIMIZERS_ROWWISE_ADAGRAD_H_
