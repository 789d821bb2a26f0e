// The form in which values travel between processes.

#ifndef TPU_EMBEDDING_OPS_CC_CORE_WIRE_H_
#define TPU_EMBEDDING_OPS_CC_CORE_WIRE_H_

#include <cstdint>
#include <cstring>

#include "core/element.h"

namespace tpu_embedding {

// Parts of a message begin at multiples of this, as tensors must in memory.
constexpr int64_t kWireAlignment = 64;

inline int64_t Padded(int64_t bytes) {
  return (bytes + kWireAlignment - 1) / kWireAlignment * kWireAlignment;
}

// Returns the nearest bfloat16, ties to even; a NaN stays a NaN.
inline BFloat16 NearestBFloat16(float value) {
  constexpr uint32_t kMagnitude = 0x7FFFFFFF;
  constexpr uint32_t kInfinity = 0x7F800000;
  uint32_t bits;
  std::memcpy(&bits, &value, sizeof(bits));
  const uint32_t rounded = (bits + 0x7FFF + (bits >> 16 & 1)) >> 16;
  const uint32_t quiet = (bits >> 16) | 0x40;
  const bool is_nan = (bits & kMagnitude) > kInfinity;
  return {static_cast<uint16_t>(is_nan ? quiet : rounded)};
}

void ToBFloat16(const float* values, int64_t count, BFloat16* out);
void FromBFloat16(const BFloat16* values, int64_t count, float* out);

}  // namespace tpu_embedding

#endif  // TPU_EMBEDDING_OPS_CC_CORE_WIRE_H_
