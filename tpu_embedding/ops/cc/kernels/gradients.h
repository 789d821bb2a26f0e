// The gradients of a batch, shared by the ops that take them.

#ifndef TPU_EMBEDDING_OPS_CC_KERNELS_GRADIENTS_H_
#define TPU_EMBEDDING_OPS_CC_KERNELS_GRADIENTS_H_

#include <string>
#include <vector>

#include "core/prepared_batch.h"
#include "kernels/step_queue_resource.h"
#include "tensorflow/core/framework/op_kernel.h"

namespace tpu_embedding {

class GradientReader {
 public:
  // Attributes: has_gradient, paths, dims, check_numerics.
  absl::Status ReadAttributes(tensorflow::OpKernelConstruction* context);

  // The input list "gradients", by feature, and the input "rates".
  absl::Status Read(tensorflow::OpKernelContext* context,
                    ReplicaGradients* gradients) const;

  // Fails unless they have the shapes of the activations of `batch` and, if
  // asked for, are finite.
  absl::Status Check(const PreparedBatch& batch,
                     const ReplicaGradients& given) const;

 private:
  absl::Status CheckFinite(int feature,
                           const tensorflow::Tensor& gradient) const;

  std::vector<bool> has_gradient_;
  std::vector<std::string> paths_;
  std::vector<int> dims_;
  bool check_numerics_ = false;
};

}  // namespace tpu_embedding

#endif  // TPU_EMBEDDING_OPS_CC_KERNELS_GRADIENTS_H_
