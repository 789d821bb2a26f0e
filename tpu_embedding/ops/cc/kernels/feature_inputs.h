// The inputs of the ops that take raw features: ids, weights, structures.

#ifndef TPU_EMBEDDING_OPS_CC_KERNELS_FEATURE_INPUTS_H_
#define TPU_EMBEDDING_OPS_CC_KERNELS_FEATURE_INPUTS_H_

#include <vector>

#include "core/prepared_batch.h"
#include "kernels/kernel_util.h"
#include "tensorflow/core/framework/op_kernel.h"

namespace tpu_embedding {

// Reads what TpuEmbeddingPrepare documents: the inputs ids, structures,
// shapes, weights, weight_structures, and the attributes about them.
class FeatureInputs {
 public:
  absl::Status ReadAttributes(tensorflow::OpKernelConstruction* context);

  // The batch of one replica, checked. It is grouped by row if `training`.
  absl::Status Prepare(tensorflow::OpKernelContext* context, bool training,
                       PreparedBatch* batch) const;

  // The views are valid while the inputs of `context` are.
  absl::Status ReadInputs(tensorflow::OpKernelContext* context,
                          std::vector<FeatureInput>* inputs) const;

  const std::vector<FeatureSpec>& specs() const { return specs_; }

 private:
  absl::Status ReadSpecs(tensorflow::OpKernelConstruction* context);
  absl::Status CheckLists(tensorflow::OpKernelConstruction* context) const;
  absl::Status ReadWeights(tensorflow::OpKernelContext* context,
                           std::vector<FeatureInput>* inputs) const;

  std::vector<FeatureSpec> specs_;
  TableMap tables_;
  std::vector<bool> has_weights_;
  std::vector<bool> has_weight_structure_;
};

}  // namespace tpu_embedding

#endif  // TPU_EMBEDDING_OPS_CC_KERNELS_FEATURE_INPUTS_H_
