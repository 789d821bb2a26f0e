// TpuEmbeddingSaveVocabulary, TpuEmbeddingLoadVocabulary, TpuEmbeddingEvict and
// TpuEmbeddingReadIds tell and set which id has which row of a growing table.

#include "core/vocabulary.h"

#include <algorithm>
#include <array>
#include <cstdint>
#include <memory>
#include <numeric>
#include <vector>

#include "core/lookup.h"
#include "kernels/apply_updates.h"
#include "kernels/growing_table.h"
#include "kernels/kernel_util.h"
#include "kernels/step_queue_resource.h"
#include "kernels/waiting_table.h"
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

REGISTER_OP("TpuEmbeddingSaveVocabulary")
    .Input("queue: resource")
    .Input("arrays: num_arrays * resource")
    .Output("ids: int64")
    .Output("rows: int64")
    .Output("hits: int64")
    .Output("last_updates: int64")
    .Output("candidates: int64")
    .Output("candidate_hits: int64")
    .Output("state: int64")
    .Output("values: types")
    .Attr("num_arrays: int >= 0")
    .Attr("types: list({float, bfloat16, uint8}) >= 0")
    .Attr("table: int >= 0")
    .SetIsStateful()
    .SetShapeFn(tensorflow::shape_inference::UnknownShape)
    .Doc(R"doc(
Reads a growing table at one moment.

arrays: its variable and those of its slots, or none.
ids ... state: the parts of a VocabularySnapshot (core/vocabulary.h).
values: from each array the row of each id, and then the shared row, if it
  exists.
)doc");

REGISTER_OP("TpuEmbeddingLoadVocabulary")
    .Input("queue: resource")
    .Input("ids: int64")
    .Input("rows: int64")
    .Input("hits: int64")
    .Input("last_updates: int64")
    .Input("candidates: int64")
    .Input("candidate_hits: int64")
    .Input("state: int64")
    .Input("arrays: num_arrays * resource")
    .Input("values: types")
    .Attr("num_arrays: int >= 1")
    .Attr("types: list({float, bfloat16, uint8}) >= 1")
    .Attr("table: int >= 0")
    .SetIsStateful()
    .SetShapeFn(tensorflow::shape_inference::NoOutputs)
    .Doc(R"doc(
Replaces the vocabulary and the rows of a growing table, or changes nothing.

arrays: the variables of the table and of its slots.
ids ... state, values: as TpuEmbeddingSaveVocabulary gives them.
)doc");

REGISTER_OP("TpuEmbeddingEvict")
    .Input("queue: resource")
    .Output("evicted: int64")
    .Attr("table: int >= 0")
    .SetIsStateful()
    .SetShapeFn(tensorflow::shape_inference::ScalarShape)
    .Doc(R"doc(
Evicts rows of a growing table at once.

evicted: the number of evicted rows.
)doc");

REGISTER_OP("TpuEmbeddingReadIds")
    .Input("queue: resource")
    .Input("arrays: num_arrays * resource")
    .Input("ids: int64")
    .Output("rows: float")
    .Attr("num_arrays: int >= 1")
    .Attr("table: int >= 0")
    .SetIsStateful()
    .SetShapeFn(tensorflow::shape_inference::UnknownShape)
    .Doc(R"doc(
Returns what a lookup for an update reads of each id, or what it has read if its
update is still to come.

arrays: as for TpuEmbeddingLookup.
ids: [n].
rows: [n, dim].
)doc");

// Returns the parts of a snapshot in the order of the ops.
std::array<std::vector<int64_t>*, 7> PartsOf(VocabularySnapshot* snapshot) {
  return {&snapshot->ids,        &snapshot->rows,
          &snapshot->hits,       &snapshot->last_updates,
          &snapshot->candidates, &snapshot->candidate_hits,
          &snapshot->state};
}

// An op of one growing table of a queue.
class VocabularyOp : public tensorflow::OpKernel {
 public:
  explicit VocabularyOp(OpKernelConstruction* context) : OpKernel(context) {
    OP_REQUIRES_OK(context, context->GetAttr("table", &table_));
  }

  void Compute(OpKernelContext* context) final {
    QueuePtr resource;
    OP_REQUIRES_OK(context, LookUpQueue(context, &resource));
    GrowingTable* growing = nullptr;
    OP_REQUIRES_OK(context, LookUpGrowing(*resource, table_, &growing));
    OP_REQUIRES_OK(context, Run(context, *resource, growing));
  }

 protected:
  int table() const { return table_; }
  virtual absl::Status Run(OpKernelContext* context,
                           const StepQueueResource& resource,
                           GrowingTable* growing) = 0;

 private:
  int table_ = 0;
};

class SaveVocabularyOp : public VocabularyOp {
 public:
  using VocabularyOp::VocabularyOp;

  absl::Status Run(OpKernelContext* context, const StepQueueResource&,
                   GrowingTable* growing) override {
    std::vector<Variable> arrays;
    TF_RETURN_IF_ERROR(LookUpArrays(context, &arrays));
    const ReadLocks locks(arrays);
    VocabularySnapshot snapshot;
    std::vector<Tensor> values;
    TF_RETURN_IF_ERROR(growing->Save(arrays, &snapshot, &values));
    int output = 0;
    for (const std::vector<int64_t>* part : PartsOf(&snapshot)) {
      const int64_t size = part->size();
      Tensor* tensor = nullptr;
      TF_RETURN_IF_ERROR(context->allocate_output(output++, {size}, &tensor));
      std::copy(part->begin(), part->end(), tensor->flat<int64_t>().data());
    }
    for (const Tensor& value : values) context->set_output(output++, value);
    return absl::OkStatus();
  }
};

class LoadVocabularyOp : public VocabularyOp {
 public:
  using VocabularyOp::VocabularyOp;

  absl::Status Run(OpKernelContext* context, const StepQueueResource& resource,
                   GrowingTable* growing) override {
    OpInputList values;
    TF_RETURN_IF_ERROR(context->input_list("values", &values));
    VocabularySnapshot snapshot;
    int next = 1;  // After the queue.
    for (std::vector<int64_t>* part : PartsOf(&snapshot)) {
      const auto numbers = context->input(next++).flat<int64_t>();
      part->assign(numbers.data(), numbers.data() + numbers.size());
    }
    std::vector<Variable> variables;
    TF_RETURN_IF_ERROR(LookUpArrays(context, &variables));
    const WriteLocks locks(variables);
    TF_RETURN_IF_ERROR(
        growing->Load(snapshot, {values.begin(), values.end()}, variables));
    WaitingTable* const waiting = resource.waiting[table()].get();
    if (waiting) waiting->rows().Restart();
    return absl::OkStatus();
  }
};

class EvictOp : public VocabularyOp {
 public:
  using VocabularyOp::VocabularyOp;

  absl::Status Run(OpKernelContext* context, const StepQueueResource&,
                   GrowingTable* growing) override {
    Tensor* evicted = nullptr;
    TF_RETURN_IF_ERROR(context->allocate_output(0, {}, &evicted));
    return WithinMemory([&] {
      evicted->scalar<int64_t>()() = growing->Evict();
      return absl::OkStatus();
    });
  }
};

class ReadIdsOp : public VocabularyOp {
 public:
  using VocabularyOp::VocabularyOp;

  absl::Status Run(OpKernelContext* context, const StepQueueResource& resource,
                   GrowingTable* growing) override {
    std::vector<Variable> tables, slots;
    const Plan& plan = *resource.plan;
    TF_RETURN_IF_ERROR(LookUpArrays(context, plan, &tables, &slots));
    TF_RETURN_IF_ERROR(CheckLength("tables", tables.size(), plan.num_arrays));
    std::vector<tensorflow::Var*> stored = StoredRows(tables, plan, table());
    TF_RETURN_IF_ERROR(growing->AdoptRows(stored));
    const Tensor* given = nullptr;
    TF_RETURN_IF_ERROR(context->input("ids", &given));
    const auto ids = given->flat<int64_t>();
    const auto batch = std::make_shared<PreparedBatch>();
    const TablePlan& own = plan.tables[table()];
    const int feature = own.features[0];
    batch->features.resize(plan.features.size());
    // Each id is one sample.
    FeatureCsr& csr = batch->features[feature];
    csr.ids.Resize(ids.size());
    csr.offsets.Resize(ids.size() + 1);
    std::copy_n(ids.data(), ids.size(), csr.ids.data());
    std::iota(csr.offsets.data(), csr.offsets.data() + csr.offsets.size(), 0);
    Tensor* rows = nullptr;
    TF_RETURN_IF_ERROR(
        context->allocate_output(0, {ids.size(), own.dim}, &rows));
    const ReadLocks locks(tables, slots);
    std::vector<TableView> views(plan.tables.size());
    const bool waits = resource.waiting[table()] && AnyWaits(resource);
    if (waits) TF_RETURN_IF_ERROR(MakeViews(resource, tables, slots, &views));
    GrowingTable::Found found;
    TF_RETURN_IF_ERROR(GrowingTable::Find(
        batch, GrowingTable::Purpose::kRepetition,
        {{growing, std::move(stored), &found}}, WorkerPool(context)));
    std::vector<CaughtUp> copies = {
        {waits ? table() : -1, &found.rows(0, feature)}};
    ReadCaughtUp(WorkerPool(context), resource, views, &copies);
    FeatureEntries entries(csr, found.rows(0, feature));
    ConstTableData data = growing->rows();
    if (const CaughtUpRows* const copy = copies[0].found.get()) {
      entries.rows = &copy->places;
      data = copy->values.data();
    }
    Lookup(entries, data, own.dim, Quantization(), 0, ids.size(),
           rows->flat<float>().data());
    return absl::OkStatus();
  }
};

REGISTER_KERNEL_BUILDER(
    Name("TpuEmbeddingReadIds").Device(tensorflow::DEVICE_CPU), ReadIdsOp);
REGISTER_KERNEL_BUILDER(
    Name("TpuEmbeddingEvict").Device(tensorflow::DEVICE_CPU), EvictOp);
REGISTER_KERNEL_BUILDER(
    Name("TpuEmbeddingSaveVocabulary").Device(tensorflow::DEVICE_CPU),
    SaveVocabularyOp);
REGISTER_KERNEL_BUILDER(
    Name("TpuEmbeddingLoadVocabulary").Device(tensorflow::DEVICE_CPU),
    LoadVocabularyOp);

}  // namespace
}  // namespace tpu_embedding
