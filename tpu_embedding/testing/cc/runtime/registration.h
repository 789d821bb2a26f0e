// Registers kernels for ops of TensorFlow that have none on the CPU.

#ifndef TPU_EMBEDDING_TESTING_CC_RUNTIME_REGISTRATION_H_
#define TPU_EMBEDDING_TESTING_CC_RUNTIME_REGISTRATION_H_

#include "tensorflow/core/framework/kernel_def_builder.h"
#include "tensorflow/core/framework/op_kernel.h"

namespace tpu_embedding {

inline bool HasCpuKernel(const char* op) {
  const auto registered = tensorflow::GetRegisteredKernelsForOp(op);
  for (const auto& kernel : registered.kernel()) {
    if (kernel.device_type() == tensorflow::DEVICE_CPU) return true;
  }
  return false;
}

// Registers `Kernel` for `op` on CPUs, unless there is a kernel already: the
// TensorFlow that is built for TPUs brings some of them, and two kernels that
// match are an error at the first use.
template <class Kernel>
bool RegisterWhereMissing(const char* op) {
  if (HasCpuKernel(op)) return false;
  using tensorflow::OpKernel;
  using tensorflow::OpKernelConstruction;
  tensorflow::kernel_factory::OpKernelRegistrar(
      tensorflow::KernelDefBuilder(op).Device(tensorflow::DEVICE_CPU).Build(),
      op, [](OpKernelConstruction* context) -> OpKernel* {
        return new Kernel(context);
      });
  return true;
}

}  // namespace tpu_embedding

// Registers the kernel class when the library is loaded. For .cc files only.
#define SOFTWARE_TPU_KERNEL(op, ...)                   \
  [[maybe_unused]] static const bool registered_##op = \
      ::tpu_embedding::RegisterWhereMissing<__VA_ARGS__>(#op)

#endif  // TPU_EMBEDDING_TESTING_CC_RUNTIME_REGISTRATION_H_
