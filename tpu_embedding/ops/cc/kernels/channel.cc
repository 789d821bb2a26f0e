// TpuEmbeddingChannel makes the channel over which the processes of one
// embedding exchange bytes; TpuEmbeddingChannelStatistics tells the bytes sent.

#include "kernels/channel.h"

#include <string>
#include <vector>

#include "kernels/kernel_util.h"
#include "kernels/plan.h"
#include "tensorflow/core/framework/op.h"
#include "tensorflow/core/framework/op_kernel.h"
#include "tensorflow/core/framework/shape_inference.h"

namespace tpu_embedding {
namespace {

using tensorflow::OpKernelConstruction;
using tensorflow::OpKernelContext;
using tensorflow::Tensor;
using tensorflow::shape_inference::InferenceContext;

REGISTER_OP("TpuEmbeddingChannel")
    .Output("channel: resource")
    .Attr("record: string")
    .SetIsStateful()
    .SetShapeFn(tensorflow::shape_inference::ScalarShape)
    .Doc(R"doc(
Makes a channel among the processes of a job. It lives as long as a handle.

record: key, rank, group_key, devices and timeout_seconds
  (engines/process_group.py).
)doc");

REGISTER_OP("TpuEmbeddingChannelStatistics")
    .Input("channel: resource")
    .Output("exchanges: int64")
    .Output("bytes_sent: int64")
    .Output("waited_microseconds: int64")
    .SetIsStateful()
    .SetShapeFn([](InferenceContext* context) {
      context->set_output(0, context->Vector(kPhases.size()));
      context->set_output(1, context->Vector(kPhases.size()));
      context->set_output(2, context->Vector(InferenceContext::kUnknownDim));
      return absl::OkStatus();
    })
    .Doc(R"doc(
Returns how many exchanges began and how many bytes were sent so far, by phase,
and how long it took until the messages of each process had arrived.
)doc");

class ChannelOp : public tensorflow::OpKernel {
 public:
  explicit ChannelOp(OpKernelConstruction* context) : OpKernel(context) {
    Record record;
    OP_REQUIRES_OK(context, record.Read(context, "record"));
    OP_REQUIRES_OK(context, record.Get("key", &key_));
    OP_REQUIRES_OK(context, record.Get("rank", &rank_));
    OP_REQUIRES_OK(context, record.Get("group_key", &group_key_));
    OP_REQUIRES_OK(context, record.Get("devices", &devices_));
    OP_REQUIRES_OK(context, record.Get("timeout_seconds", &timeout_seconds_));
    OP_REQUIRES_OK(context, CheckIndices("rank", {rank_}, devices_.size()));
  }

  void Compute(OpKernelContext* context) override {
    ChannelKeys::Get().Add(key_);
    Tensor* handle = nullptr;
    OP_REQUIRES_OK(context, context->allocate_output(0, {}, &handle));
    handle->scalar<tensorflow::ResourceHandle>()() =
        tensorflow::ResourceHandle::MakeRefCountingHandle(
            new Channel(key_, rank_, group_key_, devices_, timeout_seconds_),
            context->device()->name());
  }

 private:
  std::string key_;
  int rank_ = 0;
  int group_key_ = 0;
  std::vector<std::string> devices_;
  int64_t timeout_seconds_ = 0;
};

class ChannelStatisticsOp : public tensorflow::OpKernel {
 public:
  using OpKernel::OpKernel;

  void Compute(OpKernelContext* context) override {
    ChannelPtr channel;
    OP_REQUIRES_OK(context, LookUpChannel(context, &channel));
    Tensor *exchanges = nullptr, *bytes = nullptr, *waited = nullptr;
    const int64_t size = kPhases.size();
    OP_REQUIRES_OK(context, context->allocate_output(0, {size}, &exchanges));
    OP_REQUIRES_OK(context, context->allocate_output(1, {size}, &bytes));
    OP_REQUIRES_OK(context,
                   context->allocate_output(2, {channel->size()}, &waited));
    for (int64_t p = 0; p < size; ++p) {
      exchanges->flat<int64_t>()(p) = channel->phases[p].exchanges;
      bytes->flat<int64_t>()(p) = channel->phases[p].bytes_sent;
    }
    for (int p = 0; p < channel->size(); ++p) {
      waited->flat<int64_t>()(p) = channel->waited_microseconds[p];
    }
  }
};

REGISTER_KERNEL_BUILDER(
    Name("TpuEmbeddingChannel").Device(tensorflow::DEVICE_CPU), ChannelOp);
REGISTER_KERNEL_BUILDER(
    Name("TpuEmbeddingChannelStatistics").Device(tensorflow::DEVICE_CPU),
    ChannelStatisticsOp);

}  // namespace

absl::Status LookUpChannel(OpKernelContext* context, ChannelPtr* channel) {
  TF_RETURN_IF_ERROR(CheckScalar("channel", context->input(0)));
  return tensorflow::LookupResource(
      context, tensorflow::HandleFromInput(context, 0), channel);
}

}  // namespace tpu_embedding
