// TpuEmbeddingUpdateRows updates variables that no embedding owns.

#include <optional>
#include <utility>
#include <vector>

#include "kernels/apply_updates.h"
#include "kernels/batch_variant.h"
#include "kernels/gradients.h"
#include "kernels/kernel_util.h"
#include "kernels/plan.h"
#include "kernels/step_queue_resource.h"
#include "kernels/waiting.h"
#include "tensorflow/core/framework/common_shape_fns.h"
#include "tensorflow/core/framework/op.h"
#include "tensorflow/core/framework/op_kernel.h"

namespace tpu_embedding {
namespace {

using tensorflow::OpKernelConstruction;
using tensorflow::OpKernelContext;

REGISTER_OP("TpuEmbeddingUpdateRows")
    .Input("batch: variant")
    .Input("gradients: num_features * float")
    .Input("rates: float")
    .Input("arrays: num_arrays * resource")
    .Input("clocks: num_waiting * resource")
    .Input("sinces: num_waiting * resource")
    .Input("histories: num_waiting * resource")
    .Input("steps: double")
    .Attr("num_features: int >= 1")
    .Attr("num_arrays: int >= 1")
    .Attr("num_waiting: int >= 0")
    .Attr("idle: string")
    .Attr("plan: string")
    .SetIsStateful()
    .SetShapeFn(tensorflow::shape_inference::NoOutputs)
    .Doc(R"doc(
Updates the rows of a batch at once, without a queue.

batch: from TpuEmbeddingPrepare, for training.
gradients: the gradient of each feature.
rates: [num_tables], the learning rates.
arrays: the variables of all tables, then the slots table by table; all are
  updated in place.
clocks, sinces, histories, idle: as for TpuEmbeddingCaughtUpRows, of all tables;
  or none, if no rows wait.
steps: [num_tables, 3], for each table as for TpuEmbeddingAdvance.
plan: the record of the tables (engines/host/batches.py).
)doc");

class UpdateRowsOp : public tensorflow::OpKernel {
 public:
  explicit UpdateRowsOp(OpKernelConstruction* context) : OpKernel(context) {
    SharedPlan plan;
    int num_features = 0;
    OP_REQUIRES_OK(context, ReadPlan(context, &plan));
    OP_REQUIRES_OK(context, context->GetAttr("num_features", &num_features));
    OP_REQUIRES_OK(
        context, CheckLength("gradients", num_features, plan->features.size()));
    OP_REQUIRES_OK(context, ReadIdleRules(context, &idle_));
    has_gradient_.assign(num_features, true);
    resource_.reset(new StepQueueResource(std::move(plan)));
  }

  void Compute(OpKernelContext* context) override {
    const BatchVariant* variant = nullptr;
    const Plan& plan = *resource_->plan;
    OP_REQUIRES_OK(context, Unwrap(context->input(0), &plan, &variant));
    OP_REQUIRES_OK(context, variant->status);
    ReplicaGradients gradients;
    OP_REQUIRES_OK(context,
                   ReadGradients(context, plan, has_gradient_, &gradients));
    OP_REQUIRES_OK(context, CheckGradients(plan, *variant->batch, gradients));
    WaitingStep waiting;
    OP_REQUIRES_OK(context, waiting.tables.LookUp(context, idle_, true));
    const bool waits = !waiting.tables.empty();
    if (waits) OP_REQUIRES_OK(context, ReadSteps(context, &waiting));
    std::optional<BatchQueue::Update> update{
        {0, {{variant->batch, std::move(gradients)}}}};
    OP_REQUIRES_OK(context,
                   ApplyUpdates(
                       context, resource_.get(),
                       [&] { return std::exchange(update, std::nullopt); },
                       waits ? &waiting : nullptr));
  }

 private:
  absl::Status ReadSteps(OpKernelContext* context, WaitingStep* waiting) const {
    const int64_t tables = resource_->plan->tables.size();
    waiting->steps = context->input(context->num_inputs() - 1);
    TF_RETURN_IF_ERROR(CheckLength("idle", idle_.size(), tables));
    TF_RETURN_IF_ERROR(
        CheckLength("steps", waiting->steps.NumElements(), 3 * tables));
    for (int64_t t = 0; t < tables; ++t) {
      TF_RETURN_IF_ERROR(CheckStep(idle_[t], waiting->tables[t],
                                   waiting->steps.matrix<double>()(t, 2)));
    }
    return absl::OkStatus();
  }

  // Used for its plan and its records of the variables; the queue stays empty.
  QueuePtr resource_;
  std::vector<bool> has_gradient_;
  std::vector<IdleRule> idle_;
};

REGISTER_KERNEL_BUILDER(
    Name("TpuEmbeddingUpdateRows").Device(tensorflow::DEVICE_CPU),
    UpdateRowsOp);

}  // namespace
}  // namespace tpu_embedding
