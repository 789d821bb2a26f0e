#include "kernels/gradients.h"

#include <algorithm>
#include <cmath>
#include <string>

namespace tpu_embedding {
namespace {

using tensorflow::OpInputList;
using tensorflow::OpKernelConstruction;
using tensorflow::OpKernelContext;
using tensorflow::Tensor;

absl::Status CheckFinite(const std::string& path, const Tensor& gradient,
                         int64_t dim) {
  const auto values = gradient.flat<float>();
  for (int64_t i = 0; i < values.size(); ++i) {
    if (!std::isfinite(values(i))) {
      return absl::InvalidArgumentError(
          absl::StrCat("Feature ", path, ": the gradient of sample ", i / dim,
                       " is not finite (", values(i), ")."));
    }
  }
  return absl::OkStatus();
}

}  // namespace

absl::Status ReadHasGradient(OpKernelConstruction* context,
                             std::vector<bool>* has_gradient) {
  TF_RETURN_IF_ERROR(context->GetAttr("has_gradient", has_gradient));
  int64_t given = 0;
  TF_RETURN_IF_ERROR(context->GetAttr("num_gradients", &given));
  return CheckLength(
      "gradients", given,
      std::count(has_gradient->begin(), has_gradient->end(), true));
}

absl::Status ReadGradients(OpKernelContext* context, const Plan& plan,
                           const std::vector<bool>& has_gradient,
                           ReplicaGradients* gradients) {
  OpInputList given;
  const Tensor* rates = nullptr;
  TF_RETURN_IF_ERROR(context->input_list("gradients", &given));
  TF_RETURN_IF_ERROR(context->input("rates", &rates));
  TF_RETURN_IF_ERROR(
      CheckLength("has_gradient", has_gradient.size(), plan.features.size()));
  // A worker has no rates: each server has its own.
  const bool has_rates = !plan.placement.served;
  TF_RETURN_IF_ERROR(CheckLength("rates", rates->NumElements(),
                                 has_rates ? plan.tables.size() : 0));
  gradients->rates = *rates;
  gradients->features.resize(has_gradient.size());
  int next = 0;
  for (size_t f = 0; f < has_gradient.size(); ++f) {
    if (has_gradient[f]) gradients->features[f] = given[next++];
  }
  return absl::OkStatus();
}

absl::Status CheckGradients(const Plan& plan, const PreparedBatch& batch,
                            const ReplicaGradients& given) {
  TF_RETURN_IF_ERROR(
      CheckLength("batch", batch.tables.size(), plan.tables.size()));
  for (size_t f = 0; f < given.features.size(); ++f) {
    if (!given.features[f]) continue;
    const Tensor& gradient = *given.features[f];
    tensorflow::TensorShape expected;
    TF_RETURN_IF_ERROR(ActivationShape(batch.features[f].output_shape,
                                       plan.dim(f), &expected));
    if (gradient.shape() != expected) {
      return absl::InvalidArgumentError(absl::StrCat(
          "Feature ", plan.features[f].path, ": the gradient has shape ",
          gradient.shape().DebugString(), ", but the activation had ",
          expected.DebugString(), "."));
    }
    if (plan.check_numerics) {
      TF_RETURN_IF_ERROR(
          CheckFinite(plan.features[f].path, gradient, plan.dim(f)));
    }
  }
  return absl::OkStatus();
}

}  // namespace tpu_embedding
