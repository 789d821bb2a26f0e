// Tables of an embedding whose rows wait for their gradients. Their state is in
// the step queue; Keras's tables keep it in variables (kernels/waiting.h).

#ifndef TPU_EMBEDDING_OPS_CC_KERNELS_WAITING_TABLE_H_
#define TPU_EMBEDDING_OPS_CC_KERNELS_WAITING_TABLE_H_

#include <cstdint>
#include <memory>
#include <vector>

#include "core/batch_pool.h"
#include "core/buffer.h"
#include "core/distinct.h"
#include "core/growing_memory.h"
#include "core/idle.h"
#include "core/row_groups.h"
#include "core/row_options.h"
#include "kernels/plan.h"
#include "kernels/step_queue_resource.h"
#include "kernels/waiting.h"

namespace tpu_embedding {

// The distinct rows that some entries name, caught up.
struct CaughtUpRows {
  Buffer<float> values;    // each row once
  Buffer<int32_t> places;  // of the entries in `values`
  std::vector<int32_t> distinct;
  FirstPlaces first;
};

// The waiting rows of one table. The locks of the table and its slots guard it.
class WaitingTable {
 public:
  // `plan.idle` must not be null.
  explicit WaitingTable(const TablePlan& plan);

  WaitingRows& rows() { return rows_; }
  // Returns storage, of earlier lookups if possible: fresh memory costs a page
  // fault for each 4 KiB.
  std::shared_ptr<CaughtUpRows> TakeStorage() { return storage_->Take(); }

  // Returns whether rows can make up for a step at this rate later. If not, the
  // step must update all rows, with the options `all_rows()`.
  bool TakesStep(float rate) const;
  const RowOptions& all_rows() const { return all_rows_; }
  // Counts a step at this rate.
  void Advance(float rate);

  // The random numbers of the last step, by which rows are caught up in memory.
  Rounding rounding;

 private:
  float Decay(float rate) const;

  const std::shared_ptr<const IdleRule> idle_;
  RowOptions all_rows_;
  std::vector<int64_t> clock_;
  GrowingMemory since_;  // for all rows that may come
  std::vector<double> history_;
  WaitingRows rows_;
  const std::shared_ptr<BatchPool<CaughtUpRows>> storage_ =
      std::make_shared<BatchPool<CaughtUpRows>>();
};

// Returns whether rows of any table wait now.
bool AnyWaits(const StepQueueResource& resource);

// Catches up all rows of a table, and marks them for the consumers of deltas.
void CatchUpTable(const ParallelFor& parallel_for,
                  const StepQueueResource& resource, int table,
                  const TableView& view);

// Copies of the rows of a table that some entries name, caught up; none by
// default. Rows before the first row of a growing table, or after its last one,
// are copied as they are, not caught up.
struct CaughtUp {
  int table = -1;
  const Buffer<int32_t>* rows = nullptr;
  const RowGroups* groups = nullptr;  // of these entries, if they have `places`
  std::shared_ptr<CaughtUpRows> found = nullptr;

  // Returns the places of the entries in the copies.
  const Buffer<int32_t>& places() const {
    return groups ? groups->places : found->places;
  }
  int64_t num_distinct() const {
    return groups ? groups->num_rows() : found->distinct.size();
  }
  const int32_t* distinct() const {
    return groups ? groups->rows.data() : found->distinct.data();
  }
};

// Makes copies for a lookup, of tables that are locked.
void ReadCaughtUp(const ParallelFor& parallel_for,
                  const StepQueueResource& resource,
                  const std::vector<TableView>& views,
                  std::vector<CaughtUp>* copies);

}  // namespace tpu_embedding

#endif  // TPU_EMBEDDING_OPS_CC_KERNELS_WAITING_TABLE_H_
