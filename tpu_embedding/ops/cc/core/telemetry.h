// Counts updates: how often rows are named, and the norms of gradients and of
// changes. Every n-th update is counted while it is applied, so a step that was
// refused or discarded is never counted.

#ifndef TPU_EMBEDDING_OPS_CC_CORE_TELEMETRY_H_
#define TPU_EMBEDDING_OPS_CC_CORE_TELEMETRY_H_

#include <atomic>
#include <cstdint>
#include <cstdlib>
#include <functional>
#include <memory>
#include <mutex>
#include <vector>

#include "core/buffer.h"
#include "core/feature.h"
#include "core/update.h"

namespace tpu_embedding {

// One counted update of one table.
struct CountedUpdate {
  Buffer<int32_t> rows;          // [n], ascending, each once
  Buffer<uint32_t> ids;          // [n], entries that name the row
  Buffer<float> gradient_norms;  // [n], of the summed gradient, not clipped
  Buffer<float> update_norms;    // [n], or with `all_rows` for each table row
  int64_t invalid_ids = 0;       // dropped, or taken modulo V
  int64_t samples = 0;
  int64_t samples_without_ids = 0;

  // Makes room for an update of `num_groups` groups that changes `units` rows.
  void Resize(int64_t num_groups, int64_t units);
  // Counts the samples of a feature, and its invalid IDs.
  void AddSamples(const FeatureCsr& feature);
};

// Counts one update.
class CountingObserver : public UpdateObserver {
 public:
  explicit CountingObserver(int num_tables) : tables(num_tables) {}

  void Start(int table, int64_t num_groups, int64_t units) override {
    tables[table].Resize(num_groups, units);
  }
  void Apply(const UpdatePiece& piece,
             const std::function<void()>& apply) override;

  std::vector<CountedUpdate> tables;
};

// A row and the IDs that named it.
struct HotRow {
  int64_t row;
  int64_t ids;
};

// The sums over the counted updates of one table, and the last of them.
struct TableTelemetry {
  int64_t ids = 0;
  int64_t invalid_ids = 0;
  int64_t samples = 0;
  int64_t samples_without_ids = 0;
  int64_t distinct_ids = 0;  // summed over updates
  CountedUpdate last;
};

// Thread-safe, except that one update is counted at a time.
class Telemetry {
 public:
  // Clears all counts, then counts the first update and every n-th after it.
  // With 0 it counts nothing and frees the memory. Returns false, without a
  // change, if there is not enough memory.
  bool Start(int64_t every, const std::vector<int64_t>& num_rows);

  // Notes that an update of `samples` samples is about to be applied. Returns
  // whether to count it.
  bool Next(int64_t samples);

  // Adds the counts, by table, of the update for which `Next` returned true.
  void Add(std::vector<CountedUpdate> tables);

  // Calls `read` while nothing changes.
  struct View {
    int64_t steps;
    int64_t samples;  // of all steps
    int64_t counted_steps;
    const std::vector<TableTelemetry>& tables;
  };
  void Read(const std::function<void(const View&)>& read) const;

  // Returns how many rows of `table` counted updates named. Call it in `Read`.
  int64_t RowsTouched(int table) const;
  // Returns the `count` rows named most often, by descending count; rows with
  // equal counts are in ascending order. Call it in `Read`.
  std::vector<HotRow> Hottest(int table, int64_t count) const;

 private:
  struct Free {
    void operator()(uint32_t* memory) const { std::free(memory); }
  };
  // Counts by row, from calloc: pages without a named row take no memory.
  struct RowCounts {
    std::unique_ptr<uint32_t[], Free> of_rows;
    int64_t size = 0;
  };

  std::atomic<int64_t> every_{0};
  mutable std::mutex mutex_;
  int64_t steps_ = 0;
  int64_t samples_ = 0;
  int64_t counted_steps_ = 0;
  std::vector<TableTelemetry> tables_;
  std::vector<RowCounts> counts_;
};

}  // namespace tpu_embedding

#endif  // TPU_EMBEDDING_OPS_CC_CORE_TELEMETRY_H_
