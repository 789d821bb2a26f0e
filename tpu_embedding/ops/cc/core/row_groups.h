// The entries of one table, grouped by the row they name: the form in which
// gradients are summed and rows updated.
//
//   rows of the entries, in order: 7 2 7     samples: 0 0 2
//   rows: [2, 7]  starts: [0, 1, 3]          entries: {2,0} {7,0} {7,2}

#ifndef TPU_EMBEDDING_OPS_CC_CORE_ROW_GROUPS_H_
#define TPU_EMBEDDING_OPS_CC_CORE_ROW_GROUPS_H_

#include <cstdint>
#include <vector>

#include "core/buffer.h"
#include "core/feature.h"

namespace tpu_embedding {

struct RowEntry {
  int32_t row;
  uint32_t sample;  // numbered through all features of the table
  float gain;
};

struct RowGroups {
  Buffer<int32_t> rows;      // [num_rows], ascending, each once
  Buffer<int64_t> starts;    // [num_rows + 1]: where a row's entries begin
  Buffer<RowEntry> entries;  // by row
  int64_t num_samples = 0;
  Buffer<RowEntry> scratch;  // what the sort works in

  int64_t num_rows() const { return rows.size(); }
};

// Groups the entries of the features of one table. Samples are numbered
// through the features in the order given; within a row entries keep that
// order, so that sums do not depend on threads.
void GroupByRow(const std::vector<const FeatureCsr*>& features,
                int64_t vocabulary_size, RowGroups* groups);

// The groups of several replicas as one; their samples are numbered through
// the replicas in the order given. Of them only `entries`, in any order, and
// `num_samples` are read.
void MergeReplicas(const std::vector<const RowGroups*>& replicas,
                   int64_t vocabulary_size, RowGroups* merged);

}  // namespace tpu_embedding

#endif  // TPU_EMBEDDING_OPS_CC_CORE_ROW_GROUPS_H_
