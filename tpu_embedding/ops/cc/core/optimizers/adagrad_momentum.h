// a = a + g^2, or beta2 * a + (1 - beta2) * g^2 where beta2 != 1;
// p = g * (a + epsilon)^(-1 / exponent); m = momentum * m + p;
// w -= rate * (nesterov ? momentum * m + p : m).
// Slots: accumulators, momenta.
// Hyperparameters: momentum, use_nesterov, exponent, beta2, epsilon.

#ifndef TPU_EMBEDDING_OPS_CC_CORE_OPTIMIZERS_ADAGRAD_MOMENTUM_H_
#define TPU_EMBEDDING_OPS_CC_CORE_OPTIMIZERS_ADAGRAD_MOMENTUM_H_

#include <cmath>
#include <cstdint>

#include "core/simd.h"
#include "core/update.h"

namespace tpu_embedding {

class AdagradMomentum {
 public:
  static constexpr const char* kName = "adagrad_momentum";
  static constexpr int kNumSlots = 2;
  static constexpr bool kSlotsPerRow = false;
  static constexpr int kNumHyperparameters = 5;

  explicit AdagradMomentum(const RuleArguments& arguments)
      : rate_(arguments.rate),
        momentum_(arguments.hyperparameters[0]),
        use_nesterov_(arguments.hyperparameters[1] != 0.0f),
        power_(-1.0f / arguments.hyperparameters[2]),
        keep_(arguments.hyperparameters[3]),
        take_(keep_ == 1.0f ? 1.0f : 1.0f - keep_),
        epsilon_(arguments.hyperparameters[4]) {}

  TPU_EMBEDDING_INLINE void Apply(const float* __restrict g,
                                  float* __restrict w, float* const* slots,
                                  int64_t dim) const {
    float* __restrict a = slots[0];
    float* __restrict m = slots[1];
    for (int64_t d = 0; d < dim; ++d) {
      a[d] = keep_ * a[d] + take_ * g[d] * g[d];
      const float scale = power_ == -0.5f ? 1.0f / std::sqrt(a[d] + epsilon_)
                                          : std::pow(a[d] + epsilon_, power_);
      const float p = g[d] * scale;
      m[d] = momentum_ * m[d] + p;
      w[d] -= rate_ * (use_nesterov_ ? momentum_ * m[d] + p : m[d]);
    }
  }

 private:
  const float rate_;
  const float momentum_;
  const bool use_nesterov_;
  const float power_;
  const float keep_;
  const float take_;
  const float epsilon_;
};

}  // namespace tpu_embedding

#endif  // TPU_EMBEDDING_OPS_CC_CORE_OPTIMIZERS_ADAGRAD_MOMENTUM_H_
