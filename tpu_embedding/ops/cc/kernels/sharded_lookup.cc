// TpuEmbeddingServe and TpuEmbeddingCombine: a lookup in tables that are
// divided over processes.

#include <atomic>
#include <cstring>
#include <memory>
#include <utility>
#include <vector>

#include "core/lookup.h"
#include "core/pieces.h"
#include "core/routing.h"
#include "kernels/batch_variant.h"
#include "kernels/kernel_util.h"
#include "kernels/sharded.h"
#include "kernels/step_queue_resource.h"
#include "tensorflow/core/framework/op.h"
#include "tensorflow/core/framework/op_kernel.h"
#include "tensorflow/core/framework/shape_inference.h"

namespace tpu_embedding {
namespace {

using tensorflow::OpInputList;
using tensorflow::OpKernelConstruction;
using tensorflow::OpKernelContext;
using tensorflow::Tensor;
using tensorflow::TensorShape;
using tensorflow::shape_inference::InferenceContext;

REGISTER_OP("TpuEmbeddingServe")
    .Input("queue: resource")
    .Input("batches: num_batches * variant")
    .Input("tables: num_tables * resource")
    .Output("served: variant")
    .Output("message: uint8")
    .Output("splits: int64")
    .Output("refusal: string")
    .Attr("num_batches: int >= 0")
    .Attr("num_tables: int >= 1")
    .Attr("output_shapes: list(shape)")
    .SetIsStateful()
    .SetShapeFn([](InferenceContext* context) {
      context->set_output(0, context->Scalar());
      context->set_output(1, context->Vector(InferenceContext::kUnknownDim));
      context->set_output(2, context->Vector(InferenceContext::kUnknownDim));
      context->set_output(3, context->Scalar());
      return absl::OkStatus();
    })
    .Doc(R"doc(
Looks up what every process asked this one for.

batches: one batch from TpuEmbeddingReceiveBatch, past the queue; or none: the
  oldest one queued, which then owes its gradients if it is for training.
tables: the variables of this process's part.
served: for TpuEmbeddingCombine.
message, splits, refusal: for TpuEmbeddingExchange.
output_shapes: what is known of the activations' shapes.
)doc");

REGISTER_OP("TpuEmbeddingCombine")
    .Input("queue: resource")
    .Input("served: variant")
    .Input("received: uint8")
    .Input("received_splits: int64")
    .Output("activations: num_features * float")
    .Output("looked_up: variant")
    .Output("apply_now: bool")
    .Attr("num_features: int >= 1")
    .Attr("output_shapes: list(shape)")
    .SetIsStateful()
    .SetShapeFn(LookupShapes)
    .Doc(R"doc(
The activations, from the rows and samples that the owners sent.

served: from TpuEmbeddingServe.
received, received_splits: from TpuEmbeddingExchange.
activations, looked_up, apply_now: as of TpuEmbeddingLookup.
)doc");

// A lookup between Serve and Combine.
struct ServedVariant {
  BatchVariant looked_up;
  bool from_queue = false;
  std::vector<Tensor> rows;         // by table divided by rows: what arrives
  std::vector<Tensor> activations;  // by feature of a whole table here

  std::string TypeName() const { return "tpu_embedding::Served"; }
  std::string DebugString() const { return TypeName(); }
  void Encode(tensorflow::VariantTensorData*) const {}
  bool Decode(const tensorflow::VariantTensorData&) { return false; }
};

bool IsBFloat16(const Tensor& table) {
  return table.dtype() == tensorflow::DT_BFLOAT16;
}

int64_t ElementBytes(const Plan& plan, bool table_is_bfloat16) {
  return TravelsAsBFloat16(plan, table_is_bfloat16) ? sizeof(BFloat16)
                                                    : sizeof(float);
}

// The message from `sender` to `receiver`. `num_rows(t)` and `num_samples(f)`
// tell how many the receiver asked for.
template <class NumRows, class NumSamples>
MessageLayout LookupLayout(const Plan& plan, const std::vector<bool>& bfloat16,
                           int sender, const NumRows& num_rows,
                           const NumSamples& num_samples) {
  MessageLayout layout;
  const Placement& placement = plan.placement;
  layout.tables.resize(plan.tables.size());
  layout.features.resize(plan.features.size());
  for (size_t t = 0; t < plan.tables.size(); ++t) {
    layout.tables[t] = layout.bytes;
    if (!placement.by_rows(t)) continue;
    layout.bytes += Padded(num_rows(t) * plan.tables[t].dim *
                           ElementBytes(plan, bfloat16[t]));
  }
  for (size_t f = 0; f < plan.features.size(); ++f) {
    layout.features[f] = layout.bytes;
    if (placement.owners[plan.feature_tables[f]] != sender) continue;
    layout.bytes +=
        Padded(num_samples(f) * plan.dim(f) * ElementBytes(plan, false));
  }
  return layout;
}

class ServeOp : public tensorflow::OpKernel {
 public:
  explicit ServeOp(OpKernelConstruction* context) : OpKernel(context) {
    OP_REQUIRES_OK(context, context->GetAttr("output_shapes", &shapes_));
  }

  void Compute(OpKernelContext* context) override {
    QueuePtr resource;
    OP_REQUIRES_OK(context, LookUpQueue(context, &resource));
    const Plan& plan = *resource->plan;
    std::vector<Variable> tables;
    OP_REQUIRES_OK(context, LookUpTables(context, &tables));
    OP_REQUIRES_OK(context, CheckLength("output_shapes", shapes_.size(),
                                        plan.features.size()));
    ServedVariant served;
    served.looked_up = BatchVariant(resource->plan, nullptr, absl::OkStatus());
    absl::Status status = Take(context, resource.get(), &served);
    const ReadLocks locks(tables);
    if (status.ok()) status = CheckTables(tables, plan);
    for (size_t t = 0; t < tables.size(); ++t) {
      resource->huge_pages.Advise(t, *tables[t]->tensor());
    }
    const Placement& placement = plan.placement;
    std::vector<bool> bfloat16;
    for (const Variable& table : tables) {
      bfloat16.push_back(IsBFloat16(*table->tensor()));
    }
    std::vector<MessageLayout> layouts(placement.size);
    std::vector<int64_t> bytes(placement.size, 0);
    for (int p = 0; p < placement.size && status.ok(); ++p) {
      if (p == placement.rank) continue;
      const Asked& asked = served.looked_up.batch->routed->asked[p];
      layouts[p] = LookupLayout(
          plan, bfloat16, placement.rank,
          [&](int t) { return asked.rows[t].size(); },
          [&](int f) { return asked.features[f].num_samples(); });
      bytes[p] = layouts[p].bytes;
    }
    if (status.ok()) status = Allocate(context, plan, tables, &served);
    std::vector<char*> messages(placement.size, nullptr);
    OP_REQUIRES_OK(context,
                   SetMessage(context, 1, status, bytes,
                              [&](int p, char* data) { messages[p] = data; }));
    if (status.ok()) {
      Fill(context, plan, tables, layouts, messages, &served);
    }
    Tensor* output = nullptr;
    OP_REQUIRES_OK(context, context->allocate_output(0, {}, &output));
    output->scalar<tensorflow::Variant>()() = std::move(served);
  }

 private:
  absl::Status Take(OpKernelContext* context, StepQueueResource* resource,
                    ServedVariant* served) const {
    OpInputList batches;
    TF_RETURN_IF_ERROR(context->input_list("batches", &batches));
    BatchVariant& looked_up = served->looked_up;
    served->from_queue = batches.size() == 0;
    if (served->from_queue) {
      // It stays in the queue until all processes have served.
      SharedBatch none;
      const auto peek = [&](const SharedBatch& batch) {
        looked_up.batch = batch;
        return false;
      };
      TF_RETURN_IF_ERROR(FailedPrecondition(
          resource->queue.Dequeue(0, BatchQueue::kOutside, peek, &none)));
    } else {
      const BatchVariant* given = nullptr;
      TF_RETURN_IF_ERROR(Unwrap(batches[0], resource->plan.get(), &given));
      TF_RETURN_IF_ERROR(given->status);
      looked_up.batch = given->batch;
      looked_up.used = std::make_shared<std::atomic<bool>>(false);
      looked_up.epoch = 0;
      TF_RETURN_IF_ERROR(FailedPrecondition(resource->queue.BeginLookup(
          0, BatchQueue::kOutside, &*looked_up.epoch)));
    }
    if (!looked_up.batch->routed) {
      return absl::InvalidArgumentError(
          "A malformed graph: the batch was not divided over the processes. "
          "Trace the function again.");
    }
    return absl::OkStatus();
  }

  // The outputs of this process that it has rows for itself.
  absl::Status Allocate(OpKernelContext* context, const Plan& plan,
                        const std::vector<Variable>& tables,
                        ServedVariant* served) const {
    const PreparedBatch& batch = *served->looked_up.batch;
    const RoutedBatch& routed = *batch.routed;
    served->rows.resize(plan.tables.size());
    served->activations.resize(plan.features.size());
    for (size_t t = 0; t < plan.tables.size(); ++t) {
      if (!plan.placement.by_rows(t)) continue;
      const bool narrow =
          TravelsAsBFloat16(plan, IsBFloat16(*tables[t]->tensor()));
      const auto dtype = narrow && IsBFloat16(*tables[t]->tensor())
                             ? tensorflow::DT_BFLOAT16
                             : tensorflow::DT_FLOAT;
      TF_RETURN_IF_ERROR(context->allocate_temp(
          dtype, {routed.NumArriving(t), plan.tables[t].dim},
          &served->rows[t]));
    }
    for (size_t f = 0; f < plan.features.size(); ++f) {
      TensorShape shape;
      TF_RETURN_IF_ERROR(ActivationShape(
          plan, f, batch.features[f].output_shape, shapes_[f], &shape));
      if (!routed.IsWhole(plan.placement.rank, f)) continue;
      TF_RETURN_IF_ERROR(context->allocate_temp(tensorflow::DT_FLOAT, shape,
                                                &served->activations[f]));
    }
    return absl::OkStatus();
  }

  static void Fill(OpKernelContext* context, const Plan& plan,
                   const std::vector<Variable>& tables,
                   const std::vector<MessageLayout>& layouts,
                   const std::vector<char*>& messages, ServedVariant* served) {
    const RoutedBatch& routed = *served->looked_up.batch->routed;
    const Placement& placement = plan.placement;
    const int64_t num_tables = plan.tables.size();
    const int64_t num_features = plan.features.size();
    // For each process its tables, then its features.
    std::vector<Work> works;
    for (int p = 0; p < placement.size; ++p) {
      for (int64_t t = 0; t < num_tables; ++t) {
        const int64_t count = routed.asked[p].rows[t].size();
        works.push_back({count, count * (20 + plan.tables[t].dim / 2)});
      }
      for (int64_t f = 0; f < num_features; ++f) {
        const FeatureCsr& csr = routed.asked[p].features[f];
        const bool whole = routed.IsWhole(placement.rank, f);
        works.push_back({whole ? csr.num_samples() : 0,
                         whole ? LookupCycles(csr, plan.dim(f)) : 0});
      }
    }
    ForEachPiece(WorkerPool(context), works, [&](const Piece& piece) {
      const int p = piece.owner / (num_tables + num_features);
      const int64_t item = piece.owner % (num_tables + num_features);
      const bool own = p == placement.rank;
      const auto data = [&](int64_t table) {
        return DataOf(static_cast<const Tensor&>(*tables[table]->tensor()));
      };
      if (item < num_tables) {
        const int64_t t = item;
        // Own rows stay as they are.
        GatherRows(routed.asked[p].rows[t], data(t), plan.tables[t].dim,
                   !own && plan.bfloat16_wire, piece.begin, piece.end,
                   own ? Arriving(routed, p, t, &served->rows[t])
                       : messages[p] + layouts[p].tables[t]);
        return;
      }
      const int64_t f = item - num_tables;
      const int t = plan.feature_tables[f];
      const FeatureCsr& csr = routed.asked[p].features[f];
      const auto look_up = [&](float* out) {
        Lookup(csr, data(t), plan.dim(f), plan.tables[t].quantization,
               piece.begin, piece.end, out);
      };
      if (own) {
        look_up(served->activations[f].flat<float>().data());
      } else if (!plan.bfloat16_wire) {
        look_up(reinterpret_cast<float*>(messages[p] + layouts[p].features[f]));
      } else {
        const int64_t dim = plan.dim(f);
        std::vector<float> out((piece.end - piece.begin) * dim);
        // Lookup writes where sample 0 would be.
        look_up(out.data() - piece.begin * dim);
        ToBFloat16(
            out.data(), out.size(),
            reinterpret_cast<BFloat16*>(messages[p] + layouts[p].features[f]) +
                piece.begin * dim);
      }
    });
  }

  // Where the rows of process `p` arrive.
  static char* Arriving(const RoutedBatch& routed, int p, int t, Tensor* rows) {
    int64_t first = 0;
    for (int q = 0; q < p; ++q) first += routed.sent[q].rows[t].size();
    const int64_t row_bytes =
        rows->dim_size(1) * tensorflow::DataTypeSize(rows->dtype());
    return static_cast<char*>(rows->data()) + first * row_bytes;
  }

  std::vector<tensorflow::PartialTensorShape> shapes_;
};

class CombineOp : public tensorflow::OpKernel {
 public:
  explicit CombineOp(OpKernelConstruction* context) : OpKernel(context) {
    OP_REQUIRES_OK(context, context->GetAttr("num_features", &num_features_));
  }

  void Compute(OpKernelContext* context) override {
    QueuePtr resource;
    OP_REQUIRES_OK(context, LookUpQueue(context, &resource));
    OP_REQUIRES_OK(context, CheckScalar("served", context->input(1)));
    const auto* served =
        context->input(1).scalar<tensorflow::Variant>()().get<ServedVariant>();
    OP_REQUIRES(context, served && served->looked_up.batch,
                absl::InvalidArgumentError("A variant that is no lookup."));
    const Plan& plan = *resource->plan;
    OP_REQUIRES_OK(context, CheckLength("activations", num_features_,
                                        plan.features.size()));
    Received received;
    OP_REQUIRES_OK(context,
                   ReadReceived(context, plan.placement.size, &received));
    if (served->from_queue) {
      SharedBatch batch;
      const auto same = [&](const SharedBatch& next) {
        return next == served->looked_up.batch;
      };
      OP_REQUIRES_OK(context, FailedPrecondition(resource->queue.Dequeue(
                                  0, BatchQueue::kOutside, same, &batch)));
      OP_REQUIRES(context, batch,
                  absl::FailedPreconditionError(
                      "dequeue: another thread has dequeued the batch."));
    }
    OP_REQUIRES_OK(context, Run(context, plan, *served, received));
    Tensor* apply_now = nullptr;
    OP_REQUIRES_OK(context,
                   context->allocate_output(num_features_ + 1, {}, &apply_now));
    apply_now->scalar<bool>()() =
        served->from_queue && resource->queue.LookupsAreDone();
    OP_REQUIRES_OK(context, Wrap(context, num_features_, served->looked_up));
  }

 private:
  absl::Status Run(OpKernelContext* context, const Plan& plan,
                   const ServedVariant& served,
                   const Received& received) const {
    const PreparedBatch& batch = *served.looked_up.batch;
    const RoutedBatch& routed = *batch.routed;
    const Placement& placement = plan.placement;
    std::vector<bool> bfloat16;
    for (const Tensor& rows : served.rows) {
      bfloat16.push_back(IsBFloat16(rows));
    }
    std::vector<MessageLayout> layouts(placement.size);
    for (int p = 0; p < placement.size; ++p) {
      if (p == placement.rank) continue;
      layouts[p] = LookupLayout(
          plan, bfloat16, p,
          [&](int t) { return routed.sent[p].rows[t].size(); },
          [&](int f) { return batch.features[f].num_samples(); });
      TF_RETURN_IF_ERROR(CheckBytes(p, received.bytes[p], layouts[p].bytes));
    }
    Place(plan, routed, received, layouts, bfloat16, served);
    std::vector<float*> outputs(num_features_, nullptr);
    std::vector<Work> works;
    for (int f = 0; f < num_features_; ++f) {
      TF_RETURN_IF_ERROR(
          SetOutput(context, plan, served, received, layouts, f, &outputs[f]));
      const FeatureCsr& csr = batch.features[f];
      works.push_back({outputs[f] ? csr.num_samples() : 0,
                       outputs[f] ? LookupCycles(csr, plan.dim(f)) : 0});
    }
    ForEachPiece(WorkerPool(context), works, [&](const Piece& piece) {
      const int64_t f = piece.owner;
      const int t = plan.feature_tables[f];
      Lookup(batch.features[f], DataOf(served.rows[t]), plan.dim(f),
             plan.tables[t].quantization, piece.begin, piece.end, outputs[f]);
    });
    return absl::OkStatus();
  }

  // The rows of other processes come to their places beside one's own.
  static void Place(const Plan& plan, const RoutedBatch& routed,
                    const Received& received,
                    const std::vector<MessageLayout>& layouts,
                    const std::vector<bool>& bfloat16,
                    const ServedVariant& served) {
    for (size_t t = 0; t < plan.tables.size(); ++t) {
      if (!plan.placement.by_rows(t)) continue;
      char* to = static_cast<char*>(served.rows[t].data());
      for (int p = 0; p < plan.placement.size; ++p) {
        const int64_t count =
            routed.sent[p].rows[t].size() * plan.tables[t].dim;
        const int64_t bytes =
            count * tensorflow::DataTypeSize(served.rows[t].dtype());
        if (p != plan.placement.rank && count) {
          const char* from = received.data(p) + layouts[p].tables[t];
          if (plan.bfloat16_wire && !bfloat16[t]) {
            FromBFloat16(reinterpret_cast<const BFloat16*>(from), count,
                         reinterpret_cast<float*>(to));
          } else {
            std::memcpy(to, from, bytes);
          }
        }
        to += bytes;
      }
    }
  }

  // Sets the activations of a feature of a whole table. Else `*output` is where
  // they are to be combined.
  static absl::Status SetOutput(OpKernelContext* context, const Plan& plan,
                                const ServedVariant& served,
                                const Received& received,
                                const std::vector<MessageLayout>& layouts,
                                int f, float** output) {
    const PreparedBatch& batch = *served.looked_up.batch;
    const int owner = plan.placement.owners[plan.feature_tables[f]];
    if (owner == plan.placement.rank) {
      context->set_output(f, served.activations[f]);
      return absl::OkStatus();
    }
    TensorShape shape;
    TF_RETURN_IF_ERROR(
        ActivationShape(batch.features[f].output_shape, plan.dim(f), &shape));
    Tensor* allocated = nullptr;
    if (owner == kAllProcesses) {
      TF_RETURN_IF_ERROR(context->allocate_output(f, shape, &allocated));
      *output = allocated->flat<float>().data();
      return absl::OkStatus();
    }
    const int64_t count = shape.num_elements();
    const int64_t offset = layouts[owner].features[f];
    if (plan.bfloat16_wire) {
      TF_RETURN_IF_ERROR(context->allocate_output(f, shape, &allocated));
      FromBFloat16(
          reinterpret_cast<const BFloat16*>(received.data(owner) + offset),
          count, allocated->flat<float>().data());
      return absl::OkStatus();
    }
    // The output is a part of what was received: nothing is copied.
    const int64_t begin = received.offsets[owner] + offset;
    const Tensor part = received.tensor.Slice(
        begin, begin + count * static_cast<int64_t>(sizeof(float)));
    Tensor activations;
    TF_RETURN_IF_ERROR(
        activations.BitcastFrom(part, tensorflow::DT_FLOAT, shape));
    context->set_output(f, activations);
    return absl::OkStatus();
  }

  int num_features_ = 0;
};

REGISTER_KERNEL_BUILDER(
    Name("TpuEmbeddingServe").Device(tensorflow::DEVICE_CPU), ServeOp);
REGISTER_KERNEL_BUILDER(
    Name("TpuEmbeddingCombine").Device(tensorflow::DEVICE_CPU), CombineOp);

}  // namespace
}  // namespace tpu_embedding
