// Rows of bfloat16: rounding against the published generator and plain
// integers, lookups against naive sums, with canaries around every buffer.

#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>
#include <vector>

#include "check.h"
#include "core/bfloat16-inl.h"
#include "core/lookup.h"
#include "core/rows-inl.h"
#include "core/simd.h"

namespace tpu_embedding {
namespace {

constexpr uint16_t kCanary = 0xABCD;

uint32_t Bits(float value) {
  uint32_t bits;
  std::memcpy(&bits, &value, sizeof(bits));
  return bits;
}

float Float(uint32_t bits) {
  float value;
  std::memcpy(&value, &bits, sizeof(value));
  return value;
}

// Rounds two rows, each in every second place of those that are rounded at
// once, and checks that nothing beside them was written.
template <class F32xN>
std::vector<std::vector<uint16_t>> RoundedWith(
    const std::vector<float> (&values)[2], const Rounding& rounding,
    const int64_t (&rows)[2]) {
  const int64_t dim = values[0].size();
  std::vector<BFloat16> out[kRowsAtOnce];
  RowsToRound together;
  for (int r = 0; r < kRowsAtOnce; ++r) {
    out[r].assign(dim + 2, BFloat16{kCanary});
    together.values[r] = values[r % 2].data();
    together.rows[r] = rows[r % 2];
    together.out[r] = out[r].data() + 1;
  }
  RoundBody::Run<F32xN>(together, dim, rounding);
  std::vector<std::vector<uint16_t>> bits(kRowsAtOnce);
  for (int r = 0; r < kRowsAtOnce; ++r) {
    CHECK_EQ(out[r].front().bits, kCanary);
    CHECK_EQ(out[r].back().bits, kCanary);
    for (int64_t d = 1; d <= dim; ++d) bits[r].push_back(out[r][d].bits);
    CHECK_TRUE(bits[r] == bits[r % 2]);
  }
  bits.resize(2);
  return bits;
}

// The same bits on CPUs of all levels.
std::vector<std::vector<uint16_t>> RoundedTwo(
    const std::vector<float> (&values)[2], const Rounding& rounding,
    const int64_t (&rows)[2]) {
  const auto bits = RoundedWith<F32x16>(values, rounding, rows);
  CHECK_TRUE(RoundedWith<F32x8>(values, rounding, rows) == bits);
  CHECK_TRUE(RoundedWith<F32x4>(values, rounding, rows) == bits);
  return bits;
}

// One row, which must have the same bits whatever row it is rounded with.
std::vector<uint16_t> Rounded(const std::vector<float>& values,
                              const Rounding& rounding, int64_t row) {
  const std::vector<float> other(values.rbegin(), values.rend());
  const auto first = RoundedTwo({values, other}, rounding, {row, row + 5});
  const auto second = RoundedTwo({other, values}, rounding, {row - 3, row});
  CHECK_TRUE(first[0] == second[1]);
  return first[0];
}

// The random bits show themselves: 1 + i * 2^-23 is rounded up from
// 2^16 - i on.
std::vector<uint32_t> RandomBitsOf(int64_t dim, const Rounding& rounding,
                                   int64_t row) {
  std::vector<uint32_t> random(dim, 0);
  for (uint32_t bit = 1 << 15; bit; bit >>= 1) {
    std::vector<float> values;
    for (int64_t d = 0; d < dim; ++d) {
      values.push_back(Float(0x3F800000u + (1 << 16) - (random[d] | bit)));
    }
    const std::vector<uint16_t> bits = Rounded(values, rounding, row);
    for (int64_t d = 0; d < dim; ++d) {
      if (bits[d] == 0x3F81) random[d] |= bit;
    }
  }
  return random;
}

// What the authors of Threefry publish beside their code: the first block has
// the first two columns of each 16.
void TestGenerator() {
  const std::vector<uint32_t> zeros = {0xA96A, 0x9C6C, 0xAE66, 0xE17E,
                                       0xECD4, 0xFC10, 0xA7D8, 0x5256};
  const std::vector<uint32_t> random = RandomBitsOf(64, {}, 0);
  for (int i = 0; i < 8; ++i) CHECK_EQ(random[i / 2 * 16 + i % 2], zeros[i]);
  const Rounding rounding = {uint64_t{0x299F31D0} << 32 | 0xA4093822,
                             uint64_t{0xEC4E6C89} << 32 | 0x082EFA98};
  const std::vector<uint32_t> longest = RandomBitsOf(1024, rounding, 12345);
  for (int64_t dim : {1, 3, 7, 64, 65, 100}) {
    const std::vector<uint32_t> shorter = RandomBitsOf(dim, rounding, 12345);
    CHECK_TRUE(std::equal(shorter.begin(), shorter.end(), longest.begin()));
  }
}

void TestValues() {
  const float infinity = std::numeric_limits<float>::infinity();
  const float largest = std::numeric_limits<float>::max();
  for (uint64_t step = 0; step < 64; ++step) {
    // What is exact, and what is not finite, for any random bits.
    const std::vector<uint16_t> bits =
        Rounded({0.0f, -0.0f, 1.5f, -3.0f, infinity, -infinity, largest,
                 -largest, Float(0x7F800001), Float(0xFFFFFFFF)},
                {7, step}, 3);
    const std::vector<uint16_t> expected = {0x0000, 0x8000, 0x3FC0, 0xC040,
                                            0x7F80, 0xFF80, 0x7F7F, 0xFF7F,
                                            0x7FC0, 0xFFFF};
    CHECK_TRUE(bits == expected);
  }
}

void TestLookup(int64_t dim) {
  const std::vector<int32_t> rows = {2, 0, 2, 1};
  FeatureCsr csr;
  csr.offsets = Buffer<int64_t>(4);
  csr.offsets[0] = 0, csr.offsets[1] = 3, csr.offsets[2] = 3;
  csr.offsets[3] = 4;
  csr.rows = Buffer<int32_t>(4);
  csr.gains = Buffer<float>(4);
  for (int i = 0; i < 4; ++i) {
    csr.rows[i] = rows[i];
    csr.gains[i] = 0.5f + i;
  }
  std::vector<BFloat16> table;
  for (int64_t i = 0; i < 3 * dim; ++i) {
    table.push_back({static_cast<uint16_t>(Bits(i - 1.5f * dim) >> 16)});
  }
  for (const Quantization& quantization :
       {Quantization{}, Quantization{5, -2.0f, 2.0f}}) {
    std::vector<float> out(3 * dim + 2, 77.0f);
    Lookup(csr, table.data(), dim, quantization, 0, 3, out.data() + 1);
    CHECK_EQ(out.front(), 77.0f);
    CHECK_EQ(out.back(), 77.0f);
    for (int64_t s = 0; s < 3; ++s) {
      for (int64_t d = 0; d < dim; ++d) {
        float sum = 0;  // the same operations in the same order: equal bits
        for (int64_t i = csr.offsets[s]; i < csr.offsets[s + 1]; ++i) {
          float x = Float(uint32_t{table[rows[i] * dim + d].bits} << 16);
          if (quantization.num_buckets) {
            x = std::floor(std::min(std::max(x, -2.0f), 2.0f) + 2.5f) - 2.0f;
          }
          sum += csr.gain(s, i) * x;
        }
        CHECK_EQ(out[1 + s * dim + d], sum);
      }
    }
  }
  std::vector<float> row(dim);
  ExpandBody::Run<F32x1>(table.data() + dim, dim, row.data());
  for (int64_t d = 0; d < dim; ++d) {
    CHECK_EQ(Bits(row[d]), uint32_t{table[dim + d].bits} << 16);
  }
}

}  // namespace
}  // namespace tpu_embedding

int main() {
  using namespace tpu_embedding;
  TestGenerator();
  TestValues();
  for (int64_t dim : {1, 3, 4, 7, 8, 10, 15, 16, 17, 33, 64, 100, 130, 1024}) {
    TestLookup(dim);
  }
}
