// Simulates the quantization of looked-up values, by the attributes of an op.

#ifndef TPU_EMBEDDING_TESTING_CC_SPARSE_CORE_SIMULATED_QUANTIZATION_H_
#define TPU_EMBEDDING_TESTING_CC_SPARSE_CORE_SIMULATED_QUANTIZATION_H_

#include <algorithm>
#include <cmath>

#include "tensorflow/core/framework/op_kernel.h"

namespace tpu_embedding {

// Clips a value to [low, high] and moves it to the nearest of `num_buckets`
// values between them, ends included. With 0 buckets it leaves the value alone.
class SimulatedQuantization {
 public:
  explicit SimulatedQuantization(tensorflow::OpKernelConstruction* context) {
    OP_REQUIRES_OK(context, context->GetAttr("quantization_config_low", &low_));
    OP_REQUIRES_OK(context,
                   context->GetAttr("quantization_config_high", &high_));
    OP_REQUIRES_OK(context, context->GetAttr("quantization_config_num_buckets",
                                             &num_buckets_));
    OP_REQUIRES(context, num_buckets_ == 0 || num_buckets_ > 1,
                absl::InvalidArgumentError(
                    "`quantization_config_num_buckets` must be 0 or > 1."));
    step_ = num_buckets_ ? (high_ - low_) / (num_buckets_ - 1) : 1.0f;
  }

  float operator()(float value) const {
    if (num_buckets_ == 0) return value;
    const float x = std::min(std::max(value, low_), high_);
    return std::floor((x - low_) / step_ + 0.5f) * step_ + low_;
  }

 private:
  float low_;
  float high_;
  int num_buckets_;
  float step_;
};

}  // namespace tpu_embedding

#endif  // TPU_EMBEDDING_TESTING_CC_SPARSE_CORE_SIMULATED_QUANTIZATION_H_
