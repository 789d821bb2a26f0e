// The gradients of updates -> tables and slots.

#ifndef TPU_EMBEDDING_OPS_CC_KERNELS_APPLY_UPDATES_H_
#define TPU_EMBEDDING_OPS_CC_KERNELS_APPLY_UPDATES_H_

#include <functional>
#include <optional>

#include "absl/status/status.h"
#include "kernels/step_queue_resource.h"
#include "tensorflow/core/framework/op_kernel.h"

namespace tpu_embedding {

// The next update to apply, or none; called while the variables are locked.
using NextUpdate = std::function<std::optional<BatchQueue::Update>()>;

// Applies updates to the variables behind the resource inputs `tables` and
// `slots`. What fails before the first one leaves it where it is.
absl::Status ApplyUpdates(tensorflow::OpKernelContext* context,
                          StepQueueResource* resource, const NextUpdate& next);

}  // namespace tpu_embedding

#endif  // TPU_EMBEDDING_OPS_CC_KERNELS_APPLY_UPDATES_H_
