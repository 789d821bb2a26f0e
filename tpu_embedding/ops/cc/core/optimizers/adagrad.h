// a += g^2; w -= rate * g / sqrt(a). Slot: accumulators. No hyperparameters.

#ifndef TPU_EMBEDDING_OPS_CC_CORE_OPTIMIZERS_ADAGRAD_H_
#define TPU_EMBEDDING_OPS_CC_CORE_OPTIMIZERS_ADAGRAD_H_

#include <cmath>
#include <cstdint>

#include "core/simd.h"
#include "core/update.h"

namespace tpu_embedding {

class Adagrad {
 public:
  static constexpr const char* kName = "adagrad";
  static constexpr int kNumSlots = 1;
  static constexpr bool kSlotsPerRow = false;
  static constexpr int kNumHyperparameters = 0;

  explicit Adagrad(const RuleArguments& arguments) : rate_(arguments.rate) {}

  TPU_EMBEDDING_INLINE void Apply(const float* __restrict g,
                                  float* __restrict w, float* const* slots,
                                  int64_t dim) const {
    float* __restrict a = slots[0];
    for (int64_t d = 0; d < dim; ++d) {
      a[d] += g[d] * g[d];
      // Where the accumulator stays 0 the gradient is 0 too, and so the step.
      // A NaN is no 0: it must show in the row.
      w[d] -= a[d] <= 0.0f ? 0.0f : rate_ * g[d] / std::sqrt(a[d]);
    }
  }

 private:
  const float rate_;
};

}  // namespace tpu_embedding

#endif  // TPU_EMBEDDING_OPS_CC_CORE_OPTIMIZERS_ADAGRAD_H_
