// Rows of int8: grids, and codes with stochastic rounding.

#ifndef TPU_EMBEDDING_OPS_CC_CORE_INT8_INL_H_
#define TPU_EMBEDDING_OPS_CC_CORE_INT8_INL_H_

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <functional>
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

// As many floats as `Words` has words.
template <class Words>
using FloatsOf = std::conditional_t<sizeof(Words) == 64, F32x16, F32x8>;

// The first of a vector's lanes in the order of `less`, found without branches.
template <class Vector, class Less>
TPU_EMBEDDING_INLINE auto FirstOf(const Vector& vector, Less less) {
  Vector lanes = vector;
  for (int half = kWidth<Vector> / 2; half > 0; half /= 2) {
    for (int i = 0; i < half; ++i) {
      lanes[i] = less(lanes[half + i], lanes[i]) ? lanes[half + i] : lanes[i];
    }
  }
  return lanes[0];
}

struct RowRange {
  float low, high;
  bool finite;
};

// The smallest and the largest value of a row.
template <class Words>
TPU_EMBEDDING_INLINE RowRange RangeOf(const float* values, int64_t dim) {
  using F32xN = FloatsOf<Words>;
  constexpr int64_t kLanes = kWidth<F32xN>;
  float padded[kLanes];  // of a row that is narrower, as no table is
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
  return {FirstOf(low, std::less<float>()),
          FirstOf(high, std::greater<float>()),
          FirstOf(largest, std::greater<uint32_t>()) < kInfinity};
}

// Values that the arithmetic of TensorFlow's threads takes for 0.
inline float WithoutDenormals(float value) {
  return std::abs(value) < std::numeric_limits<float>::min() ? 0.0f : value;
}

// Whether a row keeps its grid.
inline bool Fits(const Int8Row& grid, const RowRange& range) {
  const float reach = kMiddleCode * grid.scale;
  return grid.scale > 0.0f && std::abs(range.low - grid.offset) <= reach &&
         std::abs(range.high - grid.offset) <= reach &&
         range.high - range.low > kLeastFull * grid.scale;
}

// The grid that `encode` of tables/codes.py gives; `grid` has scale and
// offset.
inline void MakeGrid(const RowRange& range, BFloat16* grid) {
  grid[0] = kNotANumber;
  grid[1] = {0};
  if (!range.finite || !std::isfinite(range.high - range.low)) return;
  const double low = WithoutDenormals(range.low);
  const double high = WithoutDenormals(range.high);
  const BFloat16 nearest =
      NearestBFloat16(static_cast<float>((low + high) / 2));
  float offset, stored;
  Load(&nearest, &offset);
  if (!std::isfinite(offset)) return;
  const double middle = offset;
  const double spread = std::max(high - middle, middle - low);
  BFloat16 scale = NearestBFloat16(
      static_cast<float>(spread * (1 + 0x1p-8) / double{kMiddleCode}));
  Load(&scale, &stored);
  if (!std::isfinite(stored)) scale = kNotANumber;
  if (!(stored >= kSmallestScale)) scale = {0};
  grid[0] = scale;
  grid[1] = NearestBFloat16(WithoutDenormals(offset) + 0.0f);  // Nor -0.
}

// The codes of as many columns as `Words` has; each is in [0, 256).
template <class Words>
TPU_EMBEDDING_INLINE void CodeLanes(const Int8Row& grid, const float* values,
                                    const uint16_t* random, uint8_t* codes) {
  using F32xN = FloatsOf<Words>;
  using Halves = std::conditional_t<sizeof(Words) == 64, U16x16, U16x8>;
  using Bytes = std::conditional_t<sizeof(Words) == 64, U8x16, U8x8>;
  F32xN x;
  Halves added;
  Words bits;
  Load(values, &x);
  std::memcpy(&added, random, sizeof(added));
  x = (x - grid.offset) / grid.scale * 65536.0f;
  std::memcpy(&bits, &x, sizeof(bits));
  const Words negative = Words{} - (bits >> 31);  // all bits or none
  bits &= ~kSign;
  std::memcpy(&x, &bits, sizeof(bits));
  x += 0x1p23f;  // The nearest whole number, in the lower 23 bits.
  std::memcpy(&bits, &x, sizeof(bits));
  const Words size = bits & 0x7FFFFF;
  const Words fixed = ((size ^ negative) - negative) + 127 * 65536 + 32768;
  const Words sum = fixed + __builtin_convertvector(added, Words);
  // In two steps, for each of which there is an instruction.
  const Bytes rounded = __builtin_convertvector(
      __builtin_convertvector(sum >> 16, Halves), Bytes);
  std::memcpy(codes, &rounded, sizeof(rounded));
}

// Rows with their numbers; the last one again where there are fewer.
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

// A body of simd.h: stores rows by the rule of docs/formats.md. A grid that
// the values fit and of which they fill 0.8 is kept. What lies between two
// steps of the grid becomes one of them, by the bits that round bfloat16.
struct CodeBody {
  template <class F32xN>
  TPU_EMBEDDING_INLINE static void Run(RowsToCode rows, int64_t dim,
                                       const Rounding& rounding) {
    using Words = RandomWords<F32xN>;
    bool rounds = false;
    for (int r = 0; r < kRowsAtOnce; ++r) {
      BFloat16* const stored = rows.grids[r];
      Int8Row& grid = rows.grid[r];
      Load(stored, &grid.scale);
      Load(stored + 1, &grid.offset);
      const RowRange range = RangeOf<Words>(rows.values[r], dim);
      if (!range.finite || !Fits(grid, range)) {
        MakeGrid(range, stored);
        Load(stored, &grid.scale);
        Load(stored + 1, &grid.offset);
      }
      if (grid.scale > 0.0f) {
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
