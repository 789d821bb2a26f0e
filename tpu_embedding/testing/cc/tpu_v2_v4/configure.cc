// ConfigureTPUEmbedding and IsTPUEmbeddingInitialized, and our own ops that
// replace the initialization of a TPU and count how often it was initialized.

#include <cmath>
#include <cstdint>
#include <string>

#include "runtime/registration.h"
#include "tensorflow/core/framework/common_shape_fns.h"
#include "tensorflow/core/framework/op.h"
#include "tensorflow/core/framework/op_kernel.h"
#include "tensorflow/core/framework/shape_inference.h"
#include "tpu_v2_v4/tpu_system.h"

namespace tpu_embedding {
namespace {

using tensorflow::OpKernel;
using tensorflow::OpKernelConstruction;
using tensorflow::OpKernelContext;
using tensorflow::Tensor;

REGISTER_OP("TpuEmbeddingSoftwareTpuInitialize")
    .Attr("meeting_timeout: float")
    .SetIsStateful()
    .SetShapeFn(tensorflow::shape_inference::NoOutputs)
    .Doc(R"doc(
Forgets the embedding engine and its tables, as the initialization of a TPU does.

meeting_timeout: seconds that an op of the next engine waits for what it needs.
)doc");

REGISTER_OP("TpuEmbeddingSoftwareTpuSession")
    .Attr("expected: int = -1")
    .Attr("ended: string = ''")
    .Output("session: int64")
    .SetIsStateful()
    .SetShapeFn(tensorflow::shape_inference::ScalarShape)
    .Doc(R"doc(
Returns how many times the TPU was initialized.

expected: the op fails if the number differs; -1 accepts any number.
ended: the text of the FailedPreconditionError.
)doc");

class InitializeOp : public OpKernel {
 public:
  explicit InitializeOp(OpKernelConstruction* context) : OpKernel(context) {
    OP_REQUIRES_OK(context, context->GetAttr("meeting_timeout", &timeout_));
    OP_REQUIRES(context, timeout_ > 0.0f && std::isfinite(timeout_),
                absl::InvalidArgumentError("`meeting_timeout` must be > 0."));
  }

  void Compute(OpKernelContext*) override {
    TpuSystem::Get().Initialize(absl::Seconds(timeout_));
  }

 private:
  float timeout_;
};

class SessionOp : public OpKernel {
 public:
  explicit SessionOp(OpKernelConstruction* context) : OpKernel(context) {
    OP_REQUIRES_OK(context, context->GetAttr("expected", &expected_));
    OP_REQUIRES_OK(context, context->GetAttr("ended", &ended_));
  }

  void Compute(OpKernelContext* context) override {
    const int64_t session = TpuSystem::Get().session();
    OP_REQUIRES(context, expected_ == -1 || expected_ == session,
                absl::FailedPreconditionError(ended_));
    Tensor* output;
    OP_REQUIRES_OK(context, context->allocate_output(0, {}, &output));
    output->scalar<int64_t>()() = session;
  }

 private:
  int64_t expected_;
  std::string ended_;
};

class ConfigureOp : public OpKernel {
 public:
  explicit ConfigureOp(OpKernelConstruction* context) : OpKernel(context) {
    OP_REQUIRES_OK(context, context->GetAttr("config", &config_));
  }

  void Compute(OpKernelContext* context) override {
    OP_REQUIRES_OK(context, TpuSystem::Get().Configure(config_));
  }

 private:
  std::string config_;
};

class IsInitializedOp : public OpKernel {
 public:
  explicit IsInitializedOp(OpKernelConstruction* context) : OpKernel(context) {
    OP_REQUIRES_OK(context, context->GetAttr("config", &config_));
  }

  void Compute(OpKernelContext* context) override {
    const EnginePtr engine = TpuSystem::Get().engine();
    Tensor* output;
    OP_REQUIRES_OK(context, context->allocate_output(0, {}, &output));
    output->scalar<bool>()() =
        engine && (config_.empty() || config_ == engine->config);
  }

 private:
  std::string config_;
};

SOFTWARE_TPU_KERNEL(TpuEmbeddingSoftwareTpuInitialize, InitializeOp);
SOFTWARE_TPU_KERNEL(TpuEmbeddingSoftwareTpuSession, SessionOp);
SOFTWARE_TPU_KERNEL(ConfigureTPUEmbedding, ConfigureOp);
SOFTWARE_TPU_KERNEL(IsTPUEmbeddingInitialized, IsInitializedOp);

}  // namespace
}  // namespace tpu_embedding
