// What the kernels of all SparseCore ops share: attributes, shapes, checks.

#ifndef TPU_EMBEDDING_OPS_CC_SOFTWARE_TPU_SPARSE_CORE_OP_H_
#define TPU_EMBEDDING_OPS_CC_SOFTWARE_TPU_SPARSE_CORE_OP_H_

#include <cstdint>
#include <string>
#include <vector>

#include "core/parallel.h"
#include "software_tpu/device_csr.h"
#include "software_tpu/meetings.h"
#include "tensorflow/core/framework/op_kernel.h"

namespace tpu_embedding {

// TensorFlow's own CPU worker pool.
ParallelFor Workers(tensorflow::OpKernelContext* context);

class SparseCoreOp : public MeetingOp {
 public:
  explicit SparseCoreOp(tensorflow::OpKernelConstruction* context);

 protected:
  // Checks the tables of all replicas, which `input` names, and sets all of
  // the frame but the number of samples.
  absl::Status FrameOf(const Contexts& contexts, const char* input,
                       CsrFrame* frame) const;

  // As much of it as depends on the number of samples of a replica.
  absl::Status SetSamples(int64_t num_samples, CsrFrame* frame) const;

  // The CSR of each replica.
  static absl::Status ReadAll(const Contexts& contexts, const CsrFrame& frame,
                              std::vector<DeviceCsr>* csrs);

 private:
  absl::Status NumSparseCores(const Contexts& contexts, int64_t* number) const;

  std::string table_;
  int num_sparse_cores_;
  int max_ids_ = 0;  // 0: the op has no such limit
  int max_unique_ids_ = 0;
};

}  // namespace tpu_embedding

#endif  // TPU_EMBEDDING_OPS_CC_SOFTWARE_TPU_SPARSE_CORE_OP_H_
