// TpuEmbeddingDequeue: the next batch of a replica -> activations.

#include <vector>

#include "kernels/kernel_util.h"
#include "kernels/lookup_all.h"
#include "kernels/step_queue_resource.h"
#include "tensorflow/core/framework/op.h"
#include "tensorflow/core/framework/op_kernel.h"
#include "tensorflow/core/framework/shape_inference.h"

namespace tpu_embedding {
namespace {

using tensorflow::OpKernelConstruction;
using tensorflow::OpKernelContext;
using tensorflow::Tensor;

REGISTER_OP("TpuEmbeddingDequeue")
    .Input("queue: resource")
    .Input("tables: num_tables * resource")
    .Output("activations: num_features * float")
    .Output("apply_now: bool")
    .Attr("num_tables: int >= 1")
    .Attr("num_features: int >= 1")
    .Attr("feature_tables: list(int)")
    .Attr("quantization: list(float)")
    .Attr("output_shapes: list(shape)")
    .Attr("replica: int")
    .SetIsStateful()
    .SetShapeFn(ActivationShapesThenScalar)
    .Doc(R"doc(
Takes the next batch of a replica and looks it up.

tables: the table variables, float32 or bfloat16 [vocabulary size, dim].
activations: for each feature [its output shape..., dim].
apply_now: whether the pending update of the step before must be applied now.
feature_tables: for each feature the index of its table.
quantization: for each table (number of buckets or 0, lower, upper).
output_shapes: what is known of the activations' shapes.
)doc");

class DequeueOp : public tensorflow::OpKernel {
 public:
  explicit DequeueOp(OpKernelConstruction* context) : OpKernel(context) {
    OP_REQUIRES_OK(context, context->GetAttr("replica", &replica_));
    OP_REQUIRES_OK(context, lookup_.ReadAttributes(context));
  }

  void Compute(OpKernelContext* context) override {
    QueuePtr resource;
    OP_REQUIRES_OK(context, LookUpQueue(context, &resource, replica_));
    std::vector<Variable> tables;
    OP_REQUIRES_OK(context, LookUpTables(context, &tables));
    SharedBatch batch;
    OP_REQUIRES_OK(
        context, FailedPrecondition(resource->queue.Dequeue(replica_, &batch)));
    OP_REQUIRES_OK(context, lookup_.Run(context, *batch, tables));
    Tensor* apply_now = nullptr;
    OP_REQUIRES_OK(context, context->allocate_output(lookup_.num_features(), {},
                                                     &apply_now));
    apply_now->scalar<bool>()() = resource->queue.LookupsAreDone();
  }

 private:
  BatchLookup lookup_;
  int replica_ = 0;
};

REGISTER_KERNEL_BUILDER(
    Name("TpuEmbeddingDequeue").Device(tensorflow::DEVICE_CPU), DequeueOp);

}  // namespace
}  // namespace tpu_embedding
