// TpuEmbeddingDeposit: one replica's gradients join the step that owes them.

#include <utility>

#include "kernels/gradients.h"
#include "kernels/kernel_util.h"
#include "kernels/step_queue_resource.h"
#include "tensorflow/core/framework/op.h"
#include "tensorflow/core/framework/op_kernel.h"
#include "tensorflow/core/framework/shape_inference.h"

namespace tpu_embedding {
namespace {

using tensorflow::OpKernelConstruction;
using tensorflow::OpKernelContext;
using tensorflow::Tensor;

REGISTER_OP("TpuEmbeddingDeposit")
    .Input("queue: resource")
    .Input("gradients: num_gradients * float")
    .Input("rates: float")
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
rates: [num_tables], this step's learning rates from the replica that completes
  it (TpuEmbeddingCompletes), zeros from the others.
apply_now: whether this completes the step and its update must be applied now.
has_gradient: by feature; one without counts as zeros.
dims: by feature the width of its table.
)doc");

class DepositOp : public tensorflow::OpKernel {
 public:
  explicit DepositOp(OpKernelConstruction* context) : OpKernel(context) {
    OP_REQUIRES_OK(context, gradients_.ReadAttributes(context));
    OP_REQUIRES_OK(context, context->GetAttr("replica", &replica_));
  }

  void Compute(OpKernelContext* context) override {
    QueuePtr resource;
    OP_REQUIRES_OK(context, LookUpQueue(context, &resource, replica_));
    SharedBatch batch;
    OP_REQUIRES_OK(context,
                   FailedPrecondition(resource->queue.Owed(replica_, &batch)));
    ReplicaGradients gradients;
    OP_REQUIRES_OK(context, gradients_.Read(context, &gradients));
    const absl::Status status = gradients_.Check(*batch, gradients);
    if (!status.ok()) resource->queue.FailDeposit(replica_);
    OP_REQUIRES_OK(context, status);
    bool apply_now = false;
    OP_REQUIRES_OK(context, FailedPrecondition(resource->queue.Deposit(
                                replica_, std::move(gradients), &apply_now)));
    Tensor* output = nullptr;
    OP_REQUIRES_OK(context, context->allocate_output(0, {}, &output));
    output->scalar<bool>()() = apply_now;
  }

 private:
  GradientReader gradients_;
  int replica_ = 0;
};

REGISTER_KERNEL_BUILDER(
    Name("TpuEmbeddingDeposit").Device(tensorflow::DEVICE_CPU), DepositOp);

}  // namespace
}  // namespace tpu_embedding
