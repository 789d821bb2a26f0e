#include "kernels/gradients.h"

#include <algorithm>
#include <cmath>

namespace tpu_embedding {

using tensorflow::OpInputList;
using tensorflow::OpKernelConstruction;
using tensorflow::OpKernelContext;
using tensorflow::Tensor;
using tensorflow::TensorShape;

absl::Status GradientReader::ReadAttributes(OpKernelConstruction* context) {
  TF_RETURN_IF_ERROR(context->GetAttr("has_gradient", &has_gradient_));
  TF_RETURN_IF_ERROR(context->GetAttr("paths", &paths_));
  TF_RETURN_IF_ERROR(context->GetAttr("dims", &dims_));
  TF_RETURN_IF_ERROR(context->GetAttr("check_numerics", &check_numerics_));
  const int64_t num_features = has_gradient_.size();
  TF_RETURN_IF_ERROR(CheckLength("paths", paths_.size(), num_features));
  TF_RETURN_IF_ERROR(CheckLength("dims", dims_.size(), num_features));
  for (const int dim : dims_) {
    if (dim < 1) return CheckLength("dims", dim, 1);
  }
  int64_t given = 0;
  TF_RETURN_IF_ERROR(context->GetAttr("num_gradients", &given));
  return CheckLength(
      "gradients", given,
      std::count(has_gradient_.begin(), has_gradient_.end(), true));
}

absl::Status GradientReader::Read(OpKernelContext* context,
                                  ReplicaGradients* gradients) const {
  OpInputList given;
  const Tensor* rates = nullptr;
  TF_RETURN_IF_ERROR(context->input_list("gradients", &given));
  TF_RETURN_IF_ERROR(context->input("rates", &rates));
  gradients->rates = *rates;
  gradients->features.resize(has_gradient_.size());
  int next = 0;
  for (size_t f = 0; f < has_gradient_.size(); ++f) {
    if (has_gradient_[f]) gradients->features[f] = given[next++];
  }
  return absl::OkStatus();
}

absl::Status GradientReader::Check(const PreparedBatch& batch,
                                   const ReplicaGradients& given) const {
  const FeatureGradients& gradients = given.features;
  TF_RETURN_IF_ERROR(
      CheckLength("features", gradients.size(), batch.features.size()));
  TF_RETURN_IF_ERROR(CheckLength("rates", given.rates.NumElements(),
                                 batch.vocabulary_sizes.size()));
  for (size_t f = 0; f < gradients.size(); ++f) {
    if (!gradients[f]) continue;
    TensorShape expected;
    TF_RETURN_IF_ERROR(
        ActivationShape(batch.features[f].output_shape, dims_[f], &expected));
    if (gradients[f]->shape() != expected) {
      return absl::InvalidArgumentError(absl::StrCat(
          "Feature ", paths_[f], ": the gradient has shape ",
          gradients[f]->shape().DebugString(), ", but the activation had ",
          expected.DebugString(), "."));
    }
    if (check_numerics_) TF_RETURN_IF_ERROR(CheckFinite(f, *gradients[f]));
  }
  return absl::OkStatus();
}

absl::Status GradientReader::CheckFinite(int feature,
                                         const Tensor& gradient) const {
  const auto values = gradient.flat<float>();
  for (int64_t i = 0; i < values.size(); ++i) {
    if (!std::isfinite(values(i))) {
      return absl::InvalidArgumentError(absl::StrCat(
          "Feature ", paths_[feature], ": the gradient of sample ",
          i / dims_[feature], " is not finite (", values(i), ")."));
    }
  }
  return absl::OkStatus();
}

}  // namespace tpu_embedding
