#include "core/wire.h"

#include <cstring>

namespace tpu_embedding {

void ToBFloat16(const float* values, int64_t count, BFloat16* out) {
  for (int64_t i = 0; i < count; ++i) out[i] = NearestBFloat16(values[i]);
}

void FromBFloat16(const BFloat16* values, int64_t count, float* out) {
  for (int64_t i = 0; i < count; ++i) {
    const uint32_t bits = static_cast<uint32_t>(values[i].bits) << 16;
    std::memcpy(out + i, &bits, sizeof(bits));
  }
}

}  // namespace tpu_embedding
