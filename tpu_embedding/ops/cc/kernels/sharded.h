// Shared code of the ops on tables divided over processes or servers.

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
#include "tensorflow/core/framework/shape_inference.h"
#include "tensorflow/core/framework/tensor.h"

namespace tpu_embedding {

// Offsets in a message of the parts that belong to tables and features.
struct MessageLayout {
  std::vector<int64_t> tables;    // offset of the rows of each
  std::vector<int64_t> features;  // offset of the samples of each
  int64_t bytes = 0;
};

// Returns whether float32 values to and from `process` travel as bfloat16.
// Values that stay in their process are not rounded.
inline bool Narrow(const Plan& plan, int process) {
  return plan.bfloat16_wire && !plan.placement.is_own(process);
}

// Outputs the list `messages` and, after it, the scalar `refusal`. Each
// receiver gets a message of `bytes`, which `write(receiver, data)` writes.
// After an error processes send each other the refusal and empty messages; with
// servers the op itself fails.
template <class Write>
absl::Status SetMessages(tensorflow::OpKernelContext* context,
                         const Placement& placement, const absl::Status& status,
                         const std::vector<int64_t>& bytes,
                         const Write& write) {
  if (placement.served) TF_RETURN_IF_ERROR(status);
  tensorflow::OpOutputList messages;
  TF_RETURN_IF_ERROR(context->output_list("messages", &messages));
  TF_RETURN_IF_ERROR(CheckLength("messages", messages.size(), bytes.size()));
  for (size_t p = 0; p < bytes.size(); ++p) {
    const int64_t size = status.ok() ? bytes[p] : 0;
    tensorflow::Tensor* message = nullptr;
    TF_RETURN_IF_ERROR(messages.allocate(p, {size}, &message));
    if (size) write(p, static_cast<char*>(message->data()));
  }
  tensorflow::Tensor* refusal = nullptr;
  TF_RETURN_IF_ERROR(context->allocate_output("refusal", {}, &refusal));
  refusal->scalar<tensorflow::tstring>()() = Refusal(status);
  return absl::OkStatus();
}

// Sets the shapes of an op with outputs for SetMessages, which come last.
inline absl::Status MessageShapes(
    tensorflow::shape_inference::InferenceContext* context) {
  using Context = tensorflow::shape_inference::InferenceContext;
  int num_messages = 0;
  TF_RETURN_IF_ERROR(context->GetAttr("num_messages", &num_messages));
  const int refusal = context->num_outputs() - 1;
  for (int i = 0; i < context->num_outputs(); ++i) {
    const bool is_message = i < refusal && i >= refusal - num_messages;
    context->set_output(i, is_message ? context->Vector(Context::kUnknownDim)
                                      : context->Scalar());
  }
  return absl::OkStatus();
}

// Reads the input list `received`, one message from each of `size` senders. The
// messages begin at multiples of kWireAlignment in memory.
inline absl::Status ReadReceived(tensorflow::OpKernelContext* context, int size,
                                 tensorflow::OpInputList* received) {
  TF_RETURN_IF_ERROR(context->input_list("received", received));
  return CheckLength("received", received->size(), size);
}

inline const char* DataOf(const tensorflow::OpInputList& received, int sender) {
  return static_cast<const char*>(received[sender].data());
}

inline absl::Status CheckRouted(const PreparedBatch& batch) {
  if (batch.routed) return absl::OkStatus();
  return absl::InvalidArgumentError(
      "A malformed graph: the batch was not divided over its owners. Trace the "
      "function again.");
}

inline absl::Status CheckBytes(int sender, int64_t bytes, int64_t expected) {
  if (bytes == expected) return absl::OkStatus();
  return absl::InternalError(absl::StrCat(
      "Process ", sender, " sent ", bytes, " bytes where ", expected,
      " are expected. Run the same release of tpu_embedding in all "
      "processes."));
}

}  // namespace tpu_embedding

#endif  // TPU_EMBEDDING_OPS_CC_KERNELS_SHARDED_H_
