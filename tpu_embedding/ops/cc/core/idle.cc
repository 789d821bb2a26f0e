#include "core/idle.h"

#include <algorithm>
#include <cmath>
#include <utility>
#include <variant>

#include "core/bfloat16-inl.h"
#include "core/rows-inl.h"
#include "core/simd.h"

// Selects versions of these functions that older systems have, too: see
// older_systems.cc.
#if defined(__GLIBC__) && defined(__x86_64__)
__asm__(".symver exp, exp@GLIBC_2.2.5");
__asm__(".symver log, log@GLIBC_2.2.5");
__asm__(".symver pow, pow@GLIBC_2.2.5");
#elif defined(__GLIBC__) && defined(__aarch64__)
__asm__(".symver exp, exp@GLIBC_2.17");
__asm__(".symver log, log@GLIBC_2.17");
__asm__(".symver pow, pow@GLIBC_2.17");
#endif

namespace tpu_embedding {
namespace {

constexpr int64_t kMostSteps = int64_t{1} << 30;
// The sums of kSign grow with the decay, and must not overflow.
constexpr double kSmallestLog = -300.0;

// Arguments of the loops over columns. The loops are compiled for each number
// of terms, and the terms are written out, so that GCC vectorizes the columns.
struct Columns {
  const float* row;
  const float* moment;
  const float* square;
  int64_t dim;
  float* out;  // may be `row`
  // Where the moment and the square are written, in place or elsewhere, or
  // null. The fades are how waiting shrinks them.
  float* moment_out = nullptr;
  float* square_out = nullptr;
  Shrink moment_fade = {};
  Shrink square_fade = {};
};

// How the loops divide by a root: epsilon is added to the root, or epsilon^2 to
// the square; at every node, or at one node for powers of a share.
enum class Root { kNodes, kNodesOfSquares, kPowers, kPowersOfSquares };

template <int kTerms, Root kRoot, bool kFades>
struct MoveByRoot {
  template <class F32xN>
  TPU_EMBEDDING_INLINE static void Run(const Columns& columns, const Wait& wait,
                                       const float* root_fades) {
    Numbers factors, fades, epsilons;
    for (int i = 0; i < kTerms; ++i) {
      factors[i] = wait.factors[i];
      fades[i] = root_fades[i];
      epsilons[i] = wait.epsilons[i];
      if (!kSquares) continue;
      fades[i] *= fades[i];
      epsilons[i] *= epsilons[i];
    }
    const auto [row, moment, square, dim, out, moment_out, square_out,
                moment_fade, square_fade] = columns;
    const Shrink shrink(wait.decay);
#pragma GCC ivdep
    for (int64_t d = 0; d < dim; ++d) {
      const float scale = kSquares ? square[d] : std::sqrt(square[d]);
      float divided;
      if (kRoot == Root::kPowers || kRoot == Root::kPowersOfSquares) {
        const float inverse = 1.0f / (scale * fades[0] + epsilons[0]);
        const float share = 1.0f - epsilons[0] * inverse;
        divided = Polynomial(factors, share) *
                  (kSquares ? std::sqrt(inverse) : inverse);
      } else {
        divided = Sum(factors, fades, epsilons, scale,
                      std::make_index_sequence<kTerms>());
      }
      out[d] = shrink(row[d], moment[d] * divided);
      if (!kFades) continue;
      moment_out[d] = moment_fade(moment[d], 0.0f);
      square_out[d] = square_fade(square[d], 0.0f);
    }
  }

 private:
  using Numbers = std::array<float, kTerms>;
  static constexpr bool kSquares =
      kRoot == Root::kNodesOfSquares || kRoot == Root::kPowersOfSquares;

  template <size_t kTerm = 0>
  TPU_EMBEDDING_INLINE static float Polynomial(const Numbers& factors,
                                               float share) {
    if constexpr (kTerm + 1 == kTerms) {
      return factors[kTerm];
    } else {
      return factors[kTerm] + share * Polynomial<kTerm + 1>(factors, share);
    }
  }
  template <size_t... kTerm>
  TPU_EMBEDDING_INLINE static float Sum(const Numbers& factors,
                                        const Numbers& fades,
                                        const Numbers& epsilons, float scale,
                                        std::index_sequence<kTerm...>) {
    return (... +
            (factors[kTerm] / RootOf(scale * fades[kTerm] + epsilons[kTerm])));
  }
  TPU_EMBEDDING_INLINE static float RootOf(float value) {
    return kSquares ? std::sqrt(value) : value;
  }
};

template <Root kRoot, int kTerms>
void MoveByRoots(int64_t terms, const Columns& columns, const Wait& wait,
                 const float* fades) {
  if (terms == kTerms && columns.moment_out) {
    RunOnThisCpu<MoveByRoot<kTerms, kRoot, true>>(columns, wait, fades);
  } else if (terms == kTerms) {
    RunOnThisCpu<MoveByRoot<kTerms, kRoot, false>>(columns, wait, fades);
  } else if constexpr (kTerms > 1) {
    MoveByRoots<kRoot, kTerms - 1>(terms, columns, wait, fades);
  }
}

void MoveByAnyRoot(const IdleRule& rule, const Columns& columns,
                   const Wait& wait, const float* fades) {
  const auto move = rule.powers && rule.epsilon_inside
                        ? MoveByRoots<Root::kPowersOfSquares, kMostPowers>
                    : rule.powers ? MoveByRoots<Root::kPowers, kMostPowers>
                    : rule.epsilon_inside
                        ? MoveByRoots<Root::kNodesOfSquares, kMostNodes>
                        : MoveByRoots<Root::kNodes, kMostNodes>;
  move(rule.num_terms(), columns, wait, fades);
}

struct Fade {
  template <class F32xN>
  TPU_EMBEDDING_INLINE static void Run(const float* values, const Shrink& any,
                                       int64_t dim, float* out) {
    const Shrink shrink = any;
#pragma GCC ivdep
    for (int64_t d = 0; d < dim; ++d) out[d] = shrink(values[d], 0.0f);
  }
};

float Sign(float x) { return x > 0.0f ? 1.0f : x < 0.0f ? -1.0f : x; }

// Returns a row as float32: in place, or converted into `copy`.
float* Floats(const TableView& table, int64_t row, float* copy) {
  if (float* const* const data = std::get_if<float*>(&table.parameters)) {
    return *data + row * table.dim;
  }
  ReadRow(table.parameters, row, table.dim, copy);
  return copy;
}

std::array<float*, kMostSlots> SlotsOf(const TableView& table, int64_t row) {
  std::array<float*, kMostSlots> slots = {};
  for (size_t k = 0; k < table.slots.size(); ++k) {
    slots[k] = table.slots[k] + row * table.dim;
  }
  return slots;
}

}  // namespace

Shrink::Shrink(double log) {
  if (log == 0.0) return;
  keep_ = std::exp(log);
  lose_ = -std::expm1(log);
  keeps_most_ = keep_ >= 0.5f;
}

void IdleRule::MakeFewFades() {
  few_fades.resize(fades.size());
  for (size_t k = 0; k < fades.size(); ++k) {
    const double log = std::log(fades[k]);
    for (int64_t n = 1; n < kFewSteps; ++n) few_fades[k][n] = Shrink(log * n);
  }
}

WaitingRows::WaitingRows(const IdleRule& rule, const WaitingState& state)
    : rule_(rule), state_(state), width_(2 + rule.num_terms()) {
  for (size_t i = 0; i < rule.nodes.size(); ++i) {
    root_fades_[i] = std::pow(rule.root_fade, rule.nodes[i]);
    epsilon_fades_[i] = std::pow(rule.epsilon_beta, rule.nodes[i]);
  }
  for (size_t k = 0; k < rule.fades.size(); ++k) {
    logs_[k] = std::log(rule.fades[k]);
  }
}

Wait WaitingRows::Find(int64_t row) const {
  Wait wait;
  const int64_t now = state_.clock[0];
  const int64_t since = Since(row);
  if (!Waits(row)) return wait;
  wait.steps = now - since;
  const double* const start = Start(since);
  const double* const end = Start(now);
  if (rule_.decays) wait.decay = end[0] - start[0];
  wait.rate = end[1];
  const int64_t terms = rule_.num_terms();
  const bool signs = rule_.move == IdleRule::Move::kSign;
  for (int64_t i = 0; i < terms; ++i) {
    const double weight = start[2 + i];
    wait.factors[i] =
        signs ? (end[2 + i] - weight) * std::exp(start[0]) : weight;
    wait.epsilons[i] = rule_.epsilon;
  }
  if (rule_.epsilon_beta == 0.0) return wait;
  const double updates = Start(since + 1)[1] - 1.0;
  const double fade = std::pow(rule_.epsilon_beta, updates);
  for (int64_t i = 0; i < terms; ++i) {
    wait.epsilons[i] *=
        static_cast<float>(std::sqrt(1.0 - fade * epsilon_fades_[i]));
  }
  return wait;
}

void WaitingRows::CatchUp(const Wait& wait, const float* row,
                          const float* const* slots, int64_t dim,
                          float* row_out, float* const* slots_out) const {
  using Move = IdleRule::Move;
  if (wait.steps == 0) {
    if (row_out != row) std::copy_n(row, dim, row_out);
    for (size_t k = 0; slots_out && k < rule_.fades.size(); ++k) {
      if (slots_out[k] != slots[k]) std::copy_n(slots[k], dim, slots_out[k]);
    }
    return;
  }
  const float* const moment = rule_.fades.empty() ? row : slots[rule_.moment];
  const float* const square = rule_.fades.empty() ? row : slots[rule_.square];
  Columns columns{row, moment, square, dim, row_out};
  const bool fades_by_root = slots_out && rule_.move == Move::kRoot;
  if (fades_by_root) {
    columns.moment_out = slots_out[rule_.moment];
    columns.square_out = slots_out[rule_.square];
    columns.moment_fade = FadeOf(rule_.moment, wait.steps);
    columns.square_fade = FadeOf(rule_.square, wait.steps);
  }
  const float factor = wait.factors[0];
  const Shrink shrink(wait.decay);
  switch (rule_.move) {
    case Move::kNone:
      RunOnThisCpu<Fade>(row, shrink, dim, row_out);
      break;
    case Move::kMomentum:
      for (int64_t d = 0; d < dim; ++d) {
        row_out[d] = shrink(row[d], moment[d] * factor);
      }
      break;
    case Move::kSign:
      for (int64_t d = 0; d < dim; ++d) {
        row_out[d] = shrink(row[d], Sign(moment[d]) * factor);
      }
      break;
    case Move::kRoot:
      MoveByAnyRoot(rule_, columns, wait, root_fades_.data());
      break;
    case Move::kFollow: {
      const auto [power, l1, l2, beta] = rule_.follow;
      const float twice_l2 = 2.0f * (l2 + beta / (2.0f * wait.rate));
      for (int64_t d = 0; d < dim; ++d) {
        const float linear = slots[1][d];
        const float quadratic =
            std::pow(slots[0][d], power) / wait.rate + twice_l2;
        row_out[d] = (std::min(std::max(linear, -l1), l1) - linear) / quadratic;
      }
      break;
    }
  }
  for (int k = 0; slots_out && k < static_cast<int>(rule_.fades.size()); ++k) {
    const bool is_done = k == rule_.moment || k == rule_.square;
    if (fades_by_root && is_done) continue;
    if (rule_.fades[k] != 1.0) {
      RunOnThisCpu<Fade>(slots[k], FadeOf(k, wait.steps), dim, slots_out[k]);
    } else if (slots_out[k] != slots[k]) {
      std::copy_n(slots[k], dim, slots_out[k]);
    }
  }
}

void WaitingRows::Begin(int64_t row, float* values, float* const* slots,
                        int64_t dim, float shrinkage) const {
  CatchUp(Find(row), values, slots, dim, values, slots);
  if (rule_.decays) {
    for (int64_t d = 0; d < dim; ++d) values[d] -= values[d] * shrinkage;
  }
  state_.since[row] = state_.clock[0] + 1;
}

void WaitingRows::Advance(double weight, double note, double shrinkage) {
  const int64_t next = ++state_.clock[0];
  const int64_t terms = rule_.num_terms();
  const double* const last = Start(next - 1);
  double* const own = Start(next);
  own[0] = last[0] + (rule_.decays ? std::log1p(-shrinkage) : 0.0);
  own[1] = note;
  if (rule_.move == IdleRule::Move::kSign) {
    own[2] = last[2] + weight * std::exp(-own[0]);
    return;
  }
  std::fill_n(own + 2, terms, 0.0);
  if (rule_.node_weights.empty()) return;
  // No row has been waiting since before the last flush.
  const int64_t horizon = std::min(rule_.horizon(), next - state_.clock[1]);
  for (int64_t age = 1; age <= horizon; ++age) {
    double* const start = Start(next - age);
    const double term =
        rule_.decays ? weight * std::exp(start[0] - own[0]) : weight;
    const double* const weights = &rule_.node_weights[(age - 1) * terms];
    for (int64_t i = 0; i < terms; ++i) start[2 + i] += term * weights[i];
  }
}

bool WaitingRows::is_full() const {
  return state_.clock[0] + 1 - state_.clock[1] >= state_.capacity ||
         Start(state_.clock[0])[0] < kSmallestLog;
}

void WaitingRows::Restart() {
  if (state_.clock[0] > kMostSteps) {  // int32 must be able to number them.
    std::fill_n(state_.since, state_.num_rows, 0);
    state_.clock[0] = 0;
  }
  state_.clock[1] = state_.clock[0];
  std::fill_n(Start(state_.clock[0]), width_, 0.0);
}

void PrefetchWait(const TableView& table, int64_t far, int64_t near) {
  KeepCalls();
  table.waiting->PrefetchSince(far);
  table.waiting->PrefetchStart(near);
}

void EndWait(const TableView& table, int64_t row, float* weights) {
  table.waiting->Begin(row, weights, SlotsOf(table, row).data(), table.dim,
                       table.shrinkage);
}

void ReadCaughtUp(const TableView& table, const WaitingRows& waiting,
                  int64_t row, float* values) {
  waiting.CatchUp(waiting.Find(row), Floats(table, row, values),
                  SlotsOf(table, row).data(), table.dim, values, nullptr);
}

void CatchUpRows(const TableView& table, const WaitingRows& waiting,
                 const Rounding& rounding, int64_t begin, int64_t end) {
  std::vector<float> copy(table.dim);
  for (int64_t row = begin; row < end; ++row) {
    const Wait wait = waiting.Find(row);
    if (wait.steps == 0) continue;
    float* const values = Floats(table, row, copy.data());
    const auto slots = SlotsOf(table, row);
    waiting.CatchUp(wait, values, slots.data(), table.dim, values,
                    slots.data());
    if (values == copy.data()) {
      RowsToRound rows;
      std::fill_n(rows.values, kRowsAtOnce, values);
      std::fill_n(rows.rows, kRowsAtOnce, rounding.NumberOf(row));
      std::fill_n(rows.out, kRowsAtOnce,
                  std::get<BFloat16*>(table.parameters) + row * table.dim);
      RunOnThisCpu<RoundBody>(rows, table.dim, rounding);
    }
    waiting.CaughtUp(row);
  }
}

}  // namespace tpu_embedding
