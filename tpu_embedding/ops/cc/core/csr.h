// The preprocessor of the SparseCores: the features of one device become one
// padded, partitioned CSR per stacked table.
//
//   features -> entries (csr_entries) -> sorted into partitions
//   (csr_partitions) -> cut into minibatches (csr_splits) -> laid out
//   (csr_layout)

#ifndef TPU_EMBEDDING_OPS_CC_CORE_CSR_H_
#define TPU_EMBEDDING_OPS_CC_CORE_CSR_H_

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "core/batch_pool.h"
#include "core/csr_entries.h"
#include "core/csr_layout.h"
#include "core/csr_partitions.h"
#include "core/csr_splits.h"
#include "core/feature.h"
#include "core/parallel.h"

namespace tpu_embedding {

// One feature and its place in the stack; see layout/csr.py.
struct CsrFeature {
  FeatureSpec spec;  // its declared shape is complete
  int64_t samples = 0;
  int64_t sample_offset = 0;
  int64_t row_offset = 0;
  int64_t rotation = 0;
  int64_t max_valency = 0;  // 0: any number of ids per sample
  int group = 0;            // of its table, made by CompleteSetup
};

struct CsrTable {
  std::string name;
  int64_t rows = 0;
  int64_t samples = 0;
  std::vector<int> features;
  IdCounts limit;  // per partition
  bool keep_positions = false;
};

// The features of one table of a stack: they share rows, so they are sorted
// together. Groups are listed by stack and by first row.
struct CsrGroup {
  int table = 0;
  TablePlace place;
  std::vector<int> features;
};

struct CsrSetup {
  int64_t num_cores = 1;     // SparseCores per device
  int64_t num_replicas = 1;  // devices
  std::vector<CsrFeature> features;
  std::vector<CsrTable> tables;
  int64_t max_ids_per_chip_per_sample = 64;
  bool allow_id_dropping = false;
  int64_t max_minibatches = 64;
  bool minibatching = false;
  std::vector<CsrGroup> groups;  // made by CompleteSetup

  int64_t num_shards() const { return num_cores * num_replicas; }
  int64_t IdCapacity(const CsrTable& table) const {
    return max_ids_per_chip_per_sample * table.samples;
  }
  int64_t RowPointersCapacity() const {
    return num_cores * max_minibatches * PaddedShards(num_shards());
  }
};

// Checks the caller's values and derives the groups. Must be called once.
Error CompleteSetup(CsrSetup* setup);

// What is known of one table of a batch.
struct CsrResult {
  CsrLayout layout;
  IdCounts largest;     // of any partition of the batch, uncut
  uint64_t splits = 0;  // of this batch, and those that were asked for
};

// One batch while it is preprocessed. It can be reused: Prepare discards the
// previous batch but keeps its storage, because fresh memory costs a page fault
// per 4 KiB.
class CsrBatch {
 public:
  explicit CsrBatch(const CsrSetup& setup) : setup_(setup) {}

  // Checks and sorts the whole batch. `splits` are cuts per table that other
  // replicas need; this batch adds its own. Nothing is written on an error.
  Error Prepare(const std::vector<FeatureInput>& inputs,
                const std::vector<uint64_t>& splits,
                const ParallelFor& parallel_for);

  const CsrResult& result(int table) const { return results_[table]; }

  // Returns how many entries did not fit into the id buffer of their stack,
  // summed over all features of the table that `feature` looks up.
  int64_t dropped_ids(int feature) const {
    return dropped_[setup_.features[feature].group];
  }

  // Writes the tables. Each has `layout.row_pointers_size` row pointers, and
  // `layout.ids_size` elements in the other arrays.
  void Write(const std::vector<CsrArrays>& arrays,
             const ParallelFor& parallel_for) const;

 private:
  // The entries of one group on one SparseCore. Units are numbered core by
  // core, so that each thread gets its share of every table.
  struct Unit {
    Partitions partitions;
    // Where minibatch m of shard p begins in `partitions`, at
    // [p * (num_minibatches + 1) + m].
    std::vector<int64_t> cuts;
    std::vector<int64_t> places;  // [p * num_minibatches + m], in the output
  };

  // The pool keeps the scratch of at most this many threads.
  static constexpr size_t kMaxThreads = 64;

  // Scratch that a thread reuses for each of its units.
  struct Scratch {
    CsrEntries entries;
    SortScratch sort;
  };

  int64_t num_groups() const { return setup_.groups.size(); }
  Unit& unit(int64_t core, int64_t group) {
    return units_[core * num_groups() + group];
  }

  Error ReadFeatures(const std::vector<FeatureInput>& inputs,
                     const ParallelFor& parallel_for);
  Error SortUnits(const std::vector<FeatureInput>& inputs,
                  const ParallelFor& parallel_for);
  CsrForm FormOf(const CsrGroup& group, const std::vector<FeatureInput>& inputs,
                 int64_t capacity) const;
  void SortUnit(const std::vector<FeatureInput>& inputs, int64_t core,
                int64_t group, Scratch* scratch, std::vector<Error>* errors);
  Error FinishTable(int table, uint64_t splits);
  Error CheckPartitions(int table, CsrResult* result);
  Error FindTableSplits(int table, CsrResult* result);
  void CutUnit(int64_t width, const std::vector<int>& bounds, Unit* unit) const;
  Error PlaceTable(int table, CsrResult* result);
  void CountDropped(int table);
  int64_t Kept(int64_t core, int64_t group, int64_t shard,
               int64_t minibatch) const;
  void WriteUnit(int64_t core, int64_t group, const CsrArrays& arrays) const;

  const CsrSetup& setup_;
  std::vector<FeatureRows> rows_;
  std::vector<Unit> units_;
  std::shared_ptr<BatchPool<Scratch>> scratch_ =
      std::make_shared<BatchPool<Scratch>>(kMaxThreads);
  std::vector<CsrResult> results_;
  std::vector<int64_t> dropped_;  // by group
};

}  // namespace tpu_embedding

#endif  // TPU_EMBEDDING_OPS_CC_CORE_CSR_H_
