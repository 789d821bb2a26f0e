// TpuEmbeddingSendGradients and TpuEmbeddingReceiveGradients: the gradients of
// a lookup in tables that are divided over processes or servers.

#include <algorithm>
#include <cstring>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "core/pieces.h"
#include "core/push_ledger.h"
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

REGISTER_OP("TpuEmbeddingSendGradients")
    .Input("queues: num_queues * resource")
    .Input("batches: num_batches * variant")
    .Input("gradients: num_gradients * float")
    .Input("rates: float")
    .Input("growing: num_growing * resource")
    .Input("clock: int64")
    .Output("messages: num_messages * uint8")
    .Output("refusal: string")
    .Attr("num_queues: int >= 0")
    .Attr("num_growing: int >= 0")
    .Attr("num_batches: int >= 0")
    .Attr("num_gradients: int >= 0")
    .Attr("num_messages: int >= 1")
    .Attr("has_gradient: list(bool)")
    .SetIsStateful()
    .SetShapeFn(MessageShapes)
    .Doc(R"doc(
Writes messages with the gradients of samples to the owners of their rows.
Changes nothing.

queues: none, or the queue whose dequeued batch owes them.
batches: none if there is a queue, or the batch: from TpuEmbeddingServe or
  TpuEmbeddingReceiveBatch, in a worker from TpuEmbeddingRoute.
gradients, has_gradient: as for TpuEmbeddingUpdate.
rates: [num_tables]; those of process 0 count. A worker has none.
growing: none, or the queue with this process's part of the tables, if a table
  grows: a full one refuses the update in all processes.
clock: the user's clock, a scalar; or empty.
messages: the message to each owner, which TpuEmbeddingReceiveGradients
  receives.
refusal: the input of TpuEmbeddingExchange.
)doc");

REGISTER_OP("TpuEmbeddingReceiveGradients")
    .Input("queue: resource")
    .Input("batches: num_batches * variant")
    .Input("received: num_received * uint8")
    .Input("rates: float")
    .Input("counters: num_counters * resource")
    .Input("push: int64")
    .Output("apply_now: bool")
    .Attr("num_batches: int >= 0")
    .Attr("num_received: int >= 1")
    .Attr("num_counters: int >= 0")
    .SetIsStateful()
    .SetShapeFn(tensorflow::shape_inference::ScalarShape)
    .Doc(R"doc(
Submits the gradients of all senders for the rows of this owner.

batches: the batch, from TpuEmbeddingServe or TpuEmbeddingReceiveBatch; or none:
  the one that was dequeued last.
received: the messages of TpuEmbeddingSendGradients to this owner, by sender.
rates: [num_tables] on a server. In a job it is empty: the rates were sent.
counters, apply_now: as for TpuEmbeddingUpdate.
push: empty, or what TpuEmbeddingCurrentPush gave, if there is a batch. A push
  that was taken before is dropped: nothing changes, and it is not counted.
)doc");

// The layout of the message to one owner: a byte for each feature of its
// tables, which tells if there is a gradient; the clock; the rates; then the
// samples of each feature that has one.
struct GradientLayout {
  std::vector<int> features;     // of the plan
  int64_t clock = 0;             // where it begins; the bytes of features at 0
  int64_t rates = 0;             // where they begin
  std::vector<int64_t> samples;  // by position in `features`
  int64_t bytes = 0;
};

// `has_gradient(k, f)` tells if feature f, the k-th of the owner, has one.
template <class HasGradient, class NumSamples>
GradientLayout LayOut(const Plan& plan, int owner, bool narrow,
                      const HasGradient& has_gradient,
                      const NumSamples& num_samples) {
  const Placement& placement = plan.placement;
  GradientLayout layout;
  for (size_t f = 0; f < plan.features.size(); ++f) {
    if (placement.Holds(owner, plan.feature_tables[f])) {
      layout.features.push_back(f);
    }
  }
  constexpr int64_t kClockBytes = sizeof(int64_t);
  layout.clock =
      (layout.features.size() + kClockBytes - 1) / kClockBytes * kClockBytes;
  layout.rates = Padded(layout.clock + kClockBytes);
  layout.bytes = layout.rates;
  if (!placement.served) {
    layout.bytes += Padded(sizeof(float) * plan.tables.size());
  }
  const int64_t width = narrow ? sizeof(BFloat16) : sizeof(float);
  for (size_t k = 0; k < layout.features.size(); ++k) {
    const int f = layout.features[k];
    layout.samples.push_back(layout.bytes);
    if (!has_gradient(k, f)) continue;
    layout.bytes += Padded(num_samples(f) * plan.dim(f) * width);
  }
  return layout;
}

class SendGradientsOp : public tensorflow::OpKernel {
 public:
  explicit SendGradientsOp(OpKernelConstruction* context) : OpKernel(context) {
    OP_REQUIRES_OK(context, ReadHasGradient(context, &has_gradient_));
  }

  void Compute(OpKernelContext* context) override {
    SharedPlan plan;
    SharedBatch batch;
    absl::Status status = FindBatch(context, &plan, &batch);
    // Without a plan it is unknown which processes must learn of the error.
    OP_REQUIRES(context, plan, status);
    ReplicaGradients gradients;
    QueuePtr growing;
    if (status.ok()) status = NoteSent(context, batch, &growing);
    if (status.ok()) status = Check(context, *plan, *batch, &gradients);
    if (status.ok()) status = ReadClock(context, &gradients.clock);
    if (status.ok() && growing) {
      status =
          CheckRoom({batch}, gradients.clock, WorkerPool(context), *growing);
    }
    const Placement& placement = plan->placement;
    std::vector<GradientLayout> layouts(placement.size);
    std::vector<int64_t> bytes(placement.size, 0);
    for (int p = 0; p < placement.size && status.ok(); ++p) {
      layouts[p] = LayOut(
          *plan, p, Narrow(*plan, p),
          [&](int, int f) { return has_gradient_[f]; },
          [&](int f) { return batch->routed->NumSent(p, f); });
      bytes[p] = layouts[p].bytes;
    }
    std::vector<char*> messages(placement.size, nullptr);
    OP_REQUIRES_OK(context,
                   SetMessages(context, placement, status, bytes,
                               [&](int p, char* data) { messages[p] = data; }));
    if (status.ok()) {
      Write(context, *plan, *batch->routed, gradients, layouts, messages);
    }
  }

 private:
  absl::Status FindBatch(OpKernelContext* context, SharedPlan* plan,
                         SharedBatch* batch) const {
    OpInputList queues, batches;
    TF_RETURN_IF_ERROR(context->input_list("queues", &queues));
    TF_RETURN_IF_ERROR(context->input_list("batches", &batches));
    TF_RETURN_IF_ERROR(
        CheckLength("batches", batches.size(), 1 - queues.size()));
    if (batches.size() == 0) {
      QueuePtr resource;
      TF_RETURN_IF_ERROR(LookUpQueue(context, &resource));
      *plan = resource->plan;
      return FailedPrecondition(resource->queue.Owed(0, batch));
    }
    const BatchVariant* variant = nullptr;
    TF_RETURN_IF_ERROR(Unwrap(batches[0], nullptr, &variant));
    *plan = variant->plan;
    *batch = variant->batch;
    return variant->status;
  }

  absl::Status Check(OpKernelContext* context, const Plan& plan,
                     const PreparedBatch& batch,
                     ReplicaGradients* gradients) const {
    TF_RETURN_IF_ERROR(CheckRouted(batch));
    TF_RETURN_IF_ERROR(
        CheckLength("gradients", batch.features.size(), plan.features.size()));
    TF_RETURN_IF_ERROR(ReadGradients(context, plan, has_gradient_, gradients));
    return CheckGradients(plan, batch, *gradients);
  }

  // Notes in the queue with growing tables, if there is one, what is sent.
  static absl::Status NoteSent(OpKernelContext* context,
                               const SharedBatch& batch, QueuePtr* growing) {
    OpInputList queues, batches;
    TF_RETURN_IF_ERROR(context->input_list("growing", &queues));
    TF_RETURN_IF_ERROR(context->input_list("batches", &batches));
    if (queues.size() == 0) return absl::OkStatus();
    TF_RETURN_IF_ERROR(CheckScalar("growing", queues[0]));
    TF_RETURN_IF_ERROR(tensorflow::LookupResource(
        context, queues[0].scalar<tensorflow::ResourceHandle>()(), growing));
    (*growing)->sent = batches.size() ? batch : nullptr;
    return absl::OkStatus();
  }

  void Write(OpKernelContext* context, const Plan& plan,
             const RoutedBatch& routed, const ReplicaGradients& gradients,
             const std::vector<GradientLayout>& layouts,
             const std::vector<char*>& messages) const {
    struct Target {
      int process, feature;
      char* data;
    };
    std::vector<Target> targets;
    std::vector<Work> works;
    for (int p = 0; p < plan.placement.size; ++p) {
      const GradientLayout& layout = layouts[p];
      // Padding has a value, so that equal gradients give equal messages.
      std::memset(messages[p], 0, layout.rates);
      for (size_t k = 0; k < layout.features.size(); ++k) {
        const int f = layout.features[k];
        messages[p][k] = has_gradient_[f];
        if (!has_gradient_[f]) continue;
        const int64_t count = routed.NumSent(p, f);
        targets.push_back({p, f, messages[p] + layout.samples[k]});
        works.push_back({count, count * (20 + plan.dim(f) / 2)});
      }
      std::memcpy(messages[p] + layout.clock, &gradients.clock,
                  sizeof(gradients.clock));
      if (!plan.placement.served) {
        std::memcpy(messages[p] + layout.rates, gradients.rates.data(),
                    sizeof(float) * plan.tables.size());
      }
    }
    ForEachPiece(WorkerPool(context), works, [&](const Piece& piece) {
      const auto [p, f, to] = targets[piece.owner];
      const int64_t dim = plan.dim(f);
      const float* from = gradients.features[f]->flat<float>().data();
      const Buffer<int32_t>& samples = routed.sent[p].features[f].samples;
      const bool all = !routed.by_rows(f) ||
                       samples.size() == routed.batch.features[f].num_samples();
      const bool narrow = Narrow(plan, p);
      char* const start = to;
      const auto copy = [&](int64_t source, int64_t target, int64_t count) {
        if (narrow) {
          ToBFloat16(from + source * dim, count * dim,
                     reinterpret_cast<BFloat16*>(start) + target * dim);
        } else {
          std::memcpy(start + target * dim * sizeof(float), from + source * dim,
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
  using OpKernel::OpKernel;

  void Compute(OpKernelContext* context) override {
    QueuePtr resource;
    OP_REQUIRES_OK(context, LookUpQueue(context, &resource));
    std::vector<Variable> counters;
    OP_REQUIRES_OK(context, LookUpCounters(context, &counters));
    std::optional<Push> push;
    OP_REQUIRES_OK(context, ReadPush(context, &push));
    SharedBatch batch;
    const BatchVariant* given = nullptr;
    OP_REQUIRES_OK(context, FindBatch(context, resource.get(), &batch, &given));
    const Plan& plan = *resource->plan;
    OpInputList received;
    OP_REQUIRES_OK(context, ReadReceived(context, plan.placement.num_senders(),
                                         &received));
    ReplicaGradients gradients;
    OP_REQUIRES_OK(context,
                   Unpack(context, plan, *batch->routed, received, &gradients));
    const auto count = [&] {
      return counters.empty() ? 0 : AddTo(counters[0].get(), 1);
    };
    bool apply_now = false;
    OP_REQUIRES_OK(context,
                   Submit(resource.get(), given, std::move(gradients), push,
                          count, WorkerPool(context), &apply_now));
    OP_REQUIRES_OK(context, SetBool(context, 0, apply_now));
  }

 private:
  // Finds the batch that takes the gradients: the given one, or the one owed.
  static absl::Status FindBatch(OpKernelContext* context,
                                StepQueueResource* resource, SharedBatch* batch,
                                const BatchVariant** given) {
    OpInputList batches;
    TF_RETURN_IF_ERROR(context->input_list("batches", &batches));
    if (batches.size() == 0) {
      TF_RETURN_IF_ERROR(FailedPrecondition(resource->queue.Owed(0, batch)));
    } else {
      TF_RETURN_IF_ERROR(Unwrap(batches[0], resource->plan.get(), given));
      TF_RETURN_IF_ERROR((*given)->status);
      *batch = (*given)->batch;
    }
    TF_RETURN_IF_ERROR(CheckRouted(**batch));
    return CheckLength("batch", (*batch)->tables.size(),
                       resource->plan->tables.size());
  }

  static absl::Status ReadPush(OpKernelContext* context,
                               std::optional<Push>* push) {
    const Tensor* input = nullptr;
    TF_RETURN_IF_ERROR(context->input("push", &input));
    if (input->NumElements() == 0) return absl::OkStatus();
    TF_RETURN_IF_ERROR(CheckLength("push", input->NumElements(), 3));
    const auto values = input->flat<int64_t>();
    *push = Push{values(0), values(1), values(2)};
    return absl::OkStatus();
  }

  static absl::Status Submit(StepQueueResource* resource,
                             const BatchVariant* given,
                             ReplicaGradients gradients,
                             const std::optional<Push>& push,
                             const BatchQueue::Count& count,
                             const ParallelFor& parallel_for, bool* apply_now) {
    BatchQueue& queue = resource->queue;
    if (!given) {
      absl::Status status = AdvanceClock(*resource, &gradients.clock);
      if (!status.ok()) queue.FailOwed(0);
      TF_RETURN_IF_ERROR(status);
      return FailedPrecondition(
          queue.SubmitOwed(0, std::move(gradients), count, apply_now));
    }
    TF_RETURN_IF_ERROR(TakeOnce(*given));
    absl::Status room;
    const auto submit = [&]() -> Error {
      // Processes checked this before sending; servers do not know each other.
      room =
          CheckRoom({given->batch}, gradients.clock, parallel_for, *resource);
      if (room.ok()) room = AdvanceClock(*resource, &gradients.clock);
      if (!room.ok()) return std::string(room.message());
      return queue.Submit(0, given->batch, std::move(gradients), given->epoch,
                          count, apply_now);
    };
    // The push number is recorded together with the update, which then belongs
    // to the queue and no longer depends on the worker.
    bool repeated = false;
    absl::Status status = FailedPrecondition(
        push ? resource->pushes.Admit(*push, submit, &repeated) : submit());
    if (!room.ok()) status = room;
    if (status.ok()) return status;
    resource->ForgetLookup(given->batch);
    if (given->used) given->used->store(false);
    return status;
  }

  static absl::Status Unpack(OpKernelContext* context, const Plan& plan,
                             const RoutedBatch& routed,
                             const OpInputList& received,
                             ReplicaGradients* gradients) {
    const Tensor* rates = nullptr;
    TF_RETURN_IF_ERROR(context->input("rates", &rates));
    const int64_t num_tables = plan.tables.size();
    gradients->rates = plan.placement.served
                           ? *rates
                           : Tensor(tensorflow::DT_FLOAT,
                                    tensorflow::TensorShape({num_tables}));
    TF_RETURN_IF_ERROR(
        CheckLength("rates", gradients->rates.NumElements(), num_tables));
    auto found = std::make_shared<ReceivedGradients>();
    found->features.resize(received.size());
    for (int p = 0; p < received.size(); ++p) {
      const char* data = DataOf(received, p);
      const PeerRequest& request = routed.requests[p];
      const bool narrow = Narrow(plan, p);
      const int64_t bytes = received[p].NumElements();
      const auto none = [](auto...) { return 0; };
      const int64_t least =
          LayOut(plan, plan.placement.rank, narrow, none, none).bytes;
      if (bytes < least) return CheckBytes(p, bytes, least);
      const GradientLayout layout = LayOut(
          plan, plan.placement.rank, narrow,
          [&](int k, int) { return data[k] != 0; },
          [&](int f) { return request.features[f].num_samples(); });
      TF_RETURN_IF_ERROR(CheckBytes(p, bytes, layout.bytes));
      int64_t clock = 0;
      std::memcpy(&clock, data + layout.clock, sizeof(clock));
      gradients->clock = std::max(gradients->clock, clock);
      if (p == 0 && !plan.placement.served) {
        std::memcpy(gradients->rates.data(), data + layout.rates,
                    gradients->rates.TotalBytes());
      }
      found->buffers.push_back(received[p]);
      found->features[p].resize(plan.features.size(), nullptr);
      for (size_t k = 0; k < layout.features.size(); ++k) {
        if (!data[k]) continue;
        const int f = layout.features[k];
        const char* samples = data + layout.samples[k];
        if (!narrow) {
          found->features[p][f] = reinterpret_cast<const float*>(samples);
          continue;
        }
        const int64_t count = request.features[f].num_samples() * plan.dim(f);
        Tensor expanded;
        TF_RETURN_IF_ERROR(
            context->allocate_temp(tensorflow::DT_FLOAT, {count}, &expanded));
        FromBFloat16(reinterpret_cast<const BFloat16*>(samples), count,
                     expanded.flat<float>().data());
        found->features[p][f] = expanded.flat<float>().data();
        found->buffers.push_back(expanded);
      }
    }
    gradients->received = std::move(found);
    return absl::OkStatus();
  }
};

REGISTER_KERNEL_BUILDER(
    Name("TpuEmbeddingSendGradients").Device(tensorflow::DEVICE_CPU),
    SendGradientsOp);
REGISTER_KERNEL_BUILDER(
    Name("TpuEmbeddingReceiveGradients").Device(tensorflow::DEVICE_CPU),
    ReceiveGradientsOp);

}  // namespace
}  // namespace tpu_embedding
