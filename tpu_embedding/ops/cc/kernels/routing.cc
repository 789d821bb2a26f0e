// TpuEmbeddingRoute and TpuEmbeddingReceiveBatch tell which process asks which
// owner for which rows.

#include "core/routing.h"

#include <cstring>
#include <memory>
#include <string>
#include <vector>

#include "core/batch_pool.h"
#include "kernels/batch_variant.h"
#include "kernels/kernel_util.h"
#include "kernels/plan.h"
#include "kernels/sharded.h"
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

REGISTER_OP("TpuEmbeddingRoute")
    .Input("batch: variant")
    .Output("routed: variant")
    .Output("messages: num_messages * uint8")
    .Output("refusal: string")
    .Attr("num_messages: int >= 1")
    .Attr("plan: string")
    .Attr("training: bool")
    .SetIsStateful()  // Only so that its variant is not folded into a constant.
    .SetShapeFn(MessageShapes)
    .Doc(R"doc(
Divides a batch over the owners of its rows.

batch: a batch prepared for whole tables. In a job a refused batch becomes a
  refusal.
routed: the input of TpuEmbeddingReceiveBatch; in a worker that of
  TpuEmbeddingCombine and TpuEmbeddingSendGradients.
messages: the message to each owner, which TpuEmbeddingReceiveBatch receives.
refusal: the input of TpuEmbeddingExchange.
plan: the record of the part of the tables that this process has; in a worker,
  which has none, the record of the whole tables.
training: whether an update may follow.
)doc");

REGISTER_OP("TpuEmbeddingReceiveBatch")
    .Input("routed: num_routed * variant")
    .Input("received: num_received * uint8")
    .Input("looked_up: num_looked_up * variant")
    .Output("batch: variant")
    .Attr("num_routed: int >= 0")
    .Attr("num_received: int >= 1")
    .Attr("num_looked_up: int >= 0")
    .Attr("plan: string")
    .Attr("training: bool")
    .SetIsStateful()  // Only so that its variant is not folded into a constant.
    .SetShapeFn(tensorflow::shape_inference::ScalarShape)
    .Doc(R"doc(
Reads what this process or server is asked for.

routed: this process's batch from TpuEmbeddingRoute, which can be used once;
  none on a server.
received: the messages of TpuEmbeddingRoute to this owner, by sender.
looked_up: for an update on a server, what TpuEmbeddingServe looked up before,
  so that its rows stay; or none.
batch: the input of the ops that take a prepared batch.
plan: the record of the part of the tables that this owner has.
training: as for TpuEmbeddingRoute.
)doc");

using RoutedPool = BatchPool<RoutedBatch>;

// Takes a batch to reuse, which releases the looked-up batch after its use.
std::shared_ptr<RoutedBatch> TakeFrom(RoutedPool* pool) {
  const std::shared_ptr<RoutedBatch> batch = pool->Take();
  return {batch.get(),
          [batch](RoutedBatch* used) { used->batch.looked_up.reset(); }};
}

class RouteOp : public tensorflow::OpKernel {
 public:
  explicit RouteOp(OpKernelConstruction* context) : OpKernel(context) {
    OP_REQUIRES_OK(context, ReadPlan(context, &plan_));
    OP_REQUIRES_OK(context, context->GetAttr("training", &training_));
    OP_REQUIRES_OK(context,
                   CheckLength("owners", plan_->placement.owners.size(),
                               plan_->tables.size()));
  }

  void Compute(OpKernelContext* context) override {
    const std::shared_ptr<RoutedBatch> routed = TakeFrom(pool_.get());
    absl::Status status =
        WithinMemory([&] { return Route(context, routed.get()); });
    const Placement& placement = plan_->placement;
    std::vector<int64_t> bytes(placement.size, 0);
    for (int p = 0; p < placement.size && status.ok(); ++p) {
      bytes[p] = Padded(4 * MessageWords(*routed, p));
    }
    OP_REQUIRES_OK(
        context,
        SetMessages(context, placement, status, bytes, [&](int p, char* data) {
          // Padding has a value, so that equal batches give equal messages.
          std::memset(data + bytes[p] - kWireAlignment, 0, kWireAlignment);
          WriteMessage(*routed, p, reinterpret_cast<int32_t*>(data));
        }));
    BatchVariant variant(plan_, SharedBatch(routed, &routed->batch),
                         absl::OkStatus());
    variant.routed = routed;
    OP_REQUIRES_OK(context, Wrap(context, 0, std::move(variant)));
  }

 private:
  absl::Status Route(OpKernelContext* context, RoutedBatch* routed) const {
    const BatchVariant* variant = nullptr;
    TF_RETURN_IF_ERROR(Unwrap(context->input(0), nullptr, &variant));
    TF_RETURN_IF_ERROR(variant->status);
    const PreparedBatch& batch = *variant->batch;
    TF_RETURN_IF_ERROR(
        CheckLength("batch", batch.features.size(), plan_->features.size()));
    TF_RETURN_IF_ERROR(CheckLength("batch", batch.vocabulary_sizes.size(),
                                   plan_->tables.size()));
    const TableMap tables{plan_->feature_tables, batch.vocabulary_sizes};
    routed->growing = plan_->growing();
    RouteBatch(batch, tables, plan_->placement, training_, WorkerPool(context),
               routed);
    routed->batch.routed = routed;
    routed->batch.trains = training_;
    routed->batch.looked_up = batch.looked_up;
    return absl::OkStatus();
  }

  SharedPlan plan_;
  bool training_ = false;
  const std::shared_ptr<RoutedPool> pool_ = std::make_shared<RoutedPool>();
};

class ReceiveBatchOp : public tensorflow::OpKernel {
 public:
  explicit ReceiveBatchOp(OpKernelConstruction* context) : OpKernel(context) {
    OP_REQUIRES_OK(context, ReadPlan(context, &plan_));
    OP_REQUIRES_OK(context, context->GetAttr("training", &training_));
    OP_REQUIRES_OK(context,
                   CheckLength("owners", plan_->placement.owners.size(),
                               plan_->tables.size()));
  }

  void Compute(OpKernelContext* context) override {
    std::shared_ptr<RoutedBatch> routed;
    OP_REQUIRES_OK(context, TakeRouted(context, &routed));
    OP_REQUIRES_OK(context, ReadLookedUp(context, &routed->batch.looked_up));
    OpInputList received;
    OP_REQUIRES_OK(
        context,
        ReadReceived(context, plan_->placement.num_senders(), &received));
    std::vector<Message> messages;
    for (const Tensor& message : received) {
      messages.push_back({static_cast<const int32_t*>(message.data()),
                          message.NumElements() / int64_t{sizeof(int32_t)}});
    }
    OP_REQUIRES_OK(
        context, WithinMemory([&] {
          return InvalidArgument(ReadMessages(
              messages, plan_->table_map, WorkerPool(context), routed.get()));
        }));
    OP_REQUIRES_OK(context,
                   Wrap(context, 0,
                        BatchVariant(plan_, SharedBatch(routed, &routed->batch),
                                     absl::OkStatus())));
  }

 private:
  // Returns this process's own batch; on a server an empty one.
  absl::Status TakeRouted(OpKernelContext* context,
                          std::shared_ptr<RoutedBatch>* routed) const {
    OpInputList given;
    TF_RETURN_IF_ERROR(context->input_list("routed", &given));
    if (given.size() == 0) {
      *routed = TakeFrom(pool_.get());
      (*routed)->training = training_;
      (*routed)->placement = plan_->placement;
      (*routed)->feature_tables = plan_->feature_tables;
      (*routed)->growing = plan_->growing();
      (*routed)->batch.trains = training_;
      (*routed)->batch.vocabulary_sizes = plan_->table_map.vocabulary_sizes;
      (*routed)->batch.routed = routed->get();
      (*routed)->batch.tables.resize(training_ ? plan_->tables.size() : 0);
      return absl::OkStatus();
    }
    const BatchVariant* variant = nullptr;
    TF_RETURN_IF_ERROR(Unwrap(given[0], plan_.get(), &variant));
    *routed = variant->routed;
    if (*routed && (*routed)->training == training_) return absl::OkStatus();
    return absl::InvalidArgumentError(
        "A malformed graph: an input is not a routed batch. Trace the function "
        "again.");
  }

  SharedPlan plan_;
  bool training_ = false;
  const std::shared_ptr<RoutedPool> pool_ = std::make_shared<RoutedPool>();
};

REGISTER_KERNEL_BUILDER(
    Name("TpuEmbeddingRoute").Device(tensorflow::DEVICE_CPU), RouteOp);
REGISTER_KERNEL_BUILDER(
    Name("TpuEmbeddingReceiveBatch").Device(tensorflow::DEVICE_CPU),
    ReceiveBatchOp);

}  // namespace
}  // namespace tpu_embedding
