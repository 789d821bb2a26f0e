// TPUCopyWithDynamicShape and TPUAnnotateTensorsWithDynamicShape: host memory
// is device memory here, so both ops return their inputs.

#include <algorithm>
#include <cstdint>
#include <limits>

#include "runtime/registration.h"
#include "tensorflow/core/framework/op_kernel.h"

namespace tpu_embedding {
namespace {

using tensorflow::OpKernel;
using tensorflow::OpKernelContext;
using tensorflow::Tensor;

template <class T>
void CopyAndPoison(const Tensor& from, int64_t size, T poison, Tensor* to) {
  const T* data = from.flat<T>().data();
  T* copy = to->flat<T>().data();
  std::copy(data, data + size, copy);
  std::fill(copy + size, copy + from.NumElements(), poison);
}

// A TPU gets the first `size` elements and undefined ones after them. Here the
// latter become values that no kernel can read unnoticed.
absl::Status CopyWithSize(const Tensor& from, int64_t size, Tensor* to) {
  switch (from.dtype()) {
    case tensorflow::DT_INT32:
      CopyAndPoison(from, size, std::numeric_limits<int32_t>::min(), to);
      return absl::OkStatus();
    case tensorflow::DT_FLOAT:
      CopyAndPoison(from, size, std::numeric_limits<float>::quiet_NaN(), to);
      return absl::OkStatus();
    default:
      return absl::InvalidArgumentError(absl::StrCat(
          "TPUCopyWithDynamicShape takes int32 and float32 here, but got ",
          tensorflow::DataTypeString(from.dtype()), "."));
  }
}

class CopyWithDynamicShapeOp : public OpKernel {
 public:
  using OpKernel::OpKernel;

  void Compute(OpKernelContext* context) override {
    tensorflow::OpInputList tensors, sizes;
    OP_REQUIRES_OK(context, context->input_list("tensors", &tensors));
    OP_REQUIRES_OK(context, context->input_list("unpadded_sizes", &sizes));
    OP_REQUIRES(context, sizes.size() == tensors.size(),
                absl::InvalidArgumentError(absl::StrCat(
                    tensors.size(), " tensors need as many sizes, but got ",
                    sizes.size(), ".")));
    for (int i = 0; i < tensors.size(); ++i) {
      OP_REQUIRES_OK(context, Copy(context, i, tensors[i], sizes[i]));
    }
  }

 private:
  static absl::Status Copy(OpKernelContext* context, int i,
                           const Tensor& tensor, const Tensor& size) {
    if (tensor.dims() != 1 || size.NumElements() != 1) {
      return absl::InvalidArgumentError(absl::StrCat(
          "Tensor ", i, " must be a vector with a scalar size, but they are ",
          tensor.shape().DebugString(), " and ", size.shape().DebugString(),
          "."));
    }
    const int64_t unpadded = size.flat<int32_t>()(0);
    if (unpadded < 0 || unpadded > tensor.NumElements()) {
      return absl::InvalidArgumentError(
          absl::StrCat("Tensor ", i, " has ", tensor.NumElements(),
                       " elements, but its unpadded size is ", unpadded, "."));
    }
    Tensor* output = nullptr;
    TF_RETURN_IF_ERROR(context->allocate_output(i, tensor.shape(), &output));
    return CopyWithSize(tensor, unpadded, output);
  }
};

class AnnotateTensorsOp : public OpKernel {
 public:
  using OpKernel::OpKernel;

  void Compute(OpKernelContext* context) override {
    for (int i = 0; i < context->num_inputs(); ++i) {
      context->set_output(i, context->input(i));
    }
  }
};

SOFTWARE_TPU_KERNEL(TPUCopyWithDynamicShape, CopyWithDynamicShapeOp);
SOFTWARE_TPU_KERNEL(TPUAnnotateTensorsWithDynamicShape, AnnotateTensorsOp);

}  // namespace
}  // namespace tpu_embedding
