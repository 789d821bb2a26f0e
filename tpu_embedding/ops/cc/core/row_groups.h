// Groups the entries of one table by the row they name: the form in which
// gradients are summed and rows updated.
//
//   rows of the entries, in order: 7 2 7     samples: 0 0 2
//   rows: [2, 7]  starts: [0, 1, 3]          samples: 0 | 0 2

#ifndef TPU_EMBEDDING_OPS_CC_CORE_ROW_GROUPS_H_
#define TPU_EMBEDDING_OPS_CC_CORE_ROW_GROUPS_H_

#include <cstdint>
#include <vector>

#include "core/buffer.h"
#include "core/feature.h"
#include "core/parallel.h"

namespace tpu_embedding {

struct RowEntry {
  int32_t row;
  // Counted through all features of a table in the order of CollectGradients in
  // kernels/apply_updates.cc: any other order would update wrong rows.
  uint32_t sample;
  float gain;
};

// An entry without a gain of its own fits in one word: sorts move less.
class PlainEntry {
 public:
  PlainEntry() = default;
  PlainEntry(int32_t row, uint32_t sample)
      : word_(static_cast<uint64_t>(row) << 32 | sample) {}

  int32_t row() const { return static_cast<int32_t>(word_ >> 32); }
  uint32_t sample() const { return static_cast<uint32_t>(word_); }

 private:
  uint64_t word_;
};

struct RowGroups {
  Buffer<int32_t> rows;      // [num_rows], ascending, each once
  Buffer<int64_t> starts;    // [num_rows + 1]: where a row's entries begin
  Buffer<uint32_t> samples;  // by row, the sample of each entry
  // The factors of gradients, as FeatureCsr has them.
  Buffer<float> gains;         // of the same entries, or empty
  Buffer<float> sample_gains;  // by sample, or empty
  // Which of `rows` each entry names, for a table with `places`.
  Buffer<int32_t> places;
  Buffer<uint32_t> sample_of;  // by entry, while entries are grouped
  // The memory in which a large table's entries are sorted.
  Buffer<PlainEntry> plain_space;
  Buffer<RowEntry> space;

  int64_t num_rows() const { return rows.size(); }
  float gain(int64_t entry) const {
    if (gains.size()) return gains[entry];
    return sample_gains.size() ? sample_gains[samples[entry]] : 1.0f;
  }
};

// The features of one table, and where their groups go.
struct TableEntries {
  std::vector<FeatureEntries> features;
  int64_t vocabulary_size = 0;
  RowGroups* groups = nullptr;
  bool places = false;  // find them; only for a table with one feature
};

// Groups the entries of each table. Samples are numbered through its features
// in the order given; within a row entries keep that order, so that sums do
// not depend on threads.
void GroupByRow(const std::vector<TableEntries>& tables,
                const ParallelFor& parallel_for);

// Groups the listed entries of one table in the same way, in the order given.
void GroupByRow(const Buffer<RowEntry>& entries, int64_t vocabulary_size,
                RowGroups* groups);

}  // namespace tpu_embedding

#endif  // TPU_EMBEDDING_OPS_CC_CORE_ROW_GROUPS_H_
