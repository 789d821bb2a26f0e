// The rows that changed since each consumer of deltas last took them.

#ifndef TPU_EMBEDDING_OPS_CC_CORE_CHANGED_ROWS_H_
#define TPU_EMBEDDING_OPS_CC_CORE_CHANGED_ROWS_H_

#include <atomic>
#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <utility>
#include <vector>

#include "core/update.h"

namespace tpu_embedding {

// A bit for each row of one table.
class RowBits {
 public:
  explicit RowBits(int64_t num_rows)
      : words_((num_rows + 63) / 64), num_rows_(num_rows) {}

  // Marks a row. Thread-safe.
  void Set(int64_t row) {
    std::atomic<uint64_t>& word = words_[row / 64];
    const uint64_t bit = uint64_t{1} << (row % 64);
    // Most rows of a step are set already, and testing is cheaper than setting.
    if (!(word.load(std::memory_order_relaxed) & bit)) {
      word.fetch_or(bit, std::memory_order_relaxed);
    }
  }
  // Removes the mark of a row. Thread-safe.
  void Clear(int64_t row) {
    words_[row / 64].fetch_and(~(uint64_t{1} << (row % 64)),
                               std::memory_order_relaxed);
  }
  bool Has(int64_t row) const {
    return words_[row / 64].load(std::memory_order_relaxed) >> (row % 64) & 1;
  }
  int64_t num_rows() const { return num_rows_; }
  int64_t Count() const;
  // Calls `visit` with each row that is set, ascending.
  void ForEach(const std::function<void(int64_t)>& visit) const;
  // Moves the bits of `other` here, which leaves `other` empty.
  void Take(RowBits* other);

 private:
  std::vector<std::atomic<uint64_t>> words_;
  int64_t num_rows_;
};

// Changes of a growing table that bits of rows cannot record, because its rows
// pass from id to id. The lock of the table guards this.
struct ConsumerIds {
  // The rows whose ids the consumer may have: it must hear when such an id
  // loses its row. Null means all rows: nothing was marked yet.
  std::unique_ptr<RowBits> known;
  // Ids that the consumer may have and that lost their rows. `since` and
  // `taken` are as in ConsumerRows.
  std::vector<int64_t> since, taken;

  // Notes that `id` lost its row.
  void Lose(int64_t row, int64_t id) {
    if (known && !known->Has(row)) return;
    since.push_back(id);
    if (known) known->Clear(row);
  }
};

// What changed for one consumer, per table: `since` has the rows changed since
// the last take, `taken` the rows that were taken but not committed yet.
struct ConsumerRows {
  std::vector<std::unique_ptr<RowBits>> since, taken;
  std::vector<ConsumerIds> lost;
};

// Thread-safe; updates mark rows while a consumer takes others.
class ChangedRows {
 public:
  explicit ChangedRows(std::vector<int64_t> num_rows)
      : num_rows_(std::move(num_rows)) {}

  // Returns the consumers whose rows an update marks.
  std::vector<std::shared_ptr<ConsumerRows>> Consumers() const;

  // Returns the consumer, made if it is new; null if there is no memory for it.
  std::shared_ptr<ConsumerRows> Begin(const std::string& name);
  // Returns the consumer, or null.
  std::shared_ptr<ConsumerRows> Find(const std::string& name) const;
  void End(const std::string& name);

 private:
  const std::vector<int64_t> num_rows_;
  mutable std::mutex mutex_;
  std::map<std::string, std::shared_ptr<ConsumerRows>> consumers_;
};

// Marks the rows of one update for one consumer.
class MarkingObserver : public UpdateObserver {
 public:
  explicit MarkingObserver(std::shared_ptr<ConsumerRows> consumer)
      : consumer_(std::move(consumer)) {}

  void Apply(const UpdatePiece& piece,
             const std::function<void()>& apply) override;

 private:
  std::shared_ptr<ConsumerRows> consumer_;
};

}  // namespace tpu_embedding

#endif  // TPU_EMBEDDING_OPS_CC_CORE_CHANGED_ROWS_H_
