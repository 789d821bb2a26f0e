// a += g^2; w -= rate * g / sqrt(a + epsilon). Slot: accumulators. The TPU rule
// has no hyperparameters and an epsilon of 0; the Keras rule has one, epsilon.

#ifndef TPU_EMBEDDING_OPS_CC_CORE_OPTIMIZERS_ADAGRAD_H_
#define TPU_EMBEDDING_OPS_CC_CORE_OPTIMIZERS_ADAGRAD_H_

#include <cmath>
#include <cstdint>

#include "core/simd.h"
#include "core/update.h"

namespace tpu_embedding {

class Adagrad {
 public:
  static constexpr const char* kName = "adagrad";
  static constexpr int kNumSlots = 1;
  static constexpr bool kSlotsPerRow = false;
  static constexpr int kNumHyperparameters = 0;

  explicit Adagrad(const RuleArguments& arguments)
      : Adagrad(arguments.rate, 0.0f) {}

  TPU_EMBEDDING_INLINE void Apply(const float* __restrict g,
                                  float* __restrict w, float* const* slots,
                                  int64_t dim) const {
    float* __restrict a = slots[0];
    for (int64_t d = 0; d < dim; ++d) {
      a[d] += g[d] * g[d];
      // Adding 0 to a square changes no bit.
      const float square = a[d] + epsilon_;
      // If the accumulator stays 0, the gradient is 0 and so is the step. A NaN
      // is not 0: it must show in the row.
      w[d] -= square <= 0.0f ? 0.0f : rate_ * g[d] / std::sqrt(square);
    }
  }

 protected:
  Adagrad(float rate, float epsilon) : rate_(rate), epsilon_(epsilon) {}

 private:
  const float rate_;
  const float epsilon_;
};

class KerasAdagrad : public Adagrad {
 public:
  static constexpr const char* kName = "keras_adagrad";
  static constexpr int kNumHyperparameters = 1;

  explicit KerasAdagrad(const RuleArguments& arguments)
      : Adagrad(arguments.rate, arguments.hyperparameters[0]) {}
};

}  // namespace tpu_embedding

#endif  // TPU_EMBEDDING_OPS_CC_CORE_OPTIMIZERS_ADAGRAD_H_
