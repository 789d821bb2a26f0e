// A growing table behind TensorFlow's variables: its vocabulary, and the memory
// of its rows and slots.
//
// The variables hold the rows that exist, in memory reserved for all rows that
// may come. A lookup finds rows for ids; memory in front of row 0 has the
// values for ids without a row. The number of an entry means:
//
//   in a Query    row        the id has this row
//                 kNoRow     it has none (only until NumberUnknown)
//                 -2 - p     it has none, and is number p of `unknown`
//   in Found      row        the entry reads this row, or one after the last
//                            row, where first values are ahead of their update
//                 -1         it reads the row of zeros
//                 -2 - k     it reads place k of the memory in front
//   in an Update  row        its gradients train this row
//                 num_rows   they are dropped
//
// Locks: a lookup takes the variables' read locks, an update their write locks;
// both take `mutex_` after them.

#ifndef TPU_EMBEDDING_OPS_CC_KERNELS_GROWING_TABLE_H_
#define TPU_EMBEDDING_OPS_CC_KERNELS_GROWING_TABLE_H_

#include <atomic>
#include <cstdint>
#include <functional>
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

// The numbers below 0 in the table above.
constexpr int32_t kRowOfZeros = -1;
constexpr int32_t WithoutRow(int64_t number) { return -2 - number; }
constexpr int64_t NumberOf(int32_t without_row) { return -2 - without_row; }
constexpr int32_t InFront(int32_t place) { return -2 - place; }

class GrowingTable {
 public:
  using SharedBatch = std::shared_ptr<const PreparedBatch>;
  using Rows = std::vector<Buffer<int32_t>>;  // by feature; empty for features
                                              // of other tables
  // The features of a batch, or what each sender asked of this owner.
  using Sources = std::vector<const std::vector<FeatureCsr>*>;

  // The entries that are looked up in one table, and what was found.
  struct Query {
    Sources sources;
    std::vector<Rows> rows;   // by source
    int64_t num_missing = 0;  // entries without a row
    UnknownIds unknown;
    std::vector<Unknown> given;  // by the lookup, for each id of `unknown`
  };

  enum class Purpose { kEvaluation, kTraining, kRepetition };

  // Notes in `changed_rows`, which all tables share, what this `table` does.
  GrowingTable(const TablePlan& plan, int table,
               const ChangedRows& changed_rows);

  // The rows that one lookup found. First values of ids without a row are in
  // memory that is borrowed for as long as this lives.
  class Found {
   public:
    Found() = default;
    ~Found();
    Found(const Found&) = delete;
    Found& operator=(const Found&) = delete;

    // Returns the rows of a sender's feature, or of the only source's.
    const Buffer<int32_t>& rows(int source, int feature) const {
      return rows_[source][feature];
    }

   private:
    friend class GrowingTable;
    GrowingTable* table_ = nullptr;
    std::vector<Rows> rows_;
    std::vector<int32_t> borrowed_;  // places in front
  };

  // Moves values that were assigned to variables into the memory. `stored`,
  // from StoredRows, must be unlocked: this locks them.
  absl::Status AdoptRows(const std::vector<tensorflow::Var*>& stored);

  // Finds the rows of a batch in some tables. In training the rows stay until
  // the batch's gradients come; this fails if they leave no room for a pending
  // update. A repetition gives what the lookup for training gave before.
  struct Search {
    GrowingTable* table;
    std::vector<tensorflow::Var*> stored;  // see StoredRows
    Found* found;
  };
  static absl::Status Find(const SharedBatch& batch, Purpose purpose,
                           const std::vector<Search>& searches,
                           const ParallelFor& parallel_for);

  // Returns where rows begin.
  ConstTableData rows() const;

  // Fails if the update of these batches, one of each replica, would find the
  // table full. If the update `pends`, later lookups leave room for it. The
  // clock may be earlier than that of the update.
  absl::Status CheckRoom(const std::vector<SharedBatch>& batches, int64_t clock,
                         bool pends, const ParallelFor& parallel_for);

  // Tell whether updates pass a clock, and the clock of the last complete one.
  bool has_clock() const { return plan_.vocabulary->has_clock; }
  int64_t clock() const { return clock_; }
  void set_clock(int64_t clock) { clock_ = clock; }

  // One update of a table.
  class Update {
   public:
    Update() = default;
    ~Update();
    Update(const Update&) = delete;
    Update& operator=(const Update&) = delete;

    // Return the number of batches, of replicas or senders; the entries of a
    // feature in one of them, with their rows; and the number of rows for
    // GroupByRow, the last of which stands for entries that are dropped.
    int num_sources() const { return sources_.size(); }
    FeatureEntries entries(int source, int feature) const {
      return {(*sources_[source])[feature], rows_[source][feature]};
    }
    int64_t num_rows() const { return num_rows_ + 1; }
    // Returns the rows that this update created, and their ids.
    const std::vector<Vocabulary::RowOfId>& created() const { return created_; }

    // Removes the entries that are dropped.
    void Drop(RowGroups* groups) const;

   private:
    friend class GrowingTable;
    GrowingTable* table_ = nullptr;
    std::unique_lock<SharedMutex> lock_;
    std::vector<SharedBatch> batches_;
    std::vector<Query> queries_;  // by batch
    // The ids that still have no row, and for each query where each of its
    // unknown ids is now: its row, or -2 minus its number in `unknown_`.
    UnknownIds unknown_;
    std::vector<std::vector<int32_t>> now_;
    Decision decision_;
    std::vector<Vocabulary::RowOfId> created_;
    std::vector<int32_t> written_;  // by created row, see WriteCreated
    Sources sources_;
    std::vector<Rows> rows_;
    int64_t num_rows_ = 0;
  };
  // One update of some tables. `Begin` leaves the tables as they were, and
  // fails if the update is impossible. `Grow` changes them. The tables stay
  // locked as long as the updates live.
  struct Growth {
    GrowingTable* table;
    std::vector<tensorflow::Var*> arrays;  // StoredRows, then slots
    int64_t clock;
    Update* update;
  };
  static absl::Status Begin(const std::vector<SharedBatch>& batches,
                            const std::vector<Growth>& growths,
                            const ParallelFor& parallel_for);
  static void Grow(const std::vector<Growth>& growths,
                   const ParallelFor& parallel_for);
  // Counts hits of an update that has grown: see Vocabulary.
  void CountHits(const RowGroups& groups, int64_t begin, int64_t end) {
    vocabulary_->CountHits(groups, begin, end);
  }
  // Must be called while no other update runs.
  int64_t num_rows() const { return vocabulary_->num_rows(); }
  const int64_t* ids() const { return vocabulary_->ids(); }

  // Releases the rows that were found by the lookups of this batch and of the
  // batch that was looked up for this update.
  void ForgetLookup(const SharedBatch& batch);

  // Evicts rows by the policy, except those that lookups or updates wait for.
  int64_t Evict();
  VocabularyCounts counts() const;

  // Reads the vocabulary, and from each of `arrays` the rows of its ids, and
  // then the shared row.
  absl::Status Save(const std::vector<Variable>& arrays,
                    VocabularySnapshot* snapshot,
                    std::vector<tensorflow::Tensor>* values) const;
  // Replaces the vocabulary, and the rows of `arrays`, StoredRows and then
  // slots, by those of `values`, as Save gives them. Changes all or nothing.
  absl::Status Load(const VocabularySnapshot& snapshot,
                    const std::vector<tensorflow::Tensor>& values,
                    const std::vector<Variable>& arrays);

  // Marks ids, with or without a row, as changed for a consumer of deltas: see
  // ChangedRows.
  void MarkIds(const int64_t* ids, int64_t size, ConsumerRows* consumer);
  struct Changes {
    std::vector<int64_t> ids;      // ascending
    std::vector<int64_t> deleted;  // ids that lost their rows, ascending
    std::vector<int64_t> size;     // number of all ids that have rows
    // From each array the rows of the ids, and then the shared row.
    std::vector<tensorflow::Tensor> rows;
  };
  absl::Status TakeIds(const std::vector<Variable>& stored,
                       ConsumerRows* consumer, Changes* changes);
  void CommitIds(ConsumerRows* consumer);

 private:
  // An array of stored rows, or of a slot.
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
    // Returns whether the variable's value is in the memory.
    bool Holds(const tensorflow::Var& variable) const;
    absl::Status Adopt(int64_t num_rows, const std::string& table,
                       tensorflow::Var* variable) const;
    void Show(int64_t num_rows, tensorflow::Var* variable) const;
  };

  // The limits on first values in front of a table and on those after its last
  // row: one for each id without a row that lookups use at one time.
  static constexpr int64_t kMaxBorrowedRows = int64_t{1} << 20;
  static constexpr int64_t kRowsPerChunk = 64;
  static constexpr int64_t kCyclesPerFirstValue = 10;
  static constexpr int64_t kCyclesPerUnknown = 400;

  // Returns whether the variables' values are in the memory.
  bool HoldsRows(const std::vector<tensorflow::Var*>& stored) const;
  static void AddSources(const PreparedBatch& batch, Sources* sources);
  // Looks up the ids of each query in its table, except for sources whose rows
  // are known.
  static absl::Status Run(const std::vector<const GrowingTable*>& tables,
                          const std::vector<Query*>& queries,
                          const ParallelFor& parallel_for);
  void NumberUnknown(Query* query) const;
  // Returns storage for rows and reuses an array if possible: fresh memory
  // costs a page fault per 4 KiB.
  Buffer<int32_t> NewRows(int64_t size) const;
  void Return(std::vector<Rows>* rows);
  static absl::Status FindLocked(const SharedBatch& batch, Purpose purpose,
                                 const std::vector<Search>& searches,
                                 const ParallelFor& parallel_for);
  absl::Status Await(const SharedBatch& batch, const ParallelFor& parallel_for);
  // A lookup whose gradients may come while its batch lives. Keeps what it
  // found once it is done, until a checkpoint is loaded.
  struct Awaited {
    std::weak_ptr<const PreparedBatch> batch;
    bool is_done = false;
    std::vector<Rows> rows;
    UnknownIds unknown;
    std::vector<Unknown> given;
  };
  std::vector<Awaited>::iterator FindAwaited(const SharedBatch& batch);
  // Begin and end the record of the lookup of a batch.
  void Expect(const SharedBatch& batch);
  void Forget(const SharedBatch& batch);
  // Forgets a lookup that failed, which may not have written first values.
  void ForgetFailed(const SharedBatch& batch);
  // Decides what a lookup gives for ids without a row, and remembers it with
  // the rows until its update.
  void Give(const SharedBatch& batch, Purpose purpose, Query* query);
  // Returns the ids that live lookups, except that of `batch`, have promised,
  // for Vocabulary::Give. May be empty if `count` more ids have room, too.
  IdMap Promised(const SharedBatch& batch, int64_t count) const;
  // Takes what the lookup of a batch found and gave.
  void TakeGiven(const SharedBatch& batch, Query* query);
  absl::Status Decide(const Growth& growth);
  // Finds where the unknown ids of all queries are now.
  void FindUnknown(Update* update) const;
  // Evicts and creates rows. The created rows have no values yet.
  void TakeRows(const Growth& growth);
  absl::Status CheckRoomLocked(const std::vector<SharedBatch>& batches,
                               int64_t clock, const ParallelFor& parallel_for);
  std::vector<int64_t> RowsOf(const VocabularySnapshot& snapshot) const;
  absl::Status CopyRows(const Variable& array, const std::vector<int64_t>& rows,
                        tensorflow::Tensor* copied) const;
  // Tells all consumers which ids got and lost rows.
  void NoteIds(const std::vector<Vocabulary::RowOfId>& created);
  void Mark(const Vocabulary& vocabulary, int64_t id,
            ConsumerRows* consumer) const;
  // Returns the rows that ids have.
  std::unique_ptr<RowBits> RowsOfIds(const Vocabulary& vocabulary) const;
  // Tells one consumer that `vocabulary` replaces that of this table.
  void NoteReplaced(const Vocabulary& vocabulary, ConsumerRows* consumer) const;
  // Holds the rows of all live lookups except those of `batches`, whose rows
  // `add_own` adds.
  Vocabulary::Hold HoldFor(const std::vector<SharedBatch>& batches,
                           const std::function<void(RowSet*)>& add_own) const;
  Vocabulary::Hold HoldFor(const Update& update) const;
  void AddRows(const std::vector<Rows>& rows, RowSet* held) const;
  void AddRowsOf(const int64_t* ids, int64_t size, RowSet* held) const;
  // Takes memory for first values; `rows` gets the row that each id reads.
  absl::Status Borrow(const SharedBatch& batch, Purpose purpose,
                      const std::vector<int64_t>& ids, Found* found,
                      std::vector<int32_t>* rows);
  // Decides what each unknown id reads. `first` gets rows that must be written.
  absl::Status Place(const SharedBatch& batch, Purpose purpose,
                     const Query& query, Found* found,
                     std::vector<int32_t>* reads,
                     std::vector<Vocabulary::RowOfId>* first);
  void ReturnFront(const std::vector<int32_t>& places);
  // Finds the first values that a lookup has already written for created rows.
  void FindWritten(Update* update) const;
  void WriteFirst(int64_t id, int64_t row) const;
  // `written` is the row that has its first values, or kNoRow.
  void WriteCreated(const Vocabulary::RowOfId& created, int32_t written) const;

  const TablePlan& plan_;
  const int table_;
  const ChangedRows& changed_rows_;
  const uint64_t salt_;
  mutable SharedMutex mutex_;  // lookups share it
  std::unique_ptr<Vocabulary> vocabulary_;
  std::vector<Array> arrays_;  // those of StoredRows, then slots
  size_t num_stored_ = 0;

  mutable std::mutex front_mutex_;
  // Places in front that no lookup uses: those that were returned, and all from
  // `next_place_` on.
  std::vector<int32_t> free_places_;
  int32_t next_place_ = 0;
  // First values after the last row, for ids to which the update of the batch
  // will give just these rows, unless other rows are free or another update
  // comes first.
  struct Ahead {
    std::weak_ptr<const PreparedBatch> batch;
    int64_t first_row = 0;
    std::vector<int64_t> ids;
  };
  Ahead ahead_;
  mutable std::vector<Buffer<int32_t>> spare_;
  std::vector<Awaited> awaited_;
  // The batches of the update that is complete and will be applied later.
  std::vector<std::weak_ptr<const PreparedBatch>> pending_;
  int64_t pending_clock_ = 0;
  std::atomic<int64_t> clock_{0};
};

}  // namespace tpu_embedding

#endif  // TPU_EMBEDDING_OPS_CC_KERNELS_GROWING_TABLE_H_
