// The variables of tables whose rows wait for their gradients, as the ops take
// them: `clocks`, `sinces` and `histories` beside `arrays`.

#ifndef TPU_EMBEDDING_OPS_CC_KERNELS_WAITING_H_
#define TPU_EMBEDDING_OPS_CC_KERNELS_WAITING_H_

#include <memory>
#include <string>
#include <variant>
#include <vector>

#include "core/idle.h"
#include "core/pieces.h"
#include "core/rows-inl.h"
#include "core/update.h"
#include "core/weighted_sum-inl.h"
#include "kernels/kernel_util.h"
#include "tensorflow/core/framework/op_kernel.h"

namespace tpu_embedding {

class Record;  // See kernels/plan.h.

// Reads a rule, a record of ops/library.py.
absl::Status ReadIdleRule(const Record& record, IdleRule* rule);

// Reads the rules in the string attribute `idle`, a list of records of
// ops/library.py, one for each table.
absl::Status ReadIdleRules(tensorflow::OpKernelConstruction* context,
                           std::vector<IdleRule>* rules);

// The waiting rows of one op's tables. The variables are locked from `LookUp`
// on, and before the tables and the slots: all ops lock in this order.
class WaitingTables {
 public:
  // Looks up one table for each rule, or none if the op got no variables.
  absl::Status LookUp(tensorflow::OpKernelContext* context,
                      const std::vector<IdleRule>& rules, bool writes);

  bool empty() const { return rows_.empty(); }
  WaitingRows& operator[](size_t table) { return *rows_[table]; }

 private:
  std::vector<Variable> variables_;
  std::unique_ptr<ReadLocks> read_locks_;
  std::unique_ptr<WriteLocks> write_locks_;
  std::vector<std::unique_ptr<WaitingRows>> rows_;
};

// Refuses a step of an optimizer that no longer trains the table, or with a
// weight decay that would leave nothing of a row.
absl::Status CheckStep(const IdleRule& rule, const WaitingRows& waiting,
                       double shrinkage);

// Counts a step of a table, which is locked. A row of `steps`, [tables, 3], has
// its weight, note and shrinkage. Catches all rows up if the history is full.
void AdvanceTable(const ParallelFor& parallel_for,
                  const tensorflow::Tensor& steps, size_t table,
                  const TableView& view, WaitingRows* waiting);

// Catches up all rows of a table, which is locked.
void CatchUpAll(const ParallelFor& parallel_for, const TableView& view,
                WaitingRows* waiting, const Rounding& rounding = {});

// Rough cycles to catch a row up, without those for its columns.
constexpr int64_t kCyclesPerWait = 150;

// Prefetches what catching up a row reads. The slots of a row that is already
// caught up are not read.
TPU_EMBEDDING_INLINE void PrefetchRow(const TableView& view,
                                      const WaitingRows& waiting, int64_t row) {
  std::visit(
      [&](const auto& table) {
        PrefetchRow<2>(table, row, view.dim);
        KeepCalls();
      },
      view.parameters);
  if (!waiting.Waits(row)) return;
  waiting.PrefetchStart(row);
  for (const float* slot : view.slots) {
    Prefetch<2>(slot + row * view.dim, view.dim);
  }
}

// Returns the work to catch up `count` rows of a table.
inline Work WorkToCatchUp(const TableView& view, int64_t count) {
  const int64_t width = view.dim * (1 + view.slots.size());
  return {count, count * (kCyclesPerWait + width)};
}

// Runs read(i) for each i in [begin, end), which reads the row row_of(i) of a
// table, caught up.
template <class RowOf, class Read>
void ReadInTurn(const TableView& view, const WaitingRows& waiting,
                int64_t begin, int64_t end, const RowOf& row_of,
                const Read& read) {
  const int64_t ahead = RowsAhead(4 * view.dim * (1 + view.slots.size()));
  for (int64_t i = begin - 2 * ahead; i < end; ++i) {
    if (i + 2 * ahead < end) waiting.PrefetchSince(row_of(i + 2 * ahead));
    if (i + ahead >= begin && i + ahead < end) {
      PrefetchRow(view, waiting, row_of(i + ahead));
    }
    if (i >= begin) read(i);
  }
}

}  // namespace tpu_embedding

#endif  // TPU_EMBEDDING_OPS_CC_KERNELS_WAITING_H_
