// The proximal step that ProximalAdagrad and ProximalYogi end with.

#ifndef TPU_EMBEDDING_OPS_CC_CORE_OPTIMIZERS_SHRINK_H_
#define TPU_EMBEDDING_OPS_CC_CORE_OPTIMIZERS_SHRINK_H_

#include <cmath>

#include "core/simd.h"

namespace tpu_embedding {

// Minimizes (w - z)^2 / 2 + l1 * |w| + l2 * w^2 / 2 over w; keeps a NaN.
TPU_EMBEDDING_INLINE float Shrink(float z, float l1, float l2) {
  const float size = std::fabs(z);
  const float left = size <= l1 ? 0.0f : size - l1;
  return std::copysign(left, z) / (1.0f + l2);
}

}  // namespace tpu_embedding

#endif  // TPU_EMBEDDING_OPS_CC_CORE_OPTIMIZERS_SHRINK_H_
