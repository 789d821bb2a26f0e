// Lookups and updates of tables whose rows are divided over parameter servers.
// On a worker: TpuEmbeddingDivide, TpuEmbeddingCombineRows,
// TpuEmbeddingDivideGradients. On a server: TpuEmbeddingServeRows,
// TpuEmbeddingSplitGradients.

#include <algorithm>
#include <atomic>
#include <cstring>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "core/batch_pool.h"
#include "core/lookup.h"
#include "core/pieces.h"
#include "core/routing.h"
#include "core/wire.h"
#include "kernels/batch_variant.h"
#include "kernels/gradients.h"
#include "kernels/kernel_util.h"
#include "kernels/step_queue_resource.h"
#include "tensorflow/core/framework/op.h"
#include "tensorflow/core/framework/op_kernel.h"
#include "tensorflow/core/framework/shape_inference.h"

namespace tpu_embedding {
namespace {

using tensorflow::OpInputList;
using tensorflow::OpKernelConstruction;
using tensorflow::OpKernelContext;
using tensorflow::OpOutputList;
using tensorflow::Tensor;
using tensorflow::TensorShape;
using tensorflow::shape_inference::InferenceContext;

absl::Status ScalarAndVectors(InferenceContext* context) {
  context->set_output(0, context->Scalar());
  for (int i = 1; i < context->num_outputs(); ++i) {
    context->set_output(i, context->Vector(InferenceContext::kUnknownDim));
  }
  return absl::OkStatus();
}

REGISTER_OP("TpuEmbeddingDivide")
    .Input("batch: variant")
    .Output("divided: variant")
    .Output("requests: num_servers * int32")
    .Attr("num_servers: int >= 1")
    .Attr("plan: string")
    .Attr("training: bool")
    .SetIsStateful()  // Only so that its variant is not folded into a constant.
    .SetShapeFn(ScalarAndVectors)
    .Doc(R"doc(
Divides a batch over the servers of its rows, or raises why it was refused.

divided: for TpuEmbeddingCombineRows and TpuEmbeddingDivideGradients.
requests: for each server, for TpuEmbeddingServeRows.
plan: the record of the whole tables.
training: whether an update may follow.
)doc");

REGISTER_OP("TpuEmbeddingServeRows")
    .Input("queue: resource")
    .Input("request: int32")
    .Input("tables: num_tables * resource")
    .Output("batch: variant")
    .Output("rows: uint8")
    .Attr("num_tables: int >= 1")
    .Attr("training: bool")
    .Attr("with_rows: bool")
    .SetIsStateful()
    .SetShapeFn(ScalarAndVectors)
    .Doc(R"doc(
The rows that a worker asked this server for.

request: from TpuEmbeddingDivide.
tables: the variables of this server's part.
batch: for training the samples with an entry here, for TpuEmbeddingUpdate.
rows: for TpuEmbeddingCombineRows.
training: as of TpuEmbeddingDivide.
with_rows: else `rows` is empty.
)doc");

REGISTER_OP("TpuEmbeddingCombineRows")
    .Input("divided: variant")
    .Input("rows: num_servers * uint8")
    .Output("activations: num_features * float")
    .Attr("num_servers: int >= 1")
    .Attr("num_features: int >= 1")
    .Attr("is_bfloat16: list(bool)")
    .Attr("output_shapes: list(shape)")
    .SetIsStateful()
    .SetShapeFn([](InferenceContext* context) {
      std::vector<tensorflow::PartialTensorShape> shapes;
      TF_RETURN_IF_ERROR(context->GetAttr("output_shapes", &shapes));
      TF_RETURN_IF_ERROR(
          CheckLength("output_shapes", shapes.size(), context->num_outputs()));
      for (int f = 0; f < context->num_outputs(); ++f) {
        tensorflow::shape_inference::ShapeHandle shape;
        TF_RETURN_IF_ERROR(
            context->MakeShapeFromPartialTensorShape(shapes[f], &shape));
        context->set_output(f, shape);
      }
      return absl::OkStatus();
    })
    .Doc(R"doc(
The activations of a batch, from the rows of all servers.

divided: from TpuEmbeddingDivide.
rows: for each server, from TpuEmbeddingServeRows.
is_bfloat16: by table, whether its rows are bfloat16.
output_shapes: what is known of the activations' shapes.
)doc");

REGISTER_OP("TpuEmbeddingDivideGradients")
    .Input("divided: variant")
    .Input("gradients: num_gradients * float")
    .Output("messages: num_servers * float")
    .Attr("num_servers: int >= 1")
    .Attr("num_gradients: int >= 0")
    .Attr("has_gradient: list(bool)")
    .SetIsStateful()
    .SetShapeFn([](InferenceContext* context) {
      for (int i = 0; i < context->num_outputs(); ++i) {
        context->set_output(i, context->Vector(InferenceContext::kUnknownDim));
      }
      return absl::OkStatus();
    })
    .Doc(R"doc(
The gradients of samples for each server, or raises why they are refused.

divided: from TpuEmbeddingDivide, for training.
gradients, has_gradient: as of TpuEmbeddingUpdate.
messages: for TpuEmbeddingSplitGradients.
)doc");

REGISTER_OP("TpuEmbeddingSplitGradients")
    .Input("batch: variant")
    .Input("message: float")
    .Output("gradients: num_gradients * float")
    .Attr("num_gradients: int >= 0")
    .Attr("has_gradient: list(bool)")
    .SetIsStateful()
    .SetShapeFn([](InferenceContext* context) {
      for (int i = 0; i < context->num_outputs(); ++i) {
        context->set_output(i, context->Matrix(InferenceContext::kUnknownDim,
                                               InferenceContext::kUnknownDim));
      }
      return absl::OkStatus();
    })
    .Doc(R"doc(
The gradients of the samples of TpuEmbeddingServeRows, without copying them.

batch: from TpuEmbeddingServeRows.
message: from TpuEmbeddingDivideGradients.
gradients, has_gradient: for TpuEmbeddingUpdate.
)doc");

// A batch on the worker between the ops of its lookup and update.
struct DividedVariant {
  SharedPlan plan;
  std::shared_ptr<const RoutedBatch> routed;

  std::string TypeName() const { return "tpu_embedding::Divided"; }
  std::string DebugString() const { return TypeName(); }
  void Encode(tensorflow::VariantTensorData*) const {}
  bool Decode(const tensorflow::VariantTensorData&) { return false; }
};

absl::Status ReadDivided(OpKernelContext* context, int64_t num_servers,
                         const DividedVariant** divided) {
  const Tensor& tensor = context->input(0);
  TF_RETURN_IF_ERROR(CheckScalar("divided", tensor));
  *divided = tensor.scalar<tensorflow::Variant>()().get<DividedVariant>();
  if (!*divided) {
    return absl::InvalidArgumentError("A variant that is no divided batch.");
  }
  return CheckLength("servers", num_servers, (*divided)->routed->sent.size());
}

absl::Status WrongSize(const char* what, int64_t size, int64_t expected) {
  if (size == expected) return absl::OkStatus();
  return absl::InternalError(absl::StrCat(
      what, ": ", size, " where ", expected,
      " are expected. Run the same release of tpu_embedding in the coordinator "
      "and in all workers and servers."));
}

class DivideOp : public tensorflow::OpKernel {
 public:
  explicit DivideOp(OpKernelConstruction* context) : OpKernel(context) {
    OP_REQUIRES_OK(context, ReadPlan(context, &plan_));
    OP_REQUIRES_OK(context, context->GetAttr("training", &training_));
    int num_servers = 0;
    OP_REQUIRES_OK(context, context->GetAttr("num_servers", &num_servers));
    OP_REQUIRES_OK(context,
                   CheckLength("requests", num_servers, plan_->placement.size));
    for (size_t t = 0; t < plan_->placement.owners.size(); ++t) {
      OP_REQUIRES(context, plan_->placement.by_rows(t),
                  absl::InvalidArgumentError(
                      "A malformed graph: a table is not divided by rows."));
    }
  }

  void Compute(OpKernelContext* context) override {
    const BatchVariant* variant = nullptr;
    OP_REQUIRES_OK(context, Unwrap(context->input(0), nullptr, &variant));
    OP_REQUIRES_OK(context, variant->status);
    const PreparedBatch& batch = *variant->batch;
    OP_REQUIRES_OK(context, CheckLength("batch", batch.features.size(),
                                        plan_->features.size()));
    OP_REQUIRES_OK(context, CheckLength("batch", batch.vocabulary_sizes.size(),
                                        plan_->tables.size()));
    const std::shared_ptr<RoutedBatch> routed = pool_->Take();
    OP_REQUIRES_OK(context, WithinMemory([&] {
                     const TableMap tables{plan_->feature_tables,
                                           batch.vocabulary_sizes};
                     RouteBatch(batch, tables, plan_->placement, training_,
                                WorkerPool(context), routed.get());
                     // The groups themselves are on the servers.
                     if (training_) {
                       routed->batch.tables.resize(plan_->tables.size());
                     }
                     return absl::OkStatus();
                   }));
    OpOutputList requests;
    OP_REQUIRES_OK(context, context->output_list("requests", &requests));
    for (int s = 0; s < plan_->placement.size; ++s) {
      Tensor* request = nullptr;
      OP_REQUIRES_OK(
          context, requests.allocate(s, {MessageWords(*routed, s)}, &request));
      WriteMessage(*routed, s, request->flat<int32_t>().data());
    }
    Tensor* output = nullptr;
    OP_REQUIRES_OK(context, context->allocate_output(0, {}, &output));
    output->scalar<tensorflow::Variant>()() = DividedVariant{plan_, routed};
  }

 private:
  SharedPlan plan_;
  bool training_ = false;
  const std::shared_ptr<BatchPool<RoutedBatch>> pool_ =
      std::make_shared<BatchPool<RoutedBatch>>();
};

class ServeRowsOp : public tensorflow::OpKernel {
 public:
  explicit ServeRowsOp(OpKernelConstruction* context) : OpKernel(context) {
    OP_REQUIRES_OK(context, context->GetAttr("training", &training_));
    OP_REQUIRES_OK(context, context->GetAttr("with_rows", &with_rows_));
  }

  void Compute(OpKernelContext* context) override {
    QueuePtr resource;
    OP_REQUIRES_OK(context, LookUpQueue(context, &resource));
    std::vector<Variable> tables;
    OP_REQUIRES_OK(context, LookUpTables(context, &tables));
    const Plan& plan = *resource->plan;
    const std::shared_ptr<PreparedBatch> batch = pool_->Take();
    std::vector<Buffer<int32_t>> rows;
    OP_REQUIRES_OK(
        context, WithinMemory([&] {
          const Tensor& request = context->input(1);
          return InvalidArgument(ReadRequest(
              {request.flat<int32_t>().data(), request.NumElements()},
              plan.table_map, training_, WorkerPool(context), &rows,
              batch.get()));
        }));
    BatchVariant looked_up(resource->plan, batch, absl::OkStatus());
    looked_up.used = std::make_shared<std::atomic<bool>>(false);
    looked_up.epoch = 0;
    OP_REQUIRES_OK(context, FailedPrecondition(resource->queue.BeginLookup(
                                0, BatchQueue::kOutside, &*looked_up.epoch)));
    OP_REQUIRES_OK(context,
                   Gather(context, plan, tables, rows, &resource->huge_pages));
    OP_REQUIRES_OK(context, Wrap(context, 0, std::move(looked_up)));
  }

 private:
  absl::Status Gather(OpKernelContext* context, const Plan& plan,
                      const std::vector<Variable>& tables,
                      const std::vector<Buffer<int32_t>>& rows,
                      HugePages* huge_pages) const {
    Tensor* message = nullptr;
    if (!with_rows_) return context->allocate_output(1, {0}, &message);
    const ReadLocks locks(tables);
    TF_RETURN_IF_ERROR(CheckTables(tables, plan));
    std::vector<int64_t> offsets;
    std::vector<Work> works;
    int64_t bytes = 0;
    for (size_t t = 0; t < tables.size(); ++t) {
      const Tensor& table = *tables[t]->tensor();
      huge_pages->Advise(t, table);
      offsets.push_back(bytes);
      const int64_t dim = plan.tables[t].dim;
      bytes += rows[t].size() * dim * tensorflow::DataTypeSize(table.dtype());
      works.push_back({rows[t].size(), rows[t].size() * (20 + dim / 2)});
    }
    TF_RETURN_IF_ERROR(context->allocate_output(1, {bytes}, &message));
    auto* data = static_cast<char*>(message->data());
    ForEachPiece(WorkerPool(context), works, [&](const Piece& piece) {
      const int64_t t = piece.owner;
      GatherRows(rows[t],
                 DataOf(static_cast<const Tensor&>(*tables[t]->tensor())),
                 plan.tables[t].dim, /*narrow=*/false, piece.begin, piece.end,
                 data + offsets[t]);
    });
    return absl::OkStatus();
  }

  bool training_ = false;
  bool with_rows_ = false;
  const std::shared_ptr<BatchPool<PreparedBatch>> pool_ =
      std::make_shared<BatchPool<PreparedBatch>>();
};

class CombineRowsOp : public tensorflow::OpKernel {
 public:
  explicit CombineRowsOp(OpKernelConstruction* context) : OpKernel(context) {
    OP_REQUIRES_OK(context, context->GetAttr("is_bfloat16", &bfloat16_));
    OP_REQUIRES_OK(context, context->GetAttr("output_shapes", &shapes_));
  }

  void Compute(OpKernelContext* context) override {
    OpInputList received;
    OpOutputList activations;
    OP_REQUIRES_OK(context, context->input_list("rows", &received));
    OP_REQUIRES_OK(context, context->output_list("activations", &activations));
    const DividedVariant* divided = nullptr;
    OP_REQUIRES_OK(context, ReadDivided(context, received.size(), &divided));
    const Plan& plan = *divided->plan;
    OP_REQUIRES_OK(context, CheckLength("activations", activations.size(),
                                        plan.features.size()));
    OP_REQUIRES_OK(context, CheckLength("output_shapes", shapes_.size(),
                                        plan.features.size()));
    OP_REQUIRES_OK(context, CheckLength("is_bfloat16", bfloat16_.size(),
                                        plan.tables.size()));
    const RoutedBatch& routed = *divided->routed;
    std::vector<Tensor> rows;
    OP_REQUIRES_OK(context, Join(context, plan, routed, received, &rows));
    std::vector<float*> outputs;
    std::vector<Work> works;
    for (size_t f = 0; f < plan.features.size(); ++f) {
      const FeatureCsr& csr = routed.batch.features[f];
      TensorShape shape;
      OP_REQUIRES_OK(context, ActivationShape(plan, f, csr.output_shape,
                                              shapes_[f], &shape));
      Tensor* output = nullptr;
      OP_REQUIRES_OK(context, activations.allocate(f, shape, &output));
      outputs.push_back(output->flat<float>().data());
      works.push_back(
          {csr.num_samples(),
           static_cast<int64_t>(csr.rows.size() + csr.num_samples()) *
               (20 + plan.dim(f) / 2)});
    }
    ForEachPiece(WorkerPool(context), works, [&](const Piece& piece) {
      const int64_t f = piece.owner;
      const int t = plan.feature_tables[f];
      Lookup(routed.batch.features[f],
             DataOf(static_cast<const Tensor&>(rows[t])), plan.dim(f),
             plan.tables[t].quantization, piece.begin, piece.end, outputs[f]);
    });
  }

 private:
  // The rows of each table, those of server 0 first.
  absl::Status Join(OpKernelContext* context, const Plan& plan,
                    const RoutedBatch& routed, const OpInputList& received,
                    std::vector<Tensor>* rows) const {
    std::vector<int64_t> next(received.size(), 0);  // in what each server sent
    rows->resize(plan.tables.size());
    for (size_t t = 0; t < plan.tables.size(); ++t) {
      const int64_t dim = plan.tables[t].dim;
      TF_RETURN_IF_ERROR(context->allocate_temp(
          bfloat16_[t] ? tensorflow::DT_BFLOAT16 : tensorflow::DT_FLOAT,
          {routed.NumArriving(t), dim}, &(*rows)[t]));
      auto* to = static_cast<char*>((*rows)[t].data());
      for (int s = 0; s < received.size(); ++s) {
        const int64_t bytes = routed.sent[s].rows[t].size() * dim *
                              (bfloat16_[t] ? sizeof(BFloat16) : sizeof(float));
        if (next[s] + bytes > received[s].NumElements()) {
          return WrongSize("Bytes of rows", received[s].NumElements(),
                           next[s] + bytes);
        }
        if (bytes) {
          std::memcpy(to,
                      static_cast<const char*>(received[s].data()) + next[s],
                      bytes);
        }
        next[s] += bytes;
        to += bytes;
      }
    }
    for (int s = 0; s < received.size(); ++s) {
      TF_RETURN_IF_ERROR(
          WrongSize("Bytes of rows", received[s].NumElements(), next[s]));
    }
    return absl::OkStatus();
  }

  std::vector<bool> bfloat16_;
  std::vector<tensorflow::PartialTensorShape> shapes_;
};

// Where the gradients of a feature end: the next ones are aligned.
int64_t PaddedValues(int64_t count) {
  return Padded(count * sizeof(float)) / sizeof(float);
}

class DivideGradientsOp : public tensorflow::OpKernel {
 public:
  explicit DivideGradientsOp(OpKernelConstruction* context)
      : OpKernel(context) {
    OP_REQUIRES_OK(context, ReadHasGradient(context, &has_gradient_));
    OP_REQUIRES_OK(context, context->GetAttr("num_servers", &num_servers_));
  }

  void Compute(OpKernelContext* context) override {
    const DividedVariant* divided = nullptr;
    OP_REQUIRES_OK(context, ReadDivided(context, num_servers_, &divided));
    const Plan& plan = *divided->plan;
    const RoutedBatch& routed = *divided->routed;
    OP_REQUIRES_OK(context, CheckLength("has_gradient", has_gradient_.size(),
                                        plan.features.size()));
    OpInputList given;
    OpOutputList messages;
    OP_REQUIRES_OK(context, context->input_list("gradients", &given));
    OP_REQUIRES_OK(context, context->output_list("messages", &messages));
    ReplicaGradients gradients;
    gradients.features.resize(has_gradient_.size());
    int next = 0;
    for (size_t f = 0; f < has_gradient_.size(); ++f) {
      if (has_gradient_[f]) gradients.features[f] = given[next++];
    }
    OP_REQUIRES_OK(context, CheckGradients(plan, routed.batch, gradients));
    const int64_t num_features = plan.features.size();
    std::vector<float*> starts;  // by server and feature
    std::vector<Work> works;
    for (int s = 0; s < num_servers_; ++s) {
      std::vector<int64_t> offsets;
      int64_t size = 0;
      for (int64_t f = 0; f < num_features; ++f) {
        const int64_t count = has_gradient_[f] ? routed.NumSent(s, f) : 0;
        offsets.push_back(size);
        size += PaddedValues(count * plan.dim(f));
        works.push_back({count, count * (20 + plan.dim(f) / 2)});
      }
      Tensor* message = nullptr;
      OP_REQUIRES_OK(context, messages.allocate(s, {size}, &message));
      float* data = message->flat<float>().data();
      for (int64_t f = 0; f < num_features; ++f) {
        starts.push_back(data + offsets[f]);
        const int64_t end = f + 1 < num_features ? offsets[f + 1] : size;
        const int64_t count = works[s * num_features + f].units * plan.dim(f);
        std::fill(data + offsets[f] + count, data + end, 0.0f);
      }
    }
    ForEachPiece(WorkerPool(context), works, [&](const Piece& piece) {
      const int64_t f = piece.owner % num_features;
      const int64_t dim = plan.dim(f);
      const Buffer<int32_t>& samples =
          routed.sent[piece.owner / num_features].features[f].samples;
      const float* from = gradients.features[f]->flat<float>().data();
      float* to = starts[piece.owner];
      for (int64_t s = piece.begin; s < piece.end; ++s) {
        std::memcpy(to + s * dim, from + samples[s] * dim, dim * sizeof(float));
      }
    });
  }

 private:
  std::vector<bool> has_gradient_;
  int num_servers_ = 0;
};

class SplitGradientsOp : public tensorflow::OpKernel {
 public:
  explicit SplitGradientsOp(OpKernelConstruction* context) : OpKernel(context) {
    OP_REQUIRES_OK(context, ReadHasGradient(context, &has_gradient_));
  }

  void Compute(OpKernelContext* context) override {
    const BatchVariant* variant = nullptr;
    OP_REQUIRES_OK(context, Unwrap(context->input(0), nullptr, &variant));
    const Plan& plan = *variant->plan;
    OP_REQUIRES_OK(context, CheckLength("has_gradient", has_gradient_.size(),
                                        plan.features.size()));
    const Tensor& message = context->input(1);
    int64_t next = 0;
    int output = 0;
    for (size_t f = 0; f < has_gradient_.size(); ++f) {
      if (!has_gradient_[f]) continue;
      const int64_t count = variant->batch->features[f].num_samples();
      const int64_t size = count * plan.dim(f);
      const int64_t end = next + PaddedValues(size);
      if (end > message.NumElements()) {
        OP_REQUIRES_OK(context,
                       WrongSize("Gradients", message.NumElements(), end));
      }
      // A part of what was received: nothing is copied.
      Tensor gradient;
      OP_REQUIRES(context,
                  gradient.CopyFrom(message.Slice(next, next + size),
                                    {count, plan.dim(f)}),
                  absl::InternalError("The gradients cannot be split."));
      context->set_output(output++, gradient);
      next = end;
    }
    OP_REQUIRES_OK(context,
                   WrongSize("Gradients", message.NumElements(), next));
  }

 private:
  std::vector<bool> has_gradient_;
};

REGISTER_KERNEL_BUILDER(
    Name("TpuEmbeddingDivide").Device(tensorflow::DEVICE_CPU), DivideOp);
REGISTER_KERNEL_BUILDER(
    Name("TpuEmbeddingServeRows").Device(tensorflow::DEVICE_CPU), ServeRowsOp);
REGISTER_KERNEL_BUILDER(
    Name("TpuEmbeddingCombineRows").Device(tensorflow::DEVICE_CPU),
    CombineRowsOp);
REGISTER_KERNEL_BUILDER(
    Name("TpuEmbeddingDivideGradients").Device(tensorflow::DEVICE_CPU),
    DivideGradientsOp);
REGISTER_KERNEL_BUILDER(
    Name("TpuEmbeddingSplitGradients").Device(tensorflow::DEVICE_CPU),
    SplitGradientsOp);

}  // namespace
}  // namespace tpu_embedding
