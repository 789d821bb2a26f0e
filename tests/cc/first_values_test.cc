// First values of rows depend on seed and id only. tests/test_growing.py has
// their distributions.

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
  tpu_embedding::TestSeedAndIdAlone();
  tpu_embedding::TestBits();
  tpu_embedding::TestBFloat16IsNearest();
}
