// Sums scaled vectors in registers, for lookups and updates.

#ifndef TPU_EMBEDDING_OPS_CC_CORE_WEIGHTED_SUM_INL_H_
#define TPU_EMBEDDING_OPS_CC_CORE_WEIGHTED_SUM_INL_H_

#include <algorithm>
#include <cstdint>
#include <type_traits>
#include <vector>

#include "core/simd.h"

namespace tpu_embedding {

constexpr int64_t kCacheLineBytes = 64;

// Prefetches into all caches (kLocality 3) or into all but the first (2).
template <int kLocality = 3, class Element>
TPU_EMBEDDING_INLINE void Prefetch(const Element* values, int64_t size) {
  constexpr int64_t kPerCacheLine = kCacheLineBytes / sizeof(Element);
  for (int64_t d = 0; d < size; d += kPerCacheLine) {
    __builtin_prefetch(values + d, /*rw=*/0, kLocality);
  }
}

// Keeps the calls of a function that only prefetches: unless it is inlined, GCC
// believes that it has no effect and drops the calls.
TPU_EMBEDDING_INLINE void KeepCalls() { asm volatile(""); }

// Returns how many rows ahead to prefetch: 16 KiB of rows. Working on these
// takes longer than a miss to memory (~100 ns), and they take up little of the
// caches.
inline int64_t RowsAhead(int64_t bytes_per_row) {
  return std::clamp<int64_t>((16 << 10) / std::max<int64_t>(bytes_per_row, 1),
                             16, 96);
}

// The widest vector that kColumns columns fill.
template <class Widest, int64_t kColumns>
using VectorOf = std::conditional_t<
    kWidth<Widest> <= kColumns, Widest,
    std::conditional_t<kColumns >= 8, F32x8,
                       std::conditional_t<kColumns >= 4, F32x4, F32x1>>>;

// Computes the blocks of kColumns columns that begin at `offsets`, in one pass
// over the terms. Where blocks overlap, elements are written twice, with the
// same value.
template <class Widest, int64_t kColumns, int kBlocks, class Terms>
TPU_EMBEDDING_INLINE void SumBlocks(const Terms& terms, int64_t begin,
                                    int64_t end,
                                    const int64_t (&offsets)[kBlocks],
                                    float* out) {
  using F32xN = VectorOf<Widest, kColumns>;
  constexpr int kCount = kColumns / kWidth<F32xN>;
  F32xN sum[kBlocks][kCount] = {};
  for (int64_t i = begin; i < end; ++i) {
    const auto vector = terms.vector(i);
    if (!vector) continue;
    const float gain = terms.gain(i);
    for (int b = 0; b < kBlocks; ++b) {
      for (int k = 0; k < kCount; ++k) {
        F32xN columns;
        Load(vector + offsets[b] + k * kWidth<F32xN>, &columns);
        sum[b][k] += gain * columns;
      }
    }
  }
  for (int b = 0; b < kBlocks; ++b) {
    for (int k = 0; k < kCount; ++k) {
      Store(sum[b][k], out + offsets[b] + k * kWidth<F32xN>);
    }
  }
}

// Computes the columns [offset, dim) with at most two blocks, which may overlap
// each other or columns before `offset`, so that odd widths need no loop over
// single columns. Requires dim >= kColumns.
template <class Widest, int64_t kColumns, class Terms>
TPU_EMBEDDING_INLINE void SumRest(const Terms& terms, int64_t begin,
                                  int64_t end, int64_t offset, int64_t dim,
                                  float* out) {
  if (offset + kColumns < dim) {
    SumBlocks<Widest, kColumns>(terms, begin, end, {offset, dim - kColumns},
                                out);
  } else if (offset < dim) {
    SumBlocks<Widest, kColumns>(terms, begin, end, {dim - kColumns}, out);
  }
}

// The number of terms that are added one after the other.
constexpr int64_t kTermsOfBlock = 4096;

// Adds the sums of blocks in pairs that cover equal numbers of blocks, so that
// the error grows with the logarithm of the number of blocks.
class SumOfBlocks {
 public:
  void Add(const float* block, int64_t dim) {
    sums_.insert(sums_.end(), block, block + dim);
    for (int64_t n = ++blocks_; n % 2 == 0; n /= 2) AddLastTwo(dim);
  }

  void Finish(int64_t dim, float* out) {
    while (static_cast<int64_t>(sums_.size()) > dim) AddLastTwo(dim);
    std::copy(sums_.begin(), sums_.end(), out);
  }

 private:
  void AddLastTwo(int64_t dim) {
    const size_t last = sums_.size() - dim;
    for (int64_t d = 0; d < dim; ++d) sums_[last - dim + d] += sums_[last + d];
    sums_.resize(last);
  }

  std::vector<float> sums_;  // [n, dim], of ever fewer blocks
  int64_t blocks_ = 0;
};

// Sums many terms by blocks; a body of simd.h. `Terms::Run` writes the sum of
// some terms to `out`.
template <class Terms>
struct SumOfManyTerms {
  template <class F32xN>
  TPU_EMBEDDING_INLINE static void Run(const Terms& terms, int64_t begin,
                                       int64_t end, int64_t dim, float* out) {
    SumOfBlocks blocks;
    for (; begin < end; begin += kTermsOfBlock) {
      const int64_t stop = std::min(end, begin + kTermsOfBlock);
      terms.template Run<F32xN>(begin, stop, dim, out);
      blocks.Add(out, dim);
    }
    blocks.Finish(dim, out);
  }
};

// Returns whether the terms fit into one block.
TPU_EMBEDDING_INLINE bool AreFewTerms(int64_t begin, int64_t end) {
  return __builtin_expect(end - begin <= kTermsOfBlock, true);
}

// Writes the sum of many terms to `out`. It is not inlined, and callers make
// `terms` for it alone: its code, or `terms` in memory, next to the sum of the
// usual few terms made a DLRM step slower.
template <class Terms>
__attribute__((noinline, cold)) void SumManyTerms(const Terms& terms,
                                                  int64_t begin, int64_t end,
                                                  int64_t dim, float* out) {
  RunOnThisCpu<SumOfManyTerms<Terms>>(terms, begin, end, dim, out);
}

// Sets out[d] to the sum over i in [begin, end) of gain(i) * vector(i)[d], for
// d < dim. A null vector stands for zeros. Each element is summed in the order
// of i, so that the bits do not depend on the width of the vectors.
template <class Widest, class Terms>
TPU_EMBEDDING_INLINE void WeightedSum(const Terms& terms, int64_t begin,
                                      int64_t end, int64_t dim, float* out) {
  // Sixteen registers hold eight sums and the terms added to them.
  constexpr int64_t kMaxColumns = std::min<int64_t>(64, 8 * kWidth<Widest>);
  int64_t offset = 0;
  for (; offset + kMaxColumns <= dim; offset += kMaxColumns) {
    SumBlocks<Widest, kMaxColumns>(terms, begin, end, {offset}, out);
  }
  if (kMaxColumns > 32 && offset + 32 <= dim) {
    SumBlocks<Widest, 32>(terms, begin, end, {offset}, out);
    offset += 32;
  }
  if (dim >= 16) {
    SumRest<Widest, 16>(terms, begin, end, offset, dim, out);
  } else if (dim >= 8) {
    SumRest<Widest, 8>(terms, begin, end, offset, dim, out);
  } else if (dim >= 4) {
    SumRest<Widest, 4>(terms, begin, end, offset, dim, out);
  } else if (dim == 3) {
    SumBlocks<Widest, 1>(terms, begin, end, {0, 1, 2}, out);
  } else if (dim == 2) {
    SumBlocks<Widest, 1>(terms, begin, end, {0, 1}, out);
  } else if (dim == 1) {
    SumBlocks<Widest, 1>(terms, begin, end, {0}, out);
  }
}

// Returns the sum of squares. Every CPU adds up the same number of partial
// sums: a single sum would wait for each addition, and a number that depends on
// the CPU would give other bits.
TPU_EMBEDDING_INLINE float SumOfSquares(const float* __restrict g,
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

}  // namespace tpu_embedding

#endif  // TPU_EMBEDDING_OPS_CC_CORE_WEIGHTED_SUM_INL_H_
