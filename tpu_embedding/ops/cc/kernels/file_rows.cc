// TpuEmbeddingFileRows reads rows of a table in a file.

#include "core/file_rows.h"

#include <cstdint>
#include <limits>
#include <memory>
#include <mutex>
#include <string>

#include "kernels/kernel_util.h"
#include "tensorflow/core/framework/op.h"
#include "tensorflow/core/framework/op_kernel.h"
#include "tensorflow/core/framework/shape_inference.h"

namespace tpu_embedding {
namespace {

using tensorflow::OpKernelConstruction;
using tensorflow::OpKernelContext;
using tensorflow::Tensor;
using tensorflow::shape_inference::InferenceContext;
using tensorflow::shape_inference::ShapeHandle;

REGISTER_OP("TpuEmbeddingFileRows")
    .Input("rows: int64")
    .Output("values: dtype")
    .Attr("dtype: {float, bfloat16, int16, uint8}")
    .Attr("shape: shape")
    .Attr("path: string")
    .SetIsStateful()
    .SetShapeFn([](InferenceContext* context) {
      ShapeHandle rows;
      TF_RETURN_IF_ERROR(context->WithRank(context->input(0), 1, &rows));
      tensorflow::TensorShape shape;
      TF_RETURN_IF_ERROR(context->GetAttr("shape", &shape));
      const auto columns = shape.dims() == 2
                               ? context->MakeDim(shape.dim_size(1))
                               : context->UnknownDim();
      context->set_output(0, context->Matrix(context->Dim(rows, 0), columns));
      return absl::OkStatus();
    })
    .Doc(R"doc(
Reads rows of a matrix in a file, without reading the whole file.

rows: [n], the rows to read.
values: [n, columns].
shape: the shape of the matrix.
path: the file, which has the rows one after the other.
)doc");

class FileRowsOp : public tensorflow::OpKernel {
 public:
  explicit FileRowsOp(OpKernelConstruction* context) : OpKernel(context) {
    tensorflow::TensorShape shape;
    tensorflow::DataType dtype;
    OP_REQUIRES_OK(context, context->GetAttr("shape", &shape));
    OP_REQUIRES_OK(context, context->GetAttr("dtype", &dtype));
    OP_REQUIRES_OK(context, context->GetAttr("path", &path_));
    const int64_t size = tensorflow::DataTypeSize(dtype);
    OP_REQUIRES(
        context,
        shape.dims() == 2 && shape.num_elements() > 0 &&
            shape.num_elements() <= std::numeric_limits<int64_t>::max() / size,
        absl::InvalidArgumentError(absl::StrCat(
            "`shape` must be that of a matrix with values. Received: ",
            shape.DebugString(), ".")));
    num_rows_ = shape.dim_size(0);
    columns_ = shape.dim_size(1);
    row_bytes_ = columns_ * size;
  }

  void Compute(OpKernelContext* context) override {
    const Tensor& rows = context->input(0);
    OP_REQUIRES(context, rows.dims() == 1,
                absl::InvalidArgumentError(
                    absl::StrCat("`rows` must be a vector. Received: shape ",
                                 rows.shape().DebugString(), ".")));
    const auto flat = rows.flat<int64_t>();
    for (int64_t i = 0; i < flat.size(); ++i) {
      OP_REQUIRES(
          context, flat(i) >= 0 && flat(i) < num_rows_,
          absl::InvalidArgumentError(absl::StrCat(
              path_, " has ", num_rows_, " rows, but no row ", flat(i), ".")));
    }
    std::shared_ptr<FileRows> file;
    OP_REQUIRES_OK(context, WithinMemory([&] { return Open(&file); }));
    Tensor* values = nullptr;
    OP_REQUIRES_OK(
        context, context->allocate_output(0, {flat.size(), columns_}, &values));
    char* const out = const_cast<char*>(values->tensor_data().data());
    OP_REQUIRES_OK(context, WithinMemory([&] {
                     return DataLoss(file->Read(flat.data(), flat.size(), out,
                                                WorkerPool(context)));
                   }));
  }

 private:
  static absl::Status DataLoss(const Error& error) {
    return error ? absl::DataLossError(*error) : absl::OkStatus();
  }

  absl::Status Open(std::shared_ptr<FileRows>* file) {
    const std::lock_guard<std::mutex> lock(mutex_);
    if (!file_) {
      TF_RETURN_IF_ERROR(
          DataLoss(FileRows::Open(path_, num_rows_, row_bytes_, &file_)));
    }
    *file = file_;
    return absl::OkStatus();
  }

  std::string path_;
  int64_t num_rows_ = 0, columns_ = 0, row_bytes_ = 0;
  std::mutex mutex_;
  std::shared_ptr<FileRows> file_;
};

REGISTER_KERNEL_BUILDER(
    Name("TpuEmbeddingFileRows").Device(tensorflow::DEVICE_CPU), FileRowsOp);

}  // namespace
}  // namespace tpu_embedding
