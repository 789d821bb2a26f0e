// One feature's ids, of any input kind, as plain CSR over its samples.
//
//   ragged [[7, 2], [], [7]], combiner mean   samples:        0     1  2
//                                             offsets:      [ 0,    2, 2, 3 ]
//                                             rows:         [ 7, 2,       7 ]
//                                             sample_gains: [.5,    0, 1 ]

#ifndef TPU_EMBEDDING_OPS_CC_CORE_FEATURE_H_
#define TPU_EMBEDDING_OPS_CC_CORE_FEATURE_H_

#include <cstdint>
#include <limits>
#include <optional>
#include <string>
#include <vector>

#include "core/buffer.h"

namespace tpu_embedding {

enum class InputKind { kDense, kSparse, kRagged };
enum class Combiner { kSum, kMean, kSqrtn };
enum class InvalidIds { kError, kDrop, kMod };

// The text of an error in the caller's values, or nothing.
using Error = std::optional<std::string>;

// Rows are numbered by int32, as on TPUs.
constexpr int64_t kMaxRows = std::numeric_limits<int32_t>::max();

// More samples than this are an error in the input, not a batch: their offsets
// alone would take 16 GiB.
constexpr int64_t kMaxSamples = int64_t{1} << 31;

// Limits the memory for rows that an input only claims to have: an input with
// more rows than the first number needs an id for each `kMaxRowsPerId` rows.
constexpr int64_t kMaxUnbackedRows = int64_t{1} << 24;
constexpr int64_t kMaxRowsPerId = 64;

// What is known of a feature before any batch comes.
struct FeatureSpec {
  std::string path;   // where it stands in the user's structure, for messages
  std::string table;  // the table's name, for messages
  int64_t vocabulary_size = 0;  // at most kMaxRows
  bool grows = false;           // its table takes any id and has rows later
  std::optional<uint64_t> hash_key;  // of a hashed table, which takes any id
  InputKind kind = InputKind::kDense;
  Combiner combiner = Combiner::kMean;
  InvalidIds invalid_ids = InvalidIds::kError;
  bool check_numerics = false;
  int64_t sequence_length = 0;  // 0: not a sequence feature
  // The declared output shape without the embedding axis; -1 for an axis of
  // any size. `shape_known` is false where nothing was declared.
  std::vector<int64_t> declared_shape;
  bool shape_known = false;
  std::string declared_source;  // who declared it, for messages
};

// A view of one batch of ids in the memory of TensorFlow.
struct FeatureInput {
  const int32_t* ids32 = nullptr;  // exactly one of ids32 and ids64 is set,
  const int64_t* ids64 = nullptr;  // unless there are no ids
  int64_t num_ids = 0;
  const float* weights = nullptr;  // num_ids values, or null for all ones
  // Sparse indices [num_ids, rank], or ragged row splits [num_rows + 1].
  const int64_t* structure = nullptr;
  int64_t structure_size = 0;
  // The structure of the weights, if they came with one of their own.
  const int64_t* weight_structure = nullptr;
  int64_t weight_structure_size = 0;
  // The input's own shape; for ragged input [num_rows].
  std::vector<int64_t> shape;
};

// The numbers that the entries of a feature or table are multiplied by.
enum class Gains { kOnes, kOfSamples, kOfEntries };

struct FeatureCsr {
  std::vector<int64_t> output_shape;  // without the embedding axis
  Buffer<int64_t> offsets;            // [num_samples + 1]
  Buffer<int32_t> rows;               // [num_entries], each in [0, V)
  // Entries of a growing table have ids instead of `rows`; their rows are
  // looked up when they are used.
  Buffer<int64_t> ids;
  // With weights each entry has its own gain; else a sample's entries may share
  // one. At most one buffer has elements; if none has, all gains are 1.
  Buffer<float> gains;         // [num_entries], or empty
  Buffer<float> sample_gains;  // [num_samples], or empty
  int64_t num_invalid = 0;     // IDs that were dropped or taken modulo V

  int64_t num_samples() const { return offsets.size() - 1; }
  int64_t num_entries() const { return offsets[num_samples()]; }
  float gain(int64_t sample, int64_t entry) const {
    if (gains.size()) return gains[entry];
    return sample_gains.size() ? sample_gains[sample] : 1.0f;
  }
};

// The entries of a feature, with the rows in its CSR or rows found for its ids.
struct FeatureEntries {
  FeatureEntries(const FeatureCsr& own) : csr(&own), rows(&own.rows) {}
  FeatureEntries(const FeatureCsr& own, const Buffer<int32_t>& found)
      : csr(&own), rows(&found) {}

  const FeatureCsr* csr;
  const Buffer<int32_t>* rows;
};

// Checks the whole input and writes `csr`. On an error `csr` is unspecified.
Error BuildCsr(const FeatureSpec& spec, const FeatureInput& input,
               FeatureCsr* csr);

}  // namespace tpu_embedding

#endif  // TPU_EMBEDDING_OPS_CC_CORE_FEATURE_H_
