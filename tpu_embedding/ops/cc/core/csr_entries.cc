#include "core/csr_entries.h"

#include <algorithm>
#include <cmath>
#include <type_traits>

#include "core/simd.h"
#include "core/text.h"

namespace tpu_embedding {
namespace {

// Computes keys of ids. All hardware so far has a power of two of shards, which
// saves the divisions.
class Keys {
 public:
  explicit Keys(const TablePlace& place)
      : num_shards_(static_cast<uint32_t>(place.num_shards)),
        rotation_(static_cast<uint32_t>(place.rotation)),
        num_tokens_(static_cast<uint32_t>(place.num_tokens)),
        bits_(__builtin_ctz(num_shards_)),
        by_mask_((num_shards_ & (num_shards_ - 1)) == 0) {}

  bool by_mask() const { return by_mask_; }

  // The branch goes one way through a whole batch.
  uint32_t Of(uint32_t id) const { return by_mask_ ? ByMask(id) : Divided(id); }

  // Rows are numbered by int32, shards and keys by less than 2^32: nothing
  // here overflows.
  TPU_EMBEDDING_INLINE uint32_t ByMask(uint32_t id) const {
    const uint32_t shard = (id + rotation_) & (num_shards_ - 1);
    return shard * num_tokens_ + (id >> bits_);
  }

 private:
  uint32_t Divided(uint32_t id) const {
    const uint32_t shard = (id + rotation_) % num_shards_;
    return shard * num_tokens_ + id / num_shards_;
  }

  const uint32_t num_shards_;
  const uint32_t rotation_;
  const uint32_t num_tokens_;
  const int bits_;
  const bool by_mask_;
};

struct Span {
  int64_t row;  // of the input, for messages
  int64_t begin;
  int64_t end;
};

// Returns the entries of one sample: one entry or none, if each position of a
// row is a sample.
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

// Scales gains with the float32 operations of Google's op where float32 has the
// range, else with the float64 quotients of docs/semantics.md.
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
    // A mean whose float32 sum is exactly 0 is 0 in Google's op.
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

// Appends entries; in the form CsrForm::kOnes if `kOnes` is set.
template <class Id, class Word, bool kOnes, bool kWeighted>
class Appender {
 public:
  Appender(const FeatureSpec& spec, const FeatureInput& input, const Id* ids,
           CsrEntries* out)
      : spec_(spec),
        weights_(input.weights),
        ids_(ids),
        vocabulary_size_(spec.vocabulary_size),
        merge_(out->form == CsrForm::kGains),
        keys_(out->place),
        low_bits_(out->words.low_bits),
        out_(out) {}

  Error AppendSample(const Span& span, int32_t sample, int64_t max_valency) {
    GainScale scale(spec_.combiner);
    const int64_t first = out_->size;
    // Locals stay in registers.
    Word* const words = out_->words.of<Word>().data();
    CsrPayload* const payloads = out_->payloads.data();
    const Word own_sample = static_cast<Word>(sample - out_->first_sample);
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
      const Word key = Word{keys_.Of(static_cast<uint32_t>(id))} << low_bits_;
      if (kOnes) {
        words[size++] = key | own_sample;
        continue;
      }
      scale.Add(weight);
      if (merge_ && size > first && (words[size - 1] ^ key) >> low_bits_ == 0) {
        payloads[size - 1].gain += weight;
        continue;
      }
      words[size] = key | static_cast<uint32_t>(size);
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
  const int low_bits_;
  CsrEntries* out_;
};

// Writes the words of ids, without samples; returns whether all are valid.
struct WriteKeys {
  template <class F32xN, class Id, class Word>
  TPU_EMBEDDING_INLINE static bool Run(const Id* ids, int64_t size,
                                       Id vocabulary_size, Keys keys,
                                       int low_bits, Word* words) {
    Id invalid = 0;
    for (int64_t i = 0; i < size; ++i) {
      const Id id = ids[i];
      invalid |= Id{id < 0} | Id{id >= vocabulary_size};
      words[i] = Word{keys.ByMask(static_cast<uint32_t>(id))} << low_bits;
    }
    return invalid == 0;
  }
};

// Appends entries of samples in the form kOnes if all ids are valid, otherwise
// nothing. Returns whether it appended. The first of its two passes handles
// many ids with one instruction.
template <class Id, class Word>
bool AppendOnes(const FeatureSpec& spec, const Id* ids, const FeatureRows& rows,
                const SampleRange& range, CsrEntries* entries) {
  const Keys keys(entries->place);
  if (rows.positions || !keys.by_mask()) return false;
  const int64_t begin = rows.begin(range.begin);
  const int64_t size = rows.begin(range.end) - begin;
  Word* const words = entries->words.of<Word>().data() + entries->size;
  if (!RunOnThisCpu<WriteKeys>(ids + begin, size,
                               static_cast<Id>(spec.vocabulary_size), keys,
                               entries->words.low_bits, words)) {
    return false;
  }
  Word sample = static_cast<Word>(range.first_sample - entries->first_sample);
  for (int64_t s = range.begin; s < range.end; ++s, ++sample) {
    Word* const end = words + (rows.begin(s + 1) - begin);
    for (Word* w = words + (rows.begin(s) - begin); w < end; ++w) *w |= sample;
  }
  entries->size += size;
  return true;
}

// Calls `body` with the ids, of whichever type they are.
template <class Body>
Error WithIds(const FeatureInput& input, const Body& body) {
  return input.ids32 ? body(input.ids32) : body(input.ids64);
}

int BitsOf(uint64_t bound) {
  return bound > 1 ? 64 - __builtin_clzll(bound - 1) : 0;
}

}  // namespace

void CsrWords::Start(uint64_t num_keys, uint64_t num_lows, bool may_be_narrow,
                     int64_t capacity) {
  narrow = may_be_narrow && BitsOf(num_keys) + BitsOf(num_lows) <= 32;
  low_bits = narrow ? BitsOf(num_lows) : 32;
  Resize(capacity);
}

void CsrWords::StartLike(const CsrWords& other, int64_t capacity) {
  narrow = other.narrow;
  low_bits = other.low_bits;
  Resize(capacity);
}

void CsrEntries::Start(const TablePlace& new_place, const SampleSpan& samples,
                       int64_t capacity, CsrForm new_form) {
  place = new_place;
  form = new_form;
  size = 0;
  const bool ones = form == CsrForm::kOnes;
  words.Start(place.num_keys(), samples.count, ones, capacity);
  first_sample = ones ? static_cast<int32_t>(samples.first) : 0;
  if (!ones) payloads.Resize(capacity);
  if (form == CsrForm::kPositions) positions.Resize(capacity);
}

int64_t CountEntries(const FeatureInput& input, const FeatureRows& rows,
                     const SampleRange& range) {
  if (!rows.positions) return rows.begin(range.end) - rows.begin(range.begin);
  return std::min(range.end - range.begin, input.num_ids);
}

Error AppendEntries(const FeatureSpec& spec, const FeatureInput& input,
                    const FeatureRows& rows, const SampleRange& range,
                    int64_t max_valency, CsrEntries* entries) {
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
    if (entries->form != CsrForm::kOnes) {
      if (input.weights) {
        return append_all(
            Appender<Id, uint64_t, false, true>(spec, input, ids, entries));
      }
      return append_all(
          Appender<Id, uint64_t, false, false>(spec, input, ids, entries));
    }
    return WithWord(entries->words, [&](auto word) -> Error {
      using Word = decltype(word);
      if (AppendOnes<Id, Word>(spec, ids, rows, range, entries)) return {};
      return append_all(
          Appender<Id, Word, true, false>(spec, input, ids, entries));
    });
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
