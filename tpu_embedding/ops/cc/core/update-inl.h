// The row loop, shared by all rules.

#ifndef TPU_EMBEDDING_OPS_CC_CORE_UPDATE_INL_H_
#define TPU_EMBEDDING_OPS_CC_CORE_UPDATE_INL_H_

#include <algorithm>
#include <array>
#include <variant>
#include <vector>

#include "core/bfloat16.h"
#include "core/dims.h"
#include "core/lanes.h"
#include "core/simd.h"
#include "core/update.h"
#include "core/weighted_sum-inl.h"

namespace tpu_embedding {

// Groups ahead whose row is asked for, and entries ahead whose gradient is.
constexpr int64_t kRowsAhead = 4;
constexpr int64_t kGradientsAhead = 8;

template <class Rule>
constexpr int64_t SlotWidth(int64_t dim) {
  return Rule::kSlotsPerRow ? 1 : dim;
}

template <class Rule, class Element>
TPU_EMBEDDING_INLINE void PrefetchGroup(const TableGradients& gradients,
                                        const Element* parameters,
                                        const TableView& table, int64_t dim,
                                        int64_t group) {
  if (group >= gradients.groups->num_rows()) return;
  const int64_t row = gradients.groups->rows[group];
  Prefetch(parameters + row * dim, dim);
  for (int k = 0; k < Rule::kNumSlots; ++k) {
    const int64_t width = SlotWidth<Rule>(dim);
    Prefetch(table.slots[k] + row * width, width);
  }
}

// The gradients of a row's samples and their gains. Asking for one asks for a
// later one.
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

template <class Lanes, Gains kGains>
TPU_EMBEDDING_INLINE void SumGradients(const TableGradients& gradients,
                                       const float* gains, int64_t begin,
                                       int64_t end, int64_t dim, float* sum) {
  const Buffer<uint32_t>& entries = gradients.groups->samples;
  const GradientTerms<kGains> terms{entries.data(), gains, gradients.samples,
                                    dim, entries.size() - 1};
  WeightedSum<Lanes>(terms, begin, end, dim, sum);
}

// sum[d] = sum of gain * gradient over the entries of one group.
template <class Lanes>
TPU_EMBEDDING_INLINE void SumGradients(const TableGradients& gradients,
                                       int64_t group, int64_t dim, float* sum) {
  const RowGroups& groups = *gradients.groups;
  const int64_t begin = groups.starts[group];
  const int64_t end = groups.starts[group + 1];
  if (groups.gains.size()) {
    SumGradients<Lanes, Gains::kOfEntries>(gradients, groups.gains.data(),
                                           begin, end, dim, sum);
  } else if (groups.sample_gains.size()) {
    SumGradients<Lanes, Gains::kOfSamples>(
        gradients, groups.sample_gains.data(), begin, end, dim, sum);
  } else {
    SumGradients<Lanes, Gains::kOnes>(gradients, nullptr, begin, end, dim, sum);
  }
}

// The rows of a table as a rule sees them: floats that it changes in place.
template <class Element>
class TableRows;

template <>
class TableRows<float> {
 public:
  TableRows(const TableView& table, int64_t dim, const RuleArguments&)
      : data_(std::get<float*>(table.parameters)), dim_(dim) {}

  const float* data() const { return data_; }

  // The row until `Close`.
  TPU_EMBEDDING_INLINE float* Open(int64_t row) { return data_ + row * dim_; }
  TPU_EMBEDDING_INLINE void Close(int64_t) {}

 private:
  float* const data_;
  const int64_t dim_;
};

template <>
class TableRows<BFloat16> {
 public:
  TableRows(const TableView& table, int64_t dim, const RuleArguments& arguments)
      : data_(std::get<BFloat16*>(table.parameters)),
        dim_(dim),
        rounding_(arguments.rounding),
        row_(dim) {}

  const BFloat16* data() const { return data_; }

  float* Open(int64_t row) {
    ExpandRow(data_ + row * dim_, dim_, row_.data());
    return row_.data();
  }
  void Close(int64_t row) {
    RoundRow(row_.data(), dim_, rounding_, row, data_ + row * dim_);
  }

 private:
  BFloat16* const data_;
  const int64_t dim_;
  const Rounding rounding_;
  std::vector<float> row_;
};

template <class Rule>
TPU_EMBEDDING_INLINE void UpdateRow(const Rule& rule, const RowOptions& options,
                                    const TableView& table, int64_t dim,
                                    int64_t row, float decay,
                                    float* __restrict gradient,
                                    float* __restrict weights) {
  std::array<float*, Rule::kNumSlots> slots;
  for (int k = 0; k < Rule::kNumSlots; ++k) {
    slots[k] = table.slots[k] + row * SlotWidth<Rule>(dim);
  }
  if (options.clips_gradient()) {
    for (int64_t d = 0; d < dim; ++d) {
      gradient[d] = std::min(std::max(gradient[d], options.clip_gradient_min),
                             options.clip_gradient_max);
    }
  }
  if (decay != 0.0f) {
    for (int64_t d = 0; d < dim; ++d) weights[d] -= decay * weights[d];
  }
  rule.Apply(gradient, weights, slots.data(), dim);
  if (options.clips_weight()) {
    for (int64_t d = 0; d < dim; ++d) {
      weights[d] = std::min(std::max(weights[d], options.clip_weight_min),
                            options.clip_weight_max);
    }
  }
}

// The loop over rows, whose sums are made of `Lanes`.
template <class Rule, class Element, class Dim>
struct RowLoop {
  template <class Lanes>
  TPU_EMBEDDING_INLINE static void Run(const RuleArguments& arguments,
                                       const RowOptions& options,
                                       const TableGradients& gradients,
                                       const TableView& table, int64_t begin,
                                       int64_t end) {
    const Rule rule(arguments);
    const float decay =
        options.weight_decay_factor *
        (options.multiply_decay_by_rate ? arguments.rate : 1.0f);
    const int64_t dim = Dim::Of(table.dim);
    TableRows<Element> parameters(table, dim, arguments);
    std::vector<float> gradient(dim);
    const Buffer<int32_t>& rows = gradients.groups->rows;
    const int64_t num_groups = rows.size();
    int64_t group = begin;
    if (options.all_rows) {
      group = std::lower_bound(rows.data(), rows.data() + num_groups, begin) -
              rows.data();
    }
    for (int64_t i = begin; i < end; ++i) {
      const int64_t row = options.all_rows ? i : rows[i];
      if (group < num_groups && rows[group] == row) {
        PrefetchGroup<Rule>(gradients, parameters.data(), table, dim,
                            group + kRowsAhead);
        SumGradients<Lanes>(gradients, group++, dim, gradient.data());
      } else {
        std::fill(gradient.begin(), gradient.end(), 0.0f);
      }
      UpdateRow(rule, options, table, dim, row, decay, gradient.data(),
                parameters.Open(row));
      parameters.Close(row);
    }
  }
};

// An UpdateFn. Rows are independent: any split of [begin, end) over threads
// gives the same bits.
template <class Rule, class Element = float>
void Update(const RuleArguments& arguments, const RowOptions& options,
            const TableGradients& gradients, const TableView& table,
            int64_t begin, int64_t end) {
  RunForDim(table.dim, [&](auto dim) {
    RunOnThisCpu<RowLoop<Rule, Element, decltype(dim)>>(
        arguments, options, gradients, table, begin, end);
  });
}

}  // namespace tpu_embedding

#endif  // TPU_EMBEDDING_OPS_CC_CORE_UPDATE_INL_H_
