// Finds where the samples of a feature lie in its input. Every reader of ids
// needs this, whatever form it converts them to.

#ifndef TPU_EMBEDDING_OPS_CC_CORE_FEATURE_ROWS_H_
#define TPU_EMBEDDING_OPS_CC_CORE_FEATURE_ROWS_H_

#include <cstdint>
#include <vector>

#include "core/buffer.h"
#include "core/feature.h"

namespace tpu_embedding {

// Returns the product of a shape, or -1 if an axis is negative or the product
// is larger than `most`.
int64_t Product(const std::vector<int64_t>& shape, int64_t most = kMaxSamples);

// The rows of an input (its shape without the last axis) and where their
// entries lie. Dense rows all have the same length; the others have splits.
struct FeatureRows {
  std::vector<int64_t> shape;
  int64_t count = 0;
  int64_t length = 0;               // dense: entries per row
  const int64_t* splits = nullptr;  // sparse and ragged
  Buffer<int64_t> own_splits;       // sparse: what `splits` points to
  // Positions per row, each of them a sample, or 0 if a row is one sample.
  int64_t positions = 0;
  std::vector<int64_t> output_shape;  // without the embedding axis

  int64_t begin(int64_t row) const {
    return splits ? splits[row] : row * length;
  }
  int64_t num_samples() const { return count * (positions ? positions : 1); }
};

// The position of one sparse entry: its row, counted over all axes but the
// last, and its column. Both are meaningless if the entry is not `inside`.
struct SparseCell {
  int64_t row;
  int64_t column;
  bool inside;
};

SparseCell ReadCell(const FeatureInput& input, int64_t entry);

// Checks the structure of the input, but not its ids, and writes `rows`,
// which may point into `input`.
Error ReadRows(const FeatureSpec& spec, const FeatureInput& input,
               FeatureRows* rows);

// Make the errors of one entry; `row` is the row of the input that has it.
Error InvalidId(const FeatureSpec& spec, int64_t row, int64_t id);
Error WeightNotFinite(const FeatureSpec& spec, int64_t row, float weight);

// Returns `id` mod `vocabulary_size`, which is never negative.
int64_t Modulo(int64_t id, int64_t vocabulary_size);

}  // namespace tpu_embedding

#endif  // TPU_EMBEDDING_OPS_CC_CORE_FEATURE_ROWS_H_
