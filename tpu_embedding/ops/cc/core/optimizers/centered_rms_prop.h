// ms = rho * ms + (1 - rho) * g^2; mg = rho * mg + (1 - rho) * g;
// mom = momentum * mom + rate * g / sqrt(max(ms - mg^2, 0) + epsilon);
// w -= mom.
// Slots: ms, mom, mg.
// Hyperparameters: rho, momentum, epsilon.

#ifndef TPU_EMBEDDING_OPS_CC_CORE_OPTIMIZERS_CENTERED_RMS_PROP_H_
#define TPU_EMBEDDING_OPS_CC_CORE_OPTIMIZERS_CENTERED_RMS_PROP_H_

#include <cmath>
#include <cstdint>

#include "core/simd.h"
#include "core/update.h"

namespace tpu_embedding {

class CenteredRmsProp {
 public:
  static constexpr const char* kName = "centered_rms_prop";
  static constexpr int kNumSlots = 3;
  static constexpr bool kSlotsPerRow = false;
  static constexpr int kNumHyperparameters = 3;

  explicit CenteredRmsProp(const RuleArguments& arguments)
      : rate_(arguments.rate),
        keep_(arguments.hyperparameters[0]),
        take_(1.0f - keep_),
        momentum_(arguments.hyperparameters[1]),
        epsilon_(arguments.hyperparameters[2]) {}

  TPU_EMBEDDING_INLINE void Apply(const float* __restrict g,
                                  float* __restrict w, float* const* slots,
                                  int64_t dim) const {
    float* __restrict ms = slots[0];
    float* __restrict mom = slots[1];
    float* __restrict mg = slots[2];
    for (int64_t d = 0; d < dim; ++d) {
      ms[d] = keep_ * ms[d] + take_ * g[d] * g[d];
      mg[d] = keep_ * mg[d] + take_ * g[d];
      // Rounding may make a variance negative. A NaN must show, so it stays.
      const float difference = ms[d] - mg[d] * mg[d];
      const float variance = difference < 0.0f ? 0.0f : difference;
      mom[d] =
          momentum_ * mom[d] + rate_ * g[d] / std::sqrt(variance + epsilon_);
      w[d] -= mom[d];
    }
  }

 private:
  const float rate_;
  const float keep_;
  const float take_;
  const float momentum_;
  const float epsilon_;
};

}  // namespace tpu_embedding

#endif  // TPU_EMBEDDING_OPS_CC_CORE_OPTIMIZERS_CENTERED_RMS_PROP_H_
