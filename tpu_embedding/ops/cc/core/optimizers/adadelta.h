// a = rho * a + (1 - rho) * g^2;
// step = g * sqrt(u + epsilon) / sqrt(a + epsilon);
// u = rho * u + (1 - rho) * step^2; w -= rate * step.
// Slots: accumulators, updates.
// Hyperparameters: rho, epsilon.

#ifndef TPU_EMBEDDING_OPS_CC_CORE_OPTIMIZERS_ADADELTA_H_
#define TPU_EMBEDDING_OPS_CC_CORE_OPTIMIZERS_ADADELTA_H_

#include <cmath>
#include <cstdint>

#include "core/simd.h"
#include "core/update.h"

namespace tpu_embedding {

class Adadelta {
 public:
  static constexpr const char* kName = "adadelta";
  static constexpr int kNumSlots = 2;
  static constexpr bool kSlotsPerRow = false;
  static constexpr int kNumHyperparameters = 2;

  explicit Adadelta(const RuleArguments& arguments)
      : rate_(arguments.rate),
        keep_(arguments.hyperparameters[0]),
        take_(1.0f - keep_),
        epsilon_(arguments.hyperparameters[1]) {}

  TPU_EMBEDDING_INLINE void Apply(const float* __restrict g,
                                  float* __restrict w, float* const* slots,
                                  int64_t dim) const {
    float* __restrict a = slots[0];
    float* __restrict u = slots[1];
    for (int64_t d = 0; d < dim; ++d) {
      a[d] = keep_ * a[d] + take_ * g[d] * g[d];
      const float step =
          g[d] * (std::sqrt(u[d] + epsilon_) / std::sqrt(a[d] + epsilon_));
      u[d] = keep_ * u[d] + take_ * step * step;
      w[d] -= rate_ * step;
    }
  }

 private:
  const float rate_;
  const float keep_;
  const float take_;
  const float epsilon_;
};

}  // namespace tpu_embedding

#endif  // TPU_EMBEDDING_OPS_CC_CORE_OPTIMIZERS_ADADELTA_H_
