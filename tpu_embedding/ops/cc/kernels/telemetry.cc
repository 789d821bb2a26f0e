// TpuEmbeddingStartTelemetry and TpuEmbeddingReadTelemetry.

#include "core/telemetry.h"

#include <algorithm>
#include <cstdint>
#include <vector>

#include "kernels/kernel_util.h"
#include "kernels/step_queue_resource.h"
#include "tensorflow/core/framework/common_shape_fns.h"
#include "tensorflow/core/framework/op.h"
#include "tensorflow/core/framework/op_kernel.h"
#include "tensorflow/core/framework/shape_inference.h"

namespace tpu_embedding {
namespace {

using tensorflow::OpKernelConstruction;
using tensorflow::OpKernelContext;
using tensorflow::OpOutputList;
using tensorflow::Tensor;

constexpr int kNumTotals = 6;
constexpr int kNumCounts = 4;
constexpr int kNumSums = 3;  // The outputs before those of single tables.

REGISTER_OP("TpuEmbeddingStartTelemetry")
    .Input("queue: resource")
    .Attr("every: int >= 0")
    .SetIsStateful()
    .SetShapeFn(tensorflow::shape_inference::NoOutputs)
    .Doc(R"doc(
Forgets what was counted, and counts the next update and every n-th after it.

every: n; 0 counts nothing.
)doc");

REGISTER_OP("TpuEmbeddingReadTelemetry")
    .Input("queue: resource")
    .Output("steps: int64")
    .Output("totals: int64")
    .Output("vocabularies: int64")
    .Output("hot_rows: num_tables * int64")
    .Output("rows: num_tables * int32")
    .Output("ids: num_tables * uint32")
    .Output("gradient_norms: num_tables * float")
    .Output("update_norms: num_tables * float")
    .Attr("num_tables: int >= 0")
    .Attr("num_hot_rows: int >= 0")
    .SetIsStateful()
    .SetShapeFn(tensorflow::shape_inference::UnknownShape)
    .Doc(R"doc(
Returns what was counted of the applied updates, for all tables or for none.

steps: [5], updates applied, updates counted, batches that wait in the queue,
  complete updates that are not applied, samples of the updates applied.
totals: [num_tables, 6], of the counted updates: IDs, invalid IDs, samples,
  samples without IDs, distinct IDs, and rows that any of them named.
vocabularies: [num_tables, 4], of all updates of growing tables: IDs without a
  row, those of them that were admitted and that were refused, and evicted rows.
hot_rows: [n, 2], the rows named most often and how often.
rows: of the last counted update: the rows, each once.
ids: by row, how often it was named.
gradient_norms: by row, the norm of its summed gradient.
update_norms: by row, or for every row of the table, the norm of its change.
)doc");

class StartTelemetryOp : public tensorflow::OpKernel {
 public:
  explicit StartTelemetryOp(OpKernelConstruction* context) : OpKernel(context) {
    OP_REQUIRES_OK(context, context->GetAttr("every", &every_));
  }

  void Compute(OpKernelContext* context) override {
    QueuePtr resource;
    OP_REQUIRES_OK(context, LookUpQueue(context, &resource));
    std::vector<int64_t> num_rows;
    for (const TablePlan& table : resource->plan->tables) {
      num_rows.push_back(table.rows);
    }
    OP_REQUIRES(context, resource->telemetry.Start(every_, num_rows),
                absl::ResourceExhaustedError(
                    "Telemetry needs 4 bytes of memory for each row of the "
                    "tables, which this machine does not have."));
  }

 private:
  int64_t every_ = 0;
};

class ReadTelemetryOp : public tensorflow::OpKernel {
 public:
  explicit ReadTelemetryOp(OpKernelConstruction* context) : OpKernel(context) {
    OP_REQUIRES_OK(context, context->GetAttr("num_hot_rows", &num_hot_rows_));
  }

  void Compute(OpKernelContext* context) override {
    QueuePtr resource;
    OP_REQUIRES_OK(context, LookUpQueue(context, &resource));
    absl::Status status;
    resource->telemetry.Read([&](const Telemetry::View& view) {
      status = Write(context, resource.get(), view);
    });
    OP_REQUIRES_OK(context, status);
  }

 private:
  absl::Status Write(OpKernelContext* context, StepQueueResource* resource,
                     const Telemetry::View& view) const {
    const int64_t num_tables =
        context->num_outputs() > kNumSums ? resource->plan->tables.size() : 0;
    if (view.tables.size() != resource->plan->tables.size()) {
      return absl::FailedPreconditionError("Telemetry is off.");
    }
    Tensor *steps = nullptr, *totals = nullptr, *vocabularies = nullptr;
    TF_RETURN_IF_ERROR(context->allocate_output("steps", {5}, &steps));
    TF_RETURN_IF_ERROR(
        context->allocate_output("totals", {num_tables, kNumTotals}, &totals));
    auto numbers = steps->flat<int64_t>();
    numbers(0) = view.steps;
    numbers(1) = view.counted_steps;
    numbers(2) = resource->queue.Depth();
    numbers(3) = resource->queue.Pending();
    numbers(4) = view.samples;
    TF_RETURN_IF_ERROR(context->allocate_output(
        "vocabularies", {num_tables, kNumCounts}, &vocabularies));
    TF_RETURN_IF_ERROR(CheckLength(
        "num_tables", context->num_outputs() - kNumSums, 5 * num_tables));
    OpOutputList hot_rows, rows, ids, gradient_norms, update_norms;
    TF_RETURN_IF_ERROR(context->output_list("hot_rows", &hot_rows));
    TF_RETURN_IF_ERROR(context->output_list("rows", &rows));
    TF_RETURN_IF_ERROR(context->output_list("ids", &ids));
    TF_RETURN_IF_ERROR(context->output_list("gradient_norms", &gradient_norms));
    TF_RETURN_IF_ERROR(context->output_list("update_norms", &update_norms));
    auto sums = totals->matrix<int64_t>();
    auto known = vocabularies->matrix<int64_t>();
    for (int64_t t = 0; t < num_tables; ++t) {
      const TableTelemetry& table = view.tables[t];
      sums(t, 0) = table.ids;
      sums(t, 1) = table.invalid_ids;
      sums(t, 2) = table.samples;
      sums(t, 3) = table.samples_without_ids;
      sums(t, 4) = table.distinct_ids;
      sums(t, 5) = resource->telemetry.RowsTouched(t);
      const GrowingTable* const growing = resource->growing[t].get();
      const VocabularyCounts counts =
          growing ? growing->counts() : VocabularyCounts();
      known(t, 0) = counts.unknown;
      known(t, 1) = counts.admitted;
      known(t, 2) = counts.refused;
      known(t, 3) = counts.evicted;
      TF_RETURN_IF_ERROR(WriteHotRows(
          resource->telemetry.Hottest(t, num_hot_rows_), t, &hot_rows));
      const CountedUpdate& last = table.last;
      TF_RETURN_IF_ERROR(Copy(last.rows, t, &rows));
      TF_RETURN_IF_ERROR(Copy(last.ids, t, &ids));
      TF_RETURN_IF_ERROR(Copy(last.gradient_norms, t, &gradient_norms));
      TF_RETURN_IF_ERROR(Copy(last.update_norms, t, &update_norms));
    }
    return absl::OkStatus();
  }

  static absl::Status WriteHotRows(const std::vector<HotRow>& hottest, int t,
                                   OpOutputList* outputs) {
    Tensor* output = nullptr;
    const int64_t size = hottest.size();
    TF_RETURN_IF_ERROR(outputs->allocate(t, {size, 2}, &output));
    auto matrix = output->matrix<int64_t>();
    for (int64_t i = 0; i < size; ++i) {
      matrix(i, 0) = hottest[i].row;
      matrix(i, 1) = hottest[i].ids;
    }
    return absl::OkStatus();
  }

  template <class T>
  static absl::Status Copy(const Buffer<T>& values, int t,
                           OpOutputList* outputs) {
    Tensor* output = nullptr;
    TF_RETURN_IF_ERROR(outputs->allocate(t, {values.size()}, &output));
    std::copy(values.data(), values.data() + values.size(),
              output->flat<T>().data());
    return absl::OkStatus();
  }

  int64_t num_hot_rows_ = 0;
};

REGISTER_KERNEL_BUILDER(
    Name("TpuEmbeddingStartTelemetry").Device(tensorflow::DEVICE_CPU),
    StartTelemetryOp);
REGISTER_KERNEL_BUILDER(
    Name("TpuEmbeddingReadTelemetry").Device(tensorflow::DEVICE_CPU),
    ReadTelemetryOp);

}  // namespace
}  // namespace tpu_embedding
