// XlaSparseDenseMatmulCustomCombinerOnTcWithCsrInput looks up a table whose
// vectors a function combines.

#include <cstdint>
#include <vector>

#include "runtime/registration.h"
#include "sparse_core/combiner.h"
#include "sparse_core/simulated_quantization.h"
#include "sparse_core/sparse_core_op.h"
#include "tensorflow/core/framework/op_kernel.h"

namespace tpu_embedding {
namespace {

using tensorflow::OpKernelConstruction;
using tensorflow::OpKernelContext;
using tensorflow::Tensor;

class CombinerLookupOp : public SparseCoreOp {
 public:
  explicit CombinerLookupOp(OpKernelConstruction* context)
      : SparseCoreOp(context),
        quantization_(context),
        combiner_(context, "combiner_computation") {
    OP_REQUIRES_OK(context, context->GetAttr("input_size", &input_size_));
    OP_REQUIRES_OK(context, context->GetAttr("max_valency", &max_valency_));
    OP_REQUIRES_OK(context, context->GetAttr("num_weights", &num_weights_));
    OP_REQUIRES(context, max_valency_ > 0,
                absl::InvalidArgumentError("`max_valency` must be > 0."));
  }

 protected:
  absl::Status ComputeAll(const Contexts& contexts) override {
    CsrFrame frame;
    Tensors parts;
    std::vector<DeviceCsr> csrs;
    TF_RETURN_IF_ERROR(Inputs(contexts, "embedding_table", &parts));
    TF_RETURN_IF_ERROR(FrameOf(contexts, parts, &frame));
    TF_RETURN_IF_ERROR(SetSamples(input_size_, &frame));
    frame.max_valency = max_valency_;
    TF_RETURN_IF_ERROR(ReadAll(contexts, frame, &csrs));
    for (size_t r = 0; r < contexts.size(); ++r) {
      // Each replica's kernel has a function of its own.
      const auto& kernel =
          static_cast<const CombinerLookupOp&>(contexts[r]->op_kernel());
      TF_RETURN_IF_ERROR(kernel.Combine(contexts[r], csrs[r], parts));
    }
    return absl::OkStatus();
  }

 private:
  absl::Status Combine(OpKernelContext* context, const DeviceCsr& csr,
                       const Tensors& parts) const {
    const int64_t dim = parts[0]->dim_size(1);
    Tensor *activations, *valencies, *vectors;
    TF_RETURN_IF_ERROR(
        context->allocate_output(0, {input_size_, dim}, &activations));
    TF_RETURN_IF_ERROR(context->allocate_output(1, {input_size_}, &valencies));
    TF_RETURN_IF_ERROR(context->allocate_output(
        2, {input_size_, max_valency_, dim}, &vectors));
    Gather(csr, parts, valencies, vectors);
    const Tensor* weights;
    TF_RETURN_IF_ERROR(context->input("weights", &weights));
    const CombinerInputs inputs = {*valencies, *vectors, *weights,
                                   std::nullopt};
    TF_RETURN_IF_ERROR(inputs.Check(max_valency_, num_weights_, dim));
    Tensor combined;
    TF_RETURN_IF_ERROR(
        inputs.Call(combiner_, context, activations->shape(), &combined));
    activations->flat<float>() = combined.flat<float>();
    return absl::OkStatus();
  }

  // Gathers the vectors of each sample in the order of its ids, then zeros.
  void Gather(const DeviceCsr& csr, const Tensors& parts, Tensor* valencies,
              Tensor* vectors) const {
    const int64_t dim = parts[0]->dim_size(1);
    valencies->flat<int32_t>().setZero();
    vectors->flat<float>().setZero();
    float* const to = vectors->flat<float>().data();
    for (const Partition& partition : csr.partitions()) {
      const float* const table =
          parts[csr.Device(partition)]->flat<float>().data();
      for (int64_t i = partition.begin; i < partition.end; ++i) {
        valencies->flat<int32_t>()(csr.Sample(partition, i)) += 1;
        const float* const row = table + csr.Row(partition, i) * dim;
        float* const vector = to + csr.Place(partition, i) * dim;
        for (int64_t d = 0; d < dim; ++d) {
          vector[d] += csr.Gain(i) * quantization_(row[d]);
        }
      }
    }
  }

  int input_size_ = 0;
  int max_valency_ = 0;
  int num_weights_ = 0;
  const SimulatedQuantization quantization_;
  const InlineFunction combiner_;
};

SOFTWARE_TPU_KERNEL(XlaSparseDenseMatmulCustomCombinerOnTcWithCsrInput,
                    CombinerLookupOp);

}  // namespace
}  // namespace tpu_embedding
