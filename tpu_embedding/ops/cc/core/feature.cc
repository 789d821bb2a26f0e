#include "core/feature.h"

#include <algorithm>
#include <cmath>
#include <type_traits>
#include <utility>

#include "core/feature_rows.h"
#include "core/id_map.h"
#include "core/simd.h"

namespace tpu_embedding {
namespace {

// Turns the weights of one sample into gains; a divisor of exactly 0 makes all
// of them 0.
void SetGains(Combiner combiner, int64_t begin, int64_t end, float* gains) {
  double divisor = 1.0;
  if (combiner != Combiner::kSum) {
    double sum = 0.0;
    for (int64_t i = begin; i < end; ++i) {
      const double weight = gains[i];
      sum += combiner == Combiner::kMean ? weight : weight * weight;
    }
    divisor = combiner == Combiner::kMean ? sum : std::sqrt(sum);
    for (int64_t i = begin; i < end; ++i) {
      gains[i] = divisor == 0.0 ? 0.0f : static_cast<float>(gains[i] / divisor);
    }
  }
}

// Returns the gain of each entry of a sample that has no weights.
float GainWithoutWeights(Combiner combiner, int64_t num_entries) {
  if (num_entries == 0) return 0.0f;
  const double sum = num_entries;
  const double divisor = combiner == Combiner::kMean ? sum : std::sqrt(sum);
  return static_cast<float>(1.0 / divisor);
}

// Checks that ids are valid. Read as unsigned, negative ids are the largest.
struct AreInRange {
  template <class F32xN, class Id>
  TPU_EMBEDDING_INLINE static bool Run(const Id* ids, int64_t size,
                                       uint64_t vocabulary_size) {
    using Unsigned = std::make_unsigned_t<Id>;
    Unsigned largest = 0;
    for (int64_t i = 0; i < size; ++i) {
      largest = std::max(largest, static_cast<Unsigned>(ids[i]));
    }
    return size == 0 || largest < vocabulary_size;
  }
};

// Returns the row of an id in a hashed table: see rows_of in hashing.py.
TPU_EMBEDDING_INLINE int32_t HashedRow(int64_t id, uint64_t key,
                                       uint64_t num_rows) {
  const uint64_t mixed = MixBits(static_cast<uint64_t>(id) ^ key);
  return static_cast<int32_t>((mixed >> 32) * num_rows >> 32);
}

struct WriteHashedRows {
  template <class F32xN, class Id>
  TPU_EMBEDDING_INLINE static void Run(const Id* ids, int64_t size,
                                       uint64_t key, uint64_t num_rows,
                                       int32_t* rows) {
    for (int64_t i = 0; i < size; ++i) {
      rows[i] = HashedRow(ids[i], key, num_rows);
    }
  }
};

// Returns the buffer for rows or for IDs of entries.
Buffer<int32_t>* EntriesOf(FeatureCsr* csr, int32_t) { return &csr->rows; }
Buffer<int64_t>* EntriesOf(FeatureCsr* csr, int64_t) { return &csr->ids; }

// Writes the entries of one feature, sample by sample, as rows (Entry is
// int32_t) or, of a growing table, as ids.
template <class Id, class Entry>
class CsrWriter {
 public:
  CsrWriter(const FeatureSpec& spec, const FeatureInput& input, const Id* ids,
            const FeatureRows& rows, FeatureCsr* csr)
      : spec_(spec),
        input_(input),
        ids_(ids),
        positions_(rows.positions),
        csr_(csr),
        entries_(*EntriesOf(csr, Entry())) {}

  Error Write(const FeatureRows& rows) {
    csr_->offsets.Resize(rows.num_samples() + 1);
    csr_->rows.Resize(0);
    csr_->ids.Resize(0);
    entries_.Resize(input_.num_ids);
    csr_->gains.Resize(input_.weights ? input_.num_ids : 0);
    csr_->offsets[0] = 0;
    if (KeepsAllEntries()) {
      WriteAll(rows);
    } else {
      for (int64_t row = 0; row < rows.count && !error_; ++row) {
        positions_ ? WriteSequence(rows, row) : WriteSample(rows, row);
      }
      if (error_) return error_;
      entries_.Truncate(size_);
      csr_->gains.Truncate(input_.weights ? size_ : 0);
    }
    WriteSampleGains();
    return std::nullopt;
  }

 private:
  bool TakesAllIds() const {
    return std::is_same_v<Entry, int64_t> || spec_.hash_key;
  }

  // Returns whether each id is an entry of its row and none is cut or refused.
  bool KeepsAllEntries() const {
    const bool checks_weights = spec_.check_numerics && input_.weights;
    return !positions_ && !checks_weights &&
           (TakesAllIds() || RunOnThisCpu<AreInRange>(ids_, input_.num_ids,
                                                      spec_.vocabulary_size));
  }

  // Writes the usual batch, without a branch for each id.
  void WriteAll(const FeatureRows& rows) {
    const int64_t size = input_.num_ids;
    for (int64_t row = 0; row < rows.count; ++row) {
      csr_->offsets[row + 1] = rows.begin(row + 1);
    }
    WriteEntries(size);
    if (!input_.weights) return;
    std::copy(input_.weights, input_.weights + size, csr_->gains.data());
    for (int64_t row = 0; row < rows.count; ++row) {
      SetGains(spec_.combiner, rows.begin(row), rows.begin(row + 1),
               csr_->gains.data());
    }
  }

  void WriteEntries(int64_t size) {
    if constexpr (std::is_same_v<Entry, int32_t>) {
      if (spec_.hash_key) {
        return RunOnThisCpu<WriteHashedRows>(ids_, size, *spec_.hash_key,
                                             spec_.vocabulary_size,
                                             entries_.data());
      }
    }
    std::copy(ids_, ids_ + size, entries_.data());
  }

  void WriteSampleGains() {
    const bool needed = !input_.weights && spec_.combiner != Combiner::kSum;
    csr_->sample_gains.Resize(needed ? csr_->num_samples() : 0);
    int64_t last_length = 0;  // Many samples have the length of the one before.
    float gain = GainWithoutWeights(spec_.combiner, last_length);
    for (int64_t s = 0; s < csr_->sample_gains.size(); ++s) {
      const int64_t length = csr_->offsets[s + 1] - csr_->offsets[s];
      if (length != std::exchange(last_length, length)) {
        gain = GainWithoutWeights(spec_.combiner, length);
      }
      csr_->sample_gains[s] = gain;
    }
  }

  void WriteSample(const FeatureRows& rows, int64_t row) {
    AppendAll(row, rows.begin(row), rows.begin(row + 1));
    CloseSample();
  }

  void WriteSequence(const FeatureRows& rows, int64_t row) {
    const int64_t end = rows.begin(row + 1);
    int64_t entry = rows.begin(row);
    for (int64_t position = 0; position < positions_; ++position) {
      if (entry < end && Position(rows, row, entry) == position) {
        AppendAll(row, entry, entry + 1);
        ++entry;
      }
      CloseSample();
    }
    // Entries past the end are cut, but a bad id among them is still an error.
    const int64_t kept = size_;
    AppendAll(row, entry, end);
    size_ = kept;
  }

  int64_t Position(const FeatureRows& rows, int64_t row, int64_t entry) const {
    return spec_.kind == InputKind::kSparse ? ReadCell(input_, entry).column
                                            : entry - rows.begin(row);
  }

  // Appends entries [begin, end) until one is an error; after that, none.
  void AppendAll(int64_t row, int64_t begin, int64_t end) {
    const int64_t vocabulary_size = spec_.vocabulary_size;
    for (int64_t entry = begin; entry < end && !error_; ++entry) {
      int64_t id = ids_[entry];
      const float weight = input_.weights ? input_.weights[entry] : 1.0f;
      if (spec_.check_numerics && !std::isfinite(weight)) {
        error_ = WeightNotFinite(spec_, row, weight);
        return;
      }
      if (spec_.hash_key) {
        id = HashedRow(id, *spec_.hash_key, vocabulary_size);
      }
      if (!TakesAllIds() && (id < 0 || id >= vocabulary_size)) {
        ++csr_->num_invalid;
        if (spec_.invalid_ids == InvalidIds::kDrop) continue;
        if (spec_.invalid_ids == InvalidIds::kError) {
          error_ = InvalidId(spec_, row, id);
          return;
        }
        id = Modulo(id, vocabulary_size);
      }
      entries_[size_] = static_cast<Entry>(id);
      if (input_.weights) csr_->gains[size_] = weight;
      ++size_;
    }
  }

  void CloseSample() {
    if (input_.weights) {
      SetGains(spec_.combiner, csr_->offsets[sample_], size_,
               csr_->gains.data());
    }
    csr_->offsets[++sample_] = size_;
  }

  const FeatureSpec& spec_;
  const FeatureInput& input_;
  const Id* ids_;
  const int64_t positions_;  // 0: a row is one sample
  FeatureCsr* csr_;
  Buffer<Entry>& entries_;
  int64_t size_ = 0;    // entries written
  int64_t sample_ = 0;  // samples closed
  Error error_;         // the first one met
};

}  // namespace

Error BuildCsr(const FeatureSpec& spec, const FeatureInput& input,
               FeatureCsr* csr) {
  FeatureRows rows;
  if (Error error = ReadRows(spec, input, &rows)) return error;
  csr->output_shape = rows.output_shape;
  csr->num_invalid = 0;
  const auto write = [&](const auto* ids) {
    using Id = std::remove_const_t<std::remove_pointer_t<decltype(ids)>>;
    return spec.grows
               ? CsrWriter<Id, int64_t>(spec, input, ids, rows, csr).Write(rows)
               : CsrWriter<Id, int32_t>(spec, input, ids, rows, csr)
                     .Write(rows);
  };
  return input.ids32 ? write(input.ids32) : write(input.ids64);
}

}  // namespace tpu_embedding
