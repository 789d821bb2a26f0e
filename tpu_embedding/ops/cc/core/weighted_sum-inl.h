// Sums of scaled vectors, kept in registers: what lookup and update both do.

#ifndef TPU_EMBEDDING_OPS_CC_CORE_WEIGHTED_SUM_INL_H_
#define TPU_EMBEDDING_OPS_CC_CORE_WEIGHTED_SUM_INL_H_

#include <cstdint>
#include <cstring>

#include "core/element.h"
#include "core/simd.h"

namespace tpu_embedding {

// Several floats at any address; each clone (core/simd.h) maps them to the
// registers that it has.
using Lanes16 = float __attribute__((vector_size(64), aligned(4), may_alias));
using Lanes8 = float __attribute__((vector_size(32), aligned(4), may_alias));
using Lanes4 = float __attribute__((vector_size(16), aligned(4), may_alias));
using Lanes1 = float;

// As many bfloat16, and as many words of 32 bits.
using Halves16 =
    uint16_t __attribute__((vector_size(32), aligned(2), may_alias));
using Halves8 =
    uint16_t __attribute__((vector_size(16), aligned(2), may_alias));
using Halves4 = uint16_t __attribute__((vector_size(8), aligned(2), may_alias));
using Wholes16 = uint32_t __attribute__((vector_size(64)));
using Wholes8 = uint32_t __attribute__((vector_size(32)));
using Wholes4 = uint32_t __attribute__((vector_size(16)));

constexpr int64_t kCacheLineBytes = 64;

template <class Element>
TPU_EMBEDDING_INLINE void Prefetch(const Element* values, int64_t size) {
  constexpr int64_t kPerCacheLine = kCacheLineBytes / sizeof(Element);
  for (int64_t d = 0; d < size; d += kPerCacheLine) {
    __builtin_prefetch(values + d, /*rw=*/0, /*locality=*/3);
  }
}

// Elements at any address as floats, as many as there are lanes.
template <class Lanes>
TPU_EMBEDDING_INLINE void Load(const float* values, Lanes* lanes) {
  *lanes = *reinterpret_cast<const Lanes*>(values);
}

// The lower halves of the floats are zeros.
template <class Halves, class Wholes, class Lanes>
TPU_EMBEDDING_INLINE void Widen(const BFloat16* values, Lanes* lanes) {
  const Halves halves = *reinterpret_cast<const Halves*>(values);
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

// out[0 .. kCount * lanes) of the sum below.
template <class Lanes, int kCount, class Terms>
TPU_EMBEDDING_INLINE void SumBlock(const Terms& terms, int64_t begin,
                                   int64_t end, int64_t offset, float* out) {
  constexpr int64_t kWidth = sizeof(Lanes) / sizeof(float);
  Lanes sum[kCount] = {};
  for (int64_t i = begin; i < end; ++i) {
    const auto* vector = terms.vector(i);
    if (!vector) continue;
    const float gain = terms.gain(i);
    for (int k = 0; k < kCount; ++k) {
      Lanes lanes;
      Load(vector + offset + k * kWidth, &lanes);
      sum[k] += gain * lanes;
    }
  }
  for (int k = 0; k < kCount; ++k) {
    *reinterpret_cast<Lanes*>(out + offset + k * kWidth) = sum[k];
  }
}

// The blocks at two offsets in one pass. Where they overlap, elements are
// written twice, the same both times.
template <class Lanes, class Terms>
TPU_EMBEDDING_INLINE void SumTwoBlocks(const Terms& terms, int64_t begin,
                                       int64_t end, int64_t first,
                                       int64_t second, float* out) {
  Lanes sum[2] = {};
  for (int64_t i = begin; i < end; ++i) {
    const auto* vector = terms.vector(i);
    if (!vector) continue;
    const float gain = terms.gain(i);
    Lanes lanes[2];
    Load(vector + first, &lanes[0]);
    Load(vector + second, &lanes[1]);
    sum[0] += gain * lanes[0];
    sum[1] += gain * lanes[1];
  }
  *reinterpret_cast<Lanes*>(out + first) = sum[0];
  *reinterpret_cast<Lanes*>(out + second) = sum[1];
}

// Covers [offset, dim), which is at most two blocks, where dim is at least one.
template <class Lanes, class Terms>
TPU_EMBEDDING_INLINE void SumRest(const Terms& terms, int64_t begin,
                                  int64_t end, int64_t offset, int64_t dim,
                                  float* out) {
  constexpr int64_t kWidth = sizeof(Lanes) / sizeof(float);
  if (offset + kWidth < dim) {
    SumTwoBlocks<Lanes>(terms, begin, end, offset, dim - kWidth, out);
  } else if (offset < dim) {
    SumBlock<Lanes, 1>(terms, begin, end, dim - kWidth, out);
  }
}

// out[d] = sum over i in [begin, end) of gain(i) * vector(i)[d], for d < dim.
// A null vector is one of zeros. Each element is summed in the order of i.
template <class Terms>
TPU_EMBEDDING_INLINE void WeightedSum(const Terms& terms, int64_t begin,
                                      int64_t end, int64_t dim, float* out) {
  int64_t offset = 0;
  for (; offset + 64 <= dim; offset += 64) {
    SumBlock<Lanes16, 4>(terms, begin, end, offset, out);
  }
  if (offset + 32 <= dim) {
    SumBlock<Lanes16, 2>(terms, begin, end, offset, out);
    offset += 32;
  }
  if (dim >= 16) {
    SumRest<Lanes16>(terms, begin, end, offset, dim, out);
  } else if (dim >= 8) {
    SumRest<Lanes8>(terms, begin, end, offset, dim, out);
  } else if (dim >= 4) {
    SumRest<Lanes4>(terms, begin, end, offset, dim, out);
  } else {
    for (; offset < dim; ++offset) {
      SumBlock<Lanes1, 1>(terms, begin, end, offset, out);
    }
  }
}

}  // namespace tpu_embedding

#endif  // TPU_EMBEDDING_OPS_CC_CORE_WEIGHTED_SUM_INL_H_
