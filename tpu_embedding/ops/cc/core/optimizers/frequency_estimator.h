// delta = min(rate - last_hit_step, max_delta), where the rate is the step;
// w = delta >= outlier_threshold * w ? delta : (1 - tau) * w + tau * delta;
// last_hit_step = rate. The gradient plays no part.
// Slot: last_hit_step.
// Hyperparameters: tau, max_delta, outlier_threshold.

#ifndef TPU_EMBEDDING_OPS_CC_CORE_OPTIMIZERS_FREQUENCY_ESTIMATOR_H_
#define TPU_EMBEDDING_OPS_CC_CORE_OPTIMIZERS_FREQUENCY_ESTIMATOR_H_

#include <algorithm>
#include <cstdint>

#include "core/simd.h"
#include "core/update.h"

namespace tpu_embedding {

class FrequencyEstimator {
 public:
  static constexpr const char* kName = "frequency_estimator";
  static constexpr int kNumSlots = 1;
  static constexpr bool kSlotsPerRow = false;
  static constexpr int kNumHyperparameters = 3;

  explicit FrequencyEstimator(const RuleArguments& arguments)
      : step_(arguments.rate),
        take_(arguments.hyperparameters[0]),
        keep_(1.0f - take_),
        max_delta_(arguments.hyperparameters[1]),
        outlier_threshold_(arguments.hyperparameters[2]) {}

  TPU_EMBEDDING_INLINE void Apply(const float*, float* __restrict w,
                                  float* const* slots, int64_t dim) const {
    float* __restrict last = slots[0];
    for (int64_t d = 0; d < dim; ++d) {
      const float delta = std::min(step_ - last[d], max_delta_);
      w[d] = delta >= outlier_threshold_ * w[d] ? delta
                                                : keep_ * w[d] + take_ * delta;
      last[d] = step_;
    }
  }

 private:
  const float step_;
  const float take_;
  const float keep_;
  const float max_delta_;
  const float outlier_threshold_;
};

}  // namespace tpu_embedding

#endif  // TPU_EMBEDDING_OPS_CC_CORE_OPTIMIZERS_FREQUENCY_ESTIMATOR_H_
