// TpuEmbeddingMarkRows, TpuEmbeddingTakeRows, TpuEmbeddingTakeIds and
// TpuEmbeddingCommitRows: the rows that changed for one consumer of deltas.

#include "core/changed_rows.h"

#include <algorithm>
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "kernels/kernel_util.h"
#include "kernels/step_queue_resource.h"
#include "tensorflow/core/framework/common_shape_fns.h"
#include "tensorflow/core/framework/op.h"
#include "tensorflow/core/framework/op_kernel.h"
#include "tensorflow/core/framework/shape_inference.h"

namespace tpu_embedding {
namespace {

using tensorflow::OpInputList;
using tensorflow::OpKernel;
using tensorflow::OpKernelConstruction;
using tensorflow::OpKernelContext;
using tensorflow::OpOutputList;
using tensorflow::Tensor;

REGISTER_OP("TpuEmbeddingMarkRows")
    .Input("queue: resource")
    .Input("rows: num_tables * int64")
    .Attr("num_tables: int >= 1")
    .Attr("consumer: string")
    .SetIsStateful()
    .SetShapeFn(tensorflow::shape_inference::NoOutputs)
    .Doc(R"doc(
Marks rows as changed for a consumer. From its first call on, updates mark the
rows that they change.

rows: the rows of each table; for a growing table ids, with or without a row.
)doc");

REGISTER_OP("TpuEmbeddingTakeRows")
    .Input("queue: resource")
    .Output("rows: num_tables * int64")
    .Attr("num_tables: int >= 1")
    .Attr("consumer: string")
    .SetIsStateful()
    .SetShapeFn(tensorflow::shape_inference::UnknownShape)
    .Doc(R"doc(
Returns the rows that changed since the consumer last committed. Rows that
change from now on are in its next delta, too.

rows: the rows of each table, ascending, each once; empty for growing tables.
)doc");

REGISTER_OP("TpuEmbeddingTakeIds")
    .Input("queue: resource")
    .Input("arrays: num_arrays * resource")
    .Output("ids: int64")
    .Output("deleted: int64")
    .Output("size: int64")
    .Output("rows: types")
    .Attr("num_arrays: int >= 1")
    .Attr("types: list({float, bfloat16, uint8}) >= 1")
    .Attr("table: int >= 0")
    .Attr("consumer: string")
    .SetIsStateful()
    .SetShapeFn(tensorflow::shape_inference::UnknownShape)
    .Doc(R"doc(
Does what TpuEmbeddingTakeRows does, for a growing table.

arrays: the variables that store its rows.
ids: changed ids that have rows, ascending.
deleted: ids that lost their rows, ascending.
size: [1], the number of all ids that have rows.
rows: from each of `arrays` the rows of the ids, and then the row that ids
  share, if it exists.
)doc");

REGISTER_OP("TpuEmbeddingCommitRows")
    .Input("queue: resource")
    .Attr("consumer: string")
    .Attr("end: bool")
    .SetIsStateful()
    .SetShapeFn(tensorflow::shape_inference::NoOutputs)
    .Doc(R"doc(
Forgets the rows that were taken last: the consumer has them.

end: whether the consumer ends; then updates mark nothing for it.
)doc");

class ConsumerOp : public OpKernel {
 public:
  explicit ConsumerOp(OpKernelConstruction* context) : OpKernel(context) {
    OP_REQUIRES_OK(context, context->GetAttr("consumer", &consumer_));
  }

 protected:
  absl::Status Find(const StepQueueResource& resource,
                    std::shared_ptr<ConsumerRows>* found) const {
    *found = resource.changed_rows.Find(consumer_);
    if (*found) return absl::OkStatus();
    return absl::FailedPreconditionError(
        absl::StrCat("No changes are tracked for consumer ", consumer_, "."));
  }

  std::string consumer_;
};

class MarkRowsOp : public ConsumerOp {
 public:
  using ConsumerOp::ConsumerOp;

  void Compute(OpKernelContext* context) override {
    QueuePtr resource;
    OP_REQUIRES_OK(context, LookUpQueue(context, &resource));
    OpInputList rows;
    OP_REQUIRES_OK(context, context->input_list("rows", &rows));
    const int num_tables = resource->plan->tables.size();
    OP_REQUIRES_OK(context, CheckLength("rows", rows.size(), num_tables));
    for (int t = 0; t < num_tables; ++t) {
      if (resource->growing[t]) continue;
      const auto flat = rows[t].flat<int64_t>();
      for (int64_t i = 0; i < flat.size(); ++i) {
        const bool known =
            flat(i) >= 0 && flat(i) < resource->plan->tables[t].rows;
        OP_REQUIRES(context, known,
                    absl::InvalidArgumentError(
                        absl::StrCat("Table ", resource->plan->tables[t].name,
                                     " has no row ", flat(i), ".")));
      }
    }
    const auto consumer = resource->changed_rows.Begin(consumer_);
    OP_REQUIRES(context, consumer != nullptr,
                absl::ResourceExhaustedError(
                    "A consumer of deltas needs two bits of memory for each "
                    "row of the tables, which this machine does not have."));
    for (int t = 0; t < num_tables; ++t) {
      const auto flat = rows[t].flat<int64_t>();
      if (GrowingTable* const growing = resource->growing[t].get()) {
        growing->MarkIds(flat.data(), flat.size(), consumer.get());
        continue;
      }
      for (int64_t i = 0; i < flat.size(); ++i) {
        consumer->since[t]->Set(flat(i));
      }
    }
  }
};

class TakeRowsOp : public ConsumerOp {
 public:
  using ConsumerOp::ConsumerOp;

  void Compute(OpKernelContext* context) override {
    QueuePtr resource;
    OP_REQUIRES_OK(context, LookUpQueue(context, &resource));
    std::shared_ptr<ConsumerRows> consumer;
    OP_REQUIRES_OK(context, Find(*resource, &consumer));
    OpOutputList outputs;
    OP_REQUIRES_OK(context, context->output_list("rows", &outputs));
    OP_REQUIRES_OK(context, CheckLength("num_tables", outputs.size(),
                                        consumer->taken.size()));
    for (size_t t = 0; t < consumer->taken.size(); ++t) {
      if (resource->growing[t]) {
        Tensor* none = nullptr;
        OP_REQUIRES_OK(context, outputs.allocate(t, {0}, &none));
        continue;
      }
      RowBits& taken = *consumer->taken[t];
      taken.Take(consumer->since[t].get());
      Tensor* rows = nullptr;
      OP_REQUIRES_OK(context, outputs.allocate(t, {taken.Count()}, &rows));
      int64_t* next = rows->flat<int64_t>().data();
      taken.ForEach([&](int64_t row) { *next++ = row; });
    }
  }
};

class TakeIdsOp : public ConsumerOp {
 public:
  explicit TakeIdsOp(OpKernelConstruction* context) : ConsumerOp(context) {
    OP_REQUIRES_OK(context, context->GetAttr("table", &table_));
  }

  void Compute(OpKernelContext* context) override {
    QueuePtr resource;
    OP_REQUIRES_OK(context, LookUpQueue(context, &resource));
    GrowingTable* growing = nullptr;
    OP_REQUIRES_OK(context, LookUpGrowing(*resource, table_, &growing));
    std::shared_ptr<ConsumerRows> consumer;
    OP_REQUIRES_OK(context, Find(*resource, &consumer));
    std::vector<Variable> stored;
    OP_REQUIRES_OK(context, LookUpArrays(context, &stored));
    const ReadLocks locks(stored);
    GrowingTable::Changes changes;
    OP_REQUIRES_OK(context, WithinMemory([&] {
                     return growing->TakeIds(stored, consumer.get(), &changes);
                   }));
    int output = 0;
    for (const auto* ids : {&changes.ids, &changes.deleted, &changes.size}) {
      const int64_t size = ids->size();
      Tensor* tensor = nullptr;
      OP_REQUIRES_OK(context,
                     context->allocate_output(output++, {size}, &tensor));
      std::copy(ids->begin(), ids->end(), tensor->flat<int64_t>().data());
    }
    for (const Tensor& rows : changes.rows) context->set_output(output++, rows);
  }

 private:
  int table_ = 0;
};

class CommitRowsOp : public ConsumerOp {
 public:
  explicit CommitRowsOp(OpKernelConstruction* context) : ConsumerOp(context) {
    OP_REQUIRES_OK(context, context->GetAttr("end", &end_));
  }

  void Compute(OpKernelContext* context) override {
    QueuePtr resource;
    OP_REQUIRES_OK(context, LookUpQueue(context, &resource));
    std::shared_ptr<ConsumerRows> consumer;
    OP_REQUIRES_OK(context, Find(*resource, &consumer));
    for (auto& taken : consumer->taken) {
      RowBits committed(taken->num_rows());
      committed.Take(taken.get());
    }
    for (const auto& growing : resource->growing) {
      if (growing) growing->CommitIds(consumer.get());
    }
    if (end_) resource->changed_rows.End(consumer_);
  }

 private:
  bool end_ = false;
};

REGISTER_KERNEL_BUILDER(
    Name("TpuEmbeddingMarkRows").Device(tensorflow::DEVICE_CPU), MarkRowsOp);
REGISTER_KERNEL_BUILDER(
    Name("TpuEmbeddingTakeRows").Device(tensorflow::DEVICE_CPU), TakeRowsOp);
REGISTER_KERNEL_BUILDER(
    Name("TpuEmbeddingTakeIds").Device(tensorflow::DEVICE_CPU), TakeIdsOp);
REGISTER_KERNEL_BUILDER(
    Name("TpuEmbeddingCommitRows").Device(tensorflow::DEVICE_CPU),
    CommitRowsOp);

}  // namespace
}  // namespace tpu_embedding
