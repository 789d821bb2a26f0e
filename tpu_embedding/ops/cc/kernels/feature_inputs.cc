#include "kernels/feature_inputs.h"

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

// Checks the structure, because the core trusts these sizes.
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
      return absl::InvalidArgumentError(absl::StrCat(
          "A malformed graph: an input has the unknown kind ", kinds[f], "."));
    }
    spec.kind = kind->second;
    spec.declared_source = sources[f];
    spec.shape_known = !shapes[f].unknown_rank();
    if (!spec.shape_known) continue;
    for (const auto& axis : shapes[f]) spec.declared_shape.push_back(axis.size);
  }
  return CheckTypes(context);
}

// Checks types once, because the reading of each batch relies on them.
absl::Status FeatureInputs::CheckTypes(OpKernelConstruction* context) const {
  const int64_t num_features = specs_.size();
  TF_RETURN_IF_ERROR(
      CheckLength("has_weights", has_weights_.size(), num_features));
  TF_RETURN_IF_ERROR(CheckLength("has_weight_structure",
                                 has_weight_structure_.size(), num_features));
  tensorflow::DataTypeVector types, expected;
  TF_RETURN_IF_ERROR(context->GetAttr("types", &types));
  for (int64_t f = 0; f < num_features; ++f) {
    const size_t ids = expected.size();
    const bool narrow =
        ids < types.size() && types[ids] == tensorflow::DT_INT32;
    expected.push_back(narrow ? tensorflow::DT_INT32 : tensorflow::DT_INT64);
    const InputKind kind = specs_[f].kind;
    const int further =
        (kind != InputKind::kDense) + (kind == InputKind::kSparse);
    expected.insert(expected.end(), further, tensorflow::DT_INT64);
    if (has_weights_[f]) expected.push_back(tensorflow::DT_FLOAT);
    if (has_weight_structure_[f]) expected.push_back(tensorflow::DT_INT64);
  }
  TF_RETURN_IF_ERROR(CheckLength("inputs", types.size(), expected.size()));
  if (types == expected) return absl::OkStatus();
  return absl::InvalidArgumentError(
      "A malformed graph: the types of `inputs` are not those in `call`.");
}

absl::Status FeatureInputs::ReadInputs(
    OpKernelContext* context, std::vector<FeatureInput>* inputs) const {
  OpInputList list;
  TF_RETURN_IF_ERROR(context->input_list("inputs", &list));
  inputs->reserve(specs_.size());
  int next = 0;
  for (size_t f = 0; f < specs_.size(); ++f) {
    FeatureInput input;
    const Tensor& ids = list[next++];
    input.num_ids = ids.NumElements();
    if (ids.dtype() == tensorflow::DT_INT32) {
      input.ids32 = ids.flat<int32_t>().data();
    } else {
      input.ids64 = Int64s(ids);
    }
    if (specs_[f].kind != InputKind::kDense) {
      const Tensor& structure = list[next++];
      input.structure = Int64s(structure);
      input.structure_size = structure.NumElements();
    }
    switch (specs_[f].kind) {
      case InputKind::kDense:
        for (const auto& axis : ids.shape()) input.shape.push_back(axis.size);
        break;
      case InputKind::kRagged:
        input.shape = {input.structure_size - 1};
        break;
      case InputKind::kSparse: {
        const Tensor& shape = list[next++];
        input.shape.assign(Int64s(shape), Int64s(shape) + shape.NumElements());
        break;
      }
    }
    TF_RETURN_IF_ERROR(CheckStructure(specs_[f], input));
    if (has_weights_[f]) {
      const Tensor& values = list[next++];
      if (values.NumElements() != input.num_ids) {
        return absl::InvalidArgumentError(
            absl::StrCat("Feature ", specs_[f].path, ": ", values.NumElements(),
                         " weights for ", input.num_ids,
                         " ids. Pass one weight for each id."));
      }
      input.weights = values.flat<float>().data();
    }
    if (has_weight_structure_[f]) {
      const Tensor& structure = list[next++];
      input.weight_structure = Int64s(structure);
      input.weight_structure_size = structure.NumElements();
    }
    inputs->push_back(std::move(input));
  }
  return absl::OkStatus();
}

}  // namespace tpu_embedding
