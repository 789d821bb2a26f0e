#include "sparse_core/combiner.h"

#include <algorithm>

#include "absl/strings/str_cat.h"

namespace tpu_embedding {

using tensorflow::OpKernelConstruction;
using tensorflow::OpKernelContext;
using tensorflow::Tensor;
using tensorflow::TensorShape;

absl::Status CombinerInputs::Check(int64_t max_valency, int64_t num_weights,
                                   int64_t dim) const {
  const int64_t samples = valencies.dims() == 1 ? valencies.dim_size(0) : -1;
  const bool gradients_fit =
      !gradients ||
      gradients->shape() == TensorShape({std::max<int64_t>(samples, 0), dim});
  if (samples >= 0 && gradients_fit &&
      vectors.shape() == TensorShape({samples, max_valency, dim}) &&
      weights.shape() == TensorShape({num_weights})) {
    return absl::OkStatus();
  }
  return absl::InvalidArgumentError(absl::StrCat(
      "A combiner with max_valency ", max_valency, " and ", num_weights,
      " weights, of a table of width ", dim, ", needs valencies [S], vectors ",
      "[S, max_valency, width] and gradients [S, width], but got ",
      valencies.shape().DebugString(), ", ", vectors.shape().DebugString(),
      " and ", gradients ? gradients->shape().DebugString() : "none",
      ", and the weights ", weights.shape().DebugString(), "."));
}

absl::Status CombinerInputs::Call(const InlineFunction& function,
                                  OpKernelContext* context,
                                  const TensorShape& shape,
                                  Tensor* result) const {
  std::vector<Tensor> arguments = {valencies, vectors};
  if (weights.NumElements() > 0) {
    const int64_t samples = valencies.dim_size(0);
    const int64_t size = weights.NumElements();
    Tensor for_each_sample(tensorflow::DT_FLOAT, {samples, size});
    for (int64_t s = 0; s < samples; ++s) {
      std::copy_n(weights.flat<float>().data(), size,
                  for_each_sample.flat<float>().data() + s * size);
    }
    arguments.push_back(for_each_sample);
  }
  if (gradients) arguments.push_back(*gradients);
  std::vector<Tensor> results;
  TF_RETURN_IF_ERROR(function.Call(context, arguments, &results));
  if (results.size() != 1 || results[0].dtype() != tensorflow::DT_FLOAT ||
      results[0].shape() != shape) {
    return absl::InvalidArgumentError(absl::StrCat(
        context->op_kernel().name(), ": a function of the combiner must ",
        "return one float32 tensor of the shape ", shape.DebugString(),
        ", but returned ", results.size(), " tensors, the first ",
        results.empty() ? "none" : results[0].DebugString(), "."));
  }
  *result = results[0];
  return absl::OkStatus();
}

CombinerGradient::CombinerGradient(OpKernelConstruction* context)
    : table_vjp_(context, "combiner_table_vjp_computation"),
      weights_vjp_(context, "combiner_weights_vjp_computation") {
  OP_REQUIRES_OK(context, context->GetAttr("max_valency", &max_valency_));
  OP_REQUIRES_OK(context, context->GetAttr("num_weights", &num_weights_));
  OP_REQUIRES(context, max_valency_ > 0,
              absl::InvalidArgumentError("`max_valency` must be > 0."));
}

absl::Status CombinerGradient::Read(OpKernelContext* context, int64_t dim,
                                    CombinerInputs* inputs) const {
  const Tensor *valencies, *vectors, *weights, *gradients;
  TF_RETURN_IF_ERROR(context->input("preserved_valencies", &valencies));
  TF_RETURN_IF_ERROR(context->input("preserved_vectors", &vectors));
  TF_RETURN_IF_ERROR(context->input("preserved_weights", &weights));
  TF_RETURN_IF_ERROR(context->input("activation_gradients", &gradients));
  *inputs = {*valencies, *vectors, *weights, *gradients};
  return inputs->Check(max_valency_, num_weights_, dim);
}

absl::Status CombinerGradient::OfVectors(OpKernelContext* context, int64_t dim,
                                         Tensor* result) const {
  CombinerInputs inputs;
  TF_RETURN_IF_ERROR(Read(context, dim, &inputs));
  Tensor of_samples;
  TF_RETURN_IF_ERROR(
      inputs.Call(table_vjp_, context, inputs.vectors.shape(), &of_samples));
  const int64_t vectors = inputs.valencies.dim_size(0) * max_valency_;
  *result = Tensor(tensorflow::DT_FLOAT, {vectors, dim});
  result->flat<float>() = of_samples.flat<float>();
  return absl::OkStatus();
}

absl::Status CombinerGradient::AddOfWeights(OpKernelContext* context,
                                            int64_t dim,
                                            std::vector<float>* sum) const {
  CombinerInputs inputs;
  TF_RETURN_IF_ERROR(Read(context, dim, &inputs));
  const int64_t samples = inputs.valencies.dim_size(0);
  Tensor of_samples;
  TF_RETURN_IF_ERROR(
      inputs.Call(weights_vjp_, context, {samples, num_weights_}, &of_samples));
  for (int64_t s = 0; s < samples; ++s) {
    for (int64_t k = 0; k < num_weights_; ++k) {
      (*sum)[k] += of_samples.matrix<float>()(s, k);
    }
  }
  return absl::OkStatus();
}

absl::Status UpdateCombinerWeights(OpKernelContext* context,
                                   const std::vector<float>& gradient) {
  const Tensor *weights, *rate;
  TF_RETURN_IF_ERROR(context->input("weights", &weights));
  TF_RETURN_IF_ERROR(context->input("combiner_weights_learning_rate", &rate));
  const int64_t size = gradient.size();
  if (weights->shape() != TensorShape({size}) || rate->NumElements() != 1) {
    return absl::InvalidArgumentError(
        absl::StrCat(context->op_kernel().name(), ": the combiner has ", size,
                     " weights and one learning rate for them, but got ",
                     weights->shape().DebugString(), " and ",
                     rate->shape().DebugString(), "."));
  }
  Tensor* updated;
  TF_RETURN_IF_ERROR(context->allocate_output(context->num_outputs() - 1,
                                              weights->shape(), &updated));
  for (int64_t k = 0; k < size; ++k) {
    updated->flat<float>()(k) =
        weights->flat<float>()(k) - rate->flat<float>()(0) * gradient[k];
  }
  return absl::OkStatus();
}

}  // namespace tpu_embedding
