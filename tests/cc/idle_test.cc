// Rows that wait, against steps with a gradient of zeros made one by one.

#include "core/idle.h"

#include <algorithm>
#include <cmath>
#include <random>
#include <vector>

#include "check.h"
#include "core/simd.h"

namespace tpu_embedding {
namespace {

using Move = IdleRule::Move;

constexpr int kRows = 7;
constexpr int kDim = 11;
constexpr int kCapacity = 9;

// A moment that fades over a root that stays: exact with one node.
IdleRule MakeRule(Move move, bool decays) {
  IdleRule rule;
  rule.move = move;
  rule.moment = 0;
  rule.square = 1;
  rule.epsilon = 0.5f;
  rule.fades = {move == Move::kSign ? 0.5 : 0.75, 1.0};
  rule.nodes = {1.0};
  rule.decays = decays;
  if (move == Move::kMomentum || move == Move::kRoot) {
    for (int age = 1; age <= 40; ++age) {
      rule.node_weights.push_back(std::pow(rule.fades[0], age));
    }
  }
  return rule;
}

// A table whose rows wait, and a twin in float64 whose rows do not.
class Twins {
 public:
  Twins(Move move, bool decays)
      : rule_(MakeRule(move, decays)),
        since_(kRows),
        history_(kCapacity * (2 + rule_.num_terms())),
        row_(kRows * kDim),
        moment_(row_.size()),
        square_(row_.size()),
        waiting_(rule_,
                 {clock_, since_.data(), history_.data(), kCapacity, kRows}) {
    for (size_t i = 0; i < row_.size(); ++i) {
      row_[i] = Draw();
      moment_[i] = i % 5 ? Draw() : 0.0f;
      square_[i] = std::abs(Draw());
    }
    twin_row_.assign(row_.begin(), row_.end());
    twin_moment_.assign(moment_.begin(), moment_.end());
  }

  void Step() {
    const double rate = 0.01 * (1 + generator_() % 9);
    const double shrinkage = rule_.decays ? rate / 8 : 0.0;
    const int64_t updated = generator_() % kRows;
    const float gradient = Draw();
    Slots slots = SlotsOf(updated);
    waiting_.Begin(updated, &row_[updated * kDim], slots.data(), kDim,
                   shrinkage);
    for (int64_t i = 0; i < kRows * kDim; ++i) {
      twin_row_[i] -= twin_row_[i] * shrinkage;
      if (i / kDim == updated) {
        // Any rule will do, which writes the row and its moment.
        row_[i] -= gradient;
        moment_[i] += gradient;
        twin_row_[i] -= gradient;
        twin_moment_[i] += gradient;
        continue;
      }
      twin_moment_[i] *= rule_.fades[0];
      twin_row_[i] -= rate * Direction(twin_moment_[i], square_[i]);
    }
    waiting_.Advance(rate, 0.0, shrinkage);
    if (waiting_.is_full()) Flush();
  }

  void Flush() {
    TableView view;
    view.parameters = row_.data();
    view.dim = kDim;
    view.slots = {moment_.data(), square_.data()};
    CatchUpRows(view, waiting_, {}, 0, kRows);
    waiting_.Restart();
    CHECK_TRUE(waiting_.none_waits());
    for (int64_t i = 0; i < kRows * kDim; ++i) {
      CHECK_LE(std::abs(moment_[i] - twin_moment_[i]), 2e-5);
    }
  }

  // Reads as lookups do, which write nothing.
  void Compare() const {
    std::vector<float> found(kDim);
    for (int64_t row = 0; row < kRows; ++row) {
      const float* const slots[] = {&moment_[row * kDim], &square_[row * kDim]};
      waiting_.CatchUp(waiting_.Find(row), &row_[row * kDim], slots, kDim,
                       found.data(), nullptr);
      for (int d = 0; d < kDim; ++d) {
        // Rounding of up to 200 steps of values below 16.
        CHECK_LE(std::abs(found[d] - twin_row_[row * kDim + d]), 2e-4);
      }
    }
  }

 private:
  using Slots = std::array<float*, 2>;

  Slots SlotsOf(int64_t row) {
    return {&moment_[row * kDim], &square_[row * kDim]};
  }
  float Draw() { return std::ldexp(1.0f + generator_() % 64, -6) - 0.5f; }
  double Direction(double moment, double square) const {
    if (rule_.move == Move::kSign) return (moment > 0) - (moment < 0);
    if (rule_.move == Move::kMomentum) return moment;
    if (rule_.move == Move::kNone) return 0.0;
    return moment / (std::sqrt(square) + rule_.epsilon);
  }

  const IdleRule rule_;
  std::mt19937_64 generator_{20260731};
  int64_t clock_[3] = {};
  std::vector<int32_t> since_;
  std::vector<double> history_;
  std::vector<float> row_, moment_, square_;
  std::vector<double> twin_row_, twin_moment_;
  WaitingRows waiting_;
};

void TestStepsOneByOne() {
  for (const Move move :
       {Move::kNone, Move::kMomentum, Move::kSign, Move::kRoot}) {
    for (const bool decays : {false, true}) {
      Twins twins(move, decays);
      for (int step = 0; step < 200; ++step) {
        twins.Step();
        twins.Compare();
      }
    }
  }
}

// A rule with so many terms, each of which weighs 0.25 after a step.
IdleRule MakeRoot(int terms, bool inside, bool powers) {
  IdleRule rule = MakeRule(Move::kRoot, false);
  rule.epsilon_inside = inside;
  rule.powers = powers;
  rule.fades[1] = 0.81;
  rule.root_fade = 0.9;
  rule.nodes.clear();
  for (int i = 0; i < terms; ++i) rule.nodes.push_back(powers ? 1.5 : 0.5 + i);
  rule.node_weights.assign(terms, 0.25);  // of age 1
  return rule;
}

// What the row loses.
double MoveOf(const IdleRule& rule, double moment, double square) {
  double sum = 0.0, share = 1.0;
  for (const double node : rule.nodes) {
    const double fade = std::pow(0.9, node);
    const double squares = square * fade * fade + 0.25;
    const double root = rule.epsilon_inside ? std::sqrt(squares)
                                            : std::sqrt(square) * fade + 0.5;
    sum += 0.5 * 0.25 * share / root;
    if (rule.powers) {
      share *= 1.0 - (rule.epsilon_inside ? 0.25 / squares : 0.5 / root);
    }
  }
  return moment * sum;
}

// Each number of terms has a loop of its own, and dims that are no multiple of
// a vector have a rest.
void TestEachNumberOfTerms(bool inside, bool powers) {
  for (int terms = 1; terms <= (powers ? kMostPowers : kMostNodes); ++terms) {
    const IdleRule rule = MakeRoot(terms, inside, powers);
    std::vector<double> history(kCapacity * (2 + terms));
    int64_t clock[3] = {};
    int32_t since[1] = {};
    WaitingRows waiting(rule, {clock, since, history.data(), kCapacity, 1});
    waiting.Advance(0.5, 0.0, 0.0);
    std::vector<float> row(kDim, 2.0f), moment(kDim, 1.5f), square(kDim);
    for (int d = 0; d < kDim; ++d) square[d] = 0.125f * d;
    std::vector<float> out(kDim);
    const float* const slots[] = {moment.data(), square.data()};
    waiting.CatchUp(waiting.Find(0), row.data(), slots, kDim, out.data(),
                    nullptr);
    for (int d = 0; d < kDim; ++d) {
      // 16 terms below 0.4 each, and a sum below 8, rounded to float32.
      CHECK_LE(std::abs(out[d] - (2.0 - MoveOf(rule, 1.5, square[d]))),
               34 * 6e-8 * 8);
    }
  }
}

// A row that decays is rounded once, however many steps it waited.
void TestRoundingOfDecay() {
  const IdleRule rule = MakeRule(Move::kNone, true);
  std::vector<double> history(kCapacity * 3);
  int64_t clock[3] = {};
  int32_t since[1] = {};
  WaitingRows waiting(rule, {clock, since, history.data(), kCapacity, 1});
  double kept = 1.0;
  for (const double shrinkage : {1e-3, 1e-5, 0.3, 0.9, 0.999}) {
    waiting.Advance(0.0, 0.0, shrinkage);
    kept *= 1.0 - shrinkage;
    for (int i = 0; i < 64; ++i) {
      const float row = 1.0f + i / 64.0f;
      float out = 0.0f;
      const float* const slots[] = {&row, &row};
      waiting.CatchUp(waiting.Find(0), &row, slots, 1, &out, nullptr);
      const double unit = std::nextafter(row, 4.0f) - row;
      // What is lost is rounded, too; of more than half of it what is kept.
      const double parts = 0.51 + 2.0 * std::min(0.25, 1.0 - kept);
      CHECK_LE(std::abs(out - row * kept), unit * parts);
    }
  }
}

// A row of bfloat16 is rounded when it is written, and its slots are not.
void TestRowsOfBFloat16() {
  const IdleRule rule = MakeRule(Move::kRoot, false);
  std::vector<double> history(kCapacity * (2 + rule.num_terms()));
  int64_t clock[3] = {};
  int32_t since[2] = {};
  WaitingRows waiting(rule, {clock, since, history.data(), kCapacity, 2});
  const BFloat16 two{0x4000};
  std::vector<BFloat16> rows(2 * kDim, two);
  std::vector<float> moment(2 * kDim, 1.5f), square(2 * kDim, 0.3f);
  TableView view;
  view.parameters = rows.data();
  view.dim = kDim;
  view.slots = {moment.data(), square.data()};
  waiting.Advance(0.5, 0.0, 0.0);
  std::vector<float> exact(kDim);
  ReadCaughtUp(view, waiting, 1, exact.data());
  CHECK_EQ(rows[kDim].bits, two.bits);
  CatchUpRows(view, waiting, {7, 1}, 1, 2);
  int up = 0;
  for (int d = 0; d < kDim; ++d) {
    float stored;
    Load(&rows[kDim + d], &stored);
    CHECK_LE(
        std::abs(exact[d] - (2.0 - 0.5 * 0.75 * 1.5 / (std::sqrt(0.3) + 0.5))),
        1e-6);
    CHECK_LT(std::abs(stored - exact[d]), 1.0 / 128);
    up += stored > exact[d];
    CHECK_EQ(moment[kDim + d], 1.5f * 0.75f);
    CHECK_EQ(rows[d].bits, two.bits);
  }
  CHECK_GT(up, 0);
  CHECK_LT(up, kDim);
}

// The whole history is one number for each step; float32 has no part in it.
void TestSignsOfADecay() {
  IdleRule rule = MakeRule(Move::kSign, true);
  std::vector<double> history(600 * 3);
  int64_t clock[3] = {};
  int32_t since[1] = {};
  WaitingRows waiting(rule, {clock, since, history.data(), 600, 1});
  int steps = 0;
  for (; !waiting.is_full(); ++steps) waiting.Advance(0.1, 0.0, 0.5);
  CHECK_LT(steps, 599);  // 0.5^433 is below e^-300.
  CHECK_GT(steps, 430);
}

}  // namespace
}  // namespace tpu_embedding

int main() {
  tpu_embedding::TestStepsOneByOne();
  for (const bool inside : {false, true}) {
    for (const bool powers : {false, true}) {
      tpu_embedding::TestEachNumberOfTerms(inside, powers);
    }
  }
  tpu_embedding::TestRoundingOfDecay();
  tpu_embedding::TestRowsOfBFloat16();
  tpu_embedding::TestSignsOfADecay();
}
