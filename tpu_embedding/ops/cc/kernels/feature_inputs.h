// How ops that take raw features read them.

#ifndef TPU_EMBEDDING_OPS_CC_KERNELS_FEATURE_INPUTS_H_
#define TPU_EMBEDDING_OPS_CC_KERNELS_FEATURE_INPUTS_H_

#include <cstdint>
#include <vector>

#include "core/feature.h"
#include "tensorflow/core/framework/op_kernel.h"

namespace tpu_embedding {

template <class T>
std::vector<T> GetList(tensorflow::OpKernelConstruction* context,
                       const char* name) {
  std::vector<T> values;
  context->SetStatus(context->GetAttr(name, &values));
  return values;
}

// The attributes and inputs that TpuEmbeddingPrepare and TpuEmbeddingPartition
// have in common.
class FeatureReader {
 public:
  // Failures go to the status of `context`.
  void ReadSpecs(tensorflow::OpKernelConstruction* context);

  // The views are valid while the inputs of `context` are.
  absl::Status ReadInputs(tensorflow::OpKernelContext* context,
                          std::vector<FeatureInput>* inputs) const;

  const std::vector<FeatureSpec>& specs() const { return specs_; }

 private:
  absl::Status ReadWeights(tensorflow::OpKernelContext* context,
                           std::vector<FeatureInput>* inputs) const;

  std::vector<FeatureSpec> specs_;
  std::vector<bool> has_weights_;
  std::vector<bool> has_weight_structure_;
};

}  // namespace tpu_embedding

#endif  // TPU_EMBEDDING_OPS_CC_KERNELS_FEATURE_INPUTS_H_
