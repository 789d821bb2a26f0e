#include "core/csr_entries.h"

#include <algorithm>
#include <cmath>
#include <type_traits>
#include <vector>

#include "core/text.h"

namespace tpu_embedding {
namespace {

// The key of an id. All hardware so far has a power of two of shards, which
// saves the divisions; the branch goes one way through a whole batch.
class Keys {
 public:
  explicit Keys(const TablePlace& place)
      : num_shards_(place.num_shards),
        shift_(place.shift),
        num_tokens_(place.num_tokens),
        bits_(__builtin_ctzll(place.num_shards)),
        by_mask_((num_shards_ & (num_shards_ - 1)) == 0) {}

  uint32_t Of(uint64_t id) const {
    const uint64_t rotated = id + shift_;
    const uint64_t shard =
        by_mask_ ? rotated & (num_shards_ - 1) : rotated % num_shards_;
    const uint64_t token = by_mask_ ? id >> bits_ : id / num_shards_;
    return static_cast<uint32_t>(shard * num_tokens_ + token);
  }

 private:
  const uint64_t num_shards_;
  const uint64_t shift_;
  const uint64_t num_tokens_;
  const int bits_;
  const bool by_mask_;
};

struct Span {
  int64_t row;  // of the input, for messages
  int64_t begin;
  int64_t end;
};

// The entries of one sample. Where each position of a row is a sample, that is
// one entry or none.
Span SpanOf(const FeatureSpec& spec, const FeatureInput& input,
            const FeatureRows& rows, int64_t sample) {
  if (!rows.positions) {
    return {sample, rows.begin(sample), rows.begin(sample + 1)};
  }
  const int64_t row = sample / rows.positions;
  const int64_t position = sample % rows.positions;
  const int64_t end = rows.begin(row + 1);
  int64_t entry = rows.begin(row);
  if (spec.kind != InputKind::kSparse) {
    entry += position;
  } else {
    int64_t after = end;
    while (entry < after) {
      const int64_t middle = entry + (after - entry) / 2;
      if (ReadCell(input, middle).column < position) {
        entry = middle + 1;
      } else {
        after = middle;
      }
    }
    if (entry < end && ReadCell(input, entry).column != position) {
      return {row, entry, entry};
    }
  }
  return entry < end ? Span{row, entry, entry + 1} : Span{row, end, end};
}

Error TooManyEntries(const FeatureSpec& spec, int64_t row, int64_t count,
                     int64_t max_valency) {
  return Concat("Feature ", spec.path, ", table ", spec.table, ": sample ", row,
                " has ", count, " ids, but its CustomCombiner takes at most ",
                max_valency, " (max_valency).");
}

// The same float32 operations as Google's op where float32 has the range;
// where it has not, the quotients of docs/semantics.md in float64.
class GainScale {
 public:
  explicit GainScale(Combiner combiner) : combiner_(combiner) {}

  void Add(float weight) {
    if (combiner_ == Combiner::kSum) return;
    const bool mean = combiner_ == Combiner::kMean;
    sum_ += mean ? weight : weight * weight;
    wide_sum_ += mean ? double{weight} : double{weight} * double{weight};
  }

  void Apply(CsrPayload* payloads, int64_t size) const {
    if (combiner_ == Combiner::kSum) return;
    const bool mean = combiner_ == Combiner::kMean;
    const float factor = 1.0f / (mean ? sum_ : std::sqrt(sum_));
    if (std::isnormal(sum_) && std::isnormal(factor)) {
      for (int64_t i = 0; i < size; ++i) payloads[i].gain *= factor;
      return;
    }
    const double divisor = mean ? wide_sum_ : std::sqrt(wide_sum_);
    // A mean whose float32 sum is exactly 0 is 0 to Google's op.
    const bool zero = divisor == 0.0 || (mean && sum_ == 0.0f);
    for (int64_t i = 0; i < size; ++i) {
      float& gain = payloads[i].gain;
      gain = zero ? 0.0f : static_cast<float>(gain / divisor);
    }
  }

 private:
  const Combiner combiner_;
  float sum_ = 0.0f;
  double wide_sum_ = 0.0;
};

// `kOnes`: the entries have the form of that name.
template <class Id, bool kOnes, bool kWeighted>
class Appender {
 public:
  Appender(const FeatureSpec& spec, const FeatureInput& input, const Id* ids,
           const TablePlace& place, CsrEntries* out)
      : spec_(spec),
        weights_(input.weights),
        ids_(ids),
        vocabulary_size_(spec.vocabulary_size),
        merge_(out->form == CsrForm::kGains),
        keys_(place),
        out_(out) {}

  Error AppendSample(const Span& span, int32_t sample, int64_t max_valency) {
    GainScale scale(spec_.combiner);
    const int64_t first = out_->size;
    // Locals, which stay in registers.
    KeyedEntry<uint32_t>* const order = out_->order.data();
    CsrPayload* const payloads = out_->payloads.data();
    int64_t size = first;
    for (int64_t entry = span.begin; entry < span.end; ++entry) {
      uint64_t id = static_cast<uint64_t>(int64_t{ids_[entry]});
      float weight = 1.0f;
      if (kWeighted) {
        weight = weights_[entry];
        if (spec_.check_numerics && !std::isfinite(weight)) {
          return WeightNotFinite(spec_, span.row, weight);
        }
      }
      if (__builtin_expect(id >= vocabulary_size_, 0)) {
        if (spec_.invalid_ids == InvalidIds::kDrop) continue;
        if (spec_.invalid_ids == InvalidIds::kError) {
          return InvalidId(spec_, span.row, ids_[entry]);
        }
        id = Modulo(ids_[entry], spec_.vocabulary_size);
      }
      const uint32_t key = keys_.Of(id);
      if (kOnes) {
        order[size++] = {key, static_cast<uint32_t>(sample)};
        continue;
      }
      scale.Add(weight);
      if (merge_ && size > first && order[size - 1].key == key) {
        payloads[size - 1].gain += weight;
        continue;
      }
      order[size] = {key, static_cast<uint32_t>(size)};
      payloads[size] = {sample, weight};
      if (!merge_) out_->positions[size] = static_cast<int32_t>(size - first);
      ++size;
    }
    if (max_valency && size - first > max_valency) {
      return TooManyEntries(spec_, span.row, size - first, max_valency);
    }
    if (!kOnes) scale.Apply(payloads + first, size - first);
    out_->size = size;
    return std::nullopt;
  }

 private:
  const FeatureSpec& spec_;
  const float* weights_;
  const Id* ids_;
  const uint64_t vocabulary_size_;
  const bool merge_;
  const Keys keys_;
  CsrEntries* out_;
};

// Calls `body` with the ids, of whichever type they are.
template <class Body>
Error WithIds(const FeatureInput& input, const Body& body) {
  return input.ids32 ? body(input.ids32) : body(input.ids64);
}

}  // namespace

int64_t CountEntries(const FeatureInput& input, const FeatureRows& rows,
                     const SampleRange& range) {
  if (!rows.positions) return rows.begin(range.end) - rows.begin(range.begin);
  return std::min(range.end - range.begin, input.num_ids);
}

Error AppendEntries(const FeatureSpec& spec, const FeatureInput& input,
                    const FeatureRows& rows, const TablePlace& place,
                    const SampleRange& range, int64_t max_valency,
                    CsrEntries* entries) {
  const auto append_all = [&](auto appender) -> Error {
    int32_t sample = static_cast<int32_t>(range.first_sample);
    for (int64_t s = range.begin; s < range.end; ++s, ++sample) {
      const Span span = SpanOf(spec, input, rows, s);
      Error error = appender.AppendSample(span, sample, max_valency);
      if (error) return error;
    }
    return std::nullopt;
  };
  return WithIds(input, [&](const auto* ids) -> Error {
    using Id = std::decay_t<decltype(*ids)>;
    if (entries->form == CsrForm::kOnes) {
      return append_all(
          Appender<Id, true, false>(spec, input, ids, place, entries));
    }
    if (input.weights) {
      return append_all(
          Appender<Id, false, true>(spec, input, ids, place, entries));
    }
    return append_all(
        Appender<Id, false, false>(spec, input, ids, place, entries));
  });
}

Error CheckEntries(const FeatureSpec& spec, const FeatureInput& input,
                   const FeatureRows& rows) {
  return WithIds(input, [&](const auto* ids) -> Error {
    for (int64_t row = 0; row < rows.count; ++row) {
      for (int64_t e = rows.begin(row); e < rows.begin(row + 1); ++e) {
        const bool valid = ids[e] >= 0 && ids[e] < spec.vocabulary_size;
        if (!valid && spec.invalid_ids == InvalidIds::kError) {
          return InvalidId(spec, row, ids[e]);
        }
        if (spec.check_numerics && input.weights &&
            !std::isfinite(input.weights[e])) {
          return WeightNotFinite(spec, row, input.weights[e]);
        }
      }
    }
    return std::nullopt;
  });
}

}  // namespace tpu_embedding
