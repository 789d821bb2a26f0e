// TpuEmbeddingStepQueue and the ops that only move batches and flags.

#include <memory>
#include <utility>
#include <vector>

#include "kernels/batch_variant.h"
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

REGISTER_OP("TpuEmbeddingStepQueue")
    .Output("queue: resource")
    .Attr("num_replicas: int >= 1")
    .Attr("capacity: int >= 1")
    .Attr("pipelined: bool")
    .SetIsStateful()
    .SetShapeFn(tensorflow::shape_inference::ScalarShape)
    .Doc(R"doc(
Makes a queue of steps. It lives as long as a handle to it.

num_replicas: batches in one step.
capacity: how many batches of one replica may wait.
pipelined: leave each update pending until the lookups of the next step.
)doc");

REGISTER_OP("TpuEmbeddingEnqueue")
    .Input("queue: resource")
    .Input("batches: num_batches * variant")
    .Attr("num_batches: int >= 1")
    .Attr("replica: int")
    .Attr("training: bool")
    .SetIsStateful()
    .SetShapeFn(tensorflow::shape_inference::NoOutputs)
    .Doc(R"doc(
Queues the batch of one replica, or the batches of all.

batches: one for `replica`, or one for each replica, which all enter or none.
training: whether gradients will be applied for this step.
)doc");

REGISTER_OP("TpuEmbeddingPending")
    .Input("queue: resource")
    .Output("ready: bool")
    .Output("before_evaluation: bool")
    .Attr("replica: int")
    .SetIsStateful()
    .SetShapeFn([](tensorflow::shape_inference::InferenceContext* context) {
      context->set_output(0, context->Scalar());
      context->set_output(1, context->Scalar());
      return absl::OkStatus();
    })
    .Doc(R"doc(
Whether an update is pending.

ready: true where one is ready to be applied.
before_evaluation: true where, besides, the next batch is an evaluation, so
  that the update must be applied before its lookups.
)doc");

REGISTER_OP("TpuEmbeddingCompletes")
    .Input("queue: resource")
    .Output("completes: bool")
    .Attr("replica: int")
    .Attr("submitting: bool")
    .SetIsStateful()
    .SetShapeFn(tensorflow::shape_inference::ScalarShape)
    .Doc(R"doc(
Whether the next gradients of a replica are the last that their step waits for.

submitting: whether they will come by TpuEmbeddingSubmit.
)doc");

REGISTER_OP("TpuEmbeddingReset")
    .Input("queue: resource")
    .SetIsStateful()
    .SetShapeFn(tensorflow::shape_inference::NoOutputs)
    .Doc(R"doc(
Forgets all batches and gradients that are queued, owed or pending.
)doc");

class StepQueueOp : public tensorflow::OpKernel {
 public:
  explicit StepQueueOp(OpKernelConstruction* context) : OpKernel(context) {
    OP_REQUIRES_OK(context, context->GetAttr("num_replicas", &num_replicas_));
    OP_REQUIRES_OK(context, context->GetAttr("capacity", &capacity_));
    OP_REQUIRES_OK(context, context->GetAttr("pipelined", &pipelined_));
  }

  void Compute(OpKernelContext* context) override {
    Tensor* handle = nullptr;
    OP_REQUIRES_OK(context, context->allocate_output(0, {}, &handle));
    handle->scalar<tensorflow::ResourceHandle>()() =
        tensorflow::ResourceHandle::MakeRefCountingHandle(
            new StepQueueResource(num_replicas_, capacity_, pipelined_),
            context->device()->name());
  }

 private:
  int num_replicas_ = 1;
  int64_t capacity_ = 1;
  bool pipelined_ = false;
};

class EnqueueOp : public tensorflow::OpKernel {
 public:
  explicit EnqueueOp(OpKernelConstruction* context) : OpKernel(context) {
    OP_REQUIRES_OK(context, context->GetAttr("replica", &replica_));
    OP_REQUIRES_OK(context, context->GetAttr("training", &training_));
  }

  void Compute(OpKernelContext* context) override {
    QueuePtr resource;
    OP_REQUIRES_OK(context, LookUpQueue(context, &resource, replica_));
    std::vector<SharedBatch> batches;
    OP_REQUIRES_OK(context, ReadBatches(context, &batches));
    const int num_batches = batches.size();
    if (num_batches == resource->queue.num_replicas()) {
      OP_REQUIRES_OK(context, FailedPrecondition(resource->queue.EnqueueAll(
                                  std::move(batches), training_)));
      return;
    }
    OP_REQUIRES(context, num_batches == 1,
                absl::InvalidArgumentError(
                    "TpuEmbeddingEnqueue takes the batch of one replica or "
                    "those of all."));
    OP_REQUIRES_OK(context, FailedPrecondition(resource->queue.Enqueue(
                                replica_, std::move(batches[0]), training_)));
  }

 private:
  static absl::Status ReadBatches(OpKernelContext* context,
                                  std::vector<SharedBatch>* batches) {
    OpInputList variants;
    TF_RETURN_IF_ERROR(context->input_list("batches", &variants));
    for (const Tensor& variant : variants) {
      const BatchVariant* batch = nullptr;
      TF_RETURN_IF_ERROR(Unwrap(variant, "TpuEmbeddingPrepare", &batch));
      batches->push_back(batch->batch);
    }
    return absl::OkStatus();
  }

  int replica_ = 0;
  bool training_ = false;
};

class PendingOp : public tensorflow::OpKernel {
 public:
  explicit PendingOp(OpKernelConstruction* context) : OpKernel(context) {
    OP_REQUIRES_OK(context, context->GetAttr("replica", &replica_));
  }

  void Compute(OpKernelContext* context) override {
    QueuePtr resource;
    OP_REQUIRES_OK(context, LookUpQueue(context, &resource, replica_));
    Tensor* ready = nullptr;
    Tensor* before_evaluation = nullptr;
    OP_REQUIRES_OK(context, context->allocate_output(0, {}, &ready));
    OP_REQUIRES_OK(context,
                   context->allocate_output(1, {}, &before_evaluation));
    const bool is_ready = resource->queue.IsReady();
    ready->scalar<bool>()() = is_ready;
    before_evaluation->scalar<bool>()() =
        is_ready && resource->queue.NextIsEvaluation(replica_);
  }

 private:
  int replica_ = 0;
};

REGISTER_KERNEL_BUILDER(
    Name("TpuEmbeddingStepQueue").Device(tensorflow::DEVICE_CPU), StepQueueOp);
REGISTER_KERNEL_BUILDER(
    Name("TpuEmbeddingEnqueue").Device(tensorflow::DEVICE_CPU), EnqueueOp);
class CompletesOp : public tensorflow::OpKernel {
 public:
  explicit CompletesOp(OpKernelConstruction* context) : OpKernel(context) {
    OP_REQUIRES_OK(context, context->GetAttr("replica", &replica_));
    OP_REQUIRES_OK(context, context->GetAttr("submitting", &submitting_));
  }

  void Compute(OpKernelContext* context) override {
    QueuePtr resource;
    OP_REQUIRES_OK(context, LookUpQueue(context, &resource, replica_));
    Tensor* completes = nullptr;
    OP_REQUIRES_OK(context, context->allocate_output(0, {}, &completes));
    completes->scalar<bool>()() =
        resource->queue.Completes(replica_, submitting_);
  }

 private:
  int replica_ = 0;
  bool submitting_ = false;
};

class ResetOp : public tensorflow::OpKernel {
 public:
  using OpKernel::OpKernel;

  void Compute(OpKernelContext* context) override {
    QueuePtr resource;
    OP_REQUIRES_OK(context, LookUpQueue(context, &resource));
    resource->queue.Reset();
  }
};

REGISTER_KERNEL_BUILDER(
    Name("TpuEmbeddingCompletes").Device(tensorflow::DEVICE_CPU), CompletesOp);
REGISTER_KERNEL_BUILDER(
    Name("TpuEmbeddingReset").Device(tensorflow::DEVICE_CPU), ResetOp);
REGISTER_KERNEL_BUILDER(
    Name("TpuEmbeddingPending").Device(tensorflow::DEVICE_CPU), PendingOp);

}  // namespace
}  // namespace tpu_embedding
