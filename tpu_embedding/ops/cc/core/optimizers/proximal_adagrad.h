// a += g^2; c = rate / sqrt(a); z = w - c * g;
// w = sign(z) * max(|z| - c * l1, 0) / (1 + c * l2). While a is 0, w does not
// change. Slot: accumulators. Hyperparameters: l1, l2.

#ifndef TPU_EMBEDDING_OPS_CC_CORE_OPTIMIZERS_PROXIMAL_ADAGRAD_H_
#define TPU_EMBEDDING_OPS_CC_CORE_OPTIMIZERS_PROXIMAL_ADAGRAD_H_

#include <cmath>
#include <cstdint>

#include "core/optimizers/shrink.h"
#include "core/simd.h"
#include "core/update.h"

namespace tpu_embedding {

class ProximalAdagrad {
 public:
  static constexpr const char* kName = "proximal_adagrad";
  static constexpr int kNumSlots = 1;
  static constexpr bool kSlotsPerRow = false;
  static constexpr int kNumHyperparameters = 2;

  explicit ProximalAdagrad(const RuleArguments& arguments)
      : rate_(arguments.rate),
        l1_(arguments.hyperparameters[0]),
        l2_(arguments.hyperparameters[1]) {}

  TPU_EMBEDDING_INLINE void Apply(const float* __restrict g,
                                  float* __restrict w, float* const* slots,
                                  int64_t dim) const {
    float* __restrict a = slots[0];
    for (int64_t d = 0; d < dim; ++d) {
      a[d] += g[d] * g[d];
      const float c = rate_ / std::sqrt(a[d]);
      // A NaN is not 0: it must show in the row.
      w[d] = a[d] <= 0.0f ? w[d] : Shrink(w[d] - c * g[d], c * l1_, c * l2_);
    }
  }

 private:
  const float rate_;
  const float l1_;
  const float l2_;
};

}  // namespace tpu_embedding

#endif  // TPU_EMBEDDING_OPS_CC_CORE_OPTIMIZERS_PROXIMAL_ADAGRAD_H_
