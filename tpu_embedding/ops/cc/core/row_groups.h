// The entries of one table, grouped by the row they name: the form in which
// gradients are summed and rows updated.
//
//   rows of the entries, in order: 7 2 7     samples: 0 0 2
//   rows: [2, 7]  starts: [0, 1, 3]          samples: [0, 0, 2]

#ifndef TPU_EMBEDDING_OPS_CC_CORE_ROW_GROUPS_H_
#define TPU_EMBEDDING_OPS_CC_CORE_ROW_GROUPS_H_

#include <cstdint>
#include <vector>

#include "core/buffer.h"
#include "core/feature.h"

namespace tpu_embedding {

struct RowGroups {
  Buffer<int64_t> rows;     // [num_rows], ascending, each once
  Buffer<int64_t> starts;   // [num_rows + 1]: where a row's entries begin
  Buffer<int64_t> samples;  // [num_entries], numbered through all features
  Buffer<float> gains;      // [num_entries]
  int64_t num_samples = 0;

  int64_t num_rows() const { return rows.size(); }
};

// Groups the entries of the features of one table. Samples are numbered
// through the features in the order given; within a row entries keep that
// order, so that sums do not depend on threads.
RowGroups GroupByRow(const std::vector<const FeatureCsr*>& features,
                     int64_t vocabulary_size);

// The groups of several replicas as one; their samples are numbered through
// the replicas in the order given.
RowGroups MergeReplicas(const std::vector<const RowGroups*>& replicas,
                        int64_t vocabulary_size);

}  // namespace tpu_embedding

#endif  // TPU_EMBEDDING_OPS_CC_CORE_ROW_GROUPS_H_
