// Turns the samples of a feature into entries with places in a stacked table.
//
// A stacked table is divided over all SparseCores of all devices: row after row
// goes to the next shard, and its number there is its token. Within a stack a
// table may be rotated, so that the first rows of all tables do not crowd on
// one shard. `Division` of layout/partition.py follows the same rule.
//
//   4 shards, rotation 1  id:     0  1  2  3  4
//                         shard:  1  2  3  0  1
//                         token:  0  0  0  0  1   (+ row_offset)

#ifndef TPU_EMBEDDING_OPS_CC_CORE_CSR_ENTRIES_H_
#define TPU_EMBEDDING_OPS_CC_CORE_CSR_ENTRIES_H_

#include <cstdint>

#include "core/buffer.h"
#include "core/feature.h"
#include "core/feature_rows.h"

namespace tpu_embedding {

// Where a table lies in its stack.
struct TablePlace {
  int64_t num_shards = 1;
  int64_t rotation = 0;
  int64_t row_offset = 0;  // rows of other tables before it on each shard
  int64_t num_tokens = 0;  // rows of the table on each shard

  uint64_t num_keys() const { return uint64_t(num_shards) * num_tokens; }
};

struct CsrPayload {
  int32_t sample;  // within the SparseCore's part of the batch
  float gain;
};

// What has to be kept of an entry beside its key.
enum class CsrForm {
  kOnes,       // its sample: its gain is 1, and so are all others
  kGains,      // its sample and its gain
  kPositions,  // and its position in the sample; no entries are merged
};

// Sums of ones below this number are exact.
constexpr int64_t kMaxOnes = int64_t{1} << 24;

// Entries as numbers that sort in the order of their keys:
//
//   | key | low part: what tells the entries of a key apart, `low_bits` |
//
// Words have 64 bits, the lower 32 for the low part, or 32 bits if those are
// enough, which halves the memory to sort.
struct CsrWords {
  // Keys are below `num_keys`, low parts below `num_lows`.
  void Start(uint64_t num_keys, uint64_t num_lows, bool may_be_narrow,
             int64_t capacity);
  // Starts words with the same width and `low_bits` as `other`.
  void StartLike(const CsrWords& other, int64_t capacity);

  template <class Word>
  Buffer<Word>& of() {
    if constexpr (sizeof(Word) == sizeof(uint32_t)) {
      return narrow_words;
    } else {
      return wide_words;
    }
  }
  void Resize(int64_t capacity) {
    narrow ? narrow_words.Resize(capacity) : wide_words.Resize(capacity);
  }
  template <class Word>
  const Word* data() const {
    return const_cast<CsrWords*>(this)->of<Word>().data();
  }

  bool narrow = false;
  int low_bits = 32;
  Buffer<uint32_t> narrow_words;
  Buffer<uint64_t> wide_words;
};

// Calls `body` with a value of the words' type.
template <class Body>
auto WithWord(const CsrWords& words, const Body& body) {
  return words.narrow ? body(uint32_t{}) : body(uint64_t{});
}

// The samples that entries belong to: [first, first + count).
struct SampleSpan {
  int64_t first = 0;
  int64_t count = 0;
};

// Entries of one table on one SparseCore, in input order. A key is shard *
// num_tokens + token, which is the order that the hardware expects.
struct CsrEntries {
  // Removes the entries but keeps the storage. Only kOnes uses `samples`.
  void Start(const TablePlace& place, const SampleSpan& samples,
             int64_t capacity, CsrForm form);

  // Appends an entry of the form kGains whose key has been computed.
  void Append(uint32_t key, const CsrPayload& payload) {
    words.wide_words[size] =
        (uint64_t{key} << 32) | static_cast<uint32_t>(size);
    payloads[size++] = payload;
  }

  TablePlace place;
  CsrForm form = CsrForm::kGains;
  // In the form kOnes the low part is the sample minus `first_sample`;
  // otherwise it indexes the arrays below.
  CsrWords words;
  int32_t first_sample = 0;
  Buffer<CsrPayload> payloads;
  Buffer<int32_t> positions;  // in the sample, in input order
  int64_t size = 0;
};

// Samples [begin, end) of a feature. In `CsrPayload::sample` the first of them
// has the number `first_sample`.
struct SampleRange {
  int64_t begin = 0;
  int64_t end = 0;
  int64_t first_sample = 0;
};

// Counts the entries of the samples, before any is dropped or merged.
int64_t CountEntries(const FeatureInput& input, const FeatureRows& rows,
                     const SampleRange& range);

// Appends the entries of the samples and checks their ids. In the form kGains
// equal ids that follow each other in a sample make one entry; the gain is the
// sum of the weights times the reciprocal of the divisor, in float32 and in
// this order, as Google's op computes it. The form kOnes is for features
// without weights that are summed. A sample may have at most `max_valency`
// entries; 0 means any number.
Error AppendEntries(const FeatureSpec& spec, const FeatureInput& input,
                    const FeatureRows& rows, const SampleRange& range,
                    int64_t max_valency, CsrEntries* entries);

// Checks all ids and weights of an input, including those that the samples of a
// sequence leave out.
Error CheckEntries(const FeatureSpec& spec, const FeatureInput& input,
                   const FeatureRows& rows);

}  // namespace tpu_embedding

#endif  // TPU_EMBEDDING_OPS_CC_CORE_CSR_ENTRIES_H_
