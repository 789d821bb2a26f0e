// m = beta_1 * m + (1 - beta_1) * g; v = beta_2 * v + (1 - beta_2) * g^2;
// w -= rate * m / sqrt(v + epsilon^2), or / (sqrt(v) + epsilon). TPU hardware
// has no bias correction; a dynamic rate can apply it. 1 - beta is formed in
// float32, as TensorFlow's TPU kernels do.
// Slots: momenta, velocities.
// Hyperparameters: beta_1, beta_2, epsilon, sum_inside_sqrt.

#ifndef TPU_EMBEDDING_OPS_CC_CORE_OPTIMIZERS_ADAM_H_
#define TPU_EMBEDDING_OPS_CC_CORE_OPTIMIZERS_ADAM_H_

#include <cmath>
#include <cstdint>

#include "core/simd.h"
#include "core/update.h"

namespace tpu_embedding {

class Adam {
 public:
  static constexpr const char* kName = "adam";
  static constexpr int kNumSlots = 2;
  static constexpr bool kSlotsPerRow = false;
  static constexpr int kNumHyperparameters = 4;

  explicit Adam(const RuleArguments& arguments)
      : rate_(arguments.rate),
        keep_m_(arguments.hyperparameters[0]),
        take_m_(1.0f - keep_m_),
        keep_v_(arguments.hyperparameters[1]),
        take_v_(1.0f - keep_v_),
        epsilon_(arguments.hyperparameters[2]),
        sum_inside_sqrt_(arguments.hyperparameters[3] != 0.0f) {}

  TPU_EMBEDDING_INLINE void Apply(const float* __restrict g,
                                  float* __restrict w, float* const* slots,
                                  int64_t dim) const {
    float* __restrict m = slots[0];
    float* __restrict v = slots[1];
    const float inside = sum_inside_sqrt_ ? epsilon_ * epsilon_ : 0.0f;
    const float outside = sum_inside_sqrt_ ? 0.0f : epsilon_;
    for (int64_t d = 0; d < dim; ++d) {
      m[d] = keep_m_ * m[d] + take_m_ * g[d];
      v[d] = keep_v_ * v[d] + take_v_ * g[d] * g[d];
      w[d] -= rate_ * m[d] / (std::sqrt(v[d] + inside) + outside);
    }
  }

 private:
  const float rate_;
  const float keep_m_;
  const float take_m_;
  const float keep_v_;
  const float take_v_;
  const float epsilon_;
  const bool sum_inside_sqrt_;
};

}  // namespace tpu_embedding

#endif  // TPU_EMBEDDING_OPS_CC_CORE_OPTIMIZERS_ADAM_H_
