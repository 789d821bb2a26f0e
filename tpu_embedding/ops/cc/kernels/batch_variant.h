// A prepared batch as a scalar variant tensor.

#ifndef TPU_EMBEDDING_OPS_CC_KERNELS_BATCH_VARIANT_H_
#define TPU_EMBEDDING_OPS_CC_KERNELS_BATCH_VARIANT_H_

#include <atomic>
#include <memory>
#include <optional>
#include <string>
#include <utility>

#include "core/prepared_batch.h"
#include "kernels/kernel_util.h"
#include "kernels/plan.h"
#include "tensorflow/core/framework/tensor.h"
#include "tensorflow/core/framework/variant.h"
#include "tensorflow/core/framework/variant_tensor_data.h"

namespace tpu_embedding {

using SharedBatch = std::shared_ptr<const PreparedBatch>;

// One batch, or the reason why it was refused: the op that takes it knows the
// queue and the replica that must learn of a refusal. Copies share the batch.
// It lives within one process: it is neither encoded nor decoded.
struct BatchVariant {
  BatchVariant() = default;
  BatchVariant(SharedPlan own_plan, SharedBatch own_batch,
               absl::Status own_status)
      : plan(std::move(own_plan)),
        batch(std::move(own_batch)),
        status(std::move(own_status)) {}

  SharedPlan plan;
  SharedBatch batch;
  absl::Status status;
  // The epoch of a lookup (StepQueue::BeginLookup), and whether its gradients
  // came: they may come only once for all copies.
  std::optional<int64_t> epoch;
  std::shared_ptr<std::atomic<bool>> used;
  // What TpuEmbeddingRoute gives and TpuEmbeddingReceiveBatch completes.
  std::shared_ptr<RoutedBatch> routed;

  std::string TypeName() const { return "tpu_embedding::Batch"; }
  std::string DebugString() const { return TypeName(); }
  void Encode(tensorflow::VariantTensorData*) const {}
  bool Decode(const tensorflow::VariantTensorData&) { return false; }
};

// Finds the batch in a scalar variant tensor. It must be of `plan`.
inline absl::Status Unwrap(const tensorflow::Tensor& tensor, const Plan* plan,
                           const BatchVariant** value) {
  TF_RETURN_IF_ERROR(CheckScalar("batch", tensor));
  *value = tensor.scalar<tensorflow::Variant>()().get<BatchVariant>();
  if (!*value) {
    return absl::InvalidArgumentError(
        "A malformed graph: an input is not a prepared batch. Trace the "
        "function again.");
  }
  if (plan && (*value)->plan.get() != plan) {
    return absl::InvalidArgumentError(
        "A malformed graph: the batch was prepared for another embedding. "
        "Trace the function again.");
  }
  return absl::OkStatus();
}

// Reads the input `looked_up`: the batch of an earlier lookup, or none.
inline absl::Status ReadLookedUp(tensorflow::OpKernelContext* context,
                                 SharedBatch* batch) {
  tensorflow::OpInputList tensors;
  TF_RETURN_IF_ERROR(context->input_list("looked_up", &tensors));
  for (const tensorflow::Tensor& tensor : tensors) {
    const BatchVariant* variant = nullptr;
    TF_RETURN_IF_ERROR(Unwrap(tensor, nullptr, &variant));
    *batch = variant->batch;
  }
  return absl::OkStatus();
}

// Marks the gradients of a lookup as taken; fails if they were taken before.
inline absl::Status TakeOnce(const BatchVariant& looked_up) {
  if (!looked_up.used || !looked_up.used->exchange(true)) {
    return absl::OkStatus();
  }
  return absl::FailedPreconditionError(
      "The gradients of this lookup were applied already; each lookup takes "
      "them once. Call the layer again, or take all gradients with one "
      "tape.gradient call.");
}

inline absl::Status Wrap(tensorflow::OpKernelContext* context, int output,
                         BatchVariant batch) {
  tensorflow::Tensor* tensor = nullptr;
  TF_RETURN_IF_ERROR(context->allocate_output(output, {}, &tensor));
  tensor->scalar<tensorflow::Variant>()() = std::move(batch);
  return absl::OkStatus();
}

}  // namespace tpu_embedding

#endif  // TPU_EMBEDDING_OPS_CC_KERNELS_BATCH_VARIANT_H_
