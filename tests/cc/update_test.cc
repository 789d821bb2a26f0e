// Lookup and update against naive loops, over dims around the vector width,
// with NaN around every buffer; and the same bits for any split over threads,
// whether the compiler knows the dim or not.

#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>
#include <random>
#include <thread>
#include <vector>

#include "check.h"
#include "core/lookup.h"
#include "core/optimizers/all.h"
#include "core/row_groups.h"
#include "core/update-inl.h"

namespace tpu_embedding {
namespace {

constexpr int64_t kRows = 37;
constexpr int64_t kSamples = 53;
constexpr int64_t kPadding = 16;
constexpr float kNan = std::numeric_limits<float>::quiet_NaN();

std::mt19937 generator(20261121);

float Random() {
  return std::uniform_real_distribution<float>(-1, 1)(generator);
}

// A matrix with NaN before and behind: reading either shows in the results.
class Matrix {
 public:
  Matrix(int64_t rows, int64_t dim, float low)
      : dim_(dim), values_(kPadding + rows * dim + kPadding, kNan) {
    for (int64_t i = 0; i < rows * dim; ++i) data()[i] = low + Random();
  }
  float* data() { return values_.data() + kPadding; }
  const float* row(int64_t r) { return data() + r * dim_; }
  bool SameBits(const Matrix& other) const {
    return std::memcmp(values_.data(), other.values_.data(),
                       values_.size() * sizeof(float)) == 0;
  }
  void CheckPadding() const {
    for (int64_t i = 0; i < kPadding; ++i) {
      CHECK_TRUE(std::isnan(values_[i]));
      CHECK_TRUE(std::isnan(values_[values_.size() - 1 - i]));
    }
  }

 private:
  int64_t dim_;
  std::vector<float> values_;
};

// Up to five entries for a sample, so that rows are shared and samples empty.
FeatureCsr RandomCsr(Gains gains) {
  std::vector<int64_t> rows;
  FeatureCsr csr;
  csr.offsets = Buffer<int64_t>(kSamples + 1);
  csr.offsets[0] = 0;
  for (int64_t s = 0; s < kSamples; ++s) {
    for (uint32_t k = generator() % 6; k > 0; --k) {
      rows.push_back(generator() % kRows);
    }
    csr.offsets[s + 1] = rows.size();
  }
  csr.rows = Buffer<int32_t>(rows.size());
  std::copy(rows.begin(), rows.end(), csr.rows.data());
  csr.gains.Resize(gains == Gains::kOfEntries ? rows.size() : 0);
  csr.sample_gains.Resize(gains == Gains::kOfSamples ? kSamples : 0);
  for (Buffer<float>* buffer : {&csr.gains, &csr.sample_gains}) {
    std::generate_n(buffer->data(), buffer->size(), Random);
  }
  return csr;
}

void TestLookup(int64_t dim, Gains gains) {
  const FeatureCsr csr = RandomCsr(gains);
  Matrix table(kRows, dim, 0);
  for (const Quantization& quantization :
       {Quantization{}, Quantization{5, -0.5f, 0.5f}}) {
    Matrix out(kSamples, dim, 0);
    Lookup(csr, table.data(), dim, quantization, 0, kSamples, out.data());
    out.CheckPadding();
    for (int64_t s = 0; s < kSamples; ++s) {
      for (int64_t d = 0; d < dim; ++d) {
        float sum = 0;  // the same operations in the same order: equal bits
        for (int64_t i = csr.offsets[s]; i < csr.offsets[s + 1]; ++i) {
          float x = table.row(csr.rows[i])[d];
          if (quantization.num_buckets) {
            const float step = 1.0f / 4;
            x = std::min(std::max(x, -0.5f), 0.5f);
            x = std::floor((x + 0.5f) / step + 0.5f) * step - 0.5f;
          }
          sum += csr.gain(s, i) * x;
        }
        CHECK_EQ(out.row(s)[d], sum);
      }
    }
  }
}

// One step's gradients; those of every seventh sample are not given.
struct Gradients {
  explicit Gradients(int64_t dim, Gains gains = Gains::kOfEntries)
      : csr(RandomCsr(gains)), values(kSamples, dim, 0) {
    GroupByRow(
        {{{csr}, kRows, &groups}},
        [](int64_t total, int64_t, const Range& body) { body(0, total); });
    for (int64_t s = 0; s < kSamples; ++s) {
      samples.push_back(s % 7 ? values.row(s) : nullptr);
    }
  }

  const FeatureCsr csr;
  RowGroups groups;
  Matrix values;
  std::vector<const float*> samples;
};

// A table and its slots.
struct State {
  State(int64_t width, int num_slots, int64_t slot_width)
      : dim(width),
        table(kRows, width, 0),
        slots(num_slots, Matrix(kRows, slot_width, 2)) {}

  TableView View() {
    TableView view{table.data(), kRows, dim, {}};
    for (Matrix& slot : slots) {
      view.slots.push_back(slot.data());
    }
    return view;
  }

  void CheckSame(const State& other) const {
    table.CheckPadding();
    CHECK_TRUE(table.SameBits(other.table));
    for (size_t k = 0; k < slots.size(); ++k) {
      slots[k].CheckPadding();
      CHECK_TRUE(slots[k].SameBits(other.slots[k]));
    }
  }

  int64_t dim;
  Matrix table;
  std::vector<Matrix> slots;
};

RowOptions Options(bool all_rows) {
  RowOptions options;
  options.clip_gradient_norm = 0.9f;
  options.clip_gradient_min = -0.5f;
  options.clip_gradient_max = 0.4f;
  options.clip_weight_min = -0.8f;
  options.weight_decay_factor = 0.1f;
  options.all_rows = all_rows;
  return options;
}

// Runs the update on `threads` threads, each with its share of the range.
template <class Rule>
void Run(const RuleArguments& arguments, const RowOptions& options,
         const Gradients& gradients, int threads, State* state) {
  const TableView view = state->View();
  const TableGradients given{&gradients.groups, gradients.samples.data()};
  const int64_t size = options.all_rows ? kRows : gradients.groups.num_rows();
  std::vector<std::thread> pool;
  for (int t = 0; t < threads; ++t) {
    pool.emplace_back([&, t] {
      Update<Rule>(arguments, options, given, view, size * t / threads,
                   size * (t + 1) / threads);
    });
  }
  for (std::thread& thread : pool) thread.join();
}

// The same on this thread in ranges of `length`, so that blocks of rows have
// other sizes.
template <class Rule>
void RunRanges(const RuleArguments& arguments, const RowOptions& options,
               const Gradients& gradients, int64_t length, State* state) {
  const TableView view = state->View();
  const TableGradients given{&gradients.groups, gradients.samples.data()};
  const int64_t size = options.all_rows ? kRows : gradients.groups.num_rows();
  for (int64_t begin = 0; begin < size; begin += length) {
    Update<Rule>(arguments, options, given, view, begin,
                 std::min(begin + length, size));
  }
}

// All rows by one thread, of a dim that the compiler does not know.
template <class Rule>
void RunAnyDim(const RuleArguments& arguments, const RowOptions& options,
               const Gradients& gradients, State* state) {
  const TableView view = state->View();
  const TableGradients given{&gradients.groups, gradients.samples.data()};
  const int64_t size = options.all_rows ? kRows : gradients.groups.num_rows();
  UpdateWithDim<Rule, float*, AnyDim>(arguments, options, given, view, 0, size);
}

template <class Rule>
void TestBits(const std::vector<float>& hyperparameters, int64_t dim) {
  const RuleArguments arguments{hyperparameters, 0.1f};
  for (bool all_rows : {false, true}) {
    const Gradients gradients(dim);
    const State start(dim, Rule::kNumSlots, Rule::kSlotsPerRow ? 1 : dim);
    State one = start;
    State many = start;
    State any = start;
    Run<Rule>(arguments, Options(all_rows), gradients, 1, &one);
    Run<Rule>(arguments, Options(all_rows), gradients, 4, &many);
    RunAnyDim<Rule>(arguments, Options(all_rows), gradients, &any);
    one.CheckSame(many);
    one.CheckSame(any);
    for (int64_t length : {1, 3, 6}) {
      State parts = start;
      RunRanges<Rule>(arguments, Options(all_rows), gradients, length, &parts);
      one.CheckSame(parts);
    }
  }
}

// Rows of bfloat16, which are opened in blocks: the same bits for any ranges,
// and some row has changed.
void TestBFloat16(int64_t dim) {
  const RuleArguments arguments{{}, 0.1f, {1, 2}};
  const Gradients gradients(dim);
  const TableGradients given{&gradients.groups, gradients.samples.data()};
  const int64_t size = gradients.groups.num_rows();
  std::vector<BFloat16> start(kRows * dim);
  for (int64_t i = 0; i < kRows * dim; ++i) {
    start[i] = {static_cast<uint16_t>(0x3F80 + i)};  // 1 and more
  }
  const size_t bytes = start.size() * sizeof(BFloat16);
  std::vector<std::vector<BFloat16>> tables;
  for (int64_t length : {int64_t{1}, int64_t{3}, int64_t{6}, size}) {
    tables.push_back(start);
    const TableView view{tables.back().data(), kRows, dim, {}};
    for (int64_t begin = 0; begin < size; begin += length) {
      Update<Sgd, BFloat16*>(arguments, {}, given, view, begin,
                             std::min(begin + length, size));
    }
    CHECK_TRUE(std::memcmp(tables.back().data(), tables[0].data(), bytes) == 0);
  }
  CHECK_TRUE(std::memcmp(tables[0].data(), start.data(), bytes) != 0);
}

// 0.5 is a valid value of most hyperparameters; as a flag it means true.
template <class... Rules>
void TestAllRules(RuleList<Rules...>, int64_t dim) {
  (TestBits<Rules>(std::vector<float>(Rules::kNumHyperparameters, 0.5f), dim),
   ...);
}

// The frame around the rule, against loops that read like docs/semantics.md.
void TestFrame(int64_t dim, Gains gains) {
  const RuleArguments arguments{{}, 0.1f};
  const Gradients gradients(dim, gains);
  const RowGroups& groups = gradients.groups;
  State state(dim, 0, dim);
  Matrix expected = state.table;
  for (int64_t g = 0; g < groups.num_rows(); ++g) {
    float* row = expected.data() + groups.rows[g] * dim;
    std::vector<float> sums(dim);
    for (int64_t i = groups.starts[g]; i < groups.starts[g + 1]; ++i) {
      const float* gradient = gradients.samples[groups.samples[i]];
      if (!gradient) continue;
      for (int64_t d = 0; d < dim; ++d) sums[d] += groups.gain(i) * gradient[d];
    }
    const float norm = std::sqrt(SumOfSquares(sums.data(), dim));
    const float factor = norm > 0.9f ? 0.9f / norm : 1.0f;
    for (int64_t d = 0; d < dim; ++d) {
      float sum = factor * sums[d];
      sum = std::min(std::max(sum, -0.5f), 0.4f);
      row[d] -= 0.1f * row[d];
      row[d] -= 0.1f * sum;
      row[d] = std::max(row[d], -0.8f);
    }
  }
  Run<Sgd>(arguments, Options(false), gradients, 1, &state);
  CHECK_TRUE(state.table.SameBits(expected));
}

}  // namespace
}  // namespace tpu_embedding

int main() {
  using namespace tpu_embedding;
  for (int64_t dim :
       {1, 2, 3, 4, 7, 8, 10, 15, 16, 17, 32, 33, 64, 100, 128, 130}) {
    for (Gains gains : {Gains::kOnes, Gains::kOfSamples, Gains::kOfEntries}) {
      TestLookup(dim, gains);
      TestFrame(dim, gains);
    }
    TestBFloat16(dim);
    TestAllRules(AllRules(), dim);
    // These numbers take other branches: square roots instead of powers, and no
    // Nesterov momentum.
    TestBits<AdagradMomentum>({0.9f, 0, 2, 0.9f, 1e-10f}, dim);
    TestBits<Ftrl>({-0.5f, 0.1f, 0.1f, 0.1f, 1}, dim);
    TestBits<Adam>({0.9f, 0.99f, 1e-7f, 0}, dim);
    TestBits<Momentum>({0.9f, 0}, dim);
  }
}
