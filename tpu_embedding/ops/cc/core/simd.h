// Defines vectors of floats, and dispatches hot loops to the CPU they run on.

#ifndef TPU_EMBEDDING_OPS_CC_CORE_SIMD_H_
#define TPU_EMBEDDING_OPS_CC_CORE_SIMD_H_

#include <cstdint>
#include <cstring>
#include <utility>

#include "core/element.h"

// Where TPU_EMBEDDING_LEVELS is defined, hot loops are compiled for several
// levels of x86-64, so that a wheel needs no -march flag. The build sets
// -ffp-contract=off: the levels differ in speed, never in bits. Instrumented
// builds have one level, as each level takes as long to compile.
#if defined(__x86_64__) && defined(__GNUC__) && !defined(__clang__) && \
    !defined(__SANITIZE_ADDRESS__) && !defined(__SANITIZE_THREAD__)
#define TPU_EMBEDDING_LEVELS
// A function called from a hot loop must be inlined into it, else it would be
// compiled for any CPU.
#define TPU_EMBEDDING_INLINE inline __attribute__((always_inline))
#else
#define TPU_EMBEDDING_INLINE inline
#endif

namespace tpu_embedding {

using F32x16 = float __attribute__((vector_size(64)));
using F32x8 = float __attribute__((vector_size(32)));
using F32x4 = float __attribute__((vector_size(16)));
using F32x1 = float;

template <class F32xN>
constexpr int64_t kWidth = sizeof(F32xN) / sizeof(float);

// Vectors of the same numbers of bfloat16, of bytes and of words of 32 bits.
using U16x16 = uint16_t __attribute__((vector_size(32)));
using U16x8 = uint16_t __attribute__((vector_size(16)));
using U16x4 = uint16_t __attribute__((vector_size(8)));
using U8x16 = uint8_t __attribute__((vector_size(16)));
using U8x8 = uint8_t __attribute__((vector_size(8)));
using U8x4 = uint8_t __attribute__((vector_size(4)));
using I32x16 = int32_t __attribute__((vector_size(64)));
using I32x8 = int32_t __attribute__((vector_size(32)));
using I32x4 = int32_t __attribute__((vector_size(16)));
using U32x16 = uint32_t __attribute__((vector_size(64)));
using U32x8 = uint32_t __attribute__((vector_size(32)));
using U32x4 = uint32_t __attribute__((vector_size(16)));
using U64x4 = uint64_t __attribute__((vector_size(32)));
using U8x32 = uint8_t __attribute__((vector_size(32)));

// Loads elements from any address as floats.
template <class F32xN>
TPU_EMBEDDING_INLINE void Load(const float* values, F32xN* vector) {
  std::memcpy(vector, values, sizeof(F32xN));
}

// A bfloat16 is the upper half of a float32 whose lower half is zeros.
template <class U16xN, class U32xN, class F32xN>
TPU_EMBEDDING_INLINE void Widen(const BFloat16* values, F32xN* vector) {
  U16xN halves;
  std::memcpy(&halves, values, sizeof(halves));
  const U32xN words = __builtin_convertvector(halves, U32xN) << 16;
  std::memcpy(vector, &words, sizeof(words));
}
TPU_EMBEDDING_INLINE void Load(const BFloat16* values, F32x16* vector) {
  Widen<U16x16, U32x16>(values, vector);
}
TPU_EMBEDDING_INLINE void Load(const BFloat16* values, F32x4* vector) {
  Widen<U16x4, U32x4>(values, vector);
}
TPU_EMBEDDING_INLINE void Load(const BFloat16* values, float* value) {
  const uint32_t word = uint32_t{values->bits} << 16;
  std::memcpy(value, &word, sizeof(word));
}

// A row of int8, or the rest of a row from some column on.
struct Int8Row {
  const uint8_t* codes = nullptr;
  float scale = 0.0f;
  float offset = 0.0f;

  explicit operator bool() const { return codes; }
  TPU_EMBEDDING_INLINE Int8Row operator+(int64_t columns) const {
    return {codes + columns, scale, offset};
  }
};

constexpr float kMiddleCode = 127.5f;

template <class I32xN, class F32xN>
TPU_EMBEDDING_INLINE void Decode(const I32xN& codes, const Int8Row& row,
                                 F32xN* vector) {
  const F32xN steps = __builtin_convertvector(codes, F32xN) - kMiddleCode;
  *vector = steps * row.scale + row.offset;
}
// Widens through 16 bits: GCC would do a fourfold widening column by column.
template <class U8xN, class U16xN, class I32xN>
TPU_EMBEDDING_INLINE void WidenBytes(const uint8_t* bytes, I32xN* words) {
  U8xN codes;
  std::memcpy(&codes, bytes, sizeof(codes));
  const U16xN halves = __builtin_convertvector(codes, U16xN);
  *words = __builtin_convertvector(halves, I32xN);
}
TPU_EMBEDDING_INLINE void Load(const Int8Row& row, F32x16* vector) {
  I32x16 words;
  WidenBytes<U8x16, U16x16>(row.codes, &words);
  Decode(words, row, vector);
}
TPU_EMBEDDING_INLINE void Load(const Int8Row& row, F32x4* vector) {
  I32x4 words;
  WidenBytes<U8x4, U16x4>(row.codes, &words);
  Decode(words, row, vector);
}
TPU_EMBEDDING_INLINE void Load(const Int8Row& row, float* value) {
  const float steps = static_cast<float>(*row.codes) - kMiddleCode;
  *value = steps * row.scale + row.offset;
}

#ifdef TPU_EMBEDDING_LEVELS
// For AVX2 these repeat each element in its word and clear what is not wanted:
// three instructions, where GCC converts with five or six.
TPU_EMBEDDING_INLINE void Load(const BFloat16* values, F32x8* vector) {
  uint64_t q[2];
  std::memcpy(q, values, sizeof(q));
  const U64x4 twice = {q[0], q[1], q[0], q[1]};
  U16x16 halves;
  std::memcpy(&halves, &twice, sizeof(halves));
  halves = __builtin_shuffle(halves, U16x16{0, 0, 1, 1, 2, 2, 3, 3,  //
                                            12, 12, 13, 13, 14, 14, 15, 15});
  U32x8 words;
  std::memcpy(&words, &halves, sizeof(words));
  words &= 0xFFFF0000;
  std::memcpy(vector, &words, sizeof(words));
}
TPU_EMBEDDING_INLINE void Load(const Int8Row& row, F32x8* vector) {
  uint64_t q;
  std::memcpy(&q, row.codes, sizeof(q));
  const U64x4 repeated = {q, q, q, q};
  U8x32 bytes;
  std::memcpy(&bytes, &repeated, sizeof(bytes));
  bytes = __builtin_shuffle(bytes, U8x32{0,  0,  0,  0,  1,  1,  1,  1,   //
                                         2,  2,  2,  2,  3,  3,  3,  3,   //
                                         20, 20, 20, 20, 21, 21, 21, 21,  //
                                         22, 22, 22, 22, 23, 23, 23, 23});
  I32x8 words;
  std::memcpy(&words, &bytes, sizeof(words));
  words &= 0xFF;
  Decode(words, row, vector);
}
#else
TPU_EMBEDDING_INLINE void Load(const BFloat16* values, F32x8* vector) {
  Widen<U16x8, U32x8>(values, vector);
}
TPU_EMBEDDING_INLINE void Load(const Int8Row& row, F32x8* vector) {
  I32x8 words;
  WidenBytes<U8x8, U16x8>(row.codes, &words);
  Decode(words, row, vector);
}
#endif

TPU_EMBEDDING_INLINE int32_t NearestInt(float value) {
#ifdef __clang__
  return static_cast<int32_t>(__builtin_lrintf(value));
#else
  return __builtin_irintf(value);  // which GCC vectorizes
#endif
}

// Rounds each lane to the nearest integer, as an int32 in a word.
template <class F32xN, class U32xN>
TPU_EMBEDDING_INLINE void RoundToInt(const F32xN& vector, U32xN* integers) {
  U32xN lanes;
  for (int i = 0; i < kWidth<F32xN>; ++i) {
    lanes[i] = NearestInt(vector[i]);
  }
  *integers = lanes;
}

template <class F32xN>
TPU_EMBEDDING_INLINE void Store(const F32xN& vector, float* values) {
  std::memcpy(values, &vector, sizeof(F32xN));
}

// Each of these functions is Body::Run<F32xN>(arguments...) compiled for one
// level of CPU, with vectors as wide as its registers: vectors that a CPU has
// no register for go through memory, which takes twice as long.
template <class Body, class... Arguments>
auto RunOnAnyCpu(Arguments... arguments) {
  return Body::template Run<F32x4>(arguments...);
}

#ifdef TPU_EMBEDDING_LEVELS
template <class Body, class... Arguments>
__attribute__((target("avx2"))) auto RunOnAvx2(Arguments... arguments) {
  return Body::template Run<F32x8>(arguments...);
}

template <class Body, class... Arguments>
__attribute__((target("arch=x86-64-v4"))) auto RunOnAvx512(
    Arguments... arguments) {
  return Body::template Run<F32x16>(arguments...);
}
#endif

// Returns the function for the highest level that this CPU supports.
template <class Body, class... Arguments>
auto FunctionForThisCpu() {
#ifdef TPU_EMBEDDING_LEVELS
  static const auto function =
      __builtin_cpu_supports("x86-64-v4") ? RunOnAvx512<Body, Arguments...>
      : __builtin_cpu_supports("avx2")    ? RunOnAvx2<Body, Arguments...>
                                          : RunOnAnyCpu<Body, Arguments...>;
  return function;
#else
  return &RunOnAnyCpu<Body, Arguments...>;
#endif
}

// Runs Body on this CPU. Lvalues are passed by reference.
template <class Body, class... Arguments>
auto RunOnThisCpu(Arguments&&... arguments) {
  const auto function = FunctionForThisCpu<Body, Arguments...>();
  return function(std::forward<Arguments>(arguments)...);
}

}  // namespace tpu_embedding

#endif  // TPU_EMBEDDING_OPS_CC_CORE_SIMD_H_
