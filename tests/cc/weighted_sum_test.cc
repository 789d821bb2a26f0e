// Weighted sums of any width, by vectors of any width, against a plain loop.

#include <cmath>
#include <cstdint>
#include <cstring>
#include <random>
#include <vector>

#include "check.h"
#include "core/bfloat16.h"
#include "core/simd.h"
#include "core/weighted_sum-inl.h"

namespace tpu_embedding {
namespace {

constexpr int64_t kMaxColumns = 140;  // two blocks of 64 and a rest
constexpr int64_t kVectors = 6;
constexpr float kGuard = -77.0f;

std::mt19937 generator(20261121);

float Random() {
  return std::uniform_real_distribution<float>(-1, 1)(generator);
}

void Set(float value, float* element) { *element = value; }
void Set(float value, BFloat16* element) {
  uint32_t bits;
  std::memcpy(&bits, &value, sizeof(bits));
  element->bits = bits >> 16;
}

// Vectors at addresses that no register is aligned to; the fourth is zeros.
template <class Element>
struct Terms {
  explicit Terms(int64_t dim) : dim(dim), values(kVectors * dim + 1) {
    for (Element& value : values) Set(Random(), &value);
    for (int64_t i = 0; i < kVectors; ++i) gains.push_back(Random());
  }

  const Element* vector(int64_t i) const {
    return i == 3 ? nullptr : values.data() + i * dim + 1;
  }
  float gain(int64_t i) const { return gains[i]; }

  const int64_t dim;
  std::vector<Element> values;
  std::vector<float> gains;
};

template <class Element>
std::vector<float> Expected(const Terms<Element>& terms, int64_t end) {
  std::vector<float> sum(terms.dim);
  for (int64_t i = 0; i < end; ++i) {
    if (!terms.vector(i)) continue;
    for (int64_t d = 0; d < terms.dim; ++d) {
      float value;
      Load(terms.vector(i) + d, &value);
      sum[d] += terms.gain(i) * value;
    }
  }
  return sum;
}

template <class F32xN, class Element>
void TestWidths() {
  for (int64_t dim = 1; dim <= kMaxColumns; ++dim) {
    const Terms<Element> terms(dim);
    for (int64_t end : {int64_t{0}, int64_t{1}, kVectors}) {
      std::vector<float> out(dim + 1, kGuard);
      WeightedSum<F32xN>(terms, 0, end, dim, out.data());
      CHECK_EQ(out.back(), kGuard);
      const std::vector<float> expected = Expected(terms, end);
      CHECK_TRUE(!std::memcmp(out.data(), expected.data(), 4 * dim));
    }
  }
}

template <class F32xN>
void TestElements() {
  TestWidths<F32xN, float>();
  TestWidths<F32xN, BFloat16>();
}

// The same term again and again, as a sample of one id has it.
struct EqualTerms {
  const float* vector(int64_t) const { return &value; }
  float gain(int64_t) const { return 1.0f; }
  template <class F32xN>
  TPU_EMBEDDING_INLINE void Run(int64_t begin, int64_t end, int64_t dim,
                                float* out) const {
    WeightedSum<F32xN>(*this, begin, end, dim, out);
  }

  float value;
};

void TestManyTerms() {
  const EqualTerms terms{0.1f};
  const auto sum = [&](int64_t count) {
    float out = kGuard;
    if (AreFewTerms(0, count)) {
      WeightedSum<F32x4>(terms, 0, count, 1, &out);
    } else {
      SumManyTerms(terms, 0, count, 1, &out);
    }
    return out;
  };
  float expected = 0.0f;
  for (int64_t i = 0; i < kTermsOfBlock; ++i) expected += terms.value;
  CHECK_EQ(sum(kTermsOfBlock), expected);  // in sequence
  CHECK_EQ(sum(kTermsOfBlock + 1), expected + terms.value);
  CHECK_EQ(sum(2 * kTermsOfBlock + 1), expected + expected + terms.value);
  CHECK_EQ(sum(3 * kTermsOfBlock), (expected + expected) + expected);
  // In sequence the error is 0.9 %.
  CHECK_TRUE(std::abs(sum(1000000) / (1000000 * double{0.1f}) - 1) < 1e-4);
}

// Says how wide its vectors are.
struct Width {
  template <class F32xN>
  static void Run(int64_t* width) {
    *width = kWidth<F32xN>;
  }
};

void TestLevels() {
  int64_t width = 0;
  RunOnAnyCpu<Width>(&width);
  CHECK_EQ(width, 4);
  int64_t widest = 4;
#ifdef TPU_EMBEDDING_LEVELS
  if (__builtin_cpu_supports("avx2")) {
    widest = 8;
    RunOnAvx2<Width>(&width);
    CHECK_EQ(width, widest);
  }
  if (__builtin_cpu_supports("x86-64-v4")) {
    widest = 16;
    RunOnAvx512<Width>(&width);
    CHECK_EQ(width, widest);
  }
#endif
  RunOnThisCpu<Width>(&width);
  CHECK_EQ(width, widest);
}

}  // namespace
}  // namespace tpu_embedding

int main() {
  using namespace tpu_embedding;
  TestElements<F32x16>();
  TestElements<F32x8>();
  TestElements<F32x4>();
  TestManyTerms();
  TestLevels();
}
