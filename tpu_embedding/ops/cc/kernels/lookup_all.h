// The lookup of a whole batch, shared by the ops that give activations.

#ifndef TPU_EMBEDDING_OPS_CC_KERNELS_LOOKUP_ALL_H_
#define TPU_EMBEDDING_OPS_CC_KERNELS_LOOKUP_ALL_H_

#include <memory>
#include <vector>

#include "core/lookup.h"
#include "core/prepared_batch.h"
#include "kernels/huge_pages.h"
#include "kernels/kernel_util.h"
#include "tensorflow/core/framework/op_kernel.h"
#include "tensorflow/core/framework/shape_inference.h"

namespace tpu_embedding {

// Reads the attributes of the lookup ops and runs them. The op's first outputs
// are the activations.
class BatchLookup {
 public:
  // Attributes: feature_tables, quantization.
  absl::Status ReadAttributes(tensorflow::OpKernelConstruction* context);

  // Looks `batch` up in `tables` and allocates the outputs.
  absl::Status Run(tensorflow::OpKernelContext* context,
                   const PreparedBatch& batch,
                   const std::vector<Variable>& tables) const;

  int num_features() const { return feature_tables_.size(); }

 private:
  std::vector<int> feature_tables_;
  std::vector<Quantization> quantization_;  // by table
  std::unique_ptr<HugePages> huge_pages_;
};

// The shapes of the attribute `output_shapes`.
absl::Status ActivationShapes(
    tensorflow::shape_inference::InferenceContext* context);

// The same, then one scalar.
absl::Status ActivationShapesThenScalar(
    tensorflow::shape_inference::InferenceContext* context);

}  // namespace tpu_embedding

#endif  // TPU_EMBEDDING_OPS_CC_KERNELS_LOOKUP_ALL_H_
