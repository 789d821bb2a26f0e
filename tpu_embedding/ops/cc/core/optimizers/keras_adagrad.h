// Keras's Adagrad: a += g^2; w -= rate * g / sqrt(a + epsilon).
// Slot: accumulators. Hyperparameter: epsilon, 0 or more.

#ifndef TPU_EMBEDDING_OPS_CC_CORE_OPTIMIZERS_KERAS_ADAGRAD_H_
#define TPU_EMBEDDING_OPS_CC_CORE_OPTIMIZERS_KERAS_ADAGRAD_H_

#include <cmath>
#include <cstdint>

#include "core/simd.h"
#include "core/update.h"

namespace tpu_embedding {

class KerasAdagrad {
 public:
  static constexpr const char* kName = "keras_adagrad";
  static constexpr int kNumSlots = 1;
  static constexpr bool kSlotsPerRow = false;
  static constexpr int kNumHyperparameters = 1;

  explicit KerasAdagrad(const RuleArguments& arguments)
      : rate_(arguments.rate), epsilon_(arguments.hyperparameters[0]) {}

  TPU_EMBEDDING_INLINE void Apply(const float* __restrict g,
                                  float* __restrict w, float* const* slots,
                                  int64_t dim) const {
    float* __restrict a = slots[0];
    for (int64_t d = 0; d < dim; ++d) {
      a[d] += g[d] * g[d];
      w[d] -= rate_ * g[d] / std::sqrt(a[d] + epsilon_);
    }
  }

 private:
  const float rate_;
  const float epsilon_;
};

}  // namespace tpu_embedding

#endif  // TPU_EMBEDDING_OPS_CC_CORE_OPTIMIZERS_KERAS_ADAGRAD_H_
