// TpuEmbeddingServe and TpuEmbeddingCombine look up tables that are divided
// over processes or servers.

#include <algorithm>
#include <atomic>
#include <cstring>
#include <deque>
#include <memory>
#include <utility>
#include <vector>

#include "core/lookup.h"
#include "core/pieces.h"
#include "core/routing.h"
#include "core/rows-inl.h"
#include "kernels/apply_updates.h"
#include "kernels/batch_variant.h"
#include "kernels/kernel_util.h"
#include "kernels/sharded.h"
#include "kernels/step_queue_resource.h"
#include "kernels/waiting_table.h"
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
    .Input("arrays: num_arrays * resource")
    .Input("runs: int64")
    .Output("looked_up: variant")
    .Output("messages: num_messages * uint8")
    .Output("refusal: string")
    .Attr("num_batches: int >= 0")
    .Attr("num_arrays: int >= 1")
    .Attr("num_messages: int >= 1")
    .Attr("output_shapes: list(shape)")
    .SetIsStateful()
    .SetShapeFn(MessageShapes)
    .Doc(R"doc(
Looks up what every process, or a worker, asked this owner for.

batches: one batch from TpuEmbeddingReceiveBatch, past the queue; or none: the
  oldest one queued, which then owes its gradients if it is for training.
arrays: the variables of this owner's part, as for TpuEmbeddingLookup.
runs: as for TpuEmbeddingExchange.
looked_up: the input of TpuEmbeddingReceiveGradients, which accepts it once, if
  a batch was given; in a job also that of TpuEmbeddingCombine and
  TpuEmbeddingSendGradients.
messages: the message to each that asked, which TpuEmbeddingCombine receives.
refusal: the input of TpuEmbeddingExchange.
output_shapes: what is known of the activations' shapes; none on a server.
)doc");

REGISTER_OP("TpuEmbeddingCombine")
    .Input("queues: num_queues * resource")
    .Input("batch: variant")
    .Input("received: num_received * uint8")
    .Output("activations: num_features * float")
    .Output("apply_now: bool")
    .Attr("num_queues: int >= 0")
    .Attr("num_received: int >= 1")
    .Attr("num_features: int >= 1")
    .Attr("output_shapes: list(shape)")
    .SetIsStateful()
    .SetShapeFn([](InferenceContext* context) {
      TF_RETURN_IF_ERROR(ActivationShapes(context));
      context->set_output(context->num_outputs() - 1, context->Scalar());
      return absl::OkStatus();
    })
    .Doc(R"doc(
Makes the activations from the rows and samples that the owners sent.

queues: the queue that TpuEmbeddingServe took the batch from, or none.
batch: from TpuEmbeddingServe, or in a worker from TpuEmbeddingRoute.
received: the messages of TpuEmbeddingServe to this process, by owner.
activations, output_shapes: as for TpuEmbeddingLookup.
apply_now: whether updates are due, as for TpuEmbeddingLookup.
)doc");

int64_t ElementBytes(bool narrow) {
  return narrow ? sizeof(BFloat16) : sizeof(float);
}

// Returns how arrived rows are stored. Rows that may wait are caught up, so
// they are float32 whatever the storage of the table.
RowStorage JoinedStorage(const TablePlan& table) {
  return table.idle ? RowStorage::kFloat32 : table.storage;
}

// Returns how rows travel.
RowStorage WireStorage(const TablePlan& table, bool narrow) {
  const RowStorage joined = JoinedStorage(table);
  const bool rounds = narrow && joined == RowStorage::kFloat32;
  return rounds ? RowStorage::kBFloat16 : joined;
}

// Returns the bytes of rows, which travel array by array.
int64_t RowsBytes(RowStorage storage, int64_t dim, int64_t num_rows) {
  int64_t bytes = 0;
  for (const int64_t width : ArrayBytes(storage, dim)) {
    bytes += Padded(num_rows * width);
  }
  return bytes;
}

// Lays out the message from `owner` to a process that asked for `num_rows(t)`
// and `num_samples(f)`. `narrow`: float32 values travel as bfloat16.
template <class NumRows, class NumSamples>
MessageLayout LookupLayout(const Plan& plan, int owner, bool narrow,
                           const NumRows& num_rows,
                           const NumSamples& num_samples) {
  MessageLayout layout;
  const Placement& placement = plan.placement;
  layout.tables.resize(plan.tables.size());
  layout.features.resize(plan.features.size());
  for (size_t t = 0; t < plan.tables.size(); ++t) {
    layout.tables[t] = layout.bytes;
    if (!placement.by_rows(t)) continue;
    layout.bytes += RowsBytes(WireStorage(plan.tables[t], narrow),
                              plan.tables[t].dim, num_rows(t));
  }
  for (size_t f = 0; f < plan.features.size(); ++f) {
    layout.features[f] = layout.bytes;
    if (placement.owners[plan.feature_tables[f]] != owner) continue;
    layout.bytes += Padded(num_samples(f) * plan.dim(f) * ElementBytes(narrow));
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
    std::vector<Variable> tables, slots;
    OP_REQUIRES_OK(context, LookUpArrays(context, plan, &tables, &slots));
    BatchVariant looked_up(resource->plan, nullptr, absl::OkStatus());
    absl::Status status = Take(context, resource.get(), &looked_up);
    if (status.ok()) status = AdoptGrowing(tables, resource.get());
    const ReadLocks locks(tables, slots);
    if (status.ok()) status = CheckTables(tables, plan);
    std::vector<TableView> views;  // none if no row waits
    if (status.ok() && AnyWaits(*resource)) {
      views.resize(plan.tables.size());
      status = MakeViews(*resource, tables, slots, &views);
    }
    if (status.ok()) status = CheckShapes(plan, *looked_up.batch);
    std::vector<GrowingTable::Found> found(plan.tables.size());
    if (status.ok()) {
      status = FindGrowing(looked_up.batch, tables, WorkerPool(context),
                           resource.get(), &found);
    }
    const Placement& placement = plan.placement;
    std::vector<MessageLayout> layouts(placement.num_senders());
    std::vector<int64_t> bytes(placement.num_senders(), 0);
    for (int p = 0; p < placement.num_senders() && status.ok(); ++p) {
      const PeerRequest& request = looked_up.batch->routed->requests[p];
      layouts[p] = LookupLayout(
          plan, placement.rank, Narrow(plan, p),
          [&](int t) { return request.wanted[t].size(); },
          [&](int f) { return request.features[f].num_samples(); });
      bytes[p] = layouts[p].bytes;
    }
    std::vector<char*> messages(placement.num_senders(), nullptr);
    OP_REQUIRES_OK(context,
                   SetMessages(context, placement, status, bytes,
                               [&](int p, char* data) { messages[p] = data; }));
    if (status.ok()) {
      for (size_t t = 0; t < plan.tables.size(); ++t) {
        if (resource->growing[t]) continue;
        resource->huge_pages.Advise(t, *tables[t]->tensor());
      }
      Fill(context, *resource, tables, found, views, layouts, messages,
           *looked_up.batch->routed);
    }
    OP_REQUIRES_OK(context, Wrap(context, 0, std::move(looked_up)));
  }

 private:
  absl::Status Take(OpKernelContext* context, StepQueueResource* resource,
                    BatchVariant* looked_up) const {
    OpInputList batches;
    TF_RETURN_IF_ERROR(context->input_list("batches", &batches));
    if (batches.size() == 0) {
      int64_t run = 0;
      TF_RETURN_IF_ERROR(ReadRun(context, &run));
      resource->queue.BeginDequeue(run);
      // The batch stays in the queue until all processes have served.
      SharedBatch none;
      const auto peek = [&](const SharedBatch& batch) {
        looked_up->batch = batch;
        return false;
      };
      TF_RETURN_IF_ERROR(FailedPrecondition(
          resource->queue.Dequeue(0, BatchQueue::kOutside, peek, &none)));
    } else {
      const BatchVariant* given = nullptr;
      TF_RETURN_IF_ERROR(Unwrap(batches[0], resource->plan.get(), &given));
      TF_RETURN_IF_ERROR(given->status);
      looked_up->batch = given->batch;
      looked_up->used = std::make_shared<std::atomic<bool>>(false);
      looked_up->epoch = 0;
      TF_RETURN_IF_ERROR(FailedPrecondition(resource->queue.BeginLookup(
          0, BatchQueue::kOutside, &*looked_up->epoch)));
    }
    return CheckRouted(*looked_up->batch);
  }

  // Checks shapes before anything travels, so that all processes refuse.
  absl::Status CheckShapes(const Plan& plan, const PreparedBatch& batch) const {
    TF_RETURN_IF_ERROR(
        CheckLength("output_shapes", shapes_.size(), batch.features.size()));
    TensorShape shape;
    for (size_t f = 0; f < batch.features.size(); ++f) {
      TF_RETURN_IF_ERROR(ActivationShape(
          plan, f, batch.features[f].output_shape, shapes_[f], &shape));
    }
    return absl::OkStatus();
  }

  // Returns the rows of the ids that a sender wants, as found for its entries.
  static Buffer<int32_t> RowsOfIds(const PeerRequest& request, int sender,
                                   const TablePlan& table, int64_t size,
                                   const GrowingTable::Found& found) {
    Buffer<int32_t> rows;
    rows.Resize(size);
    std::fill_n(rows.data(), size, kRowOfZeros);
    for (const int f : table.features) {
      const Buffer<int32_t>& positions = request.positions[f];
      for (int64_t i = 0; i < positions.size(); ++i) {
        rows[positions[i]] = found.rows(sender, f)[i];
      }
    }
    return rows;
  }

  static void Fill(OpKernelContext* context, const StepQueueResource& resource,
                   const std::vector<Variable>& tables,
                   const std::vector<GrowingTable::Found>& found,
                   const std::vector<TableView>& views,
                   const std::vector<MessageLayout>& layouts,
                   const std::vector<char*>& messages,
                   const RoutedBatch& routed) {
    const Plan& plan = *resource.plan;
    const int rank = plan.placement.rank;
    const auto entries_of = [&](int64_t sender, int64_t f) -> FeatureEntries {
      const int table = plan.feature_tables[f];
      const FeatureCsr& csr = routed.requests[sender].features[f];
      if (!resource.growing[table]) return csr;
      return {csr, found[table].rows(sender, f)};
    };
    const int64_t num_tables = plan.tables.size();
    const int64_t num_features = plan.features.size();
    // The work for each sender: its tables, then its features.
    std::vector<Work> works;
    std::vector<CaughtUp> caught_up;  // by work
    // Wanted rows by sender and table; `of_ids` has those of growing tables.
    std::vector<const Buffer<int32_t>*> wanted;
    std::deque<Buffer<int32_t>> of_ids;
    const auto read = [&](int t, const Buffer<int32_t>& rows) {
      const bool waits = !views.empty() && resource.waiting[t];
      caught_up.push_back(waits ? CaughtUp{t, &rows} : CaughtUp());
    };
    for (size_t p = 0; p < routed.requests.size(); ++p) {
      const PeerRequest& request = routed.requests[p];
      for (int64_t t = 0; t < num_tables; ++t) {
        const int64_t count = request.wanted[t].size();
        works.push_back({count, count * (20 + plan.tables[t].dim / 2)});
        wanted.push_back(&request.wanted[t].rows);
        if (resource.growing[t] && plan.placement.by_rows(t)) {
          of_ids.push_back(
              RowsOfIds(request, p, plan.tables[t], count, found[t]));
          wanted.back() = &of_ids.back();
        }
        read(t, *wanted.back());
      }
      for (int64_t f = 0; f < num_features; ++f) {
        const FeatureCsr& csr = request.features[f];
        const bool whole = routed.IsWhole(rank, f);
        works.push_back(
            {whole ? csr.num_samples() : 0,
             whole ? LookupCycles(entries_of(p, f), plan.dim(f)) : 0});
        if (whole) {
          read(plan.feature_tables[f], *entries_of(p, f).rows);
        } else {
          caught_up.emplace_back();
        }
      }
    }
    ReadCaughtUp(WorkerPool(context), resource, views, &caught_up);
    ForEachPiece(WorkerPool(context), works, [&](const Piece& piece) {
      const int p = piece.owner / (num_tables + num_features);
      const int64_t item = piece.owner % (num_tables + num_features);
      const bool narrow = Narrow(plan, p);
      const CaughtUpRows* const copy = caught_up[piece.owner].found.get();
      const auto data = [&](int64_t table) -> ConstTableData {
        if (copy) return copy->values.data();
        const GrowingTable* growing = resource.growing[table].get();
        return growing ? growing->rows() : ConstRowsOf(tables, plan, table);
      };
      if (item < num_tables) {
        const int64_t t = item;
        const TablePlan& table = plan.tables[t];
        const Buffer<int32_t>& rows =
            copy ? copy->places : *wanted[p * num_tables + t];
        char* const to = messages[p] + layouts[p].tables[t];
        const bool widens = !copy && table.storage == RowStorage::kBFloat16 &&
                            WireStorage(table, narrow) == RowStorage::kFloat32;
        if (!widens) {
          return GatherRows(rows, data(t), table.dim, narrow, piece.begin,
                            piece.end, to);
        }
        for (int64_t i = piece.begin; i < piece.end; ++i) {
          ReadRow(data(t), rows[i], table.dim,
                  reinterpret_cast<float*>(to) + i * table.dim);
        }
        return;
      }
      const int64_t f = item - num_tables;
      const int t = plan.feature_tables[f];
      const int64_t dim = plan.dim(f);
      char* to = messages[p] + layouts[p].features[f];
      const auto look_up = [&](float* out) {
        FeatureEntries entries = entries_of(p, f);
        if (copy) entries.rows = &copy->places;
        Lookup(entries, data(t), dim, plan.tables[t].quantization, piece.begin,
               piece.end, out);
      };
      if (!narrow) return look_up(reinterpret_cast<float*>(to));
      std::vector<float> out((piece.end - piece.begin) * dim);
      // Lookup expects a pointer to where sample 0 would be.
      look_up(out.data() - piece.begin * dim);
      ToBFloat16(out.data(), out.size(),
                 reinterpret_cast<BFloat16*>(to) + piece.begin * dim);
    });
  }

  std::vector<tensorflow::PartialTensorShape> shapes_;
};

class CombineOp : public tensorflow::OpKernel {
 public:
  explicit CombineOp(OpKernelConstruction* context) : OpKernel(context) {
    OP_REQUIRES_OK(context, context->GetAttr("num_features", &num_features_));
    OP_REQUIRES_OK(context, context->GetAttr("output_shapes", &shapes_));
    OP_REQUIRES_OK(context,
                   CheckLength("output_shapes", shapes_.size(), num_features_));
  }

  void Compute(OpKernelContext* context) override {
    const Tensor* tensor = nullptr;
    OP_REQUIRES_OK(context, context->input("batch", &tensor));
    const BatchVariant* variant = nullptr;
    OP_REQUIRES_OK(context, Unwrap(*tensor, nullptr, &variant));
    OP_REQUIRES(
        context, variant->batch,
        absl::InvalidArgumentError("A malformed graph: `batch` is not a "
                                   "lookup. Trace the function again."));
    OP_REQUIRES_OK(context, CheckRouted(*variant->batch));
    const Plan& plan = *variant->plan;
    OP_REQUIRES_OK(context, CheckLength("activations", num_features_,
                                        variant->batch->features.size()));
    OpInputList received, queues;
    OP_REQUIRES_OK(context,
                   ReadReceived(context, plan.placement.size, &received));
    OP_REQUIRES_OK(context, context->input_list("queues", &queues));
    bool apply_now = false;
    if (queues.size() > 0) {
      QueuePtr resource;
      OP_REQUIRES_OK(context, LookUpQueue(context, &resource));
      OP_REQUIRES_OK(context, Dequeue(resource.get(), variant->batch));
      OP_REQUIRES_OK(context, Run(context, plan, *variant->batch, received));
      apply_now = resource->queue.LookupsAreDone();
    } else {
      OP_REQUIRES_OK(context, Run(context, plan, *variant->batch, received));
    }
    OP_REQUIRES_OK(context, SetBool(context, num_features_, apply_now));
  }

 private:
  static absl::Status Dequeue(StepQueueResource* resource,
                              const SharedBatch& served) {
    SharedBatch batch;
    const auto same = [&](const SharedBatch& next) { return next == served; };
    TF_RETURN_IF_ERROR(FailedPrecondition(
        resource->queue.Dequeue(0, BatchQueue::kOutside, same, &batch)));
    if (batch) return absl::OkStatus();
    return absl::FailedPreconditionError(
        "dequeue: another thread has dequeued the batch.");
  }

  absl::Status Run(OpKernelContext* context, const Plan& plan,
                   const PreparedBatch& batch,
                   const OpInputList& received) const {
    const RoutedBatch& routed = *batch.routed;
    std::vector<MessageLayout> layouts(received.size());
    for (int p = 0; p < received.size(); ++p) {
      layouts[p] = LookupLayout(
          plan, p, Narrow(plan, p),
          [&](int t) { return routed.sent[p].wanted[t].size(); },
          [&](int f) { return batch.features[f].num_samples(); });
      TF_RETURN_IF_ERROR(
          CheckBytes(p, received[p].NumElements(), layouts[p].bytes));
    }
    std::vector<Tensor> rows;
    TF_RETURN_IF_ERROR(Join(context, plan, routed, received, layouts, &rows));
    std::vector<float*> outputs(num_features_, nullptr);
    std::vector<Work> works;
    for (int f = 0; f < num_features_; ++f) {
      TF_RETURN_IF_ERROR(
          SetOutput(context, plan, batch, received, layouts, f, &outputs[f]));
      const FeatureCsr& csr = batch.features[f];
      works.push_back({outputs[f] ? csr.num_samples() : 0,
                       outputs[f] ? LookupCycles(csr, plan.dim(f)) : 0});
    }
    ForEachPiece(WorkerPool(context), works, [&](const Piece& piece) {
      const int64_t f = piece.owner;
      const int t = plan.feature_tables[f];
      Lookup(batch.features[f], Joined(plan.tables[t], routed, t, rows[t]),
             plan.dim(f), plan.tables[t].quantization, piece.begin, piece.end,
             outputs[f]);
    });
    return absl::OkStatus();
  }

  // Returns what `Join` has made of the rows of a table.
  static ConstTableData Joined(const TablePlan& table,
                               const RoutedBatch& routed, int t,
                               const Tensor& rows) {
    const char* const data = static_cast<const char*>(rows.data());
    const int64_t first = ArrayBytes(JoinedStorage(table), table.dim)[0];
    return TableAt(JoinedStorage(table),
                   std::array<const void*, 2>{
                       data, data + Padded(routed.NumArriving(t) * first)});
  }

  // Joins the rows of each table that is divided by rows, array by array: those
  // of owner 0 come first.
  static absl::Status Join(OpKernelContext* context, const Plan& plan,
                           const RoutedBatch& routed,
                           const OpInputList& received,
                           const std::vector<MessageLayout>& layouts,
                           std::vector<Tensor>* rows) {
    const int64_t size = received.size();
    rows->resize(plan.tables.size());
    std::vector<int64_t> first_rows;  // by table and owner
    std::vector<Work> works;
    for (size_t t = 0; t < plan.tables.size(); ++t) {
      const TablePlan& table = plan.tables[t];
      int64_t row = 0;
      if (plan.placement.by_rows(t)) {
        TF_RETURN_IF_ERROR(context->allocate_temp(
            tensorflow::DT_UINT8,
            {RowsBytes(JoinedStorage(table), table.dim, routed.NumArriving(t))},
            &(*rows)[t]));
      }
      for (const Sent& sent : routed.sent) {
        const int64_t count = sent.wanted[t].size();
        first_rows.push_back(row);
        works.push_back({count, count * (5 + table.dim / 4)});
        row += count;
      }
    }
    ForEachPiece(WorkerPool(context), works, [&](const Piece& piece) {
      const int64_t t = piece.owner / size;
      const int p = piece.owner % size;
      const TablePlan& table = plan.tables[t];
      const int64_t first = first_rows[piece.owner] + piece.begin;
      const int64_t count = piece.end - piece.begin;
      const char* from = DataOf(received, p) + layouts[p].tables[t];
      char* to = static_cast<char*>((*rows)[t].data());
      if (WireStorage(table, Narrow(plan, p)) != JoinedStorage(table)) {
        FromBFloat16(
            reinterpret_cast<const BFloat16*>(from) + piece.begin * table.dim,
            count * table.dim,
            reinterpret_cast<float*>(to) + first * table.dim);
        return;
      }
      for (const int64_t width : ArrayBytes(JoinedStorage(table), table.dim)) {
        std::memcpy(to + first * width, from + piece.begin * width,
                    count * width);
        from += Padded(routed.sent[p].wanted[t].size() * width);
        to += Padded(routed.NumArriving(t) * width);
      }
    });
    return absl::OkStatus();
  }

  // Sets the activations of a feature of a whole table. For other features sets
  // `*output` to where their activations are to be combined.
  absl::Status SetOutput(OpKernelContext* context, const Plan& plan,
                         const PreparedBatch& batch,
                         const OpInputList& received,
                         const std::vector<MessageLayout>& layouts, int f,
                         float** output) const {
    const int owner = plan.placement.owners[plan.feature_tables[f]];
    TensorShape shape;
    TF_RETURN_IF_ERROR(ActivationShape(plan, f, batch.features[f].output_shape,
                                       shapes_[f], &shape));
    Tensor* allocated = nullptr;
    if (owner == kAllProcesses) {
      TF_RETURN_IF_ERROR(context->allocate_output(f, shape, &allocated));
      *output = allocated->flat<float>().data();
      return absl::OkStatus();
    }
    const int64_t count = shape.num_elements();
    const int64_t begin = layouts[owner].features[f];
    if (Narrow(plan, owner)) {
      TF_RETURN_IF_ERROR(context->allocate_output(f, shape, &allocated));
      FromBFloat16(
          reinterpret_cast<const BFloat16*>(DataOf(received, owner) + begin),
          count, allocated->flat<float>().data());
      return absl::OkStatus();
    }
    // The output is a part of what was received, so nothing is copied.
    const Tensor part = received[owner].Slice(
        begin, begin + count * static_cast<int64_t>(sizeof(float)));
    Tensor activations;
    TF_RETURN_IF_ERROR(
        activations.BitcastFrom(part, tensorflow::DT_FLOAT, shape));
    context->set_output(f, activations);
    return absl::OkStatus();
  }

  int num_features_ = 0;
  std::vector<tensorflow::PartialTensorShape> shapes_;
};

REGISTER_KERNEL_BUILDER(
    Name("TpuEmbeddingServe").Device(tensorflow::DEVICE_CPU), ServeOp);
REGISTER_KERNEL_BUILDER(
    Name("TpuEmbeddingCombine").Device(tensorflow::DEVICE_CPU), CombineOp);

}  // namespace
}  // namespace tpu_embedding
