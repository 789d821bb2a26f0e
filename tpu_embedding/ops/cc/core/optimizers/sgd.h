// w -= rate * g. No slots, no hyperparameters.

#ifndef TPU_EMBEDDING_OPS_CC_CORE_OPTIMIZERS_SGD_H_
#define TPU_EMBEDDING_OPS_CC_CORE_OPTIMIZERS_SGD_H_

#include <cstdint>

#include "core/simd.h"
#include "core/update.h"

namespace tpu_embedding {

class Sgd {
 public:
  static constexpr const char* kName = "sgd";
  static constexpr int kNumSlots = 0;
  static constexpr bool kSlotsPerRow = false;
  static constexpr int kNumHyperparameters = 0;

  explicit Sgd(const RuleArguments& arguments) : rate_(arguments.rate) {}

  TPU_EMBEDDING_INLINE void Apply(const float* __restrict g,
                                  float* __restrict w, float* const*,
                                  int64_t dim) const {
    for (int64_t d = 0; d < dim; ++d) w[d] -= rate_ * g[d];
  }

 private:
  const float rate_;
};

}  // namespace tpu_embedding

#endif  // TPU_EMBEDDING_OPS_CC_CORE_OPTIMIZERS_SGD_H_
