// The first values of a row of a growing table, made from a seed and its id.

#ifndef TPU_EMBEDDING_OPS_CC_CORE_FIRST_VALUES_H_
#define TPU_EMBEDDING_OPS_CC_CORE_FIRST_VALUES_H_

#include <cstdint>

#include "core/element.h"

namespace tpu_embedding {

struct FirstValues {
  enum class Kind { kConstant, kUniform, kNormal, kTruncatedNormal };

  Kind kind = Kind::kConstant;
  // The constant; the bounds of kUniform; or mean and standard deviation. A
  // truncated normal stays within two standard deviations.
  double first = 0.0;
  double second = 0.0;
  uint64_t seed = 0;

  // Writes the row of `id`, [dim]; bfloat16 values are rounded to nearest. Uses
  // nothing but the arithmetic of IEEE 754: every CPU gives the same bits.
  void Write(int64_t id, int64_t dim, float* row) const;
  void Write(int64_t id, int64_t dim, BFloat16* row) const;
};

// Returns the quantile of the standard normal distribution, to 7 digits, for a
// probability `p` in (0, 1).
double NormalQuantile(double p);

}  // namespace tpu_embedding

#endif  // TPU_EMBEDDING_OPS_CC_CORE_FIRST_VALUES_H_
