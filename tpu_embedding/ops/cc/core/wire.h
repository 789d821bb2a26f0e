// The form in which values travel between processes.

#ifndef TPU_EMBEDDING_OPS_CC_CORE_WIRE_H_
#define TPU_EMBEDDING_OPS_CC_CORE_WIRE_H_

#include <cstdint>

#include "core/element.h"

namespace tpu_embedding {

// Parts of a message begin at multiples of this, as tensors must in memory.
constexpr int64_t kWireAlignment = 64;

inline int64_t Padded(int64_t bytes) {
  return (bytes + kWireAlignment - 1) / kWireAlignment * kWireAlignment;
}

// To the nearest bfloat16, ties to even; a NaN stays one.
void ToBFloat16(const float* values, int64_t count, BFloat16* out);
void FromBFloat16(const BFloat16* values, int64_t count, float* out);

}  // namespace tpu_embedding

#endif  // TPU_EMBEDDING_OPS_CC_CORE_WIRE_H_
