// m = momentum * m + g; w -= rate * (nesterov ? momentum * m + g : m).
// Slot: momenta. Hyperparameters: momentum, use_nesterov.

#ifndef TPU_EMBEDDING_OPS_CC_CORE_OPTIMIZERS_MOMENTUM_H_
#define TPU_EMBEDDING_OPS_CC_CORE_OPTIMIZERS_MOMENTUM_H_

#include <cstdint>

#include "core/simd.h"
#include "core/update.h"

namespace tpu_embedding {

class Momentum {
 public:
  static constexpr const char* kName = "momentum";
  static constexpr int kNumSlots = 1;
  static constexpr bool kSlotsPerRow = false;
  static constexpr int kNumHyperparameters = 2;

  explicit Momentum(const RuleArguments& arguments)
      : rate_(arguments.rate),
        momentum_(arguments.hyperparameters[0]),
        use_nesterov_(arguments.hyperparameters[1] != 0.0f) {}

  TPU_EMBEDDING_INLINE void Apply(const float* __restrict g,
                                  float* __restrict w, float* const* slots,
                                  int64_t dim) const {
    float* __restrict m = slots[0];
    for (int64_t d = 0; d < dim; ++d) {
      m[d] = momentum_ * m[d] + g[d];
      w[d] -= rate_ * (use_nesterov_ ? momentum_ * m[d] + g[d] : m[d]);
    }
  }

 private:
  const float rate_;
  const float momentum_;
  const bool use_nesterov_;
};

}  // namespace tpu_embedding

#endif  // TPU_EMBEDDING_OPS_CC_CORE_OPTIMIZERS_MOMENTUM_H_
