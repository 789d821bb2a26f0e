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

}  // namespace

absl::Status FeatureInputs::Read(OpKernelConstruction* context,
                                 std::vector<FeatureSpec> specs) {
  specs_ = std::move(specs);
  Record call;
  std::vector<std::string> kinds, sources;
  std::vector<tensorflow::PartialTensorShape> shapes;
  TF_RETURN_IF_ERROR(call.Read(context, "call"));
  TF_RETURN_IF_ERROR(call.Get("training", &training_));
  TF_RETURN_IF_ERROR(call.Get("kinds", &kinds));
  TF_RETURN_IF_ERROR(call.Get("has_weights", &has_weights_));
  TF_RETURN_IF_ERROR(call.Get("has_weight_structure", &has_weight_structure_));
  TF_RETURN_IF_ERROR(call.Get("declared_shapes", &shapes));
  TF_RETURN_IF_ERROR(call.Get("declared_sources", &sources));
  const int64_t num_features = specs_.size();
  TF_RETURN_IF_ERROR(CheckLength("kinds", kinds.size(), num_features));
  TF_RETURN_IF_ERROR(
      CheckLength("declared_shapes", shapes.size(), num_features));
  TF_RETURN_IF_ERROR(
      CheckLength("declared_sources", sources.size(), num_features));
  for (int64_t f = 0; f < num_features; ++f) {
    FeatureSpec& spec = specs_[f];
    const auto kind = Kinds().find(kinds[f]);
    if (kind == Kinds().end()) {
      return absl::InvalidArgumentError(
          absl::StrCat("A malformed graph: an input of kind ", kinds[f], "."));
    }
    spec.kind = kind->second;
    spec.declared_source = sources[f];
    spec.shape_known = !shapes[f].unknown_rank();
    if (!spec.shape_known) continue;
    for (const auto& axis : shapes[f]) spec.declared_shape.push_back(axis.size);
  }
  return CheckLists(context);
}

// Run for each batch, the reading of inputs relies on these lengths.
absl::Status FeatureInputs::CheckLists(OpKernelConstruction* context) const {
  const int64_t num_features = specs_.size();
  const auto count = [](const std::vector<bool>& flags) {
    return std::count(flags.begin(), flags.end(), true);
  };
  int64_t num_structures = 0;
  int64_t num_shapes = 0;
  for (const FeatureSpec& spec : specs_) {
    num_structures += spec.kind != InputKind::kDense;
    num_shapes += spec.kind == InputKind::kSparse;
  }
  std::vector<tensorflow::DataType> types;
  TF_RETURN_IF_ERROR(context->GetAttr("ids_types", &types));
  TF_RETURN_IF_ERROR(CheckLength("ids", types.size(), num_features));
  int64_t given = 0;
  TF_RETURN_IF_ERROR(context->GetAttr("num_structures", &given));
  TF_RETURN_IF_ERROR(CheckLength("structures", given, num_structures));
  TF_RETURN_IF_ERROR(context->GetAttr("num_shapes", &given));
  TF_RETURN_IF_ERROR(CheckLength("shapes", given, num_shapes));
  TF_RETURN_IF_ERROR(
      CheckLength("has_weights", has_weights_.size(), num_features));
  TF_RETURN_IF_ERROR(CheckLength("has_weight_structure",
                                 has_weight_structure_.size(), num_features));
  TF_RETURN_IF_ERROR(context->GetAttr("num_weights", &given));
  TF_RETURN_IF_ERROR(CheckLength("weights", given, count(has_weights_)));
  TF_RETURN_IF_ERROR(context->GetAttr("num_weight_structures", &given));
  return CheckLength("weight_structures", given, count(has_weight_structure_));
}

absl::Status FeatureInputs::ReadInputs(
    OpKernelContext* context, std::vector<FeatureInput>* inputs) const {
  OpInputList ids, structures, shapes;
  TF_RETURN_IF_ERROR(context->input_list("ids", &ids));
  TF_RETURN_IF_ERROR(context->input_list("structures", &structures));
  TF_RETURN_IF_ERROR(context->input_list("shapes", &shapes));
  inputs->reserve(specs_.size());
  int next_structure = 0;
  int next_shape = 0;
  for (size_t f = 0; f < specs_.size(); ++f) {
    FeatureInput input;
    input.num_ids = ids[f].NumElements();
    if (ids[f].dtype() == tensorflow::DT_INT32) {
      input.ids32 = ids[f].flat<int32_t>().data();
    } else {
      input.ids64 = Int64s(ids[f]);
    }
    if (specs_[f].kind != InputKind::kDense) {
      const Tensor& structure = structures[next_structure++];
      input.structure = Int64s(structure);
      input.structure_size = structure.NumElements();
    }
    switch (specs_[f].kind) {
      case InputKind::kDense:
        for (const auto& axis : ids[f].shape())
          input.shape.push_back(axis.size);
        break;
      case InputKind::kRagged:
        input.shape = {input.structure_size - 1};
        break;
      case InputKind::kSparse: {
        const Tensor& shape = shapes[next_shape++];
        input.shape.assign(Int64s(shape), Int64s(shape) + shape.NumElements());
        break;
      }
    }
    TF_RETURN_IF_ERROR(CheckStructure(specs_[f], input));
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
