// CsrBatch with one thread and with several, into new storage and into storage
// that was used, and what limits do. tests/test_csr_oracle.py has the entries.

#include "core/csr.h"

#include <algorithm>
#include <random>
#include <string>
#include <thread>
#include <vector>

#include "check.h"

namespace tpu_embedding {
namespace {

using Random = std::mt19937;

int64_t Draw(Random& random, int64_t low, int64_t high) {
  return std::uniform_int_distribution<int64_t>(low, high)(random);
}

void InLine(int64_t total, int64_t, const Range& body) { body(0, total); }

// One thread per unit, as many at once as there are.
void OnThreads(int64_t total, int64_t, const Range& body) {
  std::vector<std::thread> threads;
  for (int64_t i = 0; i < total; ++i) {
    threads.emplace_back([&body, i] { body(i, i + 1); });
  }
  for (std::thread& thread : threads) thread.join();
}

// A ragged feature: its ids, weights and row splits.
struct Input {
  std::vector<int64_t> ids;
  std::vector<float> weights;
  std::vector<int64_t> splits{0};
  bool weighted = true;  // else all weights are 1, and nobody gives them

  FeatureInput view() const {
    FeatureInput input;
    input.ids64 = ids.data();
    input.num_ids = ids.size();
    if (weighted) input.weights = weights.data();
    input.structure = splits.data();
    input.structure_size = splits.size();
    input.shape = {static_cast<int64_t>(splits.size()) - 1};
    return input;
  }
};

struct Problem {
  CsrSetup setup;
  std::vector<Input> inputs;

  std::vector<FeatureInput> views() const {
    std::vector<FeatureInput> views;
    for (const Input& input : inputs) views.push_back(input.view());
    return views;
  }
};

// Weights are small integers, so that sums are exact in any order.
Input DrawInput(Random& random, int64_t samples, int64_t vocabulary_size) {
  Input input;
  const int64_t longest = Draw(random, 0, 9);
  input.weighted = Draw(random, 0, 1);
  for (int64_t s = 0; s < samples; ++s) {
    for (int64_t n = Draw(random, 0, longest); n > 0; --n) {
      const int64_t range = Draw(random, 0, 1) ? vocabulary_size : 3;
      input.ids.push_back(Draw(random, 0, range - 1) % vocabulary_size);
      input.weights.push_back(
          input.weighted ? static_cast<float>(Draw(random, 0, 3)) : 1.0f);
    }
    input.splits.push_back(input.ids.size());
  }
  return input;
}

void AddFeature(Random& random, CsrFeature feature, Problem* problem) {
  CsrTable& table = problem->setup.tables[0];
  const int number = problem->setup.features.size();
  feature.spec.path = "f" + std::to_string(number);
  feature.spec.kind = InputKind::kRagged;
  feature.spec.combiner = static_cast<Combiner>(Draw(random, 0, 2));
  feature.samples = problem->setup.num_cores * Draw(random, 1, 6);
  feature.spec.shape_known = true;
  feature.spec.declared_shape = {feature.samples};
  feature.sample_offset = table.samples;
  table.samples += feature.samples;
  table.features.push_back(number);
  problem->inputs.push_back(
      DrawInput(random, feature.samples, feature.spec.vocabulary_size));
  problem->setup.features.push_back(feature);
}

Problem DrawProblem(Random& random, bool positions) {
  Problem problem;
  CsrSetup& setup = problem.setup;
  setup.num_cores = Draw(random, 1, 4);
  setup.num_replicas = Draw(random, 1, 4);
  setup.max_ids_per_chip_per_sample = 8 * Draw(random, 4, 200);
  CsrTable table;
  table.name = "stack";
  table.limit = {1 << 20, 1 << 20};
  table.keep_positions = positions;
  setup.tables.push_back(table);
  for (int64_t t = Draw(random, 1, 3); t > 0; --t) {
    CsrFeature feature;
    feature.spec.table = "t" + std::to_string(t);
    feature.spec.vocabulary_size = Draw(random, 1, 150);
    feature.row_offset = setup.tables[0].rows;
    feature.rotation = Draw(random, 0, setup.num_shards() - 1);
    const int64_t block = 8 * setup.num_shards();
    setup.tables[0].rows +=
        (feature.spec.vocabulary_size + block - 1) / block * block;
    for (int64_t f = Draw(random, 1, 2); f > 0; --f) {
      AddFeature(random, feature, &problem);
    }
  }
  return problem;
}

struct Csr {
  std::vector<int32_t> row_pointers, samples, tokens, positions;
  std::vector<float> gains;
};

bool operator==(const Csr& a, const Csr& b) {
  return a.row_pointers == b.row_pointers && a.samples == b.samples &&
         a.tokens == b.tokens && a.gains == b.gains &&
         a.positions == b.positions;
}

Csr Run(const Problem& problem, uint64_t splits, const ParallelFor& parallel,
        CsrResult* result, CsrBatch* used = nullptr) {
  CsrBatch fresh(problem.setup);
  CsrBatch& batch = used ? *used : fresh;
  CHECK_EQ(batch.Prepare(problem.views(), {splits}, parallel).value_or(""), "");
  *result = batch.result(0);
  const int64_t size = result->layout.ids_size;
  Csr csr;
  // Exact sizes: the sanitizers see a write past the end.
  csr.row_pointers.resize(result->layout.row_pointers_size);
  csr.samples.resize(size);
  csr.tokens.resize(size);
  csr.gains.resize(size);
  CsrArrays arrays{csr.row_pointers.data(), csr.samples.data(),
                   csr.tokens.data(), csr.gains.data(), nullptr};
  if (problem.setup.tables[0].keep_positions) {
    csr.positions.resize(size);
    arrays.positions = csr.positions.data();
  }
  batch.Write({arrays}, parallel);
  return csr;
}

// A batch that is used again knows nothing of the one before.
void TestStorageIsUsedAgain() {
  Random random(5);
  for (int round = 0; round < 30; ++round) {
    Problem problem = DrawProblem(random, /*positions=*/round % 5 == 0);
    CHECK_EQ(CompleteSetup(&problem.setup).value_or(""), "");
    CsrBatch used(problem.setup);
    for (int turn = 0; turn < 4; ++turn) {
      CsrResult result;
      const uint64_t splits =
          turn % 2 ? uint64_t(random()) & uint64_t(random()) & 0xffff : 0;
      const Csr again = Run(problem, splits, OnThreads, &result, &used);
      CHECK_TRUE(again == Run(problem, splits, InLine, &result));
      CHECK_EQ(result.layout.dropped_ids, 0);
      for (size_t f = 0; f < problem.inputs.size(); ++f) {
        const CsrFeature& feature = problem.setup.features[f];
        problem.inputs[f] =
            DrawInput(random, feature.samples, feature.spec.vocabulary_size);
      }
    }
  }
}

// A smaller buffer keeps a prefix of what a larger one holds.
void TestDropping() {
  Random random(2);
  int64_t dropped = 0;
  for (int round = 0; round < 60; ++round) {
    Problem problem = DrawProblem(random, /*positions=*/false);
    CHECK_EQ(CompleteSetup(&problem.setup).value_or(""), "");
    CsrResult whole;
    const Csr all = Run(problem, 0, InLine, &whole);
    const int64_t samples = problem.setup.tables[0].samples;
    problem.setup.max_ids_per_chip_per_sample = samples % 8 == 0 ? 1 : 8;
    problem.setup.allow_id_dropping = true;
    CHECK_EQ(CompleteSetup(&problem.setup).value_or(""), "");
    CsrResult part;
    const Csr some = Run(problem, 0, InLine, &part);
    CHECK_LE(some.tokens.size(), samples * 8);
    CHECK_EQ(part.layout.required_ids, whole.layout.ids_size);
    const auto kept = [](const Csr& csr) {
      const auto& ids = csr.tokens;
      return ids.size() - std::count(ids.begin(), ids.end(), kFillId);
    };
    CHECK_EQ(part.layout.dropped_ids, kept(all) - kept(some));
    for (size_t i = 0; i < some.tokens.size(); ++i) {
      if (some.tokens[i] != kFillId) CHECK_EQ(some.tokens[i], all.tokens[i]);
    }
    dropped += part.layout.dropped_ids;
  }
  CHECK_GT(dropped, 0);
}

// Minibatches keep each partition within its limits, or say that they cannot.
void TestMinibatching() {
  Random random(3);
  int cut = 0, refused = 0;
  for (int round = 0; round < 100; ++round) {
    Problem problem = DrawProblem(random, /*positions=*/false);
    CsrTable& table = problem.setup.tables[0];
    table.limit = {Draw(random, 2, 12), Draw(random, 1, 8)};
    problem.setup.minibatching = true;
    problem.setup.max_ids_per_chip_per_sample = 8000;
    CHECK_EQ(CompleteSetup(&problem.setup).value_or(""), "");
    CsrBatch batch(problem.setup);
    if (batch.Prepare(problem.views(), {0}, InLine)) {
      ++refused;
      continue;
    }
    CsrResult result;
    const Csr csr = Run(problem, 0, InLine, &result);
    cut += result.splits != 0;
    for (int64_t cell = 0; cell < result.layout.cells.size(); ++cell) {
      const int64_t begin = result.layout.starts[cell];
      const int64_t end = result.layout.ends[cell];
      std::vector<int32_t> ids(csr.tokens.begin() + begin,
                               csr.tokens.begin() + end);
      CHECK_LE(ids.size(), table.limit.ids);
      ids.erase(std::unique(ids.begin(), ids.end()), ids.end());
      CHECK_LE(ids.size(), table.limit.unique);
    }
  }
  CHECK_GT(cut, 5);
  CHECK_GT(refused, 5);
}

void TestSplits() {
  BucketCounts buckets{};
  buckets[0] = buckets[1] = buckets[40] = {3, 3};
  CHECK_EQ(FindSplits(buckets, {9, 9}), 0);
  CHECK_EQ(FindSplits(buckets, {6, 6}), 1);  // only the root: at bucket 32
  CHECK_EQ(FindSplits(buckets, {6, 5}), (uint64_t{1} << 31) | 1);
  CHECK_TRUE((MinibatchBounds(0) == std::vector<int>{0, 64}));
  CHECK_TRUE((MinibatchBounds(0b111) == std::vector<int>{0, 16, 32, 48, 64}));
  CHECK_TRUE((MinibatchBounds((uint64_t{1} << 31) | 1) ==
              std::vector<int>{0, 1, 32, 64}));
  CHECK_EQ(FirstBucketAbove(buckets, {3, 3}), -1);
  CHECK_EQ(FirstBucketAbove(buckets, {3, 2}), 0);
}

}  // namespace
}  // namespace tpu_embedding

int main() {
  tpu_embedding::TestStorageIsUsedAgain();
  tpu_embedding::TestDropping();
  tpu_embedding::TestMinibatching();
  tpu_embedding::TestSplits();
}
