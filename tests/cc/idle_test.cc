// What rows that wait lose, by formula; tests/keras_layer/test_catch_up.py and
// tests/test_waiting_rows.py compare them with steps made one by one.

#include "core/idle.h"

#include <algorithm>
#include <cmath>
#include <vector>

#include "check.h"
#include "core/simd.h"

namespace tpu_embedding {
namespace {

using Move = IdleRule::Move;

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
  if (move == Move::kRoot) {
    for (int age = 1; age <= 40; ++age) {
      rule.node_weights.push_back(std::pow(rule.fades[0], age));
    }
  }
  return rule;
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
  for (const bool inside : {false, true}) {
    for (const bool powers : {false, true}) {
      tpu_embedding::TestEachNumberOfTerms(inside, powers);
    }
  }
  tpu_embedding::TestRoundingOfDecay();
  tpu_embedding::TestRowsOfBFloat16();
  tpu_embedding::TestSignsOfADecay();
}
