// One replica's batch, checked and ready for lookup and update.

#ifndef TPU_EMBEDDING_OPS_CC_CORE_PREPARED_BATCH_H_
#define TPU_EMBEDDING_OPS_CC_CORE_PREPARED_BATCH_H_

#include <cstdint>
#include <memory>
#include <vector>

#include "core/feature.h"
#include "core/parallel.h"
#include "core/row_groups.h"

namespace tpu_embedding {

struct RoutedBatch;

struct PreparedBatch {
  std::vector<FeatureCsr> features;
  std::vector<RowGroups> tables;          // by table; empty for evaluation
  std::vector<int64_t> vocabulary_sizes;  // by table: what ids were checked for
  bool trains = false;  // whether gradients of a lookup may come
  // The batch that was looked up for this update, if it is known to be another
  // one. The reference keeps its rows.
  std::shared_ptr<const PreparedBatch> looked_up;
  // The batch that this is part of if processes divide the tables, or null.
  const RoutedBatch* routed = nullptr;
};

// Maps each feature to its table, and has the sizes of the tables.
struct TableMap {
  std::vector<int> feature_tables;
  std::vector<int64_t> vocabulary_sizes;
  // Whether each table asks for the places of entries; empty if none does.
  std::vector<bool> places = {};

  // Returns the features of `table`, in order.
  std::vector<int> FeaturesOf(int table) const;
};

// Builds the CSR of every feature and, for training, groups each table's
// entries by row.
Error PrepareBatch(const std::vector<FeatureSpec>& specs,
                   const TableMap& tables,
                   const std::vector<FeatureInput>& inputs, bool training,
                   const ParallelFor& parallel_for, PreparedBatch* batch);

// Groups each table's entries by row, the form that an update needs.
void GroupRows(const TableMap& tables, const ParallelFor& parallel_for,
               PreparedBatch* batch);

}  // namespace tpu_embedding

#endif  // TPU_EMBEDDING_OPS_CC_CORE_PREPARED_BATCH_H_
