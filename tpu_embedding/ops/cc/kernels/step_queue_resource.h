// The step queue as a TensorFlow resource.

#ifndef TPU_EMBEDDING_OPS_CC_KERNELS_STEP_QUEUE_RESOURCE_H_
#define TPU_EMBEDDING_OPS_CC_KERNELS_STEP_QUEUE_RESOURCE_H_

#include <optional>
#include <string>
#include <vector>

#include "core/step_queue.h"
#include "kernels/batch_variant.h"
#include "tensorflow/core/framework/op_kernel.h"
#include "tensorflow/core/framework/resource_base.h"
#include "tensorflow/core/framework/resource_mgr.h"
#include "tensorflow/core/framework/tensor.h"

namespace tpu_embedding {

// By feature; a gradient that was not given counts as zeros.
using FeatureGradients = std::vector<std::optional<tensorflow::Tensor>>;

// What one replica hands in.
struct ReplicaGradients {
  FeatureGradients features;
  // By table the learning rate. The replica that completes a step evaluates
  // the rates, the others hand in zeros: their sum is the rate.
  tensorflow::Tensor rates;
};

using BatchQueue = StepQueue<SharedBatch, ReplicaGradients>;

class StepQueueResource : public tensorflow::ResourceBase {
 public:
  StepQueueResource(int num_replicas, int64_t capacity, bool pipelined)
      : queue(num_replicas, capacity, pipelined) {}

  std::string DebugString() const override {
    return "tpu_embedding::StepQueue";
  }

  BatchQueue queue;
};

using QueuePtr = tensorflow::core::RefCountPtr<StepQueueResource>;

// The queue behind the first input; `replica`, an attribute, must be one of it.
inline absl::Status LookUpQueue(tensorflow::OpKernelContext* context,
                                QueuePtr* queue, int replica = 0) {
  TF_RETURN_IF_ERROR(CheckScalar("queue", context->input(0)));
  TF_RETURN_IF_ERROR(tensorflow::LookupResource(
      context, tensorflow::HandleFromInput(context, 0), queue));
  return CheckIndices("replica", {replica}, (*queue)->queue.num_replicas());
}

}  // namespace tpu_embedding

#endif  // TPU_EMBEDDING_OPS_CC_KERNELS_STEP_QUEUE_RESOURCE_H_
