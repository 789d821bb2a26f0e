// m = beta_1 * m + (1 - beta_1) * g; v -= (1 - beta_2) * sign(v - g^2) * g^2;
// c = rate / (sqrt(v) + epsilon); z = w - c * m;
// w = sign(z) * max(|z| - c * l1, 0) / (1 + c * l2).
// Slots: v, m.
// Hyperparameters: beta_1, beta_2, epsilon, l1, l2.

#ifndef TPU_EMBEDDING_OPS_CC_CORE_OPTIMIZERS_PROXIMAL_YOGI_H_
#define TPU_EMBEDDING_OPS_CC_CORE_OPTIMIZERS_PROXIMAL_YOGI_H_

#include <cmath>
#include <cstdint>

#include "core/optimizers/shrink.h"
#include "core/simd.h"
#include "core/update.h"

namespace tpu_embedding {

class ProximalYogi {
 public:
  static constexpr const char* kName = "proximal_yogi";
  static constexpr int kNumSlots = 2;
  static constexpr bool kSlotsPerRow = false;
  static constexpr int kNumHyperparameters = 5;

  explicit ProximalYogi(const RuleArguments& arguments)
      : rate_(arguments.rate),
        keep_m_(arguments.hyperparameters[0]),
        take_m_(1.0f - keep_m_),
        take_v_(1.0f - arguments.hyperparameters[1]),
        epsilon_(arguments.hyperparameters[2]),
        l1_(arguments.hyperparameters[3]),
        l2_(arguments.hyperparameters[4]) {}

  TPU_EMBEDDING_INLINE void Apply(const float* __restrict g,
                                  float* __restrict w, float* const* slots,
                                  int64_t dim) const {
    float* __restrict v = slots[0];
    float* __restrict m = slots[1];
    for (int64_t d = 0; d < dim; ++d) {
      const float square = g[d] * g[d];
      m[d] = keep_m_ * m[d] + take_m_ * g[d];
      const float sign = (v[d] > square) - (v[d] < square);
      v[d] -= take_v_ * square * sign;
      const float c = rate_ / (std::sqrt(v[d]) + epsilon_);
      w[d] = Shrink(w[d] - c * m[d], c * l1_, c * l2_);
    }
  }

 private:
  const float rate_;
  const float keep_m_;
  const float take_m_;
  const float take_v_;
  const float epsilon_;
  const float l1_;
  const float l2_;
};

}  // namespace tpu_embedding

#endif  // TPU_EMBEDDING_OPS_CC_CORE_OPTIMIZERS_PROXIMAL_YOGI_H_
