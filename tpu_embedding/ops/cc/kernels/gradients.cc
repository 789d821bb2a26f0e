#include "kernels/gradients.h"

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
  return context->GetAttr("check_numerics", &check_numerics_);
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
                                   const FeatureGradients& gradients) const {
  for (size_t f = 0; f < gradients.size(); ++f) {
    if (!gradients[f]) continue;
    TensorShape expected(batch.features[f].output_shape);
    expected.AddDim(dims_[f]);
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
