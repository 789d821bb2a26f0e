#include "core/input_rows.h"

namespace tpu_embedding {

int64_t Product(const std::vector<int64_t>& shape) {
  int64_t product = 1;
  for (const int64_t axis : shape) {
    if (axis < 0 || axis > kMostSamples) return -1;
    product *= axis;
    if (product > kMostSamples) return -1;
  }
  return product;
}

std::string ShapeText(const std::vector<int64_t>& shape) {
  std::string text = "(";
  for (size_t i = 0; i < shape.size(); ++i) {
    text +=
        (i ? ", " : "") + (shape[i] < 0 ? "None" : std::to_string(shape[i]));
  }
  return text + (shape.size() == 1 ? ",)" : ")");
}

Error TooManySamples(const FeatureSpec& spec,
                     const std::vector<int64_t>& shape) {
  return Concat("Feature ", spec.path, ": the shape ", ShapeText(shape),
                " has a negative axis or more than ", kMostSamples,
                " samples.");
}

Cell SparseCell(const FeatureInput& input, int64_t entry) {
  const int64_t rank = input.shape.size();
  const int64_t* index = input.structure + entry * rank;
  Cell cell{0, index[rank - 1], true};
  for (int64_t axis = 0; axis < rank; ++axis) {
    cell.inside &= index[axis] >= 0 && index[axis] < input.shape[axis];
    if (axis + 1 < rank) cell.row = cell.row * input.shape[axis] + index[axis];
  }
  return cell;
}

namespace {

void DenseRows(const FeatureInput& input, Rows* rows) {
  rows->shape = input.shape;
  rows->length = 1;
  if (input.shape.size() > 1) {
    rows->length = input.shape.back();
    rows->shape.pop_back();
  }
  rows->count = Product(rows->shape);
}

Error RaggedRows(const FeatureSpec& spec, const FeatureInput& input,
                 Rows* rows) {
  const int64_t* splits = input.structure;
  if (input.structure_size < 1 || splits[0] != 0) {
    return Concat("Feature ", spec.path, ": row_splits must start at 0.");
  }
  rows->count = input.structure_size - 1;
  for (int64_t row = 0; row < rows->count; ++row) {
    if (splits[row + 1] < splits[row]) {
      return Concat("Feature ", spec.path, ": row_splits must not decrease, ",
                    "but row ", row, " goes from ", splits[row], " to ",
                    splits[row + 1], ".");
    }
  }
  if (splits[rows->count] != input.num_ids) {
    return Concat("Feature ", spec.path, ": row_splits end at ",
                  splits[rows->count], " but there are ", input.num_ids,
                  " ids.");
  }
  rows->splits = splits;
  rows->shape = {rows->count};
  return std::nullopt;
}

Error SparseRows(const FeatureSpec& spec, const FeatureInput& input,
                 Rows* rows) {
  rows->shape = input.shape;
  rows->shape.pop_back();
  rows->count = Product(rows->shape);
  if (rows->count < 0) return TooManySamples(spec, rows->shape);
  rows->own_splits = Buffer<int64_t>(rows->count + 1);
  int64_t row = -1;
  int64_t column = -1;
  for (int64_t entry = 0; entry < input.num_ids; ++entry) {
    const Cell cell = SparseCell(input, entry);
    if (!cell.inside) {
      return Concat("Feature ", spec.path, ": sparse entry ", entry,
                    " has an index outside of dense_shape ",
                    ShapeText(input.shape), ".");
    }
    if (cell.row < row || (cell.row == row && cell.column <= column)) {
      return Concat("Feature ", spec.path, ": sparse entry ", entry,
                    " is out of order or occurs twice. Call ",
                    "tf.sparse.reorder first and keep one entry per index.");
    }
    for (; row < cell.row; ++row) rows->own_splits[row + 1] = entry;
    column = cell.column;
  }
  for (; row < rows->count; ++row) rows->own_splits[row + 1] = input.num_ids;
  rows->splits = rows->own_splits.data();
  return std::nullopt;
}

}  // namespace

Error BuildRows(const FeatureSpec& spec, const FeatureInput& input,
                Rows* rows) {
  switch (spec.kind) {
    case InputKind::kSparse:
      return SparseRows(spec, input, rows);
    case InputKind::kRagged:
      return RaggedRows(spec, input, rows);
    case InputKind::kDense:
      break;
  }
  DenseRows(input, rows);
  return std::nullopt;
}

}  // namespace tpu_embedding
