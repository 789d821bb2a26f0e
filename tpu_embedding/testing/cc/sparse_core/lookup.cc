// XlaSparseDenseMatmulWithStaticBufferSize and ...WithCsrInput look tables up.

#include <algorithm>
#include <cstdint>
#include <vector>

#include "runtime/registration.h"
#include "sparse_core/simulated_quantization.h"
#include "sparse_core/sparse_core_op.h"
#include "tensorflow/core/framework/op_kernel.h"

namespace tpu_embedding {
namespace {

using tensorflow::OpKernelConstruction;
using tensorflow::OpKernelContext;
using tensorflow::Tensor;

// Rough cycles of one entry, without those for each of its elements.
constexpr int64_t kCyclesPerEntry = 100;

class LookupOp : public SparseCoreOp {
 public:
  explicit LookupOp(OpKernelConstruction* context)
      : SparseCoreOp(context), quantization_(context) {
    OP_REQUIRES_OK(context, context->GetAttr("input_size", &input_size_));
  }

 protected:
  absl::Status ComputeAll(const Contexts& contexts) override {
    CsrFrame frame;
    Tensors parts;
    std::vector<DeviceCsr> csrs;
    TF_RETURN_IF_ERROR(Inputs(contexts, "embedding_table", &parts));
    TF_RETURN_IF_ERROR(FrameOf(contexts, parts, &frame));
    TF_RETURN_IF_ERROR(SetSamples(input_size_, &frame));
    TF_RETURN_IF_ERROR(ReadAll(contexts, frame, &csrs));
    std::vector<float*> activations;
    const int64_t dim = parts[0]->dim_size(1);
    for (OpKernelContext* context : contexts) {
      Tensor* output;
      TF_RETURN_IF_ERROR(
          context->allocate_output(0, {input_size_, dim}, &output));
      output->flat<float>().setZero();
      activations.push_back(output->flat<float>().data());
    }
    // A SparseCore writes only to its own samples.
    const int64_t cores = frame.num_sparse_cores;
    const int64_t total = cores * static_cast<int64_t>(contexts.size());
    Workers(contexts[0])(
        total, kCyclesPerEntry * std::max<int64_t>(frame.num_samples, 1),
        [&](int64_t begin, int64_t end) {
          for (int64_t i = begin; i < end; ++i) {
            LookUp(csrs[i / cores], i % cores, parts, activations[i / cores]);
          }
        });
    return absl::OkStatus();
  }

 private:
  void LookUp(const DeviceCsr& csr, int64_t sparse_core, const Tensors& parts,
              float* activations) const {
    const int64_t dim = parts[0]->dim_size(1);
    for (const Partition& partition : csr.partitions()) {
      if (partition.sparse_core != sparse_core) continue;
      const float* const table =
          parts[csr.Device(partition)]->flat<float>().data();
      for (int64_t i = partition.begin; i < partition.end; ++i) {
        const float* const row = table + csr.Row(partition, i) * dim;
        float* const sum = activations + csr.Sample(partition, i) * dim;
        const float gain = csr.Gain(i);
        for (int64_t d = 0; d < dim; ++d) {
          sum[d] += gain * quantization_(row[d]);
        }
      }
    }
  }

  int input_size_;
  const SimulatedQuantization quantization_;
};

SOFTWARE_TPU_KERNEL(XlaSparseDenseMatmulWithStaticBufferSize, LookupOp);
SOFTWARE_TPU_KERNEL(XlaSparseDenseMatmulWithCsrInput, LookupOp);

}  // namespace
}  // namespace tpu_embedding
