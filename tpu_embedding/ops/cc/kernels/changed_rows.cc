// TpuEmbeddingMarkRows, TpuEmbeddingTakeRows and TpuEmbeddingCommitRows: the
// rows that changed for one consumer of deltas.

#include "core/changed_rows.h"

#include <cstdint>
#include <memory>
#include <string>

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

rows: of each table.
)doc");

REGISTER_OP("TpuEmbeddingTakeRows")
    .Input("queue: resource")
    .Output("rows: num_tables * int64")
    .Attr("num_tables: int >= 1")
    .Attr("consumer: string")
    .SetIsStateful()
    .SetShapeFn(tensorflow::shape_inference::UnknownShape)
    .Doc(R"doc(
The rows that changed since the consumer last committed. Rows that change from
now on are those of its next delta, too.

rows: of each table, ascending, each once.
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
                    "A consumer of deltas needs two bits for each row of the "
                    "tables, which this machine does not have."));
    for (int t = 0; t < num_tables; ++t) {
      const auto flat = rows[t].flat<int64_t>();
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
      RowBits& taken = *consumer->taken[t];
      taken.Take(consumer->since[t].get());
      Tensor* rows = nullptr;
      OP_REQUIRES_OK(context, outputs.allocate(t, {taken.Count()}, &rows));
      int64_t* next = rows->flat<int64_t>().data();
      taken.ForEach([&](int64_t row) { *next++ = row; });
    }
  }
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
    Name("TpuEmbeddingCommitRows").Device(tensorflow::DEVICE_CPU),
    CommitRowsOp);

}  // namespace
}  // namespace tpu_embedding
