// Vectors of floats, and hot loops that use the widest of the CPU they run on.

#ifndef TPU_EMBEDDING_OPS_CC_CORE_LANES_H_
#define TPU_EMBEDDING_OPS_CC_CORE_LANES_H_

#include <cstdint>
#include <cstring>

#include "core/element.h"
#include "core/simd.h"

namespace tpu_embedding {

using Lanes16 = float __attribute__((vector_size(64)));
using Lanes8 = float __attribute__((vector_size(32)));
using Lanes4 = float __attribute__((vector_size(16)));
using Lanes1 = float;

template <class Lanes>
constexpr int64_t kWidth = sizeof(Lanes) / sizeof(float);

// As many bfloat16, and as many words of 32 bits.
using Halves16 = uint16_t __attribute__((vector_size(32)));
using Halves8 = uint16_t __attribute__((vector_size(16)));
using Halves4 = uint16_t __attribute__((vector_size(8)));
using Wholes16 = uint32_t __attribute__((vector_size(64)));
using Wholes8 = uint32_t __attribute__((vector_size(32)));
using Wholes4 = uint32_t __attribute__((vector_size(16)));

// Elements at any address as floats, as many as there are lanes.
template <class Lanes>
TPU_EMBEDDING_INLINE void Load(const float* values, Lanes* lanes) {
  std::memcpy(lanes, values, sizeof(Lanes));
}

// The lower halves of the floats are zeros.
template <class Halves, class Wholes, class Lanes>
TPU_EMBEDDING_INLINE void Widen(const BFloat16* values, Lanes* lanes) {
  Halves halves;
  std::memcpy(&halves, values, sizeof(halves));
  const Wholes wholes = __builtin_convertvector(halves, Wholes) << 16;
  std::memcpy(lanes, &wholes, sizeof(wholes));
}
TPU_EMBEDDING_INLINE void Load(const BFloat16* values, Lanes16* lanes) {
  Widen<Halves16, Wholes16>(values, lanes);
}
TPU_EMBEDDING_INLINE void Load(const BFloat16* values, Lanes8* lanes) {
  Widen<Halves8, Wholes8>(values, lanes);
}
TPU_EMBEDDING_INLINE void Load(const BFloat16* values, Lanes4* lanes) {
  Widen<Halves4, Wholes4>(values, lanes);
}
TPU_EMBEDDING_INLINE void Load(const BFloat16* values, float* lane) {
  const uint32_t whole = uint32_t{values->bits} << 16;
  std::memcpy(lane, &whole, sizeof(whole));
}

template <class Lanes>
TPU_EMBEDDING_INLINE void Store(const Lanes& lanes, float* values) {
  std::memcpy(values, &lanes, sizeof(Lanes));
}

// Body::Run<Lanes>(arguments...) compiled for one level of CPU each, with its
// registers as lanes: lanes that a CPU has no register for go through memory,
// which takes twice as long. The levels differ in speed, never in bits.
template <class Body, class... Arguments>
void RunOnAnyCpu(const Arguments&... arguments) {
  Body::template Run<Lanes4>(arguments...);
}

#ifdef TPU_EMBEDDING_LEVELS
template <class Body, class... Arguments>
__attribute__((target("avx2"))) void RunOnAvx2(const Arguments&... arguments) {
  Body::template Run<Lanes8>(arguments...);
}

template <class Body, class... Arguments>
__attribute__((target("arch=x86-64-v4"))) void RunOnAvx512(
    const Arguments&... arguments) {
  Body::template Run<Lanes16>(arguments...);
}
#endif

// The fastest of them that this CPU can run.
template <class Body, class... Arguments>
void RunOnThisCpu(const Arguments&... arguments) {
#ifdef TPU_EMBEDDING_LEVELS
  static const auto run =
      __builtin_cpu_supports("x86-64-v4") ? RunOnAvx512<Body, Arguments...>
      : __builtin_cpu_supports("avx2")    ? RunOnAvx2<Body, Arguments...>
                                          : RunOnAnyCpu<Body, Arguments...>;
  run(arguments...);
#else
  RunOnAnyCpu<Body>(arguments...);
#endif
}

}  // namespace tpu_embedding

#endif  // TPU_EMBEDDING_OPS_CC_CORE_LANES_H_
