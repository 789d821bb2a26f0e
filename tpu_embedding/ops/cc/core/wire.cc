#include "core/wire.h"

#include <cstring>

namespace tpu_embedding {

void ToBFloat16(const float* values, int64_t count, BFloat16* out) {
  constexpr uint32_t kMagnitude = 0x7FFFFFFF;
  constexpr uint32_t kInfinity = 0x7F800000;
  for (int64_t i = 0; i < count; ++i) {
    uint32_t bits;
    std::memcpy(&bits, values + i, sizeof(bits));
    const uint32_t rounded = (bits + 0x7FFF + (bits >> 16 & 1)) >> 16;
    const uint32_t quiet = (bits >> 16) | 0x40;
    out[i].bits = (bits & kMagnitude) > kInfinity ? quiet : rounded;
  }
}

void FromBFloat16(const BFloat16* values, int64_t count, float* out) {
  for (int64_t i = 0; i < count; ++i) {
    const uint32_t bits = static_cast<uint32_t>(values[i].bits) << 16;
    std::memcpy(out + i, &bits, sizeof(bits));
  }
}

}  // namespace tpu_embedding
