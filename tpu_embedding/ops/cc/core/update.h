// Updates one table: sums the gradients of each touched row, clips, decays,
// applies the optimizer's rule, clips the row.

#ifndef TPU_EMBEDDING_OPS_CC_CORE_UPDATE_H_
#define TPU_EMBEDDING_OPS_CC_CORE_UPDATE_H_

#include <cstdint>
#include <functional>
#include <vector>

#include "core/bfloat16.h"
#include "core/element.h"
#include "core/row_groups.h"

namespace tpu_embedding {

struct RowOptions;  // See core/row_options.h.
class WaitingRows;  // See core/idle.h.

// Returns whether rows that no entry names are updated too.
bool UpdatesAllRows(const RowOptions& options);

// A table and its slots, row-major; the slots are float32.
struct TableView {
  TableData parameters;  // [num_rows, dim]
  int64_t num_rows = 0;
  int64_t dim = 0;
  std::vector<float*> slots;  // each [num_rows, dim], or of width 1 for a
                              // rule with a slot per row
  // Set if rows wait for their gradients: they are caught up before the rule,
  // and lose `shrinkage` of themselves by weight decay.
  const WaitingRows* waiting = nullptr;
  float shrinkage = 0.0f;
};

// Catches up the row of a table with `waiting`, before its gradient is applied.
void EndWait(const TableView& table, int64_t row, float* weights);
// Prefetches what EndWait reads; see WaitingRows::PrefetchSince.
void PrefetchWait(const TableView& table, int64_t far, int64_t near);

// One step's gradients for a table.
struct TableGradients {
  const RowGroups* groups = nullptr;
  // The gradient of each sample's activation, [dim]; null means zeros.
  const float* const* samples = nullptr;
};

// The constants of a rule, in the order that its header documents, the learning
// rate of this step, and how rows that are not stored as float32 are rounded.
struct RuleArguments {
  std::vector<float> hyperparameters;
  float rate = 0.0f;
  Rounding rounding = {};
};

// Updates the groups [begin, end), or, if all rows are updated, the rows
// [begin, end).
using UpdateFn = void (*)(const RuleArguments& arguments,
                          const RowOptions& options,
                          const TableGradients& gradients,
                          const TableView& table, int64_t begin, int64_t end);

// The part of a table that one thread updates: the groups [begin, end), or with
// `all_rows` the rows [begin, end).
struct UpdatePiece {
  int table;
  const TableGradients& gradients;
  const TableView& view;
  bool all_rows;
  int64_t begin, end;
};

// Sees an update while it is applied, by several threads at once.
class UpdateObserver {
 public:
  virtual ~UpdateObserver() = default;
  // Is called before any piece of a table is updated. The update has
  // `num_groups` groups and changes `units` rows.
  virtual void Start(int table, int64_t num_groups, int64_t units) {
    (void)table, (void)num_groups, (void)units;
  }
  // Runs `apply`, which updates the piece.
  virtual void Apply(const UpdatePiece& piece,
                     const std::function<void()>& apply) = 0;
};

}  // namespace tpu_embedding

#endif  // TPU_EMBEDDING_OPS_CC_CORE_UPDATE_H_
