// The rows of an input: what its last axis runs over.

#ifndef TPU_EMBEDDING_OPS_CC_CORE_INPUT_ROWS_H_
#define TPU_EMBEDDING_OPS_CC_CORE_INPUT_ROWS_H_

#include <cstdint>
#include <sstream>
#include <string>
#include <vector>

#include "core/buffer.h"
#include "core/feature.h"

namespace tpu_embedding {

template <class... Parts>
std::string Concat(const Parts&... parts) {
  std::ostringstream text;
  (text << ... << parts);
  return text.str();
}

// The product of a shape, or -1 where an axis is negative or the product is
// larger than any batch.
int64_t Product(const std::vector<int64_t>& shape);

// As Python writes a tuple; an axis below 0 is None.
std::string ShapeText(const std::vector<int64_t>& shape);

Error TooManySamples(const FeatureSpec& spec,
                     const std::vector<int64_t>& shape);

// Rows of the input (its shape without the last axis) and where their entries
// lie. Dense rows have one length, the others have splits.
struct Rows {
  std::vector<int64_t> shape;
  int64_t count = 0;
  int64_t length = 0;               // dense: entries per row
  const int64_t* splits = nullptr;  // sparse and ragged
  Buffer<int64_t> own_splits;       // sparse: what `splits` points to

  int64_t begin(int64_t row) const {
    return splits ? splits[row] : row * length;
  }
};

// The position of one sparse entry: its row, counted over all axes but the
// last, and its column.
struct Cell {
  int64_t row;
  int64_t column;
  bool inside;
};

Cell SparseCell(const FeatureInput& input, int64_t entry);

// Finds the rows of an input of any kind and checks its structure.
Error BuildRows(const FeatureSpec& spec, const FeatureInput& input, Rows* rows);

}  // namespace tpu_embedding

#endif  // TPU_EMBEDDING_OPS_CC_CORE_INPUT_ROWS_H_
