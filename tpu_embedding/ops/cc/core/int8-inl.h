// Stores rows of int8: grids, and codes with stochastic rounding.

#ifndef TPU_EMBEDDING_OPS_CC_CORE_INT8_INL_H_
#define TPU_EMBEDDING_OPS_CC_CORE_INT8_INL_H_

#include <algorithm>
#include <array>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <limits>
#include <type_traits>

#include "core/bfloat16-inl.h"
#include "core/element.h"
#include "core/simd.h"
#include "core/wire.h"

namespace tpu_embedding {

constexpr float kSmallestScale = 0x1p-100f;  // A smaller one counts as 0.
constexpr float kLeastFull = 204.0f;         // 0.8 of the 255 steps of a grid
constexpr uint8_t kCodeOfOffset = 128;       // of rows of one value
constexpr BFloat16 kNotANumber{0x7FC0};

// A vector of as many floats as `Words` has words.
template <class Words>
using FloatsOf = std::conditional_t<sizeof(Words) == 64, F32x16, F32x8>;

// Returns the largest of a vector's lanes, or the smallest.
template <bool kLargest, class Vector>
TPU_EMBEDDING_INLINE auto EndOf(const Vector& lanes) {
  using Lane = std::decay_t<decltype(lanes[0])>;
  constexpr int kLanes = sizeof(Vector) / sizeof(Lane);
  if constexpr (kLanes == 2) {
    const Lane a = lanes[0], b = lanes[1];
    return (kLargest ? b > a : b < a) ? b : a;
  } else {
    typedef Lane Half __attribute__((vector_size(sizeof(Vector) / 2)));
    Half a, b;
    std::memcpy(&a, &lanes, sizeof(a));
    std::memcpy(&b, reinterpret_cast<const Lane*>(&lanes) + kLanes / 2,
                sizeof(b));
    const Half ends = (kLargest ? b > a : b < a) ? b : a;
    return EndOf<kLargest>(ends);
  }
}

struct RowRange {
  float low, high;
  bool finite;
};

// Returns the smallest and largest value of a row, and whether all are finite.
template <class Words>
TPU_EMBEDDING_INLINE RowRange RangeOf(const float* values, int64_t dim) {
  using F32xN = FloatsOf<Words>;
  constexpr int64_t kLanes = kWidth<F32xN>;
  float padded[kLanes];  // for narrower rows, which no table has
  if (dim < kLanes) {
    std::fill_n(padded, kLanes, values[0]);
    std::copy_n(values, dim, padded);
    values = padded;
    dim = kLanes;
  }
  F32xN low, high;
  Words largest = {};
  Load(values, &low);
  high = low;
  for (int64_t d = 0; d < dim; d += kLanes) {
    const float* const columns = values + std::min(d, dim - kLanes);
    F32xN x;
    Words bits;
    Load(columns, &x);
    std::memcpy(&bits, columns, sizeof(bits));
    bits &= ~kSign;
    low = x < low ? x : low;
    high = x > high ? x : high;
    largest = bits > largest ? bits : largest;
  }
  return {EndOf<false>(low), EndOf<true>(high),
          EndOf<true>(largest) < kInfinity};
}

// Returns 0 for values that TensorFlow's threads treat as 0 in arithmetic.
inline float WithoutDenormals(float value) {
  return std::abs(value) < std::numeric_limits<float>::min() ? 0.0f : value;
}

// Returns whether a row keeps its grid. Neither this nor `GridOf` has branches,
// which would be mispredicted.
inline bool Fits(const Int8Row& grid, const RowRange& range) {
  const float reach = kMiddleCode * grid.scale;
  int fits = range.finite;
  fits &= grid.scale > 0.0f;
  fits &= std::abs(range.low - grid.offset) <= reach;
  fits &= std::abs(range.high - grid.offset) <= reach;
  fits &= range.high - range.low > kLeastFull * grid.scale;
  return fits;
}

// Returns the scale and the offset that `encode` of tables/codes.py gives.
inline std::array<BFloat16, 2> GridOf(const RowRange& range) {
  const double low = WithoutDenormals(range.low);
  const double high = WithoutDenormals(range.high);
  const BFloat16 nearest =
      NearestBFloat16(static_cast<float>((low + high) / 2));
  float offset, step;
  Load(&nearest, &offset);
  const double middle = offset;
  const double spread = std::max(high - middle, middle - low);
  const BFloat16 scale = NearestBFloat16(
      static_cast<float>(spread * (1 + 0x1p-8) / double{kMiddleCode}));
  Load(&scale, &step);
  int finite = range.finite;
  finite &= std::isfinite(range.high - range.low);
  finite &= std::isfinite(offset);
  const BFloat16 used = step >= kSmallestScale ? scale : BFloat16{0};
  const BFloat16 start =
      NearestBFloat16(WithoutDenormals(offset) + 0.0f);  // -0 becomes 0.
  return {finite ? used : kNotANumber, finite ? start : BFloat16{0}};
}

// Gives a row a new grid unless it keeps the old one.
TPU_EMBEDDING_INLINE void Renew(const RowRange& range, BFloat16* stored,
                                Int8Row* grid) {
  const bool keeps = Fits(*grid, range);
  const std::array<BFloat16, 2> made = GridOf(range);
  for (int k = 0; k < 2; ++k) stored[k] = keeps ? stored[k] : made[k];
  Load(stored, &grid->scale);
  Load(stored + 1, &grid->offset);
}

// Writes the codes of as many columns as `Words` has; each is in [0, 256).
template <class Words>
TPU_EMBEDDING_INLINE void CodeLanes(const Int8Row& grid, const float* values,
                                    const uint16_t* random, uint8_t* codes) {
  using F32xN = FloatsOf<Words>;
  using Halves = std::conditional_t<sizeof(Words) == 64, U16x16, U16x8>;
  using Bytes = std::conditional_t<sizeof(Words) == 64, U8x16, U8x8>;
  F32xN x;
  Halves added;
  Words fixed;
  Load(values, &x);
  std::memcpy(&added, random, sizeof(added));
  RoundToInt((x - grid.offset) / grid.scale * 65536.0f, &fixed);
  fixed += 127 * 65536 + 32768;
  const Words sum = fixed + __builtin_convertvector(added, Words);
  // CPUs have an instruction for each of these two steps.
  const Bytes rounded = __builtin_convertvector(
      __builtin_convertvector(sum >> 16, Halves), Bytes);
  std::memcpy(codes, &rounded, sizeof(rounded));
}

// Rows and their numbers. Fewer rows than kRowsAtOnce repeat the last one.
struct RowsToCode {
  const float* values[kRowsAtOnce];
  int64_t rows[kRowsAtOnce];
  uint8_t* codes[kRowsAtOnce];
  BFloat16* grids[kRowsAtOnce];  // scale and offset, which may be kept
  Int8Row grid[kRowsAtOnce] = {};

  TPU_EMBEDDING_INLINE void StoreInto(int r, const Int8Table& table,
                                      int64_t row, int64_t dim) {
    codes[r] = table.codes + row * dim;
    grids[r] = table.grids + 2 * row;
  }

  template <class Words>
  TPU_EMBEDDING_INLINE void RoundBlock(int r, int64_t begin, int64_t size,
                                       const uint16_t* random) const {
    constexpr int64_t kLanes = sizeof(Words) / sizeof(uint32_t);
    if (!(grid[r].scale > 0.0f)) return;
    for (int64_t run = 0; run < size; run += kWordColumns) {
      const float* columns = values[r] + begin + run;
      uint8_t* out = codes[r] + begin + run;
      float last[kWordColumns];
      uint8_t last_codes[kWordColumns];
      const int64_t count = std::min(size - run, kWordColumns);
      if (count < kWordColumns) {
        std::fill_n(last, kWordColumns, grid[r].offset);
        std::copy_n(columns, count, last);
        columns = last;
        out = last_codes;
      }
      for (int64_t d = 0; d < kWordColumns; d += kLanes) {
        CodeLanes<Words>(grid[r], columns + d, random + run * kRowsAtOnce + d,
                         out + d);
      }
      if (count < kWordColumns) {
        std::copy_n(last_codes, count, codes[r] + begin + run);
      }
    }
  }
};

// A body of simd.h: stores rows by the rule of docs/formats.md. A row keeps its
// grid if its values fit into the grid and fill 0.8 of it. Between two steps of
// the grid, the random bits that also round bfloat16 choose one of the two.
struct CodeBody {
  template <class F32xN>
  TPU_EMBEDDING_INLINE static void Run(RowsToCode rows, int64_t dim,
                                       const Rounding& rounding) {
    using Words = RandomWords<F32xN>;
    RowRange ranges[kRowsAtOnce];
    for (int r = 0; r < kRowsAtOnce; ++r) {
      ranges[r] = RangeOf<Words>(rows.values[r], dim);
    }
    bool keep = true;
    for (int r = 0; r < kRowsAtOnce; ++r) {
      Load(rows.grids[r], &rows.grid[r].scale);
      Load(rows.grids[r] + 1, &rows.grid[r].offset);
      keep &= Fits(rows.grid[r], ranges[r]);
    }
    if (!keep) {  // Few blocks have a row that needs a new grid.
      for (int r = 0; r < kRowsAtOnce; ++r) {
        Renew(ranges[r], rows.grids[r], &rows.grid[r]);
      }
    }
    bool rounds = false;
    for (int r = 0; r < kRowsAtOnce; ++r) {
      if (rows.grid[r].scale > 0.0f) {
        rounds = true;
      } else {
        std::memset(rows.codes[r], kCodeOfOffset, dim);
      }
    }
    if (rounds) ForRandomBlocks<Words>(rounding, rows, dim);
  }
};

}  // namespace tpu_embedding

#endif  // TPU_EMBEDDING_OPS_CC_CORE_INT8_INL_H_
