// Loops over rows, for all rules.

#ifndef TPU_EMBEDDING_OPS_CC_CORE_UPDATE_INL_H_
#define TPU_EMBEDDING_OPS_CC_CORE_UPDATE_INL_H_

#include <algorithm>
#include <array>
#include <cmath>
#include <variant>
#include <vector>

#include "core/bfloat16-inl.h"
#include "core/dims.h"
#include "core/int8-inl.h"
#include "core/row_options.h"
#include "core/rows-inl.h"
#include "core/simd.h"
#include "core/update.h"
#include "core/weighted_sum-inl.h"

namespace tpu_embedding {

// The number of entries ahead for which gradients are prefetched.
constexpr int64_t kGradientsAhead = 8;

// The gradients and gains of all entries, of which sums take some. Reading a
// gradient prefetches a later one.
template <Gains kGains>
struct GradientTerms {
  const uint32_t* entries;  // the sample of each
  const float* gains;       // by entry or by sample
  const float* const* samples;
  int64_t dim;
  int64_t last;  // of all entries

  TPU_EMBEDDING_INLINE const float* vector(int64_t i) const {
    const int64_t ahead = std::min(i + kGradientsAhead, last);
    if (const float* next = samples[entries[ahead]]) {
      Prefetch(next, dim);
    }
    return samples[entries[i]];
  }
  TPU_EMBEDDING_INLINE float gain(int64_t i) const {
    if (kGains == Gains::kOnes) return 1.0f;
    return gains[kGains == Gains::kOfSamples ? entries[i] : i];
  }
};

template <class F32xN, Gains kGains>
TPU_EMBEDDING_INLINE void SumEntries(const TableGradients& gradients,
                                     const float* gains, int64_t begin,
                                     int64_t end, int64_t dim, float* sum) {
  const Buffer<uint32_t>& entries = gradients.groups->samples;
  const GradientTerms<kGains> terms{entries.data(), gains, gradients.samples,
                                    dim, entries.size() - 1};
  WeightedSum<F32xN>(terms, begin, end, dim, sum);
}

// Sums gain * gradient over the entries [begin, end), one by one.
template <class F32xN>
TPU_EMBEDDING_INLINE void SumEntries(const TableGradients& gradients,
                                     int64_t begin, int64_t end, int64_t dim,
                                     float* sum) {
  const RowGroups& groups = *gradients.groups;
  if (groups.gains.size()) {
    SumEntries<F32xN, Gains::kOfEntries>(gradients, groups.gains.data(), begin,
                                         end, dim, sum);
  } else if (groups.sample_gains.size()) {
    SumEntries<F32xN, Gains::kOfSamples>(gradients, groups.sample_gains.data(),
                                         begin, end, dim, sum);
  } else {
    SumEntries<F32xN, Gains::kOnes>(gradients, nullptr, begin, end, dim, sum);
  }
}

// Sums entries in the form that `SumManyTerms` expects.
struct GroupedEntries {
  template <class F32xN>
  TPU_EMBEDDING_INLINE void Run(int64_t begin, int64_t end, int64_t dim,
                                float* sum) const {
    SumEntries<F32xN>(gradients, begin, end, dim, sum);
  }

  const TableGradients& gradients;
};

// Sums the entries of one group.
template <class F32xN>
TPU_EMBEDDING_INLINE void SumGradients(const TableGradients& gradients,
                                       int64_t group, int64_t dim, float* sum) {
  const int64_t* const starts = gradients.groups->starts.data();
  const int64_t begin = starts[group];
  const int64_t end = starts[group + 1];
  if (AreFewTerms(begin, end)) {
    SumEntries<F32xN>(gradients, begin, end, dim, sum);
  } else {
    SumManyTerms(GroupedEntries{gradients}, begin, end, dim, sum);
  }
}

// The most rows that a rule updates in one call.
constexpr int kRowsOfBlock = 4;

struct RowBlock {
  int size = 0;
  std::array<int64_t, kRowsOfBlock> rows;
  std::array<float*, kRowsOfBlock> weights;
  float* gradients;  // [size, dim], the sums, which UpdateRows clips in place
};

// Presents the rows of a table to a rule as floats, which it changes in place.
// There is one class for each alternative of TableData.
template <class Table>
class TableRows;

template <>
class TableRows<float*> {
 public:
  TableRows(const TableView& table, int64_t dim, const Rounding&)
      : data_(std::get<float*>(table.parameters)), dim_(dim) {}

  const float* data() const { return data_; }

  // Opens the row at place `k` of the block, to be changed until `Close`.
  template <class F32xN>
  TPU_EMBEDDING_INLINE float* Open(int, int64_t row) {
    return data_ + row * dim_;
  }
  template <class F32xN>
  TPU_EMBEDDING_INLINE void Close(const RowBlock&) {}

 private:
  float* const data_;
  const int64_t dim_;
};

// Rounds rows when they are stored; the rule changes a copy of floats. `Body`
// stores as many of them at once as `Rows` has places for.
template <class Table, class Rows, class Body>
class RoundedRows {
 public:
  RoundedRows(const TableView& table, int64_t dim, const Rounding& rounding)
      : data_(std::get<Table>(table.parameters)),
        dim_(dim),
        rounding_(rounding),
        rows_(kRowsOfBlock * dim) {}

  Table data() const { return data_; }

  template <class F32xN>
  TPU_EMBEDDING_INLINE float* Open(int k, int64_t row) {
    float* const opened = rows_.data() + k * dim_;
    ExpandBody::Run<F32xN>(RowAt(data_, row, dim_), dim_, opened);
    return opened;
  }
  template <class F32xN>
  TPU_EMBEDDING_INLINE void Close(const RowBlock& block) {
    for (int k = 0; k < block.size; k += kRowsAtOnce) {
      Rows rows;
      for (int r = 0; r < kRowsAtOnce; ++r) {
        const int own = std::min(k + r, block.size - 1);
        const int64_t row = block.rows[own];
        rows.values[r] = block.weights[own];
        rows.rows[r] = rounding_.NumberOf(row);
        rows.StoreInto(r, data_, row, dim_);
      }
      Body::template Run<F32xN>(rows, dim_, rounding_);
    }
  }

 private:
  const Table data_;
  const int64_t dim_;
  const Rounding rounding_;
  std::vector<float> rows_;  // of the block
};

template <>
class TableRows<BFloat16*>
    : public RoundedRows<BFloat16*, RowsToRound, RoundBody> {
  using RoundedRows::RoundedRows;
};

template <>
class TableRows<Int8Table>
    : public RoundedRows<Int8Table, RowsToCode, CodeBody> {
  using RoundedRows::RoundedRows;
};

// What updating a block of rows needs: a rule, whose type only update_rows
// knows, and its table.
struct TableUpdate {
  using UpdateRowsFn = void (*)(const TableUpdate* update,
                                const RowBlock* block);

  const void* rule;
  int num_slots;
  bool slots_per_row;
  const RowOptions* options;
  const TableView* table;
  float decay;
  UpdateRowsFn update_rows;  // of the CPU and the dim
};

TPU_EMBEDDING_INLINE void Clip(float low, float high, int64_t dim,
                               float* __restrict values) {
  for (int64_t d = 0; d < dim; ++d) {
    values[d] = std::min(std::max(values[d], low), high);
  }
}

// Scales the values down to an L2 norm of `limit`, as apply_rule of
// optimizers/base.py does: if one value is NaN, all become NaN.
TPU_EMBEDDING_INLINE void ClipNorm(float limit, int64_t dim,
                                   float* __restrict values) {
  const float norm = std::sqrt(SumOfSquares(values, dim));
  if (norm <= limit) return;
  const float factor = limit / norm;
  for (int64_t d = 0; d < dim; ++d) values[d] *= factor;
}

// Updates a block of rows by the sums of their gradients. A body of simd.h.
template <class Rule, class KnownDim>
struct UpdateRows {
  template <class F32xN>
  TPU_EMBEDDING_INLINE static void Run(const TableUpdate* update,
                                       const RowBlock* block) {
    // No write to a row can change this copy. Without it GCC could not
    // vectorize loops that read the constants of a rule conditionally.
    const Rule rule = *static_cast<const Rule*>(update->rule);
    const RowOptions& options = *update->options;
    const float decay = update->decay;
    const int64_t dim = DimOn<F32xN, KnownDim>::Of(update->table->dim);
    if (options.clips_gradient_norm()) {
      for (int i = 0; i < block->size; ++i) {
        ClipNorm(options.clip_gradient_norm, dim, block->gradients + i * dim);
      }
    }
    const bool clips_gradient = options.clips_gradient();
    const bool clips_weight = options.clips_weight();
    for (int i = 0; i < block->size; ++i) {
      const int64_t row = block->rows[i];
      float* const weights = block->weights[i];
      float* const gradient = block->gradients + i * dim;
      std::array<float*, Rule::kNumSlots> slots;
      for (int k = 0; k < Rule::kNumSlots; ++k) {
        slots[k] =
            update->table->slots[k] + row * (Rule::kSlotsPerRow ? 1 : dim);
      }
      if (clips_gradient) {
        Clip(options.clip_gradient_min, options.clip_gradient_max, dim,
             gradient);
      }
      if (decay != 0.0f) {
        for (int64_t d = 0; d < dim; ++d) weights[d] -= decay * weights[d];
      }
      rule.Apply(gradient, weights, slots.data(), dim);
      if (clips_weight) {
        Clip(options.clip_weight_min, options.clip_weight_max, dim, weights);
      }
    }
  }
};

template <class Table>
TPU_EMBEDDING_INLINE void PrefetchRowAndSlots(const Table& parameters,
                                              const TableUpdate& update,
                                              int64_t dim, int64_t row) {
  PrefetchRow<2>(parameters, row, dim);
  for (int k = 0; k < update.num_slots; ++k) {
    const float* slot = update.table->slots[k];
    if (update.slots_per_row) {
      Prefetch<2>(slot + row, 1);
    } else {
      Prefetch<2>(slot + row * dim, dim);
    }
  }
}

// Loops over the rows of one table; a body of simd.h. It is compiled for each
// storage of rows and each dim, but not for each rule, which takes a fifth of
// the time to compile. It calls the rule through a pointer once per block of
// rows: a call per row made a DLRM step with SGD 2 to 3 % slower. The sum is
// inlined: as a call it made short rows a tenth slower.
// docs/performance-notes.md has the measurements.
template <class Table, class KnownDim>
struct RowLoop {
  template <class F32xN>
  TPU_EMBEDDING_INLINE static void Run(const TableUpdate& update,
                                       const Rounding& rounding,
                                       const TableGradients& gradients,
                                       int64_t begin, int64_t end) {
    const TableView& table = *update.table;
    const bool all_rows = update.options->all_rows;
    const int64_t dim = DimOn<F32xN, KnownDim>::Of(table.dim);
    TableRows<Table> parameters(table, dim, rounding);
    std::vector<float> sums(kRowsOfBlock * dim);
    RowBlock block;
    block.gradients = sums.data();
    const int32_t* const rows = gradients.groups->rows.data();
    const int64_t num_groups = gradients.groups->num_rows();
    const int64_t slot_bytes = update.slots_per_row ? 4 : 4 * dim;
    const int64_t distance = RowsAhead(RowBytes(parameters.data(), dim) +
                                       update.num_slots * slot_bytes);
    int64_t group = begin;
    if (all_rows) {
      group = std::lower_bound(rows, rows + num_groups, begin) - rows;
    }
    const int64_t first = group;
    const auto prefetch = [&](int64_t ahead) {
      if (ahead >= num_groups) return;
      PrefetchRowAndSlots(parameters.data(), update, dim, rows[ahead]);
      const int64_t near = std::max(ahead - distance / 2, first);
      if (table.waiting) PrefetchWait(table, rows[ahead], rows[near]);
    };
    for (int64_t k = first; k < first + distance; ++k) prefetch(k);
    for (int64_t i = begin; i < end; i += block.size) {
      block.size = std::min<int64_t>(kRowsOfBlock, end - i);
      for (int k = 0; k < block.size; ++k) {
        const int64_t row = all_rows ? i + k : rows[i + k];
        float* const sum = block.gradients + k * dim;
        if (group < num_groups && rows[group] == row) {
          prefetch(group + distance);
          SumGradients<F32xN>(gradients, group++, dim, sum);
        } else {
          std::fill_n(sum, dim, 0.0f);
        }
        block.rows[k] = row;
        block.weights[k] = parameters.template Open<F32xN>(k, row);
        if (table.waiting) EndWait(table, row, block.weights[k]);
      }
      update.update_rows(&update, &block);
      parameters.template Close<F32xN>(block);
    }
  }
};

// Is an UpdateFn for tables of one known dim, or of any dim.
template <class Rule, class Table, class Dim>
void UpdateWithDim(const RuleArguments& arguments, const RowOptions& options,
                   const TableGradients& gradients, const TableView& table,
                   int64_t begin, int64_t end) {
  const Rule rule(arguments);
  const float rate = options.multiply_decay_by_rate ? arguments.rate : 1.0f;
  const TableUpdate update{
      &rule,
      Rule::kNumSlots,
      Rule::kSlotsPerRow,
      &options,
      &table,
      options.weight_decay_factor * rate,
      FunctionForThisCpu<UpdateRows<Rule, DimOfRules<Dim>>, const TableUpdate*,
                         const RowBlock*>()};
  RunOnThisCpu<RowLoop<Table, Dim>>(update, arguments.rounding, gradients,
                                    begin, end);
}

// Updates a table, as an UpdateFn. Rows are independent: however threads split
// [begin, end), the bits are the same.
template <class Rule, class Table = float*>
void Update(const RuleArguments& arguments, const RowOptions& options,
            const TableGradients& gradients, const TableView& table,
            int64_t begin, int64_t end) {
  RunForDim(table.dim, [&](auto dim) {
    UpdateWithDim<Rule, Table, decltype(dim)>(arguments, options, gradients,
                                              table, begin, end);
  });
}

}  // namespace tpu_embedding

#endif  // TPU_EMBEDDING_OPS_CC_CORE_UPDATE_INL_H_
