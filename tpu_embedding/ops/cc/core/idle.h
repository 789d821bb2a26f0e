// Catches up rows that wait for their next gradient: the C++ side of
// tpu_embedding/optimizers/idle.py, which has the mathematics, and of
// tpu_embedding/keras/rows/waiting.py, which does the same by TensorFlow's ops.

#ifndef TPU_EMBEDDING_OPS_CC_CORE_IDLE_H_
#define TPU_EMBEDDING_OPS_CC_CORE_IDLE_H_

#include <algorithm>
#include <array>
#include <cstdint>
#include <string>
#include <vector>

#include "core/bfloat16.h"
#include "core/simd.h"
#include "core/update.h"

namespace tpu_embedding {

constexpr int kMostNodes = 16;
constexpr int kMostPowers = 8;
constexpr int kMostSlots = 4;
constexpr int kFewSteps = 128;

// Multiplies a value by a factor with one rounding. A factor near 1 would
// itself be rounded, so the lost part is subtracted. Infinity stays infinite.
class Shrink {
 public:
  Shrink() = default;  // by nothing
  // Shrinks by a factor exp(log).
  explicit Shrink(double log);
  TPU_EMBEDDING_INLINE float operator()(float value, float move) const {
    const float rest = value - move;
    const float kept = rest * keep_;
    const float less = value - (move + rest * lose_);
    return keeps_most_ && less == less ? less : kept;
  }

 private:
  float keep_ = 1.0f, lose_ = 0.0f;
  bool keeps_most_ = true;
};

// The effect on a row of a step whose gradient is zeros; see `Idle` of idle.py.
struct IdleRule {
  enum class Move { kNone, kMomentum, kSign, kRoot, kFollow };

  Move move = Move::kNone;
  int moment = 0;
  int square = 0;
  float epsilon = 0.0f;
  bool epsilon_inside = false;
  double epsilon_beta = 0.0;
  double root_fade = 1.0;
  std::vector<double> fades;         // by slot
  std::array<float, 4> follow = {};  // power, l1, l2 and beta of Ftrl
  std::vector<double> nodes;         // one, if the move needs none
  bool powers = false;               // one node n times, for powers of a share
  std::vector<double> node_weights;  // [horizon, nodes], row-major
  bool decays = false;
  std::string name;   // of the table
  int64_t owner = 0;  // the optimizer that it belongs to
  // How `fades` shrink each slot in 0, 1, ... steps; may be empty. Most rows
  // wait for only a few steps.
  std::vector<std::array<Shrink, kFewSteps>> few_fades;

  void MakeFewFades();
  int64_t num_terms() const { return nodes.size(); }
  // Returns after how many steps the weights are final; 0 without weights.
  int64_t horizon() const { return node_weights.size() / nodes.size(); }
};

// What is needed to catch up a row.
struct Wait {
  int64_t steps = 0;
  double decay = 0.0;  // the logarithm of what weight decay leaves
  std::array<float, kMostNodes> factors = {};
  std::array<float, kMostNodes> epsilons;
  float rate = 0.0f;  // of the last step
};

// The variables of a `Waiting`.
struct WaitingState {
  int64_t* clock = nullptr;   // [3]: steps, the last flush, the owner
  int32_t* since = nullptr;   // by row
  double* history = nullptr;  // [capacity, 2 + terms]
  int64_t capacity = 0;
  int64_t num_rows = 0;
};

// The rows of a table. Several threads may read at the same time, or write
// different rows.
class WaitingRows {
 public:
  WaitingRows(const IdleRule& rule, const WaitingState& state);

  int64_t owner() const { return state_.clock[2]; }
  int64_t num_rows() const { return state_.num_rows; }
  bool none_waits() const { return state_.clock[0] <= state_.clock[1]; }
  // A row that another thread updates may be one step ahead of the clock.
  bool Waits(int64_t row) const { return Since(row) < state_.clock[0]; }

  // Prefetch what `Find` reads for a row: first the step since which the row
  // waits, and later the history of that step.
  void PrefetchSince(int64_t row) const {
    __builtin_prefetch(state_.since + row);
  }
  void PrefetchStart(int64_t row) const {
    const double* const start = Start(Since(row));
    __builtin_prefetch(start);
    __builtin_prefetch(start + width_ - 1);  // It may end in the next line.
  }

  // Finds what waiting did to a row.
  Wait Find(int64_t row) const;

  // Applies the wait: reads `row` and `slots`, writes `row_out` and
  // `slots_out`, which may be the same. A null `slots_out` is not written.
  void CatchUp(const Wait& wait, const float* row, const float* const* slots,
               int64_t dim, float* row_out, float* const* slots_out) const;

  // Catches up and shrinks a row that is updated in the step about to begin.
  void Begin(int64_t row, float* values, float* const* slots, int64_t dim,
             float shrinkage) const;
  // Notes that a row is caught up.
  void CaughtUp(int64_t row) const { state_.since[row] = state_.clock[0]; }

  // Counts a step; see `Waiting.advance`. Weight decay multiplies rows by 1 -
  // `shrinkage`.
  void Advance(double weight, double note, double shrinkage);
  // Returns whether a pass over all rows is due.
  bool is_full() const;
  // Restarts the history. All rows must be caught up.
  void Restart();

 private:
  int64_t Since(int64_t row) const {
    return std::max<int64_t>(state_.since[row], state_.clock[1]);
  }
  // Returns how `steps` of waiting shrink a slot.
  Shrink FadeOf(int slot, int64_t steps) const {
    return steps < kFewSteps && !rule_.few_fades.empty()
               ? rule_.few_fades[slot][steps]
               : Shrink(logs_[slot] * steps);
  }
  double* Start(int64_t step) const {
    return state_.history + step % state_.capacity * width_;
  }

  const IdleRule& rule_;
  const WaitingState state_;
  const int64_t width_;
  std::array<float, kMostNodes> root_fades_;
  std::array<double, kMostNodes> epsilon_fades_;
  std::array<double, kMostSlots> logs_;  // of the factors of the slots
};

// Reads a row of a table as float32, caught up.
void ReadCaughtUp(const TableView& table, const WaitingRows& waiting,
                  int64_t row, float* values);

// Catches up the rows [begin, end) of a table in memory, and their slots.
// Rounds rows of bfloat16.
void CatchUpRows(const TableView& table, const WaitingRows& waiting,
                 const Rounding& rounding, int64_t begin, int64_t end);

}  // namespace tpu_embedding

#endif  // TPU_EMBEDDING_OPS_CC_CORE_IDLE_H_
