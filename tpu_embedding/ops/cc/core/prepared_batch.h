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
  // Of an update the batch that was looked up, where that is known to be
  // another one, so that its rows stay.
  std::shared_ptr<const PreparedBatch> looked_up;
  // What this is a part of where tables are divided over processes, or null.
  const RoutedBatch* routed = nullptr;
};

// Which table each feature reads, and how large the tables are.
struct TableMap {
  std::vector<int> feature_tables;
  std::vector<int64_t> vocabulary_sizes;
  // By table, whether it asks for the places of entries; empty: none does.
  std::vector<bool> places = {};

  // The features of `table`, in order.
  std::vector<int> FeaturesOf(int table) const;
};

// Builds the CSR of every feature and, for training, groups each table's
// entries by row.
Error PrepareBatch(const std::vector<FeatureSpec>& specs,
                   const TableMap& tables,
                   const std::vector<FeatureInput>& inputs, bool training,
                   const ParallelFor& parallel_for, PreparedBatch* batch);

// Groups each table's entries by row: what an update needs of a batch.
void GroupRows(const TableMap& tables, const ParallelFor& parallel_for,
               PreparedBatch* batch);

}  // namespace tpu_embedding

#endif  // TPU_EMBEDDING_OPS_CC_CORE_PREPARED_BATCH_H_
