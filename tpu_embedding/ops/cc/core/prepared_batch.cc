#include "core/prepared_batch.h"

#include <algorithm>

namespace tpu_embedding {
namespace {

// Rough cycles for checking one id, and for sorting one.
constexpr int64_t kCyclesPerCheck = 10;
constexpr int64_t kCyclesPerSort = 50;

}  // namespace

std::vector<int> TableMap::FeaturesOf(int table) const {
  std::vector<int> features;
  for (size_t f = 0; f < feature_tables.size(); ++f) {
    if (feature_tables[f] == table) features.push_back(f);
  }
  return features;
}

Error PrepareBatch(const std::vector<FeatureSpec>& specs,
                   const TableMap& tables,
                   const std::vector<FeatureInput>& inputs, bool training,
                   const ParallelFor& parallel_for, PreparedBatch* batch) {
  const int64_t num_features = specs.size();
  const int64_t num_tables = tables.vocabulary_sizes.size();
  int64_t num_ids = 0;
  for (const FeatureInput& input : inputs) num_ids += input.num_ids;

  batch->features.resize(num_features);
  batch->vocabulary_sizes = tables.vocabulary_sizes;
  std::vector<Error> errors(num_features);
  const int64_t check_cost =
      kCyclesPerCheck * num_ids / std::max<int64_t>(num_features, 1);
  parallel_for(num_features, check_cost, [&](int64_t begin, int64_t end) {
    for (int64_t f = begin; f < end; ++f) {
      errors[f] = BuildCsr(specs[f], inputs[f], &batch->features[f]);
    }
  });
  for (const Error& error : errors) {
    if (error) return error;
  }
  if (!training) return std::nullopt;

  batch->tables.resize(num_tables);
  const int64_t sort_cost =
      kCyclesPerSort * num_ids / std::max<int64_t>(num_tables, 1);
  parallel_for(num_tables, sort_cost, [&](int64_t begin, int64_t end) {
    for (int64_t t = begin; t < end; ++t) {
      std::vector<const FeatureCsr*> features;
      for (int f : tables.FeaturesOf(t)) {
        features.push_back(&batch->features[f]);
      }
      batch->tables[t] = GroupByRow(features, tables.vocabulary_sizes[t]);
    }
  });
  return std::nullopt;
}

}  // namespace tpu_embedding
