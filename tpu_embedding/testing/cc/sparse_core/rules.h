// Maps the optimizers of the SparseCore ops to the rules of the core.

#ifndef TPU_EMBEDDING_TESTING_CC_SPARSE_CORE_RULES_H_
#define TPU_EMBEDDING_TESTING_CC_SPARSE_CORE_RULES_H_

#include <vector>

#include "core/update.h"
#include "tensorflow/core/framework/op_kernel.h"

namespace tpu_embedding {

struct SparseCoreRule {
  const char* optimizer;           // in the name of the op
  std::vector<const char*> slots;  // the op's inputs
  UpdateFn update;
  // Reads from the op's attributes what the header of the rule lists.
  absl::Status (*read)(tensorflow::OpKernelConstruction* context,
                       std::vector<float>* hyperparameters);
};

// Returns one row for each optimizer that there is an op for.
const std::vector<SparseCoreRule>& SparseCoreRules();

}  // namespace tpu_embedding

#endif  // TPU_EMBEDDING_TESTING_CC_SPARSE_CORE_RULES_H_
