#include "core/first_values.h"

#include <algorithm>
#include <cmath>
#include <cstring>

#include "core/id_map.h"
#include "core/simd.h"
#include "core/wire.h"

namespace tpu_embedding {
namespace {

using Kind = FirstValues::Kind;

// The probabilities below -2 standard deviations, and between -2 and 2.
constexpr double kBelow = 0.022750131948179195;
constexpr double kWithin = 0.9544997361036416;
// A probability farther from a half than this is in a tail of the distribution.
constexpr double kTail = 0.425;
constexpr uint64_t kMantissa = (uint64_t{1} << 52) - 1;

TPU_EMBEDDING_INLINE double FromBits(uint64_t bits) {
  double value;
  std::memcpy(&value, &bits, sizeof(value));
  return value;
}

TPU_EMBEDDING_INLINE uint64_t BitsOf(double value) {
  uint64_t bits;
  std::memcpy(&bits, &value, sizeof(bits));
  return bits;
}

// Converts an integer below 2^53. Each half is put behind the bits of a power
// of two, which is then subtracted: AVX2 has no conversion, and the compiler
// would vectorize no loop with one.
TPU_EMBEDDING_INLINE double ToDouble(uint64_t integer) {
  const double high = FromBits(0x4530000000000000 | integer >> 32);
  const double low = FromBits(0x4330000000000000 | (integer & 0xffffffff));
  return (high - (0x1p84 + 0x1p52)) + low;
}

// Returns the natural logarithm of a normal x > 0. The last bit of std::log may
// depend on the system's library; the last bit of this does not.
TPU_EMBEDDING_INLINE double Log(double x) {
  const uint64_t bits = BitsOf(x);
  double mantissa = FromBits(0x3fe0000000000000 | (bits & kMantissa));
  const bool is_small = mantissa < 0.7071067811865476;  // it is in [0.5, 1)
  mantissa *= is_small ? 2.0 : 1.0;
  const double exponent =
      ToDouble(bits >> 52) - 1022.0 - (is_small ? 1.0 : 0.0);
  const double s = (mantissa - 1.0) / (mantissa + 1.0);
  const double square = s * s;  // below 0.0295: 9 terms are enough
  double sum = 0.0;
  for (int k = 17; k >= 1; k -= 2) sum = sum * square + 1.0 / k;
  return 2.0 * s * sum + exponent * 0.6931471805599453;
}

// Returns a number in (0, 1), never at an end.
TPU_EMBEDDING_INLINE double Uniform(uint64_t bits) {
  return (ToDouble(bits >> 11) + 0.5) * 0x1p-53;
}

// Computes NormalQuantile between the tails, by PPND7 of algorithm AS 241
// (Wichura, 1988).
TPU_EMBEDDING_INLINE double QuantileInside(double p) {
  const double q = p - 0.5;
  const double r = 0.180625 - q * q;
  return q *
         (((59.109374720 * r + 159.29113202) * r + 50.434271938) * r +
          3.3871327179) /
         (((67.187563600 * r + 78.757757664) * r + 17.895169469) * r + 1.0);
}

TPU_EMBEDDING_INLINE double QuantileInTail(double p) {
  const bool is_below = p - 0.5 < 0.0;
  const double root = std::sqrt(-Log(is_below ? p : 1.0 - p));
  const double near = root - 1.6;
  const double far = root - 5.0;
  const double near_value =
      (((0.17023821103 * near + 1.3067284816) * near + 2.7568153900) * near +
       1.4234372777) /
      ((0.12021132975 * near + 0.73700164250) * near + 1.0);
  const double far_value =
      (((0.017337203997 * far + 0.42868294337) * far + 3.0812263860) * far +
       6.6579051150) /
      ((0.012258202635 * far + 0.24197894225) * far + 1.0);
  const double value = root <= 5.0 ? near_value : far_value;
  return is_below ? -value : value;
}

bool IsInTail(double p) { return std::abs(p - 0.5) > kTail; }

// The number of columns made in one pass: their buffers stay in the first
// cache.
constexpr int64_t kColumns = 64;
constexpr int kTailsAtOnce = 8;  // a register of AVX-512

// Replaces probabilities by quantiles. The few in the tails, a ninth of those
// of a truncated normal, are collected side by side: computing both formulas
// for each column took twice as long.
TPU_EMBEDDING_INLINE void ToQuantiles(double* values) {
  double tails[kColumns] = {};
  int places[kColumns];
  int count = 0;
  for (int i = 0; i < kColumns; ++i) {
    tails[count] = values[i];
    places[count] = i;
    count += IsInTail(values[i]);
  }
  for (int i = 0; i < kColumns; ++i) values[i] = QuantileInside(values[i]);
  for (int k = 0; k < count; k += kTailsAtOnce) {
    for (int i = 0; i < kTailsAtOnce; ++i) {
      tails[k + i] = QuantileInTail(tails[k + i]);  // Some are only padding.
    }
  }
  for (int k = 0; k < count; ++k) values[places[k]] = tails[k];
}

// Writes `size` <= kColumns of the columns from `first` on. A body of simd.h.
struct WriteColumns {
  template <class F32xN>
  TPU_EMBEDDING_INLINE static void Run(const FirstValues& values, uint64_t row,
                                       int64_t first, int64_t size,
                                       float* columns) {
    double numbers[kColumns];
    for (int64_t i = 0; i < kColumns; ++i) {
      numbers[i] = Uniform(MixBits(row + (first + i) * 0x9e3779b97f4a7c15u));
    }
    double start = values.first;
    double range = values.second;
    if (values.kind == Kind::kUniform) {
      range -= start;
    } else {
      if (values.kind == Kind::kTruncatedNormal) {
        for (double& number : numbers) number = kBelow + kWithin * number;
      }
      ToQuantiles(numbers);
    }
    for (int64_t i = 0; i < size; ++i) {
      columns[i] = static_cast<float>(start + range * numbers[i]);
    }
  }
};

// Calls write(first column, columns, their number) for the row of `id`.
template <class Sink>
void WriteRow(const FirstValues& values, int64_t id, int64_t dim,
              const Sink& write) {
  const uint64_t row =
      MixBits(MixBits(values.seed) ^ static_cast<uint64_t>(id));
  float columns[kColumns];
  std::fill_n(columns, kColumns, static_cast<float>(values.first));
  for (int64_t first = 0; first < dim; first += kColumns) {
    const int64_t size = std::min(kColumns, dim - first);
    if (values.kind != Kind::kConstant) {
      RunOnThisCpu<WriteColumns>(values, row, first, size, columns);
    }
    write(first, columns, size);
  }
}

}  // namespace

double NormalQuantile(double p) {
  return IsInTail(p) ? QuantileInTail(p) : QuantileInside(p);
}

void FirstValues::Write(int64_t id, int64_t dim, float* row) const {
  WriteRow(*this, id, dim,
           [=](int64_t first, const float* columns, int64_t size) {
             std::copy_n(columns, size, row + first);
           });
}

void FirstValues::Write(int64_t id, int64_t dim, BFloat16* row) const {
  WriteRow(*this, id, dim,
           [=](int64_t first, const float* columns, int64_t size) {
             ToBFloat16(columns, size, row + first);
           });
}

}  // namespace tpu_embedding
