// TpuEmbeddingLookup: a prepared batch -> activations, past the queue.

#include <memory>
#include <vector>

#include "kernels/batch_variant.h"
#include "kernels/kernel_util.h"
#include "kernels/lookup_all.h"
#include "kernels/step_queue_resource.h"
#include "tensorflow/core/framework/op.h"
#include "tensorflow/core/framework/op_kernel.h"

namespace tpu_embedding {
namespace {

using tensorflow::OpKernelConstruction;
using tensorflow::OpKernelContext;
using tensorflow::Tensor;

REGISTER_OP("TpuEmbeddingLookup")
    .Input("queue: resource")
    .Input("batch: variant")
    .Input("tables: num_tables * resource")
    .Output("activations: num_features * float")
    .Output("ticket: variant")
    .Attr("num_tables: int >= 1")
    .Attr("num_features: int >= 1")
    .Attr("feature_tables: list(int)")
    .Attr("quantization: list(float)")
    .Attr("output_shapes: list(shape)")
    .Attr("replica: int")
    .SetIsStateful()
    .SetShapeFn(ActivationShapesThenScalar)
    .Doc(R"doc(
Looks a batch up at once. Its gradients may or may not follow by
TpuEmbeddingSubmit, so that any number of lookups can share a step.

batch: what TpuEmbeddingPrepare gives, prepared for training.
ticket: a scalar that TpuEmbeddingSubmit takes, once.
The others are those of TpuEmbeddingDequeue.
)doc");

class LookupOp : public tensorflow::OpKernel {
 public:
  explicit LookupOp(OpKernelConstruction* context) : OpKernel(context) {
    OP_REQUIRES_OK(context, context->GetAttr("replica", &replica_));
    OP_REQUIRES_OK(context, lookup_.ReadAttributes(context));
  }

  void Compute(OpKernelContext* context) override {
    QueuePtr resource;
    OP_REQUIRES_OK(context, LookUpQueue(context, &resource, replica_));
    const BatchVariant* batch = nullptr;
    OP_REQUIRES_OK(context,
                   Unwrap(context->input(1), "TpuEmbeddingPrepare", &batch));
    std::vector<Variable> tables;
    OP_REQUIRES_OK(context, LookUpTables(context, &tables));
    OP_REQUIRES_OK(context,
                   FailedPrecondition(resource->queue.BeginLookup(replica_)));
    OP_REQUIRES_OK(context, lookup_.Run(context, *batch->batch, tables));
    Tensor* ticket = nullptr;
    OP_REQUIRES_OK(
        context, context->allocate_output(lookup_.num_features(), {}, &ticket));
    ticket->scalar<tensorflow::Variant>()() =
        TicketVariant{std::make_shared<Ticket>(batch->batch)};
  }

 private:
  BatchLookup lookup_;
  int replica_ = 0;
};

REGISTER_KERNEL_BUILDER(
    Name("TpuEmbeddingLookup").Device(tensorflow::DEVICE_CPU), LookupOp);

}  // namespace
}  // namespace tpu_embedding
