// What the ops share that work on tables divided over processes.

#ifndef TPU_EMBEDDING_OPS_CC_KERNELS_SHARDED_H_
#define TPU_EMBEDDING_OPS_CC_KERNELS_SHARDED_H_

#include <cstdint>
#include <vector>

#include "core/routing.h"
#include "core/wire.h"
#include "kernels/channel.h"
#include "kernels/kernel_util.h"
#include "kernels/plan.h"
#include "tensorflow/core/framework/op_kernel.h"
#include "tensorflow/core/framework/tensor.h"

namespace tpu_embedding {

// Offsets in a message of the parts that belong to tables and features.
struct MessageLayout {
  std::vector<int64_t> tables;    // offset of the rows of each
  std::vector<int64_t> features;  // offset of the samples of each
  int64_t bytes = 0;
};

// How a table's rows, and float32 values, travel.
inline bool TravelsAsBFloat16(const Plan& plan, bool table_is_bfloat16) {
  return plan.bfloat16_wire || table_is_bfloat16;
}

// Outputs `message`, `splits` and `refusal` of an op, from `first` on; with a
// refusal the message is empty. `write(process, data)` writes each part, of
// `bytes`.
template <class Write>
absl::Status SetMessage(tensorflow::OpKernelContext* context, int first,
                        const absl::Status& status,
                        const std::vector<int64_t>& bytes, const Write& write) {
  tensorflow::Tensor *message = nullptr, *splits = nullptr, *refusal = nullptr;
  int64_t total = 0;
  for (const int64_t part : bytes) total += status.ok() ? part : 0;
  const int64_t size = bytes.size();
  TF_RETURN_IF_ERROR(context->allocate_output(first, {total}, &message));
  TF_RETURN_IF_ERROR(context->allocate_output(first + 1, {size}, &splits));
  TF_RETURN_IF_ERROR(context->allocate_output(first + 2, {}, &refusal));
  refusal->scalar<tensorflow::tstring>()() = Refusal(status);
  auto* next = static_cast<char*>(message->data());
  for (int64_t p = 0; p < size; ++p) {
    splits->flat<int64_t>()(p) = status.ok() ? bytes[p] : 0;
    if (!status.ok()) continue;
    if (bytes[p]) write(p, next);
    next += bytes[p];
  }
  return absl::OkStatus();
}

// The inputs `received` and `received_splits`: where the part of each process
// begins, and its size. Aligned as kWireAlignment says.
struct Received {
  tensorflow::Tensor tensor;
  std::vector<int64_t> offsets, bytes;

  const char* data(int process) const {
    return static_cast<const char*>(tensor.data()) + offsets[process];
  }
};

inline absl::Status ReadReceived(tensorflow::OpKernelContext* context, int size,
                                 Received* received) {
  const tensorflow::Tensor *tensor = nullptr, *splits = nullptr;
  TF_RETURN_IF_ERROR(context->input("received", &tensor));
  TF_RETURN_IF_ERROR(context->input("received_splits", &splits));
  TF_RETURN_IF_ERROR(
      CheckLength("received_splits", splits->NumElements(), size));
  received->tensor = *tensor;
  int64_t next = 0;
  for (int p = 0; p < size; ++p) {
    received->offsets.push_back(next);
    received->bytes.push_back(splits->flat<int64_t>()(p));
    next += received->bytes.back();
  }
  return CheckLength("received", tensor->NumElements(), next);
}

inline absl::Status CheckBytes(int process, int64_t bytes, int64_t expected) {
  if (bytes == expected) return absl::OkStatus();
  return absl::InternalError(absl::StrCat(
      "Process ", process, " sent ", bytes, " bytes where ", expected,
      " are expected. Run the same release of tpu_embedding in all "
      "processes."));
}

}  // namespace tpu_embedding

#endif  // TPU_EMBEDDING_OPS_CC_KERNELS_SHARDED_H_
