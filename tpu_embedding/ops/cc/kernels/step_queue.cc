// TpuEmbeddingStepQueue, and the ops that only move batches and flags.

#include <utility>
#include <vector>

#include "kernels/batch_variant.h"
#include "kernels/kernel_util.h"
#include "kernels/step_queue_resource.h"
#include "tensorflow/core/framework/common_shape_fns.h"
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
    .Attr("plan: string")
    .SetIsStateful()
    .SetShapeFn(tensorflow::shape_inference::ScalarShape)
    .Doc(R"doc(
Makes a queue of steps. It lives as long as a handle to it.

plan: the record of the embedding (engines/host/batches.py).
)doc");

REGISTER_OP("TpuEmbeddingEnqueue")
    .Input("queue: resource")
    .Input("batches: num_batches * variant")
    .Input("runs: int64")
    .Output("apply_now: bool")
    .Attr("num_batches: int >= 1")
    .Attr("replica: int")
    .Attr("training: bool")
    .SetIsStateful()
    .SetShapeFn(tensorflow::shape_inference::ScalarShape)
    .Doc(R"doc(
Queues the batch of one replica, or the batches of all.

batches: one for `replica`, or one for each replica, which all enter or none.
runs: empty in strategy.run in a graph; eagerly the number of this run, or 0
  outside of runs.
apply_now: whether updates are due, as they are before an evaluation.
training: whether gradients will be applied for this step.
)doc");

REGISTER_OP("TpuEmbeddingFlush")
    .Input("queue: resource")
    .Output("apply_now: bool")
    .SetIsStateful()
    .SetShapeFn(tensorflow::shape_inference::ScalarShape)
    .Doc(R"doc(
Makes the pending update due. apply_now: whether there is one.
)doc");

REGISTER_OP("TpuEmbeddingReset")
    .Input("queue: resource")
    .Input("counters: num_counters * resource")
    .Attr("num_counters: int >= 0")
    .SetIsStateful()
    .SetShapeFn(tensorflow::shape_inference::NoOutputs)
    .Doc(R"doc(
Discards all batches and gradients that are queued, owed or pending.

counters: none, or the number of updates, from which those discarded are
  subtracted.
)doc");

class StepQueueOp : public tensorflow::OpKernel {
 public:
  explicit StepQueueOp(OpKernelConstruction* context) : OpKernel(context) {
    OP_REQUIRES_OK(context, ReadPlan(context, &plan_));
  }

  void Compute(OpKernelContext* context) override {
    Tensor* handle = nullptr;
    OP_REQUIRES_OK(context, context->allocate_output(0, {}, &handle));
    StepQueueResource* resource = nullptr;
    OP_REQUIRES_OK(context, WithinMemory([&] {
                     resource = new StepQueueResource(plan_);
                     return absl::OkStatus();
                   }));
    handle->scalar<tensorflow::ResourceHandle>()() =
        tensorflow::ResourceHandle::MakeRefCountingHandle(
            resource, context->device()->name());
  }

 private:
  SharedPlan plan_;
};

class EnqueueOp : public tensorflow::OpKernel {
 public:
  explicit EnqueueOp(OpKernelConstruction* context) : OpKernel(context) {
    OP_REQUIRES_OK(context, context->GetAttr("replica", &replica_));
    OP_REQUIRES_OK(context, context->GetAttr("training", &training_));
  }

  void Compute(OpKernelContext* context) override {
    QueuePtr resource;
    int64_t run = 0;
    OP_REQUIRES_OK(context, LookUpQueue(context, &resource, replica_));
    OP_REQUIRES_OK(context, ReadRun(context, &run));
    OpInputList variants;
    OP_REQUIRES_OK(context, context->input_list("batches", &variants));
    BatchQueue& queue = resource->queue;
    const bool all = variants.size() == queue.num_replicas();
    OP_REQUIRES(
        context, all || variants.size() == 1,
        absl::InvalidArgumentError("TpuEmbeddingEnqueue takes the batch of one "
                                   "replica or the batches of all replicas."));
    std::vector<SharedBatch> batches;
    const absl::Status status = ReadBatches(variants, *resource, &batches);
    // The other replicas' batches of this step may be queued already.
    if (!status.ok() && !all) queue.FailEnqueue(replica_, run);
    OP_REQUIRES_OK(context, status);
    bool apply_now = false;
    OP_REQUIRES_OK(
        context,
        FailedPrecondition(
            all ? queue.EnqueueAll(std::move(batches), training_, &apply_now)
                : queue.Enqueue(replica_, std::move(batches[0]), training_, run,
                                &apply_now)));
    OP_REQUIRES_OK(context, SetBool(context, 0, apply_now));
  }

 private:
  absl::Status ReadBatches(const OpInputList& variants,
                           const StepQueueResource& resource,
                           std::vector<SharedBatch>* batches) const {
    for (const Tensor& variant : variants) {
      const BatchVariant* batch = nullptr;
      TF_RETURN_IF_ERROR(Unwrap(variant, resource.plan.get(), &batch));
      TF_RETURN_IF_ERROR(batch->status);
      if (training_) {
        TF_RETURN_IF_ERROR(CheckLength("batch", batch->batch->tables.size(),
                                       resource.plan->tables.size()));
      }
      batches->push_back(batch->batch);
    }
    return absl::OkStatus();
  }

  int replica_ = 0;
  bool training_ = false;
};

class FlushOp : public tensorflow::OpKernel {
 public:
  using OpKernel::OpKernel;

  void Compute(OpKernelContext* context) override {
    QueuePtr resource;
    OP_REQUIRES_OK(context, LookUpQueue(context, &resource));
    Tensor* apply_now = nullptr;
    OP_REQUIRES_OK(context, context->allocate_output(0, {}, &apply_now));
    apply_now->scalar<bool>()() = resource->queue.Flush();
  }
};

class ResetOp : public tensorflow::OpKernel {
 public:
  using OpKernel::OpKernel;

  void Compute(OpKernelContext* context) override {
    QueuePtr resource;
    OP_REQUIRES_OK(context, LookUpQueue(context, &resource));
    std::vector<Variable> counters;
    OP_REQUIRES_OK(context, LookUpCounters(context, &counters));
    const int64_t discarded = resource->queue.Reset();
    for (const Variable& counter : counters) AddTo(counter.get(), -discarded);
  }
};

REGISTER_KERNEL_BUILDER(
    Name("TpuEmbeddingStepQueue").Device(tensorflow::DEVICE_CPU), StepQueueOp);
REGISTER_KERNEL_BUILDER(
    Name("TpuEmbeddingEnqueue").Device(tensorflow::DEVICE_CPU), EnqueueOp);
REGISTER_KERNEL_BUILDER(
    Name("TpuEmbeddingFlush").Device(tensorflow::DEVICE_CPU), FlushOp);
REGISTER_KERNEL_BUILDER(
    Name("TpuEmbeddingReset").Device(tensorflow::DEVICE_CPU), ResetOp);

}  // namespace
}  // namespace tpu_embedding
