// q = -learning_rate_power; b = a + g^2;
// linear += g - (b^q - a^q) / rate * w;
// quadratic = b^q / rate + 2 * l2 + beta / rate;
// w = |linear| <= l1 or quadratic == 0
//         ? 0 : (sign(linear) * l1 - linear) / quadratic; a = b.
// With multiply_linear_by_learning_rate the slot holds linear * rate and each
// term above is multiplied by the rate, so that nothing is divided by it.
// Slots: accumulators, linears.
// Hyperparameters: learning_rate_power, l1, l2, beta,
// multiply_linear_by_learning_rate. allow_zero_accumulator changes nothing
// here: no term divides by a, and if a, b, beta and l2 are 0, the quadratic
// term is 0 and gives a row of zeros.

#ifndef TPU_EMBEDDING_OPS_CC_CORE_OPTIMIZERS_FTRL_H_
#define TPU_EMBEDDING_OPS_CC_CORE_OPTIMIZERS_FTRL_H_

#include <cmath>
#include <cstdint>

#include "core/simd.h"
#include "core/update.h"

namespace tpu_embedding {

class Ftrl {
 public:
  static constexpr const char* kName = "ftrl";
  static constexpr int kNumSlots = 2;
  static constexpr bool kSlotsPerRow = false;
  static constexpr int kNumHyperparameters = 5;

  explicit Ftrl(const RuleArguments& arguments)
      : power_(-arguments.hyperparameters[0]),
        scale_(arguments.hyperparameters[4] != 0.0f ? arguments.rate : 1.0f),
        divisor_(arguments.hyperparameters[4] != 0.0f ? 1.0f : arguments.rate),
        l1_(arguments.hyperparameters[1] * scale_),
        l2_(arguments.hyperparameters[2] * scale_),
        beta_(arguments.hyperparameters[3]) {}

  TPU_EMBEDDING_INLINE void Apply(const float* __restrict g,
                                  float* __restrict w, float* const* slots,
                                  int64_t dim) const {
    // The power is compared once for a row: a loop that may call std::pow is
    // not vectorized, which made the usual power 2.6 times slower.
    if (power_ == 0.5f) {
      ApplyWith([](float a) { return std::sqrt(a); }, g, w, slots, dim);
    } else {
      const float power = power_;
      ApplyWith([power](float a) { return std::pow(a, power); }, g, w, slots,
                dim);
    }
  }

 private:
  // Applies the rule with root(a) = a^q.
  template <class Root>
  TPU_EMBEDDING_INLINE void ApplyWith(const Root& root,
                                      const float* __restrict g,
                                      float* __restrict w, float* const* slots,
                                      int64_t dim) const {
    float* __restrict a = slots[0];
    float* __restrict linear = slots[1];
    for (int64_t d = 0; d < dim; ++d) {
      const float b = a[d] + g[d] * g[d];
      const float root_b = root(b);
      const float sigma = (root_b - root(a[d])) / divisor_;
      linear[d] += scale_ * g[d] - sigma * w[d];
      const float quadratic = (root_b + beta_) / divisor_ + 2.0f * l2_;
      w[d] = std::fabs(linear[d]) <= l1_ || quadratic == 0.0f
                 ? 0.0f
                 : (std::copysign(l1_, linear[d]) - linear[d]) / quadratic;
      a[d] = b;
    }
  }

  const float power_;
  const float scale_;    // of linear, gradient, l1 and l2
  const float divisor_;  // of sigma and quadratic
  const float l1_;
  const float l2_;
  const float beta_;
};

}  // namespace tpu_embedding

#endif  // TPU_EMBEDDING_OPS_CC_CORE_OPTIMIZERS_FTRL_H_
