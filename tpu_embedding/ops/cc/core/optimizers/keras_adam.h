// Keras's Adam: m += (g - m) * take_1; v += (g^2 - v) * take_2;
// w -= rate * m / (sqrt(v) + epsilon). The rate includes the bias correction.
// This is not an option of adam.h: m += (g - m) * take rounds differently than
// m = keep * m + take * g, so the two share no line of their loops.
// Slots: momenta, velocities.
// Hyperparameters: take_1 = 1 - beta_1 and take_2 = 1 - beta_2, which Keras
// forms in double precision, and epsilon.

#ifndef TPU_EMBEDDING_OPS_CC_CORE_OPTIMIZERS_KERAS_ADAM_H_
#define TPU_EMBEDDING_OPS_CC_CORE_OPTIMIZERS_KERAS_ADAM_H_

#include <cmath>
#include <cstdint>

#include "core/simd.h"
#include "core/update.h"

namespace tpu_embedding {

class KerasAdam {
 public:
  static constexpr const char* kName = "keras_adam";
  static constexpr int kNumSlots = 2;
  static constexpr bool kSlotsPerRow = false;
  static constexpr int kNumHyperparameters = 3;

  explicit KerasAdam(const RuleArguments& arguments)
      : rate_(arguments.rate),
        take_m_(arguments.hyperparameters[0]),
        take_v_(arguments.hyperparameters[1]),
        epsilon_(arguments.hyperparameters[2]) {}

  TPU_EMBEDDING_INLINE void Apply(const float* __restrict g,
                                  float* __restrict w, float* const* slots,
                                  int64_t dim) const {
    float* __restrict m = slots[0];
    float* __restrict v = slots[1];
    for (int64_t d = 0; d < dim; ++d) {
      m[d] += (g[d] - m[d]) * take_m_;
      v[d] += (g[d] * g[d] - v[d]) * take_v_;
      w[d] -= rate_ * m[d] / (std::sqrt(v[d]) + epsilon_);
    }
  }

 private:
  const float rate_;
  const float take_m_;
  const float take_v_;
  const float epsilon_;
};

}  // namespace tpu_embedding

#endif  // TPU_EMBEDDING_OPS_CC_CORE_OPTIMIZERS_KERAS_ADAM_H_
