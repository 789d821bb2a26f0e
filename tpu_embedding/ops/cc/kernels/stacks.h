// Stacked batches as the inputs and outputs of ops.

#ifndef TPU_EMBEDDING_OPS_CC_KERNELS_STACKS_H_
#define TPU_EMBEDDING_OPS_CC_KERNELS_STACKS_H_

#include <string>
#include <vector>

#include "core/prepared_batch.h"
#include "core/stacks.h"
#include "tensorflow/core/framework/op_kernel.h"

namespace tpu_embedding {

// Which features are in which stack. Attributes: stack_names, feature_stacks,
// first_tokens, paths, feature_tables, vocabulary_sizes.
class Stacks {
 public:
  absl::Status ReadAttributes(tensorflow::OpKernelConstruction* context);

  // The outputs row_pointers, sample_ids, token_ids and gains, in this order,
  // each a list with one tensor for each stack.
  absl::Status Write(tensorflow::OpKernelContext* context,
                     const PreparedBatch& batch) const;

  // Undoes Write: reads the inputs row_pointers, token_ids and gains, of which
  // nothing is trusted, into the features of `batch`.
  // `output_shapes`: for each feature its shape without the embedding axis.
  absl::Status Read(tensorflow::OpKernelContext* context,
                    std::vector<std::vector<int64_t>> output_shapes,
                    PreparedBatch* batch) const;

  const TableMap& tables() const { return tables_; }

 private:
  struct Stack {
    std::string name;
    std::vector<int> indices;  // of its features
    std::vector<StackedFeature> features;
  };

  absl::Status WriteOne(tensorflow::OpKernelContext* context, int stack,
                        const PreparedBatch& batch) const;

  std::vector<Stack> stacks_;
  TableMap tables_;
};

}  // namespace tpu_embedding

#endif  // TPU_EMBEDDING_OPS_CC_KERNELS_STACKS_H_
