// A prepared batch as a scalar variant tensor.

#ifndef TPU_EMBEDDING_OPS_CC_KERNELS_BATCH_VARIANT_H_
#define TPU_EMBEDDING_OPS_CC_KERNELS_BATCH_VARIANT_H_

#include <atomic>
#include <memory>
#include <string>
#include <utility>

#include "core/prepared_batch.h"
#include "kernels/kernel_util.h"
#include "tensorflow/core/framework/tensor.h"
#include "tensorflow/core/framework/variant.h"
#include "tensorflow/core/framework/variant_tensor_data.h"

namespace tpu_embedding {

using SharedBatch = std::shared_ptr<const PreparedBatch>;

// Copies share the batch. It lives within one process: it is neither encoded
// nor decoded.
struct BatchVariant {
  SharedBatch batch;

  std::string TypeName() const { return "tpu_embedding::PreparedBatch"; }
  std::string DebugString() const { return TypeName(); }
  void Encode(tensorflow::VariantTensorData*) const {}
  bool Decode(const tensorflow::VariantTensorData&) { return false; }
};

// A lookup whose gradients may be submitted, once.
struct Ticket {
  explicit Ticket(SharedBatch looked_up) : batch(std::move(looked_up)) {}

  const SharedBatch batch;
  std::atomic<bool> used{false};
};

// Copies are the same ticket.
struct TicketVariant {
  std::shared_ptr<Ticket> ticket;

  std::string TypeName() const { return "tpu_embedding::Ticket"; }
  std::string DebugString() const { return TypeName(); }
  void Encode(tensorflow::VariantTensorData*) const {}
  bool Decode(const tensorflow::VariantTensorData&) { return false; }
};

// The value of a scalar variant tensor, or an error that says what it is not.
template <class T>
absl::Status Unwrap(const tensorflow::Tensor& tensor, const char* source,
                    const T** value) {
  TF_RETURN_IF_ERROR(CheckScalar(source, tensor));
  *value = tensor.scalar<tensorflow::Variant>()().get<T>();
  if (*value) return absl::OkStatus();
  return absl::InvalidArgumentError(
      absl::StrCat("A variant that does not come from ", source, "."));
}

}  // namespace tpu_embedding

#endif  // TPU_EMBEDDING_OPS_CC_KERNELS_BATCH_VARIANT_H_
