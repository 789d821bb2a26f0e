// TpuEmbeddingUpdate adds one replica's gradients to their step, and
// TpuEmbeddingApplyUpdate applies due updates to tables and slots.

#include <utility>
#include <vector>

#include "kernels/apply_updates.h"
#include "kernels/batch_variant.h"
#include "kernels/gradients.h"
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

REGISTER_OP("TpuEmbeddingUpdate")
    .Input("queue: resource")
    .Input("batches: num_batches * variant")
    .Input("gradients: num_gradients * float")
    .Input("rates: float")
    .Input("counters: num_counters * resource")
    .Input("clock: int64")
    .Output("apply_now: bool")
    .Attr("num_batches: int >= 0")
    .Attr("num_gradients: int >= 0")
    .Attr("num_counters: int >= 0")
    .Attr("has_gradient: list(bool)")
    .Attr("replica: int")
    .SetIsStateful()
    .SetShapeFn(tensorflow::shape_inference::ScalarShape)
    .Doc(R"doc(
Submits the gradients of one lookup. Those of the n-th lookups of every replica
are summed into one update.

batches: the batch, from TpuEmbeddingLookup or TpuEmbeddingFromStacks; or none:
  the one that `replica` dequeued last.
gradients: the gradients of the activations, for the features that have one.
rates: [num_tables], the learning rates from the last replica, zeros from the
  others.
counters: none, or the number of updates, which grows when one is complete.
clock: the user's clock, a scalar from the last replica; or empty.
apply_now: whether updates are due.
has_gradient: by feature, whether it has a gradient; otherwise zeros count.
)doc");

REGISTER_OP("TpuEmbeddingApplyUpdate")
    .Input("queue: resource")
    .Input("apply_now: bool")
    .Input("arrays: num_arrays * resource")
    .Attr("num_arrays: int >= 1")
    .SetIsStateful()
    .SetShapeFn(tensorflow::shape_inference::NoOutputs)
    .Doc(R"doc(
Applies the updates that are due, if `apply_now`.

arrays: the variables of all tables, then the slots table by table; all are
  updated in place.
)doc");

class UpdateOp : public tensorflow::OpKernel {
 public:
  explicit UpdateOp(OpKernelConstruction* context) : OpKernel(context) {
    OP_REQUIRES_OK(context, context->GetAttr("replica", &replica_));
    OP_REQUIRES_OK(context, ReadHasGradient(context, &has_gradient_));
  }

  void Compute(OpKernelContext* context) override {
    QueuePtr resource;
    OP_REQUIRES_OK(context, LookUpQueue(context, &resource, replica_));
    std::vector<Variable> counters;
    OP_REQUIRES_OK(context, LookUpCounters(context, &counters));
    ReplicaGradients gradients;
    OP_REQUIRES_OK(context, ReadGradients(context, *resource->plan,
                                          has_gradient_, &gradients));
    OP_REQUIRES_OK(context, ReadClock(context, &gradients.clock));
    const auto count = [&] {
      return counters.empty() ? 0 : AddTo(counters[0].get(), 1);
    };
    OpInputList batches;
    OP_REQUIRES_OK(context, context->input_list("batches", &batches));
    bool apply_now = false;
    OP_REQUIRES_OK(
        context, batches.size() == 0
                     ? SubmitOwed(context, resource.get(), std::move(gradients),
                                  count, &apply_now)
                     : Submit(context, resource.get(), batches[0],
                              std::move(gradients), count, &apply_now));
    OP_REQUIRES_OK(context, SetBool(context, 0, apply_now));
  }

 private:
  // Checks the batches of a complete update; an incomplete one has none.
  static absl::Status CheckComplete(OpKernelContext* context,
                                    const std::vector<SharedBatch>& completed,
                                    const StepQueueResource& resource,
                                    int64_t* clock) {
    if (completed.empty()) return absl::OkStatus();
    TF_RETURN_IF_ERROR(
        CheckRoom(completed, *clock, WorkerPool(context), resource));
    return AdvanceClock(resource, clock);
  }

  // Submits the gradients of the batch dequeued last.
  absl::Status SubmitOwed(OpKernelContext* context, StepQueueResource* resource,
                          ReplicaGradients gradients,
                          const BatchQueue::Count& count,
                          bool* apply_now) const {
    BatchQueue& queue = resource->queue;
    SharedBatch batch;
    TF_RETURN_IF_ERROR(FailedPrecondition(queue.Owed(replica_, &batch)));
    absl::Status status = CheckGradients(*resource->plan, *batch, gradients);
    if (status.ok()) {
      status = CheckComplete(context, queue.CompletedByOwed(replica_),
                             *resource, &gradients.clock);
    }
    if (!status.ok()) queue.FailOwed(replica_);
    TF_RETURN_IF_ERROR(status);
    return FailedPrecondition(
        queue.SubmitOwed(replica_, std::move(gradients), count, apply_now));
  }

  // Submits the gradients of a batch past the queue.
  absl::Status Submit(OpKernelContext* context, StepQueueResource* resource,
                      const Tensor& tensor, ReplicaGradients gradients,
                      const BatchQueue::Count& count, bool* apply_now) const {
    const BatchVariant* variant = nullptr;
    TF_RETURN_IF_ERROR(Unwrap(tensor, resource->plan.get(), &variant));
    absl::Status status = variant->status;
    if (status.ok()) {
      status = CheckGradients(*resource->plan, *variant->batch, gradients);
    }
    if (status.ok()) {
      status = CheckComplete(
          context, resource->queue.CompletedBy(replica_, variant->batch),
          *resource, &gradients.clock);
    }
    if (!status.ok()) {
      resource->queue.FailLookup();
      resource->ForgetLookup(variant->batch);
    }
    TF_RETURN_IF_ERROR(status);
    TF_RETURN_IF_ERROR(TakeOnce(*variant));
    status = FailedPrecondition(
        resource->queue.Submit(replica_, variant->batch, std::move(gradients),
                               variant->epoch, count, apply_now));
    if (status.ok()) return status;
    resource->ForgetLookup(variant->batch);
    if (variant->used) variant->used->store(false);
    return status;
  }

  std::vector<bool> has_gradient_;
  int replica_ = 0;
};

class ApplyUpdateOp : public tensorflow::OpKernel {
 public:
  using OpKernel::OpKernel;

  void Compute(OpKernelContext* context) override {
    const Tensor* apply_now = nullptr;
    OP_REQUIRES_OK(context, context->input("apply_now", &apply_now));
    OP_REQUIRES_OK(context, CheckScalar("apply_now", *apply_now));
    if (!apply_now->flat<bool>()(0)) return;
    QueuePtr resource;
    OP_REQUIRES_OK(context, LookUpQueue(context, &resource));
    OP_REQUIRES_OK(context, ApplyUpdates(context, resource.get(), [&] {
                     return resource->queue.TakeDue();
                   }));
  }
};

REGISTER_KERNEL_BUILDER(
    Name("TpuEmbeddingUpdate").Device(tensorflow::DEVICE_CPU), UpdateOp);
REGISTER_KERNEL_BUILDER(
    Name("TpuEmbeddingApplyUpdate").Device(tensorflow::DEVICE_CPU),
    ApplyUpdateOp);

}  // namespace
}  // namespace tpu_embedding
