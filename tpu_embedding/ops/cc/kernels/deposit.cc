// TpuEmbeddingDeposit: one replica's gradients join the step that owes them.

#include <cmath>
#include <string>
#include <utility>
#include <vector>

#include "kernels/kernel_util.h"
#include "kernels/step_queue_resource.h"
#include "tensorflow/core/framework/op.h"
#include "tensorflow/core/framework/op_kernel.h"
#include "tensorflow/core/framework/shape_inference.h"

namespace tpu_embedding {
namespace {

using tensorflow::OpInputList;
using tensorflow::OpKernelConstruction;
using tensorflow::OpKernelContext;
using tensorflow::Tensor;
using tensorflow::TensorShape;

REGISTER_OP("TpuEmbeddingDeposit")
    .Input("queue: resource")
    .Input("gradients: num_gradients * float")
    .Output("apply_now: bool")
    .Attr("num_gradients: int >= 0")
    .Attr("has_gradient: list(bool)")
    .Attr("paths: list(string)")
    .Attr("dims: list(int)")
    .Attr("check_numerics: bool")
    .Attr("replica: int")
    .SetIsStateful()
    .SetShapeFn(tensorflow::shape_inference::ScalarShape)
    .Doc(R"doc(
Hands in the gradients of the batch that a replica dequeued last.

gradients: of the activations, for the features that have one.
apply_now: whether this completes the step and its update must be applied now.
has_gradient: by feature; one without counts as zeros.
dims: by feature the width of its table.
)doc");

class DepositOp : public tensorflow::OpKernel {
 public:
  explicit DepositOp(OpKernelConstruction* context) : OpKernel(context) {
    OP_REQUIRES_OK(context, context->GetAttr("has_gradient", &has_gradient_));
    OP_REQUIRES_OK(context, context->GetAttr("paths", &paths_));
    OP_REQUIRES_OK(context, context->GetAttr("dims", &dims_));
    OP_REQUIRES_OK(context, context->GetAttr("replica", &replica_));
    OP_REQUIRES_OK(context,
                   context->GetAttr("check_numerics", &check_numerics_));
  }

  void Compute(OpKernelContext* context) override {
    QueuePtr resource;
    OP_REQUIRES_OK(context, LookUpQueue(context, &resource));
    SharedBatch batch;
    OP_REQUIRES_OK(
        context, FailedPrecondition(resource->queue.Owed(replica_, &batch)));
    FeatureGradients gradients;
    OP_REQUIRES_OK(context, ReadGradients(context, &gradients));
    const absl::Status status = Check(*batch, gradients);
    if (!status.ok()) resource->queue.FailDeposit(replica_);
    OP_REQUIRES_OK(context, status);
    bool apply_now = false;
    OP_REQUIRES_OK(context,
                   FailedPrecondition(resource->queue.Deposit(
                       replica_, std::move(gradients), &apply_now)));
    Tensor* output = nullptr;
    OP_REQUIRES_OK(context, context->allocate_output(0, {}, &output));
    output->scalar<bool>()() = apply_now;
  }

 private:
  absl::Status ReadGradients(OpKernelContext* context,
                             FeatureGradients* gradients) const {
    OpInputList given;
    TF_RETURN_IF_ERROR(context->input_list("gradients", &given));
    gradients->resize(has_gradient_.size());
    int next = 0;
    for (size_t f = 0; f < has_gradient_.size(); ++f) {
      if (has_gradient_[f]) (*gradients)[f] = given[next++];
    }
    return absl::OkStatus();
  }

  absl::Status Check(const PreparedBatch& batch,
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

  absl::Status CheckFinite(int feature, const Tensor& gradient) const {
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

  std::vector<bool> has_gradient_;
  std::vector<std::string> paths_;
  std::vector<int> dims_;
  bool check_numerics_ = false;
  int replica_ = 0;
};

REGISTER_KERNEL_BUILDER(
    Name("TpuEmbeddingDeposit").Device(tensorflow::DEVICE_CPU), DepositOp);

}  // namespace
}  // namespace tpu_embedding
