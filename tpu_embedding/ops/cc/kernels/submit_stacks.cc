// TpuEmbeddingSubmitStacks: the gradients of stacked batches.

#include <memory>
#include <utility>
#include <vector>

#include "kernels/gradients.h"
#include "kernels/kernel_util.h"
#include "kernels/stacks.h"
#include "kernels/step_queue_resource.h"
#include "tensorflow/core/framework/op.h"
#include "tensorflow/core/framework/op_kernel.h"
#include "tensorflow/core/framework/shape_inference.h"

namespace tpu_embedding {
namespace {

using tensorflow::OpKernelConstruction;
using tensorflow::OpKernelContext;
using tensorflow::Tensor;

REGISTER_OP("TpuEmbeddingSubmitStacks")
    .Input("queue: resource")
    .Input("row_pointers: num_stacks * int32")
    .Input("token_ids: num_stacks * int32")
    .Input("gains: num_stacks * float")
    .Input("samples: int64")
    .Input("gradients: num_gradients * float")
    .Input("rates: float")
    .Output("apply_now: bool")
    .Attr("num_stacks: int >= 1")
    .Attr("num_gradients: int >= 0")
    .Attr("stack_names: list(string)")
    .Attr("feature_stacks: list(int)")
    .Attr("first_tokens: list(int)")
    .Attr("feature_tables: list(int)")
    .Attr("vocabulary_sizes: list(int)")
    .Attr("has_gradient: list(bool)")
    .Attr("paths: list(string)")
    .Attr("dims: list(int)")
    .Attr("check_numerics: bool")
    .Attr("replica: int")
    .SetIsStateful()
    .SetShapeFn(tensorflow::shape_inference::ScalarShape)
    .Doc(R"doc(
Hands in gradients together with the batch that they are of. Those of the n-th
submission of every replica are summed into one update.

samples: [number of features], how many samples each feature has.
gradients: of the features that have one, [samples, dim].
The others are those of TpuEmbeddingPreprocess and TpuEmbeddingDeposit.
)doc");

class SubmitStacksOp : public tensorflow::OpKernel {
 public:
  explicit SubmitStacksOp(OpKernelConstruction* context) : OpKernel(context) {
    OP_REQUIRES_OK(context, context->GetAttr("replica", &replica_));
    OP_REQUIRES_OK(context, gradients_.ReadAttributes(context));
    OP_REQUIRES_OK(context, stacks_.ReadAttributes(context));
  }

  void Compute(OpKernelContext* context) override {
    QueuePtr resource;
    OP_REQUIRES_OK(context, LookUpQueue(context, &resource, replica_));
    const Tensor* samples = nullptr;
    OP_REQUIRES_OK(context, context->input("samples", &samples));
    const int64_t num_features = stacks_.tables().feature_tables.size();
    OP_REQUIRES(context, samples->NumElements() == num_features,
                absl::InvalidArgumentError("One number of samples for each "
                                           "feature is needed."));
    std::vector<std::vector<int64_t>> shapes;
    for (int64_t f = 0; f < num_features; ++f) {
      shapes.push_back({samples->flat<int64_t>()(f)});
    }
    auto batch = std::make_shared<PreparedBatch>();
    OP_REQUIRES_OK(context,
                   stacks_.Read(context, std::move(shapes), batch.get()));
    ReplicaGradients gradients;
    OP_REQUIRES_OK(context, gradients_.Read(context, &gradients));
    OP_REQUIRES_OK(context, gradients_.Check(*batch, gradients));
    GroupRows(stacks_.tables(), WorkerPool(context), batch.get());
    Tensor* apply_now = nullptr;
    OP_REQUIRES_OK(context, context->allocate_output(0, {}, &apply_now));
    resource->queue.Submit(replica_, std::move(batch), std::move(gradients),
                           &apply_now->scalar<bool>()());
  }

 private:
  GradientReader gradients_;
  Stacks stacks_;
  int replica_ = 0;
};

REGISTER_KERNEL_BUILDER(
    Name("TpuEmbeddingSubmitStacks").Device(tensorflow::DEVICE_CPU),
    SubmitStacksOp);

}  // namespace
}  // namespace tpu_embedding
