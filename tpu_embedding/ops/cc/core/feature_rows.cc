#include "core/feature_rows.h"

#include <algorithm>
#include <utility>

#include "core/text.h"

namespace tpu_embedding {
namespace {

// Returns how many rows an input with `num_ids` ids may claim.
int64_t MostRows(int64_t num_ids) {
  if (num_ids > kMaxSamples / kMaxRowsPerId) return kMaxSamples;
  return std::max(kMaxUnbackedRows, num_ids * kMaxRowsPerId);
}

std::string ShapeText(const std::vector<int64_t>& shape) {
  std::string text = "(";
  for (size_t i = 0; i < shape.size(); ++i) {
    text +=
        (i ? ", " : "") + (shape[i] < 0 ? "None" : std::to_string(shape[i]));
  }
  return text + (shape.size() == 1 ? ",)" : ")");
}

Error TooManySamples(const FeatureSpec& spec, const std::vector<int64_t>& shape,
                     int64_t most) {
  return Concat("Feature ", spec.path, ": the shape ", ShapeText(shape),
                " has a negative axis or more than ", most, " samples.");
}

// Counts the rows of a shape if no splits stand for them.
Error CountRows(const FeatureSpec& spec, const FeatureInput& input,
                FeatureRows* rows) {
  const int64_t most = MostRows(input.num_ids);
  rows->count = Product(rows->shape, most);
  if (rows->count < 0) return TooManySamples(spec, rows->shape, most);
  return std::nullopt;
}

Error DenseRows(const FeatureSpec& spec, const FeatureInput& input,
                FeatureRows* rows) {
  rows->shape = input.shape;
  rows->length = 1;
  if (input.shape.size() > 1) {
    rows->length = input.shape.back();
    rows->shape.pop_back();
  }
  return CountRows(spec, input, rows);
}

Error RaggedRows(const FeatureSpec& spec, const FeatureInput& input,
                 FeatureRows* rows) {
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
                 FeatureRows* rows) {
  rows->shape = input.shape;
  rows->shape.pop_back();
  if (Error error = CountRows(spec, input, rows)) return error;
  rows->own_splits = Buffer<int64_t>(rows->count + 1);
  int64_t row = -1;
  int64_t column = -1;
  for (int64_t entry = 0; entry < input.num_ids; ++entry) {
    const SparseCell cell = ReadCell(input, entry);
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

Error BuildRows(const FeatureSpec& spec, const FeatureInput& input,
                FeatureRows* rows) {
  switch (spec.kind) {
    case InputKind::kSparse:
      return SparseRows(spec, input, rows);
    case InputKind::kRagged:
      return RaggedRows(spec, input, rows);
    case InputKind::kDense:
      break;
  }
  return DenseRows(spec, input, rows);
}

Error CheckWeights(const FeatureSpec& spec, const FeatureInput& input) {
  if (!input.weight_structure) return std::nullopt;
  if (!std::equal(input.structure, input.structure + input.structure_size,
                  input.weight_structure,
                  input.weight_structure + input.weight_structure_size)) {
    return Concat("Feature ", spec.path, ": the weights must have the ",
                  spec.kind == InputKind::kSparse ? "indices" : "row_splits",
                  " of the ids. Build them with `with_values`.");
  }
  return std::nullopt;
}

bool Matches(const std::vector<int64_t>& shape,
             const std::vector<int64_t>& declared) {
  if (shape.size() != declared.size()) return false;
  for (size_t i = 0; i < shape.size(); ++i) {
    if (declared[i] >= 0 && declared[i] != shape[i]) return false;
  }
  return true;
}

std::string DeclaredText(const FeatureSpec& spec) {
  return Concat(ShapeText(spec.declared_shape), " that ", spec.declared_source,
                " declares");
}

// Fills the open axis of a shape, if there is one, so that its product is
// `count`. Returns false if no value does, or if several axes are open.
bool FillOpenAxis(int64_t count, std::vector<int64_t>* shape) {
  int64_t known = 1;
  int64_t* open = nullptr;
  for (int64_t& axis : *shape) {
    if (axis >= 0) {
      known *= axis;
    } else if (open) {
      return false;
    } else {
      open = &axis;
    }
  }
  if (!open) return true;
  if (known == 0 || count % known != 0) return false;
  *open = count / known;
  return true;
}

// Sets the output shape and the number of positions per row.
Error SetOutputShape(const FeatureSpec& spec, FeatureRows* rows) {
  std::vector<int64_t> shape = rows->shape;
  rows->positions = spec.sequence_length;
  if (spec.sequence_length > 0) shape.push_back(spec.sequence_length);
  if (spec.shape_known && spec.kind == InputKind::kRagged &&
      spec.sequence_length == 0) {
    shape = spec.declared_shape;
    const bool filled = FillOpenAxis(rows->count, &shape);
    const int64_t product = Product(shape);
    if (filled && shape.size() > 1 && rows->count > 0 &&
        product > rows->count && product % rows->count == 0) {
      rows->positions = product / rows->count;
    } else if (!filled || product != rows->count) {
      return Concat("Feature ", spec.path, ": a ragged input of ", rows->count,
                    " rows does not fill the output shape ", DeclaredText(spec),
                    ".");
    }
  }
  if (spec.shape_known && !Matches(shape, spec.declared_shape)) {
    return Concat("Feature ", spec.path, ": the input gives output shape ",
                  ShapeText(shape), ", not ", DeclaredText(spec), ".");
  }
  if (Product(shape) < 0) return TooManySamples(spec, shape, kMaxSamples);
  rows->output_shape = std::move(shape);
  return std::nullopt;
}

}  // namespace

int64_t Product(const std::vector<int64_t>& shape, int64_t most) {
  int64_t product = 1;
  for (const int64_t axis : shape) {
    if (axis < 0 || axis > most) return -1;
    product *= axis;
    if (product > most) return -1;
  }
  return product;
}

SparseCell ReadCell(const FeatureInput& input, int64_t entry) {
  const int64_t rank = input.shape.size();
  const int64_t* index = input.structure + entry * rank;
  SparseCell cell{0, index[rank - 1], true};
  for (int64_t axis = 0; axis < rank; ++axis) {
    cell.inside = index[axis] >= 0 && index[axis] < input.shape[axis];
    if (!cell.inside) break;  // the row may be past any integer
    if (axis + 1 < rank) cell.row = cell.row * input.shape[axis] + index[axis];
  }
  return cell;
}

Error ReadRows(const FeatureSpec& spec, const FeatureInput& input,
               FeatureRows* rows) {
  Error error = BuildRows(spec, input, rows);
  if (!error) error = CheckWeights(spec, input);
  if (!error) error = SetOutputShape(spec, rows);
  return error;
}

Error InvalidId(const FeatureSpec& spec, int64_t row, int64_t id) {
  return Concat("Feature ", spec.path, ", table ", spec.table, ": sample ", row,
                " has id ", id, ", but ids must be in [0, ",
                spec.vocabulary_size, "). Fix the input, or set ",
                "invalid_ids=\"drop\" or \"mod\" where the table or the "
                "embedding is configured.");
}

Error WeightNotFinite(const FeatureSpec& spec, int64_t row, float weight) {
  return Concat("Feature ", spec.path, ": sample ", row,
                " has a weight that is not finite (", weight, ").");
}

int64_t Modulo(int64_t id, int64_t vocabulary_size) {
  return (id % vocabulary_size + vocabulary_size) % vocabulary_size;
}

}  // namespace tpu_embedding
