// TpuEmbeddingLookupStacks: stacked batches -> activations.

#include <utility>
#include <vector>

#include "kernels/kernel_util.h"
#include "kernels/lookup_all.h"
#include "kernels/stacks.h"
#include "kernels/step_queue_resource.h"
#include "tensorflow/core/framework/op.h"
#include "tensorflow/core/framework/op_kernel.h"

namespace tpu_embedding {
namespace {

using tensorflow::OpInputList;
using tensorflow::OpKernelConstruction;
using tensorflow::OpKernelContext;
using tensorflow::Tensor;

REGISTER_OP("TpuEmbeddingLookupStacks")
    .Input("queue: resource")
    .Input("row_pointers: num_stacks * int32")
    .Input("token_ids: num_stacks * int32")
    .Input("gains: num_stacks * float")
    .Input("shapes: num_features * int64")
    .Input("tables: num_tables * resource")
    .Output("activations: num_features * float")
    .Attr("num_stacks: int >= 1")
    .Attr("num_tables: int >= 1")
    .Attr("num_features: int >= 1")
    .Attr("stack_names: list(string)")
    .Attr("feature_stacks: list(int)")
    .Attr("first_tokens: list(int)")
    .Attr("paths: list(string)")
    .Attr("feature_tables: list(int)")
    .Attr("vocabulary_sizes: list(int)")
    .Attr("quantization: list(float)")
    .Attr("output_shapes: list(shape)")
    .Attr("replica: int")
    .SetIsStateful()
    .SetShapeFn(ActivationShapes)
    .Doc(R"doc(
Looks up what TpuEmbeddingPreprocess gives.

shapes: its output_shapes.
The others are those of TpuEmbeddingPreprocess and TpuEmbeddingDequeue.
)doc");

class LookupStacksOp : public tensorflow::OpKernel {
 public:
  explicit LookupStacksOp(OpKernelConstruction* context) : OpKernel(context) {
    OP_REQUIRES_OK(context, context->GetAttr("replica", &replica_));
    OP_REQUIRES_OK(context, lookup_.ReadAttributes(context));
    OP_REQUIRES_OK(context, stacks_.ReadAttributes(context));
  }

  void Compute(OpKernelContext* context) override {
    QueuePtr resource;
    OP_REQUIRES_OK(context, LookUpQueue(context, &resource, replica_));
    std::vector<Variable> tables;
    OP_REQUIRES_OK(context, LookUpTables(context, &tables));
    OpInputList inputs;
    OP_REQUIRES_OK(context, context->input_list("shapes", &inputs));
    std::vector<std::vector<int64_t>> shapes;
    for (const Tensor& shape : inputs) {
      const auto axes = shape.flat<int64_t>();
      shapes.emplace_back(axes.data(), axes.data() + axes.size());
    }
    PreparedBatch batch;
    OP_REQUIRES_OK(context, stacks_.Read(context, std::move(shapes), &batch));
    OP_REQUIRES_OK(context,
                   FailedPrecondition(resource->queue.BeginLookup(replica_)));
    OP_REQUIRES_OK(context, lookup_.Run(context, batch, tables));
  }

 private:
  BatchLookup lookup_;
  Stacks stacks_;
  int replica_ = 0;
};

REGISTER_KERNEL_BUILDER(
    Name("TpuEmbeddingLookupStacks").Device(tensorflow::DEVICE_CPU),
    LookupStacksOp);

}  // namespace
}  // namespace tpu_embedding
