// a += mean(g^2); w -= rate * g / sqrt(a), with one accumulator for a row.
// Slot: accumulators [num_rows, 1]. No hyperparameters.

#ifndef TPU_EMBEDDING_OPS_CC_CORE_OPTIMIZERS_ROWWISE_ADAGRAD_H_
#define TPU_EMBEDDING_OPS_CC_CORE_OPTIMIZERS_ROWWISE_ADAGRAD_H_

#include <cmath>
#include <cstdint>

#include "core/simd.h"
#include "core/update.h"

namespace tpu_embedding {

class RowwiseAdagrad {
 public:
  static constexpr const char* kName = "rowwise_adagrad";
  static constexpr int kNumSlots = 1;
  static constexpr bool kSlotsPerRow = true;
  static constexpr int kNumHyperparameters = 0;

  explicit RowwiseAdagrad(const RuleArguments& arguments)
      : rate_(arguments.rate) {}

  TPU_EMBEDDING_INLINE void Apply(const float* __restrict g,
                                  float* __restrict w, float* const* slots,
                                  int64_t dim) const {
    float& a = slots[0][0];
    a += SumOfSquares(g, dim) / static_cast<float>(dim);
    if (a <= 0.0f) return;
    const float root = std::sqrt(a);
    for (int64_t d = 0; d < dim; ++d) w[d] -= rate_ * g[d] / root;
  }

 private:
  // In a fixed number of sums, whatever registers there are: one sum alone
  // would wait for each addition, and a number of its own for each clone would
  // give other bits.
  static TPU_EMBEDDING_INLINE float SumOfSquares(const float* __restrict g,
                                                 int64_t dim) {
    constexpr int64_t kSums = 16;
    float sums[kSums] = {};
    int64_t d = 0;
    for (; d + kSums <= dim; d += kSums) {
      for (int64_t k = 0; k < kSums; ++k) sums[k] += g[d + k] * g[d + k];
    }
    for (int64_t k = 0; d + k < dim; ++k) sums[k] += g[d + k] * g[d + k];
    for (int64_t half = kSums / 2; half > 0; half /= 2) {
      for (int64_t k = 0; k < half; ++k) sums[k] += sums[k + half];
    }
    return sums[0];
  }

  const float rate_;
};

}  // namespace tpu_embedding

#endif  // TPU_EMBEDDING_OPS_CC_CORE_OPTIMIZERS_ROWWISE_ADAGRAD_H_
