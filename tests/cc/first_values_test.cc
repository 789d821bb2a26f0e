// First values of rows: distributions, and that they depend on seed and id
// only.

#include "core/first_values.h"

#include <cmath>
#include <cstdint>
#include <vector>

#include "check.h"

namespace tpu_embedding {
namespace {

using Kind = FirstValues::Kind;

std::vector<float> Row(const FirstValues& values, int64_t id, int64_t dim) {
  std::vector<float> row(dim);
  values.Write(id, dim, row.data());
  return row;
}

void TestQuantiles() {
  CHECK_EQ(NormalQuantile(0.5), 0.0);
  for (double x = -8.0; x <= 4.0; x += 0.125) {
    const double p = 0.5 * std::erfc(-x / std::sqrt(2.0));
    CHECK_LT(std::abs(NormalQuantile(p) - x), 1e-6 * (1.0 + std::abs(x)));
  }
}

void TestMoments() {
  struct Case {
    Kind kind;
    double first, second, mean, variance, low, high;
  };
  // The variance of a normal variable within two standard deviations.
  constexpr double kTruncated = 0.7737413035;
  const Case cases[] = {
      {Kind::kUniform, -1.0, 3.0, 1.0, 16.0 / 12.0, -1.0, 3.0},
      {Kind::kNormal, 1.0, 2.0, 1.0, 4.0, -20.0, 20.0},
      {Kind::kTruncatedNormal, 1.0, 2.0, 1.0, 4.0 * kTruncated, -3.0, 5.0},
  };
  for (const Case& c : cases) {
    const FirstValues values{c.kind, c.first, c.second, 5};
    double sum = 0.0, squares = 0.0;
    constexpr int kRows = 2000, kDim = 50;
    for (int64_t id = -kRows / 2; id < kRows / 2; ++id) {
      for (const float x : Row(values, id, kDim)) {
        CHECK_GE(x, c.low);
        CHECK_LE(x, c.high);
        sum += x;
        squares += (x - c.mean) * (x - c.mean);
      }
    }
    // Five standard deviations of the estimates.
    const double number = kRows * kDim;
    CHECK_LT(std::abs(sum / number - c.mean),
             5 * std::sqrt(c.variance / number));
    CHECK_LT(std::abs(squares / number / c.variance - 1.0),
             5 * std::sqrt(2.0 / number));
  }
}

void TestSeedAndIdAlone() {
  const FirstValues values{Kind::kNormal, 0.0, 1.0, 5};
  const FirstValues other{Kind::kNormal, 0.0, 1.0, 6};
  const std::vector<float> row = Row(values, -3, 8);
  // The same whatever was made before, and a wider row begins with the same.
  CHECK_TRUE(row == Row(values, -3, 8));
  const std::vector<float> wide = Row(values, -3, 200);
  for (const int dim : {1, 8, 9, 63, 64, 65, 128, 130}) {
    CHECK_TRUE(Row(values, -3, dim) ==
               std::vector<float>(wide.begin(), wide.begin() + dim));
  }
  CHECK_TRUE(row != Row(values, -2, 8));
  CHECK_TRUE(row != Row(other, -3, 8));
}

// Bits that another CPU, compiler or version must give too.
void TestBits() {
  const FirstValues values{Kind::kTruncatedNormal, 0.0, 1.0, 42};
  const std::vector<float> row = Row(values, 7, 4);
  CHECK_EQ(row[0], -0x1.201a7ep-2f);
  CHECK_EQ(row[1], -0x1.5873eap+0f);
  CHECK_EQ(row[2], -0x1.7e231ep-3f);
  CHECK_EQ(row[3], -0x1.e5f032p-1f);
}

void TestBFloat16IsNearest() {
  const FirstValues values{Kind::kConstant, 1.0 + 3.0 / 256, 0.0, 0};
  BFloat16 row[1];
  values.Write(0, 1, row);
  CHECK_EQ(row[0].bits, 0x3f82);  // 1 + 4 / 256, as a tie goes to even
}

}  // namespace
}  // namespace tpu_embedding

int main() {
  tpu_embedding::TestQuantiles();
  tpu_embedding::TestMoments();
  tpu_embedding::TestSeedAndIdAlone();
  tpu_embedding::TestBits();
  tpu_embedding::TestBFloat16IsNearest();
}
