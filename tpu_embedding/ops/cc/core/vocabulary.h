// Decides which id of a growing table has which row, which ids get a row, and
// which rows are evicted.
//
//   lookup    Find, Give                           ids -> rows, or none
//   update    Find, Decide, Take, CountHits        in this order
//
// Everything is a function of the updates so far: threads, memory and the salt
// of the map have no effect. Rows are numbered in the order in which ids are
// first seen; an evicted row is used again, the lowest first.

#ifndef TPU_EMBEDDING_OPS_CC_CORE_VOCABULARY_H_
#define TPU_EMBEDDING_OPS_CC_CORE_VOCABULARY_H_

#include <cstdint>
#include <deque>
#include <functional>
#include <string>
#include <utility>
#include <vector>

#include "core/buffer.h"
#include "core/feature.h"
#include "core/first_values.h"
#include "core/growing_memory.h"
#include "core/id_map.h"
#include "core/row_groups.h"

namespace tpu_embedding {

constexpr int32_t kNoRow = -1;

// What a lookup gives for an id without a row, and what its gradients train:
// zeros, which nothing trains; the first values of the row that the id may get;
// or row 0, which all such ids share.
enum class Unknown { kZeros, kInitializer, kShared };

// Which rows are evicted: none; those whose last update is the longest ago;
// those with the fewest hits; those without an update for `max_age` updates, or
// units of the clock.
enum class Eviction { kNone, kLeastRecent, kLeastFrequent, kAge };

struct VocabularyOptions {
  std::string table;  // for messages
  int64_t max_rows = 0;
  int64_t min_rows = 0;  // the fewest ids that evictions keep
  int64_t min_count = 1;
  int64_t max_candidates = 0;
  Eviction eviction = Eviction::kNone;
  int64_t max_age = 0;
  bool has_clock = false;  // updates pass a clock, by which rows age
  Unknown unknown = Unknown::kZeros;
  bool shares_when_full = false;  // else an error
  FirstValues first_values;

  // Returns whether lookups promise rows: if a lookup gave first values, its
  // update creates the row and takes none that was promised to others.
  bool Promises() const { return shares_when_full && min_count == 1; }
};

// The ids of a lookup or of an update that have no row, each once, in the order
// in which they are first seen.
struct UnknownIds {
  std::vector<int64_t> ids;
  std::vector<int64_t> hits;  // the entries of each
};

// Which unknown ids get a row.
struct Decision {
  std::vector<bool> admitted;
  std::vector<int64_t> hits_before;  // in earlier updates
  int64_t num_admitted = 0;
  int64_t num_promised = 0;  // rows that are left for updates to come
};

struct VocabularyCounts {
  int64_t unknown = 0;  // ids without a row, once for each update
  int64_t admitted = 0;
  int64_t refused = 0;  // ids of `unknown` that got no row
  int64_t evicted = 0;
};

// Everything that a vocabulary knows, for files.
struct VocabularySnapshot {
  std::vector<int64_t> ids;  // ascending
  // Each id's row, and its hits and last update, 0 if none are counted. With a
  // clock the last update is its time by that clock.
  std::vector<int64_t> rows, hits, last_updates;
  std::vector<int64_t> candidates, candidate_hits;  // 0 hits: none
  std::vector<int64_t> state;                       // of kStateSize
};

// The places in the state of a snapshot, as files have it.
struct VocabularyState {
  enum Place : int {
    kNumRows,
    kUpdatesBegun,
    kUnknown,  // the counts
    kAdmitted,
    kRefused,
    kEvicted,
    kNextCandidate,
    kCursor,  // the sweep
    kSweeping,
    kThreshold,
    kTies,
    kClock,  // of the last update, plus 1; 0 without a clock
    kSize
  };
};

// A set of rows.
class RowSet {
 public:
  explicit RowSet(int64_t num_rows) : words_((num_rows + 63) / 64) {}
  void Add(int32_t row) { words_[row / 64] |= uint64_t{1} << row % 64; }
  bool Has(int32_t row) const { return words_[row / 64] >> row % 64 & 1; }

 private:
  std::vector<uint64_t> words_;
};

// Reading is thread-safe while nothing changes the vocabulary.
class Vocabulary {
 public:
  // Adds the rows that may not be evicted: those that this update names or that
  // were looked up for later updates. Called only if rows may be evicted.
  using Hold = std::function<void(RowSet*)>;

  Vocabulary(VocabularyOptions options, uint64_t salt);

  const VocabularyOptions& options() const { return options_; }
  // Returns the number of rows ever used, evicted or not, with a shared row 0.
  int64_t num_rows() const { return num_rows_; }
  int64_t num_ids() const { return map_.size(); }
  int64_t clock() const { return clock_; }
  const VocabularyCounts& counts() const { return counts_; }

  // Writes the row of each id, or kNoRow. Returns how many are kNoRow.
  int64_t Find(const int64_t* ids, int64_t size, int32_t* rows) const;

  // Returns whether `count` ids may get rows without evictions.
  bool HasRoomFor(int64_t count) const { return room() >= count; }

  // Returns what a lookup, for an update or not, gives for each id without a
  // row. `promised` has the ids without a row for which lookups gave first
  // values and whose updates are still to come. It may be empty if there is
  // room for these and for `unknown`.
  std::vector<Unknown> Give(const UnknownIds& unknown, bool training,
                            const IdMap& promised) const;

  // Decides which ids the update will admit: ids of `promised`, as in Give,
  // come before others. Fails if the table is full at that clock. Reserves
  // memory, including that for a growing `num_rows`, but changes nothing else.
  Error Decide(const UnknownIds& unknown, const IdMap& promised,
               const Hold& hold, int64_t clock, Decision* decision);

  // A row, and the id that has or had it.
  struct RowOfId {
    int32_t row;
    int64_t id;
  };

  // Returns the most rows that the table can have after Take.
  int64_t MostRowsAfter(const Decision& decision) const;

  // Begins the update: evicts, admits, and remembers candidates. `rows` gets
  // the row of each id of `unknown`, or kNoRow. `created` gets the new rows,
  // each with the id whose first values it must get.
  void Take(const UnknownIds& unknown, const Decision& decision,
            const Hold& hold, int64_t clock, std::vector<int32_t>* rows,
            std::vector<RowOfId>* created);

  // Evicts as if many new ids had arrived. Returns the number of evicted rows.
  int64_t Evict(const Hold& hold);

  // Returns what was evicted since the last call.
  std::vector<RowOfId> TakeEvicted() { return std::exchange(evicted_, {}); }

  // Return whether an id has the row, and which id.
  bool HasId(int32_t row) const {
    return row >= num_shared() && row < num_rows_ &&
           (!Evicts() || use_of(row).last);
  }
  int64_t IdOf(int32_t row) const { return id_of(row); }
  // Returns the id of each row; kSharedId for the shared one.
  const int64_t* ids() const { return &id_of(0); }

  VocabularySnapshot Save() const;
  // Loads into a new vocabulary, which may have other options. After an error
  // the vocabulary cannot be used.
  Error Load(const VocabularySnapshot& snapshot);

  // Count hits of the update that has begun: those in the groups [begin, end),
  // whose rows its gradients train, and those of one id whose `row` its
  // gradients do not train.
  void CountHits(const RowGroups& groups, int64_t begin, int64_t end);
  void CountHits(int32_t row, int64_t hits);

  // The id whose first values the shared row has.
  static constexpr int64_t kSharedId = 0x7465647261687365;

 private:
  // The hits of a row, and the number of the last update that hit it, counted
  // from 1; 0 if no id has the row.
  struct Use {
    uint32_t hits;
    uint32_t last;
  };
  // An id that was hit, but not often enough yet; free if it has no hits.
  struct Candidate {
    int64_t id;
    int64_t hits;
  };

  bool Evicts() const { return options_.eviction != Eviction::kNone; }
  int64_t num_shared() const { return options_.unknown == Unknown::kShared; }
  // Return how many ids may have rows, and how many more may get one.
  int64_t capacity() const { return options_.max_rows - num_shared(); }
  int64_t room() const { return capacity() - map_.size(); }

  int64_t& id_of(int32_t row) const {
    return reinterpret_cast<int64_t*>(ids_.data())[row];
  }
  Use& use_of(int32_t row) const {
    return reinterpret_cast<Use*>(uses_.data())[row];
  }
  // Returns the eviction key. Rows with the smallest key are evicted first.
  uint32_t KeyOf(int32_t row) const;
  int64_t& time_of(int32_t row) const {
    return reinterpret_cast<int64_t*>(times_.data())[row];
  }
  void SetLast(int32_t row);
  // Return when the row was updated last, and the time now: by the clock if
  // there is one, else in updates.
  int64_t LastOf(int32_t row) const;
  int64_t Now() const { return options_.has_clock ? clock_ : step_; }
  // Returns whether the row may be evicted by an update at the time `now`.
  bool IsEvictable(int32_t row, const RowSet& held, int64_t now) const;

  int64_t CountEvictable(int64_t most, int64_t now, const Hold& hold) const;
  // Makes room for `needed` rows now, besides those that are promised.
  void MakeRoom(int64_t needed, int64_t num_promised, const Hold& hold);
  // Chooses the largest key to evict from a sample of one row per `stride`.
  void BeginSweep(int64_t wanted, const RowSet& held, int64_t stride);
  void SweepSlice(const RowSet& held);
  void EvictRows(const std::vector<int32_t>& rows);
  int32_t NewRow(int64_t id, int64_t hits);
  int64_t HitsOfCandidate(int64_t id) const;
  void AddCandidate(int64_t id, int64_t hits);
  void ForgetCandidate(int64_t id);

  const VocabularyOptions options_;
  IdMap map_;
  GrowingMemory ids_;    // by row, int64
  GrowingMemory uses_;   // by row, Use; only if rows are evicted
  GrowingMemory times_;  // by row the clock of its last update, if there is one
  int64_t num_rows_ = 0;
  std::vector<int32_t> free_;  // evicted, a heap with the lowest first
  std::vector<RowOfId> evicted_;
  int64_t step_ = 0;   // updates begun
  int64_t clock_ = 0;  // of the last one
  VocabularyCounts counts_;

  // Candidates are forgotten in the order in which they came.
  IdMap places_;  // of candidates
  std::deque<Candidate> candidates_;
  int64_t next_candidate_ = 0;

  // The sweep evicts the rows with a key below the threshold, and the first
  // `ties_` of the rows with exactly that key.
  int64_t cursor_ = 0;
  bool sweeping_ = false;
  uint32_t threshold_ = 0;
  int64_t ties_ = 0;
};

}  // namespace tpu_embedding

#endif  // TPU_EMBEDDING_OPS_CC_CORE_VOCABULARY_H_
