#include "core/first_values.h"

#include <cmath>
#include <cstring>

#include "core/id_map.h"

namespace tpu_embedding {
namespace {

// Between two and minus two standard deviations.
constexpr double kBelow = 0.022750131948179195;
constexpr double kWithin = 0.9544997361036416;

// The natural logarithm of x > 0. The libraries of two systems may differ in
// the last bit of std::log; this does not.
double Log(double x) {
  int exponent;
  double mantissa = std::frexp(x, &exponent);  // in [0.5, 1)
  if (mantissa < 0.7071067811865476) {
    mantissa *= 2.0;
    --exponent;
  }
  const double s = (mantissa - 1.0) / (mantissa + 1.0);
  const double square = s * s;  // below 0.0295: 9 terms are enough
  double sum = 0.0;
  for (int k = 17; k >= 1; k -= 2) sum = sum * square + 1.0 / k;
  return 2.0 * s * sum + exponent * 0.6931471805599453;
}

// In (0, 1), never at an end.
double Uniform(uint64_t bits) {
  return (static_cast<double>(bits >> 11) + 0.5) * 0x1p-53;
}

BFloat16 Nearest(float value) {
  uint32_t bits;
  std::memcpy(&bits, &value, sizeof(bits));
  return {static_cast<uint16_t>((bits + 0x7fff + (bits >> 16 & 1)) >> 16)};
}

// Calls write(column, value) for each column.
template <class Sink>
void WriteRow(const FirstValues& values, int64_t id, int64_t dim,
              const Sink& write) {
  using Kind = FirstValues::Kind;
  const uint64_t row =
      MixBits(MixBits(values.seed) ^ static_cast<uint64_t>(id));
  for (int64_t d = 0; d < dim; ++d) {
    double value = values.first;
    if (values.kind != Kind::kConstant) {
      const double u = Uniform(MixBits(row + d * 0x9e3779b97f4a7c15u));
      double deviates = u;
      if (values.kind == Kind::kUniform) {
        value += (values.second - values.first) * u;
      } else {
        if (values.kind == Kind::kTruncatedNormal)
          deviates = kBelow + kWithin * u;
        value += values.second * NormalQuantile(deviates);
      }
    }
    write(d, static_cast<float>(value));
  }
}

}  // namespace

// Algorithm AS 241 (Wichura, 1988), PPND7.
double NormalQuantile(double p) {
  const double q = p - 0.5;
  if (std::abs(q) <= 0.425) {
    const double r = 0.180625 - q * q;
    return q *
           (((59.109374720 * r + 159.29113202) * r + 50.434271938) * r +
            3.3871327179) /
           (((67.187563600 * r + 78.757757664) * r + 17.895169469) * r + 1.0);
  }
  double r = std::sqrt(-Log(q < 0.0 ? p : 1.0 - p));
  double value;
  if (r <= 5.0) {
    r -= 1.6;
    value = (((0.17023821103 * r + 1.3067284816) * r + 2.7568153900) * r +
             1.4234372777) /
            ((0.12021132975 * r + 0.73700164250) * r + 1.0);
  } else {
    r -= 5.0;
    value = (((0.017337203997 * r + 0.42868294337) * r + 3.0812263860) * r +
             6.6579051150) /
            ((0.012258202635 * r + 0.24197894225) * r + 1.0);
  }
  return q < 0.0 ? -value : value;
}

void FirstValues::Write(int64_t id, int64_t dim, float* row) const {
  WriteRow(*this, id, dim, [=](int64_t d, float value) { row[d] = value; });
}

void FirstValues::Write(int64_t id, int64_t dim, BFloat16* row) const {
  WriteRow(*this, id, dim,
           [=](int64_t d, float value) { row[d] = Nearest(value); });
}

}  // namespace tpu_embedding
