// TpuEmbeddingRoute and TpuEmbeddingReceiveBatch: which rows each process asks
// which other for.

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

using tensorflow::OpKernelConstruction;
using tensorflow::OpKernelContext;
using tensorflow::Tensor;
using tensorflow::shape_inference::InferenceContext;

REGISTER_OP("TpuEmbeddingRoute")
    .Input("batch: variant")
    .Output("routed: variant")
    .Output("message: uint8")
    .Output("splits: int64")
    .Output("refusal: string")
    .Attr("plan: string")
    .Attr("training: bool")
    .SetIsStateful()  // Only so that its variant is not folded into a constant.
    .SetShapeFn([](InferenceContext* context) {
      context->set_output(0, context->Scalar());
      context->set_output(1, context->Vector(InferenceContext::kUnknownDim));
      context->set_output(2, context->Vector(InferenceContext::kUnknownDim));
      context->set_output(3, context->Scalar());
      return absl::OkStatus();
    })
    .Doc(R"doc(
Divides this process's batch over the owners of its rows.

batch: prepared for whole tables; a refused one becomes a refusal.
routed: for TpuEmbeddingReceiveBatch.
message, splits, refusal: for TpuEmbeddingExchange.
plan: the record of the part of the tables that this process has.
training: whether an update may follow.
)doc");

REGISTER_OP("TpuEmbeddingReceiveBatch")
    .Input("routed: variant")
    .Input("received: uint8")
    .Input("received_splits: int64")
    .Output("batch: variant")
    .SetIsStateful()
    .SetShapeFn(tensorflow::shape_inference::ScalarShape)
    .Doc(R"doc(
Completes a batch with what the other processes ask of this one.

routed: from TpuEmbeddingRoute, once.
received, received_splits: from TpuEmbeddingExchange.
batch: for the ops that take a prepared batch, with the plan of TpuEmbeddingRoute.
)doc");

// A batch on its way from Route to ReceiveBatch.
struct RouteVariant {
  SharedPlan plan;
  std::shared_ptr<RoutedBatch> routed;

  std::string TypeName() const { return "tpu_embedding::Route"; }
  std::string DebugString() const { return TypeName(); }
  void Encode(tensorflow::VariantTensorData*) const {}
  bool Decode(const tensorflow::VariantTensorData&) { return false; }
};

class RouteOp : public tensorflow::OpKernel {
 public:
  explicit RouteOp(OpKernelConstruction* context) : OpKernel(context) {
    OP_REQUIRES_OK(context, ReadPlan(context, &plan_));
    OP_REQUIRES_OK(context, context->GetAttr("training", &training_));
  }

  void Compute(OpKernelContext* context) override {
    const std::shared_ptr<RoutedBatch> routed = pool_->Take();
    absl::Status status =
        WithinMemory([&] { return Route(context, routed.get()); });
    const Placement& placement = plan_->placement;
    std::vector<int64_t> bytes(placement.size, 0);
    for (int p = 0; p < placement.size && status.ok(); ++p) {
      if (p == placement.rank) continue;
      bytes[p] = Padded(sizeof(int64_t) + 4 * MessageWords(*routed, p));
    }
    OP_REQUIRES_OK(
        context, SetMessage(context, 1, status, bytes, [&](int p, char* data) {
          // Padding has a value, so that equal batches give equal messages.
          std::memset(data + bytes[p] - kWireAlignment, 0, kWireAlignment);
          const int64_t words = MessageWords(*routed, p);
          std::memcpy(data, &words, sizeof(words));
          WriteMessage(*routed, p,
                       reinterpret_cast<int32_t*>(data + sizeof(words)));
        }));
    Tensor* tensor = nullptr;
    OP_REQUIRES_OK(context, context->allocate_output(0, {}, &tensor));
    tensor->scalar<tensorflow::Variant>()() = RouteVariant{plan_, routed};
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
    RouteBatch(batch, tables, plan_->placement, training_, WorkerPool(context),
               routed);
    routed->batch.routed = routed;
    return absl::OkStatus();
  }

  SharedPlan plan_;
  bool training_ = false;
  const std::shared_ptr<BatchPool<RoutedBatch>> pool_ =
      std::make_shared<BatchPool<RoutedBatch>>();
};

class ReceiveBatchOp : public tensorflow::OpKernel {
 public:
  using OpKernel::OpKernel;

  void Compute(OpKernelContext* context) override {
    OP_REQUIRES_OK(context, CheckScalar("routed", context->input(0)));
    const auto* variant =
        context->input(0).scalar<tensorflow::Variant>()().get<RouteVariant>();
    OP_REQUIRES(context, variant,
                absl::InvalidArgumentError("A variant that is no route."));
    RoutedBatch* routed = variant->routed.get();
    Received received;
    OP_REQUIRES_OK(context,
                   ReadReceived(context, routed->placement.size, &received));
    OP_REQUIRES_OK(
        context, WithinMemory([&] { return Read(context, received, routed); }));
    OP_REQUIRES_OK(
        context, Wrap(context, 0,
                      BatchVariant(variant->plan,
                                   SharedBatch(variant->routed, &routed->batch),
                                   absl::OkStatus())));
  }

 private:
  static absl::Status Read(OpKernelContext* context, const Received& received,
                           RoutedBatch* routed) {
    const int rank = routed->placement.rank;
    std::vector<int32_t> own(MessageWords(*routed, rank));
    WriteMessage(*routed, rank, own.data());
    std::vector<Message> messages;
    for (int p = 0; p < routed->placement.size; ++p) {
      if (p == rank) {
        messages.push_back({own.data(), static_cast<int64_t>(own.size())});
        continue;
      }
      int64_t words = -1;
      if (received.bytes[p] >= int64_t{sizeof(words)}) {
        std::memcpy(&words, received.data(p), sizeof(words));
      }
      if (words < 0 ||
          words > (received.bytes[p] - int64_t{sizeof(words)}) / 4) {
        return CheckBytes(p, received.bytes[p], 4 * words);
      }
      messages.push_back(
          {reinterpret_cast<const int32_t*>(received.data(p) + sizeof(words)),
           words});
    }
    const TableMap tables{routed->feature_tables,
                          routed->batch.vocabulary_sizes};
    return InvalidArgument(
        ReadMessages(messages, tables, WorkerPool(context), routed));
  }
};

REGISTER_KERNEL_BUILDER(
    Name("TpuEmbeddingRoute").Device(tensorflow::DEVICE_CPU), RouteOp);
REGISTER_KERNEL_BUILDER(
    Name("TpuEmbeddingReceiveBatch").Device(tensorflow::DEVICE_CPU),
    ReceiveBatchOp);

}  // namespace
}  // namespace tpu_embedding
