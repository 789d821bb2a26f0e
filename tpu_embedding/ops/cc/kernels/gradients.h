// What the ops that take gradients share.

#ifndef TPU_EMBEDDING_OPS_CC_KERNELS_GRADIENTS_H_
#define TPU_EMBEDDING_OPS_CC_KERNELS_GRADIENTS_H_

#include <vector>

#include "kernels/plan.h"
#include "kernels/step_queue_resource.h"
#include "tensorflow/core/framework/op_kernel.h"

namespace tpu_embedding {

// Reads the attribute "has_gradient", by feature; checks "num_gradients".
absl::Status ReadHasGradient(tensorflow::OpKernelConstruction* context,
                             std::vector<bool>* has_gradient);

// Reads the inputs "gradients" and "rates".
absl::Status ReadGradients(tensorflow::OpKernelContext* context,
                           const Plan& plan,
                           const std::vector<bool>& has_gradient,
                           ReplicaGradients* gradients);

// Fails unless the gradients have the shapes of the activations and, where the
// plan asks for it, are finite.
absl::Status CheckGradients(const Plan& plan, const PreparedBatch& batch,
                            const ReplicaGradients& gradients);

}  // namespace tpu_embedding

#endif  // TPU_EMBEDDING_OPS_CC_KERNELS_GRADIENTS_H_
