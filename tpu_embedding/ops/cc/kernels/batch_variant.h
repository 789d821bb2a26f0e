// A prepared batch as a scalar variant tensor.

#ifndef TPU_EMBEDDING_OPS_CC_KERNELS_BATCH_VARIANT_H_
#define TPU_EMBEDDING_OPS_CC_KERNELS_BATCH_VARIANT_H_

#include <memory>
#include <string>

#include "core/prepared_batch.h"
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

}  // namespace tpu_embedding

#endif  // TPU_EMBEDDING_OPS_CC_KERNELS_BATCH_VARIANT_H_
