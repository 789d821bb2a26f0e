// TpuEmbeddingSendGradients and TpuEmbeddingReceiveGradients: the gradients of
// a lookup in tables that are divided over processes.

#include <cstring>
#include <memory>
#include <utility>
#include <vector>

#include "core/pieces.h"
#include "core/routing.h"
#include "kernels/gradients.h"
#include "kernels/sharded.h"
#include "kernels/step_queue_resource.h"
#include "tensorflow/core/framework/common_shape_fns.h"
#include "tensorflow/core/framework/op.h"
#include "tensorflow/core/framework/op_kernel.h"
#include "tensorflow/core/framework/shape_inference.h"

namespace tpu_embedding {
namespace {

using tensorflow::OpInputList;
using tensorflow::OpKernelConstruction;
using tensorflow::OpKernelContext;
using tensorflow::Tensor;
using tensorflow::shape_inference::InferenceContext;

REGISTER_OP("TpuEmbeddingSendGradients")
    .Input("queue: resource")
    .Input("batches: num_batches * variant")
    .Input("gradients: num_gradients * float")
    .Input("rates: float")
    .Output("message: uint8")
    .Output("splits: int64")
    .Output("refusal: string")
    .Attr("num_batches: int >= 0")
    .Attr("num_gradients: int >= 0")
    .Attr("has_gradient: list(bool)")
    .SetIsStateful()
    .SetShapeFn([](InferenceContext* context) {
      context->set_output(0, context->Vector(InferenceContext::kUnknownDim));
      context->set_output(1, context->Vector(InferenceContext::kUnknownDim));
      context->set_output(2, context->Scalar());
      return absl::OkStatus();
    })
    .Doc(R"doc(
The gradients of samples, for the owners of their rows. Nothing changes.

batches, gradients, has_gradient: as of TpuEmbeddingUpdate.
rates: [num_tables]; those of process 0 count.
message, splits, refusal: for TpuEmbeddingExchange.
)doc");

REGISTER_OP("TpuEmbeddingReceiveGradients")
    .Input("queue: resource")
    .Input("batches: num_batches * variant")
    .Input("gradients: num_gradients * float")
    .Input("rates: float")
    .Input("received: uint8")
    .Input("received_splits: int64")
    .Input("counters: num_counters * resource")
    .Output("apply_now: bool")
    .Attr("num_batches: int >= 0")
    .Attr("num_gradients: int >= 0")
    .Attr("num_counters: int >= 0")
    .Attr("has_gradient: list(bool)")
    .SetIsStateful()
    .SetShapeFn(tensorflow::shape_inference::ScalarShape)
    .Doc(R"doc(
Hands in the gradients of all processes for the rows of this one.

batches, gradients, rates, has_gradient: those of TpuEmbeddingSendGradients.
received, received_splits: from TpuEmbeddingExchange.
counters, apply_now: as of TpuEmbeddingUpdate.
)doc");

// The message from one process to another: which features have gradients, one
// byte each, the rates, then the samples of each feature that has them.
struct GradientLayout {
  int64_t rates = 0;  // the offset; the flags are at 0
  MessageLayout samples;
};

template <class HasGradient, class NumSamples>
GradientLayout LayOut(const Plan& plan, const HasGradient& has_gradient,
                      const NumSamples& num_samples) {
  GradientLayout layout;
  layout.rates = Padded(plan.features.size());
  int64_t next = layout.rates + Padded(4 * plan.tables.size());
  const int64_t width = plan.bfloat16_wire ? sizeof(BFloat16) : sizeof(float);
  for (size_t f = 0; f < plan.features.size(); ++f) {
    layout.samples.features.push_back(next);
    if (has_gradient(f)) next += Padded(num_samples(f) * plan.dim(f) * width);
  }
  layout.samples.bytes = next;
  return layout;
}

// The batch that takes the gradients: the one in the input "batches", whose
// variant is then `*given`, or if there is none the one that is owed.
absl::Status FindBatch(OpKernelContext* context, StepQueueResource* resource,
                       int replica, SharedBatch* batch,
                       const BatchVariant** given) {
  OpInputList batches;
  TF_RETURN_IF_ERROR(context->input_list("batches", &batches));
  *given = nullptr;
  if (batches.size() == 0) {
    return FailedPrecondition(resource->queue.Owed(replica, batch));
  }
  const BatchVariant* variant = nullptr;
  TF_RETURN_IF_ERROR(Unwrap(batches[0], resource->plan.get(), &variant));
  *given = variant;
  TF_RETURN_IF_ERROR(variant->status);
  *batch = (*given)->batch;
  return absl::OkStatus();
}

// Hands in the gradients of what FindBatch found.
absl::Status HandIn(StepQueueResource* resource, int replica,
                    const BatchVariant* given, ReplicaGradients gradients,
                    const BatchQueue::Count& count, bool* apply_now) {
  if (!given) {
    return FailedPrecondition(resource->queue.Deposit(
        replica, std::move(gradients), count, apply_now));
  }
  if (given->used && given->used->exchange(true)) {
    return absl::FailedPreconditionError(
        "The gradients of this lookup were applied already; each lookup takes "
        "them once. Call the layer again, or take all gradients with one "
        "tape.gradient call.");
  }
  const absl::Status status = FailedPrecondition(
      resource->queue.Submit(replica, given->batch, std::move(gradients),
                             given->epoch, count, apply_now));
  if (!status.ok() && given->used) given->used->store(false);
  return status;
}

// What both ops read alike.
struct OwnGradients {
  SharedBatch batch;
  const BatchVariant* given = nullptr;
  ReplicaGradients gradients;

  absl::Status Read(OpKernelContext* context, StepQueueResource* resource,
                    const std::vector<bool>& has_gradient) {
    const Plan& plan = *resource->plan;
    TF_RETURN_IF_ERROR(ReadGradients(context, plan, has_gradient, &gradients));
    TF_RETURN_IF_ERROR(FindBatch(context, resource, 0, &batch, &given));
    if (!batch->routed || !batch->routed->training) {
      return absl::InvalidArgumentError(
          "A malformed graph: the batch was not prepared for training. Trace "
          "the function again.");
    }
    return CheckGradients(plan, *batch, gradients);
  }
};

class SendGradientsOp : public tensorflow::OpKernel {
 public:
  explicit SendGradientsOp(OpKernelConstruction* context) : OpKernel(context) {
    OP_REQUIRES_OK(context, ReadHasGradient(context, &has_gradient_));
  }

  void Compute(OpKernelContext* context) override {
    QueuePtr resource;
    OP_REQUIRES_OK(context, LookUpQueue(context, &resource));
    const Plan& plan = *resource->plan;
    OwnGradients own;
    const absl::Status status =
        own.Read(context, resource.get(), has_gradient_);
    const Placement& placement = plan.placement;
    std::vector<GradientLayout> layouts(placement.size);
    std::vector<int64_t> bytes(placement.size, 0);
    for (int p = 0; p < placement.size && status.ok(); ++p) {
      if (p == placement.rank) continue;
      const RoutedBatch& routed = *own.batch->routed;
      layouts[p] = LayOut(
          plan, [&](int f) { return has_gradient_[f]; },
          [&](int f) { return routed.NumSent(p, f); });
      bytes[p] = layouts[p].samples.bytes;
    }
    std::vector<char*> messages(placement.size, nullptr);
    OP_REQUIRES_OK(context,
                   SetMessage(context, 0, status, bytes,
                              [&](int p, char* data) { messages[p] = data; }));
    if (status.ok()) Write(context, plan, own, layouts, messages);
  }

 private:
  void Write(OpKernelContext* context, const Plan& plan,
             const OwnGradients& own,
             const std::vector<GradientLayout>& layouts,
             const std::vector<char*>& messages) const {
    const RoutedBatch& routed = *own.batch->routed;
    const int64_t num_features = plan.features.size();
    std::vector<Work> works;
    for (int p = 0; p < plan.placement.size; ++p) {
      const bool other = p != plan.placement.rank;
      if (other) {
        char* flags = messages[p];
        std::memset(flags, 0, layouts[p].samples.features[0]);
        for (int64_t f = 0; f < num_features; ++f) flags[f] = has_gradient_[f];
        std::memcpy(flags + layouts[p].rates,
                    own.gradients.rates.flat<float>().data(),
                    sizeof(float) * plan.tables.size());
      }
      for (int64_t f = 0; f < num_features; ++f) {
        const int64_t count =
            other && has_gradient_[f] ? routed.NumSent(p, f) : 0;
        works.push_back({count, count * (20 + plan.dim(f) / 2)});
      }
    }
    ForEachPiece(WorkerPool(context), works, [&](const Piece& piece) {
      const int p = piece.owner / num_features;
      const int64_t f = piece.owner % num_features;
      const int64_t dim = plan.dim(f);
      const float* from = own.gradients.features[f]->flat<float>().data();
      char* to = messages[p] + layouts[p].samples.features[f];
      const Buffer<int32_t>& samples = routed.sent[p].features[f].samples;
      const bool all = !routed.by_rows(f) ||
                       samples.size() == routed.batch.features[f].num_samples();
      const auto copy = [&](int64_t source, int64_t target, int64_t count) {
        if (plan.bfloat16_wire) {
          ToBFloat16(from + source * dim, count * dim,
                     reinterpret_cast<BFloat16*>(to) + target * dim);
        } else {
          std::memcpy(to + target * dim * sizeof(float), from + source * dim,
                      count * dim * sizeof(float));
        }
      };
      if (all) {
        copy(piece.begin, piece.begin, piece.end - piece.begin);
        return;
      }
      for (int64_t s = piece.begin; s < piece.end; ++s) copy(samples[s], s, 1);
    });
  }

  std::vector<bool> has_gradient_;
};

class ReceiveGradientsOp : public tensorflow::OpKernel {
 public:
  explicit ReceiveGradientsOp(OpKernelConstruction* context)
      : OpKernel(context) {
    OP_REQUIRES_OK(context, ReadHasGradient(context, &has_gradient_));
  }

  void Compute(OpKernelContext* context) override {
    QueuePtr resource;
    OP_REQUIRES_OK(context, LookUpQueue(context, &resource));
    std::vector<Variable> counters;
    OP_REQUIRES_OK(context, LookUpCounters(context, &counters));
    OwnGradients own;
    OP_REQUIRES_OK(context, own.Read(context, resource.get(), has_gradient_));
    Received received;
    OP_REQUIRES_OK(
        context,
        ReadReceived(context, resource->plan->placement.size, &received));
    auto gradients = std::make_shared<ReceivedGradients>();
    OP_REQUIRES_OK(
        context, Unpack(context, *resource->plan, *own.batch->routed, received,
                        gradients.get(), &own.gradients.rates));
    own.gradients.received = std::move(gradients);
    const auto count = [&] {
      return counters.empty() ? 0 : AddTo(counters[0].get(), 1);
    };
    bool apply_now = false;
    OP_REQUIRES_OK(
        context, HandIn(resource.get(), 0, own.given, std::move(own.gradients),
                        count, &apply_now));
    Tensor* output = nullptr;
    OP_REQUIRES_OK(context, context->allocate_output(0, {}, &output));
    output->scalar<bool>()() = apply_now;
  }

 private:
  static absl::Status Unpack(OpKernelContext* context, const Plan& plan,
                             const RoutedBatch& routed,
                             const Received& received,
                             ReceivedGradients* gradients, Tensor* rates) {
    const Placement& placement = plan.placement;
    const int64_t num_features = plan.features.size();
    gradients->buffers.push_back(received.tensor);
    gradients->features.resize(placement.size);
    for (int p = 0; p < placement.size; ++p) {
      gradients->features[p].resize(num_features, nullptr);
      if (p == placement.rank) continue;
      if (received.bytes[p] < Padded(num_features)) {
        return CheckBytes(p, received.bytes[p], Padded(num_features));
      }
      const char* data = received.data(p);
      const Asked& asked = routed.asked[p];
      const GradientLayout layout = LayOut(
          plan, [&](int f) { return data[f] != 0; },
          [&](int f) { return asked.features[f].num_samples(); });
      TF_RETURN_IF_ERROR(
          CheckBytes(p, received.bytes[p], layout.samples.bytes));
      if (p == 0) {
        *rates = Tensor(tensorflow::DT_FLOAT, rates->shape());
        std::memcpy(rates->data(), data + layout.rates, rates->TotalBytes());
      }
      for (int64_t f = 0; f < num_features; ++f) {
        if (!data[f]) continue;
        const char* samples = data + layout.samples.features[f];
        if (!plan.bfloat16_wire) {
          gradients->features[p][f] = reinterpret_cast<const float*>(samples);
          continue;
        }
        const int64_t count = asked.features[f].num_samples() * plan.dim(f);
        Tensor expanded;
        TF_RETURN_IF_ERROR(
            context->allocate_temp(tensorflow::DT_FLOAT, {count}, &expanded));
        FromBFloat16(reinterpret_cast<const BFloat16*>(samples), count,
                     expanded.flat<float>().data());
        gradients->features[p][f] = expanded.flat<float>().data();
        gradients->buffers.push_back(expanded);
      }
    }
    return absl::OkStatus();
  }

  std::vector<bool> has_gradient_;
};

REGISTER_KERNEL_BUILDER(
    Name("TpuEmbeddingSendGradients").Device(tensorflow::DEVICE_CPU),
    SendGradientsOp);
REGISTER_KERNEL_BUILDER(
    Name("TpuEmbeddingReceiveGradients").Device(tensorflow::DEVICE_CPU),
    ReceiveGradientsOp);

}  // namespace
}  // namespace tpu_embedding
