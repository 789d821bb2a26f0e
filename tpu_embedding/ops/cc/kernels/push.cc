// TpuEmbeddingBeginPushes and TpuEmbeddingCurrentPush set and tell the number
// under which a scheduled function pushes gradients.
//
// The number is looked up by the id of the run, not passed as a tensor through
// the user's functions: those may have been traced before, and are called with
// and without a number.

#include <cstdint>
#include <deque>
#include <map>
#include <mutex>
#include <optional>

#include "core/push_ledger.h"
#include "kernels/kernel_util.h"
#include "tensorflow/core/framework/common_shape_fns.h"
#include "tensorflow/core/framework/op.h"
#include "tensorflow/core/framework/op_kernel.h"
#include "tensorflow/core/framework/shape_inference.h"
#include "tensorflow/core/platform/random.h"

namespace tpu_embedding {
namespace {

using tensorflow::OpKernelContext;
using tensorflow::Tensor;

REGISTER_OP("TpuEmbeddingBeginPushes")
    .Input("number: int64")
    .SetIsStateful()
    .SetShapeFn(tensorflow::shape_inference::NoOutputs)
    .Doc(R"doc(
Numbers the pushes of this run of a function.

number: [2], the coordinator and the number of the scheduled function.
)doc");

REGISTER_OP("TpuEmbeddingCurrentPush")
    .Output("push: int64")
    .Output("has_number: bool")
    .SetIsStateful()
    .SetShapeFn([](tensorflow::shape_inference::InferenceContext* context) {
      context->set_output(0, context->Vector(context->UnknownDim()));
      context->set_output(1, context->Scalar());
      return absl::OkStatus();
    })
    .Doc(R"doc(
Returns what tells the pushes of this run of a function from those of others.

push: [3], coordinator, number, and a random number of the run; or empty in a
  function that has no number.
has_number: whether the function has one. An op with one output and no input
  would be moved to the device of its consumer, another process, where no run is
  known.
)doc");

// The runs that have begun in this process, the newest 4,096. A process runs
// far fewer at a time.
class Runs {
 public:
  void Begin(int64_t step, const Push& push) {
    std::lock_guard<std::mutex> lock(mutex_);
    if (pushes_.insert_or_assign(step, push).second) order_.push_back(step);
    while (order_.size() > 4096) {
      pushes_.erase(order_.front());
      order_.pop_front();
    }
  }

  std::optional<Push> Find(int64_t step) {
    std::lock_guard<std::mutex> lock(mutex_);
    const auto found = pushes_.find(step);
    if (found == pushes_.end()) return std::nullopt;
    return found->second;
  }

 private:
  std::mutex mutex_;
  std::map<int64_t, Push> pushes_;  // by step id, which is random
  std::deque<int64_t> order_;
};

Runs* AllRuns() {
  static Runs* const runs = new Runs();
  return runs;
}

class BeginPushesOp : public tensorflow::OpKernel {
 public:
  using OpKernel::OpKernel;

  void Compute(OpKernelContext* context) override {
    const Tensor& number = context->input(0);
    OP_REQUIRES_OK(context, CheckLength("number", number.NumElements(), 2));
    const auto values = number.flat<int64_t>();
    AllRuns()->Begin(context->step_id(),
                     {values(0), values(1),
                      static_cast<int64_t>(tensorflow::random::New64())});
  }
};

class CurrentPushOp : public tensorflow::OpKernel {
 public:
  using OpKernel::OpKernel;

  void Compute(OpKernelContext* context) override {
    const std::optional<Push> push = AllRuns()->Find(context->step_id());
    Tensor* output = nullptr;
    OP_REQUIRES_OK(context,
                   context->allocate_output(0, {push ? 3 : 0}, &output));
    Tensor* has_number = nullptr;
    OP_REQUIRES_OK(context, context->allocate_output(1, {}, &has_number));
    has_number->scalar<bool>()() = push.has_value();
    if (!push) return;
    auto values = output->flat<int64_t>();
    values(0) = push->source;
    values(1) = push->number;
    values(2) = push->run;
  }
};

REGISTER_KERNEL_BUILDER(
    Name("TpuEmbeddingBeginPushes").Device(tensorflow::DEVICE_CPU),
    BeginPushesOp);
REGISTER_KERNEL_BUILDER(
    Name("TpuEmbeddingCurrentPush").Device(tensorflow::DEVICE_CPU),
    CurrentPushOp);

}  // namespace
}  // namespace tpu_embedding
