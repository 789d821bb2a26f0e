// TpuEmbeddingSoftwareTpuAllReduce gives each replica the sum over all of them.

#include "absl/strings/str_cat.h"
#include "runtime/registration.h"
#include "runtime/replica_barrier.h"
#include "tensorflow/core/framework/op.h"
#include "tensorflow/core/framework/op_kernel.h"
#include "tensorflow/core/framework/register_types.h"
#include "tensorflow/core/framework/shape_inference.h"
#include "tensorflow/core/framework/tensor_util.h"

namespace tpu_embedding {
namespace {

using tensorflow::DataTypeString;
using tensorflow::OpKernelContext;
using tensorflow::Tensor;

REGISTER_OP("TpuEmbeddingSoftwareTpuAllReduce")
    .Input("values: T")
    .Output("sums: T")
    .Attr("T: list(type) >= 1")
    .SetIsStateful()
    .SetShapeFn([](tensorflow::shape_inference::InferenceContext* context) {
      for (int i = 0; i < context->num_inputs(); ++i) {
        context->set_output(i, context->input(i));
      }
      return absl::OkStatus();
    })
    .Doc(R"doc(
Sums each value over all replicas, in replica order.
)doc");

template <class T>
void AddTo(const Tensor& value, Tensor* sum) {
  sum->flat<T>() = sum->flat<T>() + value.flat<T>();
}

absl::Status Add(const Tensor& value, Tensor* sum) {
  switch (value.dtype()) {
#define ADD(T)                               \
  case tensorflow::DataTypeToEnum<T>::value: \
    AddTo<T>(value, sum);                    \
    return absl::OkStatus();
    TF_CALL_NUMBER_TYPES(ADD)
#undef ADD
    default:
      return absl::InvalidArgumentError(
          absl::StrCat("An all-reduce needs numbers, but got ",
                       DataTypeString(value.dtype()), "."));
  }
}

class AllReduceOp : public BarrierOp {
 public:
  using BarrierOp::BarrierOp;

 protected:
  absl::Status ComputeAll(const Contexts& contexts) override {
    for (int i = 0; i < contexts[0]->num_inputs(); ++i) {
      TF_RETURN_IF_ERROR(Reduce(contexts, i));
    }
    return absl::OkStatus();
  }

  absl::Status CheckAlone() const override {
    return absl::FailedPreconditionError(absl::StrCat(
        name(), " has no replicas: it belongs in SoftwareTPUStrategy.run."));
  }

 private:
  absl::Status Reduce(const Contexts& contexts, int i) const {
    const Tensor& first = contexts[0]->input(i);
    Tensor sum = tensorflow::tensor::DeepCopy(first);
    for (size_t r = 1; r < contexts.size(); ++r) {
      const Tensor& value = contexts[r]->input(i);
      if (value.shape() != first.shape() || value.dtype() != first.dtype()) {
        return absl::InvalidArgumentError(absl::StrCat(
            name(), ": value ", i, " of replica ", r, " is ",
            DataTypeString(value.dtype()), value.shape().DebugString(),
            ", but that of replica 0 is ", DataTypeString(first.dtype()),
            first.shape().DebugString(), ". Replicas must agree in both."));
      }
      TF_RETURN_IF_ERROR(Add(value, &sum));
    }
    for (OpKernelContext* context : contexts) context->set_output(i, sum);
    return absl::OkStatus();
  }
};

SOFTWARE_TPU_KERNEL(TpuEmbeddingSoftwareTpuAllReduce, AllReduceOp);

}  // namespace
}  // namespace tpu_embedding
