#include "kernels/feature_inputs.h"

#include <algorithm>
#include <map>
#include <string>
#include <utility>

namespace tpu_embedding {
namespace {

using tensorflow::OpInputList;
using tensorflow::OpKernelConstruction;
using tensorflow::OpKernelContext;
using tensorflow::Tensor;

const std::map<std::string, InputKind>& Kinds() {
  static const auto* kinds =
      new std::map<std::string, InputKind>{{"dense", InputKind::kDense},
                                           {"sparse", InputKind::kSparse},
                                           {"ragged", InputKind::kRagged}};
  return *kinds;
}

const std::map<std::string, Combiner>& Combiners() {
  static const auto* combiners =
      new std::map<std::string, Combiner>{{"sum", Combiner::kSum},
                                          {"mean", Combiner::kMean},
                                          {"sqrtn", Combiner::kSqrtn}};
  return *combiners;
}

const std::map<std::string, InvalidIds>& InvalidIdRules() {
  static const auto* rules =
      new std::map<std::string, InvalidIds>{{"error", InvalidIds::kError},
                                            {"drop", InvalidIds::kDrop},
                                            {"mod", InvalidIds::kMod}};
  return *rules;
}

// TensorFlow's int64_t need not be the same type as ours, only the same bits.
const int64_t* Int64s(const Tensor& tensor) {
  return reinterpret_cast<const int64_t*>(tensor.flat<int64_t>().data());
}

// The core trusts these sizes.
absl::Status CheckStructure(const FeatureSpec& spec,
                            const FeatureInput& input) {
  const int64_t rank = input.shape.size();
  if (rank < 1) return CheckLength("shapes", rank, 1);
  if (spec.kind == InputKind::kSparse &&
      (rank < 2 || input.structure_size != input.num_ids * rank)) {
    return absl::InvalidArgumentError(absl::StrCat(
        "Feature ", spec.path, ": a sparse input of ", input.num_ids,
        " values and rank ", rank, " has ", input.structure_size,
        " numbers in its indices; it needs rank >= 2 and one index of that ",
        "rank for each value."));
  }
  return absl::OkStatus();
}

absl::Status CheckDense(const FeatureInput& input, const Tensor& ids) {
  TF_RETURN_IF_ERROR(CheckLength("shapes", input.shape.size(), ids.dims()));
  for (int axis = 0; axis < ids.dims(); ++axis) {
    TF_RETURN_IF_ERROR(
        CheckLength("ids", ids.dim_size(axis), input.shape[axis]));
  }
  return absl::OkStatus();
}

}  // namespace

absl::Status FeatureInputs::ReadAttributes(OpKernelConstruction* context) {
  tables_.feature_tables = GetList<int>(context, "feature_tables");
  tables_.vocabulary_sizes = GetList<int64_t>(context, "vocabulary_sizes");
  has_weights_ = GetList<bool>(context, "has_weights");
  has_weight_structure_ = GetList<bool>(context, "has_weight_structure");
  TF_RETURN_IF_ERROR(context->status());
  TF_RETURN_IF_ERROR(ReadSpecs(context));
  return CheckLists(context);
}

// Run for each batch, the reading of inputs relies on these lengths.
absl::Status FeatureInputs::CheckLists(OpKernelConstruction* context) const {
  const int64_t num_features = specs_.size();
  const auto count = [](const std::vector<bool>& flags) {
    return std::count(flags.begin(), flags.end(), true);
  };
  int64_t given = 0;
  TF_RETURN_IF_ERROR(context->GetAttr("num_features", &given));
  TF_RETURN_IF_ERROR(CheckLength("ids", given, num_features));
  TF_RETURN_IF_ERROR(
      CheckLength("has_weights", has_weights_.size(), num_features));
  TF_RETURN_IF_ERROR(CheckLength("has_weight_structure",
                                 has_weight_structure_.size(), num_features));
  TF_RETURN_IF_ERROR(context->GetAttr("num_weights", &given));
  TF_RETURN_IF_ERROR(CheckLength("weights", given, count(has_weights_)));
  TF_RETURN_IF_ERROR(context->GetAttr("num_weight_structures", &given));
  return CheckLength("weight_structures", given, count(has_weight_structure_));
}

absl::Status FeatureInputs::Prepare(OpKernelContext* context, bool training,
                                    PreparedBatch* batch) const {
  std::vector<FeatureInput> inputs;
  TF_RETURN_IF_ERROR(ReadInputs(context, &inputs));
  return WithinMemory([&] {
    return InvalidArgument(PrepareBatch(specs_, tables_, inputs, training,
                                        WorkerPool(context), batch));
  });
}

absl::Status FeatureInputs::ReadSpecs(OpKernelConstruction* context) {
  const auto paths = GetList<std::string>(context, "paths");
  const auto kinds = GetList<std::string>(context, "kinds");
  const auto lengths = GetList<int64_t>(context, "sequence_lengths");
  const auto names = GetList<std::string>(context, "table_names");
  const auto combiners = GetList<std::string>(context, "combiners");
  const auto rules = GetList<std::string>(context, "invalid_ids");
  const auto shapes =
      GetList<tensorflow::PartialTensorShape>(context, "declared_shapes");
  const auto sources = GetList<std::string>(context, "declared_sources");
  bool check_numerics = false;
  TF_RETURN_IF_ERROR(context->GetAttr("check_numerics", &check_numerics));
  TF_RETURN_IF_ERROR(context->status());
  for (const int64_t rows : tables_.vocabulary_sizes) {
    if (rows < 1 || rows > kMostRows) {
      return absl::InvalidArgumentError(
          absl::StrCat("A table of ", rows, " rows; int32 must number them."));
    }
  }
  const int64_t num_features = paths.size();
  const int64_t num_tables = tables_.vocabulary_sizes.size();
  TF_RETURN_IF_ERROR(CheckLength("feature_tables",
                                 tables_.feature_tables.size(), num_features));
  TF_RETURN_IF_ERROR(
      CheckIndices("feature_tables", tables_.feature_tables, num_tables));
  TF_RETURN_IF_ERROR(CheckLength("kinds", kinds.size(), num_features));
  TF_RETURN_IF_ERROR(
      CheckLength("sequence_lengths", lengths.size(), num_features));
  TF_RETURN_IF_ERROR(
      CheckLength("declared_shapes", shapes.size(), num_features));
  TF_RETURN_IF_ERROR(
      CheckLength("declared_sources", sources.size(), num_features));
  TF_RETURN_IF_ERROR(CheckLength("table_names", names.size(), num_tables));
  TF_RETURN_IF_ERROR(CheckLength("combiners", combiners.size(), num_tables));
  TF_RETURN_IF_ERROR(CheckLength("invalid_ids", rules.size(), num_tables));
  for (size_t f = 0; f < paths.size(); ++f) {
    const int table = tables_.feature_tables[f];
    FeatureSpec spec;
    spec.path = paths[f];
    spec.table = names[table];
    spec.vocabulary_size = tables_.vocabulary_sizes[table];
    spec.kind = Kinds().at(kinds[f]);
    spec.combiner = Combiners().at(combiners[table]);
    spec.invalid_ids = InvalidIdRules().at(rules[table]);
    spec.check_numerics = check_numerics;
    if (lengths[f] < 0) return CheckLength("sequence_lengths", lengths[f], 0);
    spec.sequence_length = lengths[f];
    spec.shape_known = !shapes[f].unknown_rank();
    spec.declared_source = sources[f];
    if (spec.shape_known) {
      for (const auto& axis : shapes[f]) {
        spec.declared_shape.push_back(axis.size);
      }
    }
    specs_.push_back(std::move(spec));
  }
  return absl::OkStatus();
}

absl::Status FeatureInputs::ReadInputs(
    OpKernelContext* context, std::vector<FeatureInput>* inputs) const {
  OpInputList ids, structures, shapes;
  TF_RETURN_IF_ERROR(context->input_list("ids", &ids));
  TF_RETURN_IF_ERROR(context->input_list("structures", &structures));
  TF_RETURN_IF_ERROR(context->input_list("shapes", &shapes));
  for (size_t f = 0; f < specs_.size(); ++f) {
    FeatureInput input;
    input.num_ids = ids[f].NumElements();
    if (ids[f].dtype() == tensorflow::DT_INT32) {
      input.ids32 = ids[f].flat<int32_t>().data();
    } else {
      input.ids64 = Int64s(ids[f]);
    }
    input.shape.assign(Int64s(shapes[f]),
                       Int64s(shapes[f]) + shapes[f].NumElements());
    input.structure = Int64s(structures[f]);
    input.structure_size = structures[f].NumElements();
    TF_RETURN_IF_ERROR(CheckStructure(specs_[f], input));
    if (specs_[f].kind == InputKind::kDense) {
      TF_RETURN_IF_ERROR(CheckDense(input, ids[f]));
    }
    inputs->push_back(std::move(input));
  }
  return ReadWeights(context, inputs);
}

absl::Status FeatureInputs::ReadWeights(
    OpKernelContext* context, std::vector<FeatureInput>* inputs) const {
  OpInputList weights, structures;
  TF_RETURN_IF_ERROR(context->input_list("weights", &weights));
  TF_RETURN_IF_ERROR(context->input_list("weight_structures", &structures));
  int next_weights = 0;
  int next_structure = 0;
  for (size_t f = 0; f < specs_.size(); ++f) {
    FeatureInput& input = (*inputs)[f];
    if (has_weight_structure_[f]) {
      const Tensor& structure = structures[next_structure++];
      input.weight_structure = Int64s(structure);
      input.weight_structure_size = structure.NumElements();
    }
    if (!has_weights_[f]) continue;
    const Tensor& values = weights[next_weights++];
    if (values.NumElements() != input.num_ids) {
      return absl::InvalidArgumentError(
          absl::StrCat("Feature ", specs_[f].path, ": ", values.NumElements(),
                       " weights for ", input.num_ids,
                       " ids. Weights have the feature's own structure."));
    }
    input.weights = values.flat<float>().data();
  }
  return absl::OkStatus();
}

}  // namespace tpu_embedding
