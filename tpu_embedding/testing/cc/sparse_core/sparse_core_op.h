// Shared code of the kernels of all SparseCore ops: attributes, shapes, checks.

#ifndef TPU_EMBEDDING_TESTING_CC_SPARSE_CORE_SPARSE_CORE_OP_H_
#define TPU_EMBEDDING_TESTING_CC_SPARSE_CORE_SPARSE_CORE_OP_H_

#include <cstdint>
#include <string>
#include <vector>

#include "runtime/replica_barrier.h"
#include "runtime/workers.h"
#include "sparse_core/device_csr.h"
#include "sparse_core/table_gradients.h"
#include "tensorflow/core/framework/op_kernel.h"

namespace tpu_embedding {

using Tensors = std::vector<const tensorflow::Tensor*>;

// Finds the input `name` of each replica.
absl::Status Inputs(const Contexts& contexts, const char* name,
                    Tensors* tensors);

class SparseCoreOp : public BarrierOp {
 public:
  explicit SparseCoreOp(tensorflow::OpKernelConstruction* context);

 protected:
  // Checks the parts of the table, by device, and sets all of the frame but the
  // number of samples.
  absl::Status FrameOf(const Contexts& contexts, const Tensors& parts,
                       CsrFrame* frame) const;

  // Sets what depends on the number of samples of a replica.
  absl::Status SetSamples(int64_t num_samples, CsrFrame* frame) const;

  // Reads the CSR of each replica.
  static absl::Status ReadAll(const Contexts& contexts, const CsrFrame& frame,
                              std::vector<DeviceCsr>* csrs);

  // Checks the gradients of the activations and the CSR of all replicas.
  virtual absl::Status ReadGradients(const Contexts& contexts, int64_t dim,
                                     CsrFrame* frame,
                                     TableGradientSums* sums) const;

 private:
  absl::Status NumSparseCores(const Contexts& contexts, int64_t* number) const;

  std::string table_;
  int num_sparse_cores_ = -1;
  int max_ids_ = 0;  // 0: the op has no such limit
  int max_unique_ids_ = 0;
};

}  // namespace tpu_embedding

#endif  // TPU_EMBEDDING_TESTING_CC_SPARSE_CORE_SPARSE_CORE_OP_H_
