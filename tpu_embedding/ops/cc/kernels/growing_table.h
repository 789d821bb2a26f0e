// A growing table behind TensorFlow's variables: its vocabulary, and the memory
// of its rows and slots.
//
// The variables hold the rows that there are, in memory reserved for all that
// may come. A lookup finds rows for ids; in front of row 0 there is memory for
// what has no row: a row of zeros, with number -1, and before it first values.
//
// Locks: who looks up holds the variables' read locks, who updates their write
// locks, and then `mutex`.

#ifndef TPU_EMBEDDING_OPS_CC_KERNELS_GROWING_TABLE_H_
#define TPU_EMBEDDING_OPS_CC_KERNELS_GROWING_TABLE_H_

#include <cstdint>
#include <memory>
#include <mutex>
#include <optional>
#include <vector>

#include "core/changed_rows.h"
#include "core/growing_memory.h"
#include "core/parallel.h"
#include "core/prepared_batch.h"
#include "core/shared_mutex.h"
#include "core/vocabulary.h"
#include "kernels/kernel_util.h"
#include "kernels/plan.h"

namespace tpu_embedding {

class GrowingTable {
 public:
  using SharedBatch = std::shared_ptr<const PreparedBatch>;
  using Rows = std::vector<Buffer<int32_t>>;  // by feature; of others none
  // The features of a batch, or what each sender asked of this owner.
  using Sources = std::vector<const std::vector<FeatureCsr>*>;

  // What is asked of one table, and found.
  struct Query {
    Sources sources;
    std::vector<Rows> rows;   // by source
    int64_t num_missing = 0;  // entries without a row
    // The ids of those, which have -2 less their place here as row.
    UnknownIds unknown;
  };

  // `changed_rows`, of this and other tables, learns what this `table` does.
  GrowingTable(const TablePlan& plan, int table,
               const ChangedRows& changed_rows);

  // The rows that one lookup found. What has no row is in memory of its own,
  // for as long as this lives.
  class Found {
   public:
    Found() = default;
    ~Found();
    Found(const Found&) = delete;
    Found& operator=(const Found&) = delete;

    // Of a sender's feature, or of the only source.
    const Buffer<int32_t>& rows(int source, int feature) const {
      return rows_[source][feature];
    }

   private:
    friend class GrowingTable;
    GrowingTable* table_ = nullptr;
    std::vector<Rows> rows_;
    bool has_borrowed_ = false;
  };

  // Moves what was assigned to a variable into the memory. `parameters` is
  // unlocked.
  absl::Status AdoptParameters(tensorflow::Var* parameters);

  // Finds the rows of a batch in some tables, which stay until its gradients
  // come, if they may. Fails if they leave no room for a pending update.
  struct Search {
    GrowingTable* table;
    const tensorflow::Var* parameters;
    Found* found;
  };
  static absl::Status Find(const SharedBatch& batch,
                           const std::vector<Search>& searches,
                           const ParallelFor& parallel_for);

  // Where rows begin.
  ConstTableData rows() const;

  // Fails if the update of these batches, one of each replica, would find the
  // table full. If it `pends`, later lookups leave it its room.
  absl::Status CheckRoom(const std::vector<SharedBatch>& batches, bool pends,
                         const ParallelFor& parallel_for);

  // One update of a table.
  class Update {
   public:
    Update() = default;
    ~Update();
    Update(const Update&) = delete;
    Update& operator=(const Update&) = delete;

    // The entries of a feature of the batches of all replicas or senders, and
    // their rows, for GroupByRow with this many rows: the last one stands for
    // entries that are dropped.
    int num_sources() const { return query_.sources.size(); }
    FeatureEntries entries(int source, int feature) const {
      return {(*query_.sources[source])[feature], query_.rows[source][feature]};
    }
    int64_t num_rows() const { return num_rows_ + 1; }

    // Removes the entries that are dropped.
    void Drop(RowGroups* groups) const;

   private:
    friend class GrowingTable;
    GrowingTable* table_ = nullptr;
    std::unique_lock<SharedMutex> lock_;
    std::vector<SharedBatch> batches_;
    Query query_;
    Decision decision_;
    std::vector<Vocabulary::RowOfId> created_;
    int64_t num_rows_ = 0;
  };
  // One update of some tables. `Begin` leaves them as they were, and fails
  // where the update cannot be; `Grow` changes them; their locks end with the
  // updates.
  struct Growth {
    GrowingTable* table;
    tensorflow::Var* parameters;
    std::vector<tensorflow::Var*> slots;
    Update* update;
  };
  static absl::Status Begin(const std::vector<SharedBatch>& batches,
                            const std::vector<Growth>& growths,
                            const ParallelFor& parallel_for);
  static void Grow(const std::vector<Growth>& growths,
                   const ParallelFor& parallel_for);
  // Of an update that has grown: see Vocabulary.
  void CountHits(const RowGroups& groups, int64_t begin, int64_t end) {
    vocabulary_->CountHits(groups, begin, end);
  }
  // While no other update is.
  int64_t num_rows() const { return vocabulary_->num_rows(); }

  // Gives up what the policy gives up, but what lookups and updates wait for.
  int64_t Evict();
  VocabularyCounts counts() const;

  // Reads the vocabulary, and of each of `arrays`, the parameters and slots or
  // none, the rows of its ids, and then the shared row.
  absl::Status Save(const std::vector<Variable>& arrays,
                    VocabularySnapshot* snapshot,
                    std::vector<tensorflow::Tensor>* values) const;
  // Replaces the vocabulary, and the rows of the parameters and slots by those
  // of `values`, as Save gives them. All or nothing.
  absl::Status Load(const VocabularySnapshot& snapshot,
                    const std::vector<tensorflow::Tensor>& values,
                    const std::vector<tensorflow::Var*>& arrays);

  // The ids that changed for a consumer of deltas: see ChangedRows. Marked are
  // ids with or without a row.
  void MarkIds(const int64_t* ids, int64_t size, ConsumerRows* consumer);
  struct Changes {
    std::vector<int64_t> ids;      // ascending
    std::vector<int64_t> deleted;  // ids that lost their rows, ascending
    std::vector<int64_t> size;     // number of all ids that have rows
    tensorflow::Tensor rows;       // of the ids, and then the shared row
  };
  absl::Status TakeIds(const Variable& parameters, ConsumerRows* consumer,
                       Changes* changes);
  void CommitIds(ConsumerRows* consumer);

 private:
  // The parameters or a slot.
  struct Array {
    std::shared_ptr<GrowingMemory> memory;
    tensorflow::DataType dtype;
    int64_t width;

    int64_t row_bytes() const {
      return width * tensorflow::DataTypeSize(dtype);
    }
    char* row(int64_t number) const {
      return memory->data() + number * row_bytes();
    }
    // Whether the variable's value is in the memory.
    bool Holds(const tensorflow::Var& variable) const;
    absl::Status Adopt(int64_t num_rows, const std::string& table,
                       tensorflow::Var* variable) const;
    void Show(int64_t num_rows, tensorflow::Var* variable) const;
  };

  static void AddSources(const PreparedBatch& batch, Sources* sources);
  // Answers what each of the tables is asked.
  static absl::Status Run(const std::vector<const GrowingTable*>& tables,
                          const ParallelFor& parallel_for,
                          std::vector<Query>* queries);
  void NumberUnknown(Query* query) const;
  // Storage for rows, of some that were returned if there is any: fresh memory
  // costs a page fault for each 4 KiB.
  Buffer<int32_t> NewRows(int64_t size) const;
  void Return(std::vector<Rows>* rows);
  absl::Status Await(const SharedBatch& batch, const ParallelFor& parallel_for);
  void Forget(const SharedBatch& batch);
  // A batch that lives while its gradients may come, and the rows of its ids.
  struct Awaited {
    std::weak_ptr<const PreparedBatch> batch;
    std::vector<Rows> rows;
    UnknownIds unknown;
    int64_t generation = -1;  // of the vocabulary that the rows were found in
  };
  std::vector<Awaited>::iterator FindAwaited(const SharedBatch& batch);
  void Keep(const SharedBatch& batch, const Query& query);
  // Takes what the lookups found, unless ids got or lost rows since.
  void TakeKept(const std::vector<SharedBatch>& batches, Query* query);
  absl::Status Decide(const Growth& growth) const;
  // Evicts and creates; the created rows have no values yet.
  void TakeRows(const Growth& growth);
  absl::Status CheckRoomLocked(const std::vector<SharedBatch>& batches,
                               const ParallelFor& parallel_for);
  std::vector<int64_t> RowsOf(const VocabularySnapshot& snapshot) const;
  absl::Status CopyRows(const Variable& array, const std::vector<int64_t>& rows,
                        tensorflow::Tensor* copied) const;
  // Tells all consumers which ids got and lost rows.
  void NoteIds(const std::vector<Vocabulary::RowOfId>& created);
  void Mark(const Vocabulary& vocabulary, int64_t id,
            ConsumerRows* consumer) const;
  // The rows that ids have.
  std::unique_ptr<RowBits> RowsOfIds(const Vocabulary& vocabulary) const;
  // Tells one consumer that `vocabulary` takes the place of the own one.
  void NoteReplaced(const Vocabulary& vocabulary, ConsumerRows* consumer) const;
  // For an update of `batches`, whose rows these are.
  Vocabulary::Hold HoldFor(const std::vector<SharedBatch>& batches,
                           const std::vector<Rows>& rows) const;
  // What ids without a row read: that with place p reads row first + step * p.
  struct Places {
    int64_t first;
    int64_t step;
  };
  absl::Status PlaceUnknown(const SharedBatch& batch, UnknownIds* unknown,
                            Found* found, Places* places);
  absl::Status Borrow(const SharedBatch& batch, const std::vector<int64_t>& ids,
                      Found* found, Places* places);
  void ReturnFront();
  // Whether the lookup of the update has written the row.
  bool IsAhead(const Vocabulary::RowOfId& created) const;
  void WriteFirst(int64_t id, int64_t row) const;
  void WriteCreated(const Vocabulary::RowOfId& created) const;

  const TablePlan& plan_;
  const int table_;
  const ChangedRows& changed_rows_;
  const uint64_t salt_;
  mutable SharedMutex mutex_;  // lookups share it
  std::unique_ptr<Vocabulary> vocabulary_;
  int64_t generation_ = 0;  // grows whenever ids get or lose rows
  Array parameters_;
  std::vector<Array> slots_;

  mutable std::mutex front_mutex_;
  int64_t front_used_ = 0;   // of the rows in front, without that of zeros
  int64_t num_lookups_ = 0;  // that use them
  // First values after the last row, of the ids that the update of the batch
  // will give these rows, if no other update comes before.
  struct Ahead {
    std::weak_ptr<const PreparedBatch> batch;
    int64_t first_row = 0;
    std::vector<int64_t> ids;
  };
  Ahead ahead_;
  mutable std::vector<Buffer<int32_t>> spare_;
  std::vector<Awaited> awaited_;
  // Those of the update that is complete, and will be applied later.
  std::vector<std::weak_ptr<const PreparedBatch>> pending_;
};

}  // namespace tpu_embedding

#endif  // TPU_EMBEDDING_OPS_CC_KERNELS_GROWING_TABLE_H_
