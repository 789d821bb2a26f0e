// TpuEmbeddingSubmit: the gradients of one TpuEmbeddingLookup.

#include <utility>

#include "kernels/batch_variant.h"
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

REGISTER_OP("TpuEmbeddingSubmit")
    .Input("queue: resource")
    .Input("ticket: variant")
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
Hands in the gradients of one lookup. Those of the n-th submission of every
replica are summed into one update.

ticket: what TpuEmbeddingLookup gave; it can be used once.
The others are those of TpuEmbeddingDeposit.
)doc");

class SubmitOp : public tensorflow::OpKernel {
 public:
  explicit SubmitOp(OpKernelConstruction* context) : OpKernel(context) {
    OP_REQUIRES_OK(context, context->GetAttr("replica", &replica_));
    OP_REQUIRES_OK(context, gradients_.ReadAttributes(context));
  }

  void Compute(OpKernelContext* context) override {
    QueuePtr resource;
    OP_REQUIRES_OK(context, LookUpQueue(context, &resource, replica_));
    const TicketVariant* variant = nullptr;
    OP_REQUIRES_OK(context,
                   Unwrap(context->input(1), "TpuEmbeddingLookup", &variant));
    Ticket& ticket = *variant->ticket;
    ReplicaGradients gradients;
    OP_REQUIRES_OK(context, gradients_.Read(context, &gradients));
    OP_REQUIRES_OK(context, gradients_.Check(*ticket.batch, gradients));
    OP_REQUIRES(context, !ticket.used.exchange(true),
                absl::FailedPreconditionError(
                    "The gradients of this lookup were applied already; each "
                    "lookup takes them once. Call the layer again, or take "
                    "all gradients with one tape.gradient call."));
    Tensor* apply_now = nullptr;
    OP_REQUIRES_OK(context, context->allocate_output(0, {}, &apply_now));
    resource->queue.Submit(replica_, ticket.batch, std::move(gradients),
                           &apply_now->scalar<bool>()());
  }

 private:
  GradientReader gradients_;
  int replica_ = 0;
};

REGISTER_KERNEL_BUILDER(
    Name("TpuEmbeddingSubmit").Device(tensorflow::DEVICE_CPU), SubmitOp);

}  // namespace
}  // namespace tpu_embedding
