// TpuEmbeddingEncodeRows encodes float values as rows of int8.

#include "core/int8-inl.h"
#include "core/parallel.h"
#include "kernels/kernel_util.h"
#include "tensorflow/core/framework/common_shape_fns.h"
#include "tensorflow/core/framework/op.h"
#include "tensorflow/core/framework/op_kernel.h"

namespace tpu_embedding {
namespace {

using tensorflow::OpKernelContext;
using tensorflow::Tensor;

constexpr int64_t kCyclesPerValue = 2;

REGISTER_OP("TpuEmbeddingEncodeRows")
    .Input("values: float")
    .Input("rows: int64")
    .Input("seed: int64")
    .Output("codes: uint8")
    .Output("grids: bfloat16")
    .SetShapeFn([](tensorflow::shape_inference::InferenceContext* context) {
      tensorflow::shape_inference::ShapeHandle values;
      TF_RETURN_IF_ERROR(context->WithRank(context->input(0), 2, &values));
      context->set_output(0, values);
      context->set_output(1, context->Matrix(context->Dim(values, 0), 2));
      return absl::OkStatus();
    })
    .Doc(R"doc(
Returns what an int8 table stores for values.

values: [n, dim].
rows: [n], the numbers of these rows in the table, for the random bits.
seed: the rounding seed of the table, a scalar.
codes: [n, dim].
grids: [n, 2], the scale and the offset of each row.
)doc");

class EncodeRowsOp : public tensorflow::OpKernel {
 public:
  using OpKernel::OpKernel;

  void Compute(OpKernelContext* context) override {
    const Tensor& values = context->input(0);
    const Tensor& rows = context->input(1);
    OP_REQUIRES(context, values.dims() == 2,
                absl::InvalidArgumentError("`values` must be a matrix."));
    OP_REQUIRES_OK(context,
                   CheckLength("rows", rows.NumElements(), values.dim_size(0)));
    OP_REQUIRES_OK(context, CheckScalar("seed", context->input(2)));
    const int64_t size = values.dim_size(0), dim = values.dim_size(1);
    Tensor* codes = nullptr;
    Tensor* grids = nullptr;
    OP_REQUIRES_OK(context,
                   context->allocate_output(0, values.shape(), &codes));
    OP_REQUIRES_OK(context, context->allocate_output(1, {size, 2}, &grids));
    const float* const from = values.flat<float>().data();
    const int64_t* const numbers = rows.flat<int64_t>().data();
    uint8_t* const to = codes->flat<uint8_t>().data();
    auto* const pairs = static_cast<BFloat16*>(grids->data());
    std::fill_n(pairs, 2 * size, BFloat16{0});
    Rounding rounding;
    rounding.seed = context->input(2).flat<int64_t>()(0);
    WorkerPool(context)(size, 100 + dim * kCyclesPerValue,
                        [&](int64_t begin, int64_t end) {
                          for (int64_t i = begin; i < end; i += kRowsAtOnce) {
                            RowsToCode block;
                            for (int r = 0; r < kRowsAtOnce; ++r) {
                              const int64_t row = std::min(i + r, end - 1);
                              block.values[r] = from + row * dim;
                              block.rows[r] = numbers[row];
                              block.codes[r] = to + row * dim;
                              block.grids[r] = pairs + 2 * row;
                            }
                            RunOnThisCpu<CodeBody>(block, dim, rounding);
                          }
                        });
  }
};

REGISTER_KERNEL_BUILDER(
    Name("TpuEmbeddingEncodeRows").Device(tensorflow::DEVICE_CPU),
    EncodeRowsOp);

}  // namespace
}  // namespace tpu_embedding
