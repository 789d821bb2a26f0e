// TpuEmbeddingLookup looks up a prepared batch, or the next one of the queue.

#include "core/lookup.h"

#include <algorithm>
#include <atomic>
#include <memory>
#include <utility>
#include <vector>

#include "core/pieces.h"
#include "kernels/apply_updates.h"
#include "kernels/batch_variant.h"
#include "kernels/kernel_util.h"
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
using tensorflow::shape_inference::InferenceContext;

REGISTER_OP("TpuEmbeddingLookup")
    .Input("queue: resource")
    .Input("batches: num_batches * variant")
    .Input("arrays: num_arrays * resource")
    .Input("runs: int64")
    .Output("activations: num_features * float")
    .Output("looked_up: variant")
    .Output("apply_now: bool")
    .Attr("num_batches: int >= 0")
    .Attr("num_arrays: int >= 1")
    .Attr("num_features: int >= 1")
    .Attr("output_shapes: list(shape)")
    .Attr("replica: int")
    .SetIsStateful()
    .SetShapeFn([](InferenceContext* context) {
      TF_RETURN_IF_ERROR(ActivationShapes(context));
      context->set_output(context->num_outputs() - 2, context->Scalar());
      context->set_output(context->num_outputs() - 1, context->Scalar());
      return absl::OkStatus();
    })
    .Doc(R"doc(
Looks up a batch: the given one, past the queue, or the next one in the queue.

batches: one batch, whose gradients may or may not follow by TpuEmbeddingUpdate,
  so that any number of lookups can share a step; or none: the oldest one queued
  for `replica`, which then owes its gradients if it is for training.
arrays: the variables of the tables, and then the slots of all tables, if rows of
  any wait for their gradients.
runs: empty in strategy.run in a graph; eagerly the number of this run, or 0
  outside of runs.
activations: for each feature [its output shape..., dim].
looked_up: the input of TpuEmbeddingUpdate, which accepts it once, if a batch
  was given.
apply_now: whether updates are due because all replicas have looked up the
  queue's next step.
output_shapes: what is known of the activations' shapes.
)doc");

class LookupOp : public tensorflow::OpKernel {
 public:
  explicit LookupOp(OpKernelConstruction* context) : OpKernel(context) {
    OP_REQUIRES_OK(context, context->GetAttr("replica", &replica_));
    OP_REQUIRES_OK(context, context->GetAttr("output_shapes", &shapes_));
  }

  void Compute(OpKernelContext* context) override {
    QueuePtr resource;
    int64_t run = 0;
    OP_REQUIRES_OK(context, LookUpQueue(context, &resource, replica_));
    OP_REQUIRES_OK(context, ReadRun(context, &run));
    std::vector<Variable> tables, slots;
    OP_REQUIRES_OK(context,
                   LookUpArrays(context, *resource->plan, &tables, &slots));
    OpInputList batches;
    OP_REQUIRES_OK(context, context->input_list("batches", &batches));
    OP_REQUIRES_OK(context, AdoptGrowing(tables, resource.get()));
    BatchQueue& queue = resource->queue;
    BatchVariant looked_up(resource->plan, nullptr, absl::OkStatus());
    const ReadLocks locks(tables, slots);
    Outputs outputs;
    outputs.caught_up.resize(resource->plan->features.size());
    if (AnyWaits(*resource)) {
      outputs.views.resize(resource->plan->tables.size());
      OP_REQUIRES_OK(context,
                     MakeViews(*resource, tables, slots, &outputs.views));
    }
    if (batches.size() == 0) {
      // A batch that cannot be looked up stays in the queue.
      absl::Status accepted;
      const auto accept = [&](const SharedBatch& batch) {
        accepted = Allocate(context, batch, tables, resource.get(), &outputs);
        return accepted.ok();
      };
      OP_REQUIRES_OK(context, FailedPrecondition(queue.Dequeue(
                                  replica_, run, accept, &looked_up.batch)));
      OP_REQUIRES_OK(context, accepted);
    } else {
      const BatchVariant* given = nullptr;
      OP_REQUIRES_OK(context, Unwrap(batches[0], resource->plan.get(), &given));
      if (!given->status.ok()) queue.FailLookup();
      OP_REQUIRES_OK(context, given->status);
      looked_up.batch = given->batch;
      looked_up.used = std::make_shared<std::atomic<bool>>(false);
      looked_up.epoch = 0;
      OP_REQUIRES_OK(context, FailedPrecondition(queue.BeginLookup(
                                  replica_, run, &*looked_up.epoch)));
      OP_REQUIRES_OK(context, Allocate(context, looked_up.batch, tables,
                                       resource.get(), &outputs));
    }
    Run(context, *looked_up.batch, tables, resource.get(), &outputs);
    const int num_features = resource->plan->features.size();
    Tensor* apply_now = nullptr;
    OP_REQUIRES_OK(context,
                   context->allocate_output(num_features + 1, {}, &apply_now));
    apply_now->scalar<bool>()() = batches.size() == 0 && queue.LookupsAreDone();
    OP_REQUIRES_OK(context, Wrap(context, num_features, std::move(looked_up)));
  }

 private:
  struct Outputs {
    std::vector<float*> features;            // of each one
    std::vector<GrowingTable::Found> found;  // of each growing table
    std::vector<TableView> views;            // none if no row waits
    std::vector<CaughtUp> caught_up;         // by feature
  };

  // Does everything that can fail.
  absl::Status Allocate(OpKernelContext* context, const SharedBatch& shared,
                        const std::vector<Variable>& tables,
                        StepQueueResource* resource, Outputs* outputs) const {
    const Plan& plan = *resource->plan;
    const PreparedBatch& batch = *shared;
    TF_RETURN_IF_ERROR(
        CheckLength("output_shapes", shapes_.size(), plan.features.size()));
    TF_RETURN_IF_ERROR(CheckTables(tables, plan));
    outputs->features.reserve(batch.features.size());
    for (size_t f = 0; f < batch.features.size(); ++f) {
      tensorflow::TensorShape shape;
      TF_RETURN_IF_ERROR(ActivationShape(
          plan, f, batch.features[f].output_shape, shapes_[f], &shape));
      Tensor* output = nullptr;
      TF_RETURN_IF_ERROR(context->allocate_output(f, shape, &output));
      outputs->features.push_back(output->flat<float>().data());
    }
    outputs->found = std::vector<GrowingTable::Found>(plan.tables.size());
    return FindGrowing(shared, tables, WorkerPool(context), resource,
                       &outputs->found);
  }

  void Run(OpKernelContext* context, const PreparedBatch& batch,
           const std::vector<Variable>& tables, StepQueueResource* resource,
           Outputs* outputs) const {
    const Plan& plan = *resource->plan;
    for (size_t t = 0; t < plan.tables.size(); ++t) {
      if (resource->growing[t]) continue;
      resource->huge_pages.Advise(t, *tables[t]->tensor());
    }
    std::vector<CaughtUp>& caught_up = outputs->caught_up;
    const auto entries_of = [&](int64_t f) -> FeatureEntries {
      const int table = plan.feature_tables[f];
      if (caught_up[f].found) return {batch.features[f], caught_up[f].places()};
      if (!resource->growing[table]) return batch.features[f];
      return {batch.features[f], outputs->found[table].rows(0, f)};
    };
    for (size_t f = 0; f < caught_up.size() && !outputs->views.empty(); ++f) {
      const int table = plan.feature_tables[f];
      if (!resource->waiting[table]) continue;
      const bool grouped =
          !batch.tables.empty() && plan.table_map.places[table];
      caught_up[f] = {table, entries_of(f).rows,
                      grouped ? &batch.tables[table] : nullptr};
    }
    ReadCaughtUp(WorkerPool(context), *resource, outputs->views, &caught_up);
    std::vector<Work> works;
    works.reserve(batch.features.size());
    for (size_t f = 0; f < batch.features.size(); ++f) {
      works.push_back({batch.features[f].num_samples(),
                       LookupCycles(entries_of(f), plan.dim(f))});
    }
    ForEachPiece(WorkerPool(context), works, [&](const Piece& piece) {
      const int64_t f = piece.owner;
      const int table = plan.feature_tables[f];
      const GrowingTable* growing = resource->growing[table].get();
      const ConstTableData rows =
          caught_up[f].found ? ConstTableData(caught_up[f].found->values.data())
          : growing          ? growing->rows()
                             : ConstRowsOf(tables, plan, table);
      Lookup(entries_of(f), rows, plan.dim(f), plan.tables[table].quantization,
             piece.begin, piece.end, outputs->features[f]);
    });
  }

  std::vector<tensorflow::PartialTensorShape> shapes_;
  int replica_ = 0;
};

REGISTER_KERNEL_BUILDER(
    Name("TpuEmbeddingLookup").Device(tensorflow::DEVICE_CPU), LookupOp);

}  // namespace
}  // namespace tpu_embedding
