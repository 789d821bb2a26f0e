// Reads the inputs of the ops that take raw features.

#ifndef TPU_EMBEDDING_OPS_CC_KERNELS_FEATURE_INPUTS_H_
#define TPU_EMBEDDING_OPS_CC_KERNELS_FEATURE_INPUTS_H_

#include <vector>

#include "core/prepared_batch.h"
#include "kernels/kernel_util.h"
#include "kernels/plan.h"
#include "tensorflow/core/framework/op_kernel.h"

namespace tpu_embedding {

// Reads what TpuEmbeddingPrepare documents: the list `inputs`, and the record
// in the attribute `call`.
class FeatureInputs {
 public:
  // Takes the features of a plan and adds what `call` says about them.
  absl::Status Read(tensorflow::OpKernelConstruction* context,
                    std::vector<FeatureSpec> specs);

  // The views are valid while the inputs of `context` are.
  absl::Status ReadInputs(tensorflow::OpKernelContext* context,
                          std::vector<FeatureInput>* inputs) const;

  const std::vector<FeatureSpec>& specs() const { return specs_; }
  bool training() const { return training_; }

 private:
  absl::Status CheckTypes(tensorflow::OpKernelConstruction* context) const;

  std::vector<FeatureSpec> specs_;
  std::vector<bool> has_weights_;
  std::vector<bool> has_weight_structure_;
  bool training_ = false;
};

}  // namespace tpu_embedding

#endif  // TPU_EMBEDDING_OPS_CC_KERNELS_FEATURE_INPUTS_H_
