// Applies the gradients of updates to tables and slots.

#ifndef TPU_EMBEDDING_OPS_CC_KERNELS_APPLY_UPDATES_H_
#define TPU_EMBEDDING_OPS_CC_KERNELS_APPLY_UPDATES_H_

#include <functional>
#include <optional>
#include <vector>

#include "absl/status/status.h"
#include "kernels/step_queue_resource.h"
#include "kernels/waiting.h"
#include "tensorflow/core/framework/op_kernel.h"

namespace tpu_embedding {

// Makes the views of a plan's tables and slots, which are locked.
absl::Status MakeViews(const StepQueueResource& resource,
                       const std::vector<Variable>& tables,
                       const std::vector<Variable>& slots,
                       std::vector<TableView>* views);

// Returns the next update, or none; called while the variables are locked.
using NextUpdate = std::function<std::optional<BatchQueue::Update>()>;

// The tables whose rows wait for their gradients, and the step that they take.
struct WaitingStep {
  WaitingTables tables;
  tensorflow::Tensor steps;  // see AdvanceTable
};

// Applies updates to the variables behind the resource inputs `arrays`. An
// error before the first update leaves it in the queue. Each update is a step
// of `waiting`, if there is one.
absl::Status ApplyUpdates(tensorflow::OpKernelContext* context,
                          StepQueueResource* resource, const NextUpdate& next,
                          WaitingStep* waiting = nullptr);

}  // namespace tpu_embedding

#endif  // TPU_EMBEDDING_OPS_CC_KERNELS_APPLY_UPDATES_H_
