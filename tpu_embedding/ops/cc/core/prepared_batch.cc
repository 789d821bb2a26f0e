#include "core/prepared_batch.h"

#include <algorithm>
#include <numeric>

namespace tpu_embedding {
namespace {

// Rough cycles for checking one id.
constexpr int64_t kCyclesPerCheck = 10;

// Returns the indices of `sizes`, the largest first.
std::vector<int> ByDescendingSize(const std::vector<int64_t>& sizes) {
  std::vector<int> order(sizes.size());
  std::iota(order.begin(), order.end(), 0);
  std::stable_sort(order.begin(), order.end(),
                   [&](int a, int b) { return sizes[a] > sizes[b]; });
  return order;
}

}  // namespace

std::vector<int> TableMap::FeaturesOf(int table) const {
  std::vector<int> features;
  for (size_t f = 0; f < feature_tables.size(); ++f) {
    if (feature_tables[f] == table) features.push_back(f);
  }
  return features;
}

void GroupRows(const TableMap& tables, const ParallelFor& parallel_for,
               PreparedBatch* batch) {
  const int64_t num_tables = tables.vocabulary_sizes.size();
  batch->tables.resize(num_tables);
  std::vector<TableEntries> entries(num_tables);
  for (int64_t t = 0; t < num_tables; ++t) {
    for (int f : tables.FeaturesOf(t)) {
      entries[t].features.push_back(batch->features[f]);
    }
    entries[t].vocabulary_size = tables.vocabulary_sizes[t];
    entries[t].groups = &batch->tables[t];
    entries[t].places = !tables.places.empty() && tables.places[t];
  }
  GroupByRow(entries, parallel_for);
}

Error PrepareBatch(const std::vector<FeatureSpec>& specs,
                   const TableMap& tables,
                   const std::vector<FeatureInput>& inputs, bool training,
                   const ParallelFor& parallel_for, PreparedBatch* batch) {
  const int64_t num_features = specs.size();
  std::vector<int64_t> sizes;
  for (const FeatureInput& input : inputs) sizes.push_back(input.num_ids);
  const int64_t num_ids =
      std::accumulate(sizes.begin(), sizes.end(), int64_t{0});

  batch->features.resize(num_features);
  batch->vocabulary_sizes = tables.vocabulary_sizes;
  batch->trains = training;
  std::vector<Error> errors(num_features);
  const auto order = ByDescendingSize(sizes);
  ForEachItem(parallel_for, num_features,
              kCyclesPerCheck * num_ids / std::max<int64_t>(num_features, 1),
              [&](int64_t i) {
                const int f = order[i];
                errors[f] = BuildCsr(specs[f], inputs[f], &batch->features[f]);
              });
  for (const Error& error : errors) {
    if (error) return error;
  }
  if (training) {
    GroupRows(tables, parallel_for, batch);
  } else {
    batch->tables.clear();
  }
  return std::nullopt;
}

}  // namespace tpu_embedding
