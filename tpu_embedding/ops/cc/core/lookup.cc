#include "core/lookup.h"

#include <algorithm>
#include <cmath>
#include <variant>

#include "core/dims.h"
#include "core/rows-inl.h"
#include "core/simd.h"
#include "core/weighted_sum-inl.h"

namespace tpu_embedding {
namespace {

// The rows and gains of a sample. Reading a row prefetches a later one.
template <class Table, Gains kGains>
struct RowTerms {
  Table table;
  int64_t dim;
  const int32_t* rows;
  const float* gains;
  int64_t last;              // of all entries
  int64_t distance;          // of a row that is prefetched
  float sample_gain = 1.0f;  // of the sample at hand

  TPU_EMBEDDING_INLINE auto vector(int64_t i) const {
    const int64_t ahead = std::min(i + distance, last);
    PrefetchRow(table, rows[ahead], dim);
    return RowAt(table, rows[i], dim);
  }
  // Prefetches the rows that no read of another row prefetches.
  TPU_EMBEDDING_INLINE void PrefetchFirst(int64_t begin) const {
    const int64_t end = std::min(begin + distance, last + 1);
    for (int64_t i = begin; i < end; ++i) PrefetchRow(table, rows[i], dim);
  }
  TPU_EMBEDDING_INLINE float gain(int64_t i) const {
    if (kGains == Gains::kOnes) return 1.0f;
    return kGains == Gains::kOfEntries ? gains[i] : sample_gain;
  }
};

// Returns the terms of all samples of a feature.
template <class Table, Gains kGains>
TPU_EMBEDDING_INLINE RowTerms<Table, kGains> TermsOf(
    const FeatureEntries& entries, Table table, int64_t dim) {
  return {table,
          dim,
          entries.rows->data(),
          entries.csr->gains.data(),
          entries.rows->size() - 1,
          RowsAhead(RowBytes(table, dim))};
}

// Sums entries of sample `s` in the form that `SumManyTerms` expects.
template <class Table, Gains kGains>
struct PlainEntries {
  template <class F32xN>
  TPU_EMBEDDING_INLINE void Run(int64_t begin, int64_t end, int64_t dim,
                                float* sum) const {
    auto terms = TermsOf<Table, kGains>(entries, table, dim);
    if (kGains == Gains::kOfSamples) {
      terms.sample_gain = entries.csr->sample_gains[s];
    }
    WeightedSum<F32xN>(terms, begin, end, dim, sum);
  }

  const FeatureEntries& entries;
  Table table;
  int64_t s;
};

template <class Table, Gains kGains, class Dim>
struct PlainLookup {
  template <class F32xN>
  TPU_EMBEDDING_INLINE static void Run(const FeatureEntries& entries,
                                       Table table, int64_t any_dim,
                                       int64_t begin, int64_t end, float* out) {
    const int64_t dim = DimOn<F32xN, Dim>::Of(any_dim);
    const FeatureCsr& csr = *entries.csr;
    const int64_t* offsets = csr.offsets.data();
    auto terms = TermsOf<Table, kGains>(entries, table, dim);
    terms.PrefetchFirst(offsets[begin]);
    for (int64_t s = begin; s < end; ++s) {
      if (!AreFewTerms(offsets[s], offsets[s + 1])) {
        SumManyTerms(PlainEntries<Table, kGains>{entries, table, s}, offsets[s],
                     offsets[s + 1], dim, out + s * dim);
        continue;
      }
      if (kGains == Gains::kOfSamples) terms.sample_gain = csr.sample_gains[s];
      WeightedSum<F32xN>(terms, offsets[s], offsets[s + 1], dim, out + s * dim);
    }
  }
};

// Sums the entries of sample `s`, with values rounded to `num_buckets` levels.
template <class Table>
struct QuantizedEntries {
  template <class F32xN>
  TPU_EMBEDDING_INLINE void Run(int64_t begin, int64_t end, int64_t dim,
                                float* __restrict sum) const {
    const float lower = quantization.lower;
    const float upper = quantization.upper;
    const float step = (upper - lower) / (quantization.num_buckets - 1);
    std::fill(sum, sum + dim, 0.0f);
    for (int64_t i = begin; i < end; ++i) {
      const auto row = RowAt(table, rows[i], dim);
      const float gain = csr->gain(s, i);
      for (int64_t d = 0; d < dim; ++d) {
        float value;
        Load(row + d, &value);
        const float x = std::min(std::max(value, lower), upper);
        const float level = std::floor((x - lower) / step + 0.5f);
        sum[d] += gain * (level * step + lower);
      }
    }
  }

  const FeatureCsr* csr;
  const int32_t* rows;
  Table table;
  Quantization quantization;
  int64_t s;
};

struct QuantizedLookup {
  template <class F32xN, class Table>
  TPU_EMBEDDING_INLINE static void Run(const FeatureEntries& entries,
                                       Table table, int64_t dim,
                                       Quantization quantization, int64_t begin,
                                       int64_t end, float* out) {
    const int64_t* offsets = entries.csr->offsets.data();
    QuantizedEntries<Table> own{entries.csr, entries.rows->data(), table,
                                quantization, begin};
    for (; own.s < end; ++own.s) {
      const int64_t first = offsets[own.s], last = offsets[own.s + 1];
      if (AreFewTerms(first, last)) {
        own.template Run<F32xN>(first, last, dim, out + own.s * dim);
      } else {
        SumManyTerms(own, first, last, dim, out + own.s * dim);
      }
    }
  }
};

template <class Table>
void LookupIn(Table table, const FeatureEntries& entries, int64_t dim,
              const Quantization& quantization, int64_t begin, int64_t end,
              float* out) {
  if (quantization.num_buckets) {
    RunOnThisCpu<QuantizedLookup>(entries, table, dim, quantization, begin, end,
                                  out);
  } else {
    RunForDim(dim, [&](auto fixed) {
      using Dim = decltype(fixed);
      const auto run = [&](auto body) {
        RunOnThisCpu<decltype(body)>(entries, table, dim, begin, end, out);
      };
      if (entries.csr->gains.size()) {
        run(PlainLookup<Table, Gains::kOfEntries, Dim>());
      } else if (entries.csr->sample_gains.size()) {
        run(PlainLookup<Table, Gains::kOfSamples, Dim>());
      } else {
        run(PlainLookup<Table, Gains::kOnes, Dim>());
      }
    });
  }
}

}  // namespace

void Lookup(const FeatureEntries& entries, const ConstTableData& table,
            int64_t dim, const Quantization& quantization, int64_t begin,
            int64_t end, float* out) {
  std::visit(
      [&](const auto& rows) {
        LookupIn(rows, entries, dim, quantization, begin, end, out);
      },
      table);
}

}  // namespace tpu_embedding
