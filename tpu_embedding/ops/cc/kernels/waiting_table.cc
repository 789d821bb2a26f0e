// TpuEmbeddingCatchUpTables passes over all rows of an embedding that wait, and
// TpuEmbeddingReadRows reads some.

#include "kernels/waiting_table.h"

#include <algorithm>
#include <cmath>
#include <utility>

#include "core/distinct.h"
#include "core/pieces.h"
#include "kernels/apply_updates.h"
#include "tensorflow/core/framework/common_shape_fns.h"
#include "tensorflow/core/framework/op.h"
#include "tensorflow/core/framework/op_kernel.h"
#include "tensorflow/core/framework/shape_inference.h"

namespace tpu_embedding {
namespace {

// Rough cycles to find whether an entry names a row that others name.
constexpr int64_t kCyclesPerReadEntry = 20;

// Returns for each row the step since which it waits; all are 0 at first.
int32_t* SinceOf(GrowingMemory* memory, int64_t rows) {
  const size_t bytes = rows * sizeof(int32_t);
  if (memory->capacity() < bytes) memory->Grow(bytes);
  return reinterpret_cast<int32_t*>(memory->data());
}

void FindDistinct(const WaitingRows& waiting, const Buffer<int32_t>& rows,
                  CaughtUpRows* found) {
  found->first.Start(rows.size());
  found->places.Resize(rows.size());
  found->distinct.clear();
  for (int64_t i = 0; i < rows.size(); ++i) {
    const int64_t place = found->first.Of(rows, i);
    if (place == i) {
      waiting.PrefetchSince(rows[i]);
      found->places[i] = found->distinct.size();
      found->distinct.push_back(rows[i]);
    } else {
      found->places[i] = found->places[place];
    }
  }
}

REGISTER_OP("TpuEmbeddingCatchUpTables")
    .Input("queue: resource")
    .Input("arrays: num_arrays * resource")
    .Attr("num_arrays: int >= 1")
    .SetIsStateful()
    .SetShapeFn(tensorflow::shape_inference::NoOutputs)
    .Doc(R"doc(
Makes rows that wait for their gradients what they would be if each update had
updated all rows.

arrays: the variables of all tables, then the slots table by table; all are
  written in place.
)doc");

class CatchUpTablesOp : public tensorflow::OpKernel {
 public:
  using OpKernel::OpKernel;

  void Compute(tensorflow::OpKernelContext* context) override {
    QueuePtr resource;
    OP_REQUIRES_OK(context, LookUpQueue(context, &resource));
    std::vector<Variable> tables, slots;
    OP_REQUIRES_OK(context,
                   LookUpArrays(context, *resource->plan, &tables, &slots));
    const WriteLocks locks(tables, slots);
    if (!AnyWaits(*resource)) return;
    OP_REQUIRES_OK(context, CheckTables(tables, *resource->plan));
    OP_REQUIRES_OK(context, locks.MakeWritable(context));
    std::vector<TableView> views(resource->plan->tables.size());
    OP_REQUIRES_OK(context, MakeViews(*resource, tables, slots, &views));
    for (size_t t = 0; t < views.size(); ++t) {
      CatchUpTable(WorkerPool(context), *resource, t, views[t]);
    }
  }
};

REGISTER_OP("TpuEmbeddingReadRows")
    .Input("queue: resource")
    .Input("arrays: num_arrays * resource")
    .Input("rows: int64")
    .Output("values: float")
    .Attr("num_arrays: int >= 1")
    .Attr("table: int >= 0")
    .SetIsStateful()
    .SetShapeFn(tensorflow::shape_inference::UnknownShape)
    .Doc(R"doc(
Reads rows of a table whose rows wait, caught up. Writes nothing.

arrays: as for TpuEmbeddingCatchUpTables.
rows: [n], rows of the table with the number `table`.
values: [n, dim].
)doc");

class ReadRowsOp : public tensorflow::OpKernel {
 public:
  explicit ReadRowsOp(tensorflow::OpKernelConstruction* context)
      : OpKernel(context) {
    OP_REQUIRES_OK(context, context->GetAttr("table", &table_));
  }

  void Compute(tensorflow::OpKernelContext* context) override {
    QueuePtr resource;
    OP_REQUIRES_OK(context, LookUpQueue(context, &resource));
    OP_REQUIRES_OK(context,
                   CheckIndices("table", {table_}, resource->waiting.size()));
    OP_REQUIRES(context, resource->waiting[table_] != nullptr,
                absl::InvalidArgumentError(
                    "A malformed graph: the table has no waiting rows."));
    std::vector<Variable> tables, slots;
    OP_REQUIRES_OK(context,
                   LookUpArrays(context, *resource->plan, &tables, &slots));
    const ReadLocks locks(tables, slots);
    OP_REQUIRES_OK(context, CheckTables(tables, *resource->plan));
    std::vector<TableView> views(resource->plan->tables.size());
    OP_REQUIRES_OK(context, MakeViews(*resource, tables, slots, &views));
    const tensorflow::Tensor& numbers =
        context->input(context->num_inputs() - 1);
    Buffer<int32_t> rows(numbers.NumElements());
    for (int64_t i = 0; i < rows.size(); ++i) {
      const int64_t row = numbers.flat<int64_t>()(i);
      OP_REQUIRES(context, row >= 0 && row < views[table_].num_rows,
                  absl::InvalidArgumentError(absl::StrCat(
                      "Table ", resource->plan->tables[table_].name,
                      " has no row ", row, ".")));
      rows[i] = row;
    }
    std::vector<CaughtUp> copies = {{table_, &rows}};
    ReadCaughtUp(WorkerPool(context), *resource, views, &copies);
    tensorflow::Tensor* values = nullptr;
    const int64_t dim = views[table_].dim;
    OP_REQUIRES_OK(context,
                   context->allocate_output(0, {rows.size(), dim}, &values));
    const CaughtUpRows& found = *copies[0].found;
    for (int64_t i = 0; i < rows.size(); ++i) {
      std::copy_n(found.values.data() + found.places[i] * dim, dim,
                  values->flat<float>().data() + i * dim);
    }
  }

 private:
  int table_ = 0;
};

REGISTER_KERNEL_BUILDER(
    Name("TpuEmbeddingReadRows").Device(tensorflow::DEVICE_CPU), ReadRowsOp);
REGISTER_KERNEL_BUILDER(
    Name("TpuEmbeddingCatchUpTables").Device(tensorflow::DEVICE_CPU),
    CatchUpTablesOp);

}  // namespace

std::vector<std::shared_ptr<WaitingTable>> MakeWaiting(const Plan& plan) {
  std::vector<std::shared_ptr<WaitingTable>> made;
  for (const TablePlan& table : plan.tables) {
    made.push_back(table.idle ? std::make_shared<WaitingTable>(table)
                              : nullptr);
  }
  return made;
}

WaitingTable::WaitingTable(const TablePlan& plan)
    : idle_(plan.idle),
      all_rows_(*plan.options),
      clock_(3),
      since_(plan.rows * sizeof(int32_t)),
      history_(plan.history * (2 + idle_->num_terms())),
      rows_(*idle_, {clock_.data(), SinceOf(&since_, plan.rows),
                     history_.data(), plan.history, plan.rows}) {
  all_rows_.all_rows = true;
}

float WaitingTable::Decay(float rate) const {
  return all_rows_.weight_decay_factor *
         (all_rows_.multiply_decay_by_rate ? rate : 1.0f);
}

bool WaitingTable::TakesStep(float rate) const {
  // With more decay, a row forgets its moves faster than its momenta fade, so
  // that the steps after `horizon` count, too.
  return std::isfinite(rate) &&
         std::abs(Decay(rate)) * static_cast<float>(idle_->horizon()) <= 1.0f;
}

void WaitingTable::Advance(float rate) {
  rows_.Advance(rate, 0.0, Decay(rate));
}

bool AnyWaits(const StepQueueResource& resource) {
  for (const auto& waiting : resource.waiting) {
    if (waiting && !waiting->rows().none_waits()) return true;
  }
  return false;
}

void CatchUpTable(const ParallelFor& parallel_for,
                  const StepQueueResource& resource, int table,
                  const TableView& view) {
  WaitingTable* const waiting = resource.waiting[table].get();
  if (!waiting || waiting->rows().none_waits()) return;
  CatchUpAll(parallel_for, view, &waiting->rows(), waiting->rounding);
  for (const auto& consumer : resource.changed_rows.Consumers()) {
    for (int64_t row = 0; row < view.num_rows; ++row) {
      consumer->since[table]->Set(row);
    }
  }
}

void ReadCaughtUp(const ParallelFor& parallel_for,
                  const StepQueueResource& resource,
                  const std::vector<TableView>& views,
                  std::vector<CaughtUp>* copies) {
  std::vector<CaughtUp*> own;
  int64_t entries = 0;
  for (CaughtUp& copy : *copies) {
    if (copy.table < 0) continue;
    copy.found = resource.waiting[copy.table]->TakeStorage();
    own.push_back(&copy);
    if (!copy.groups) entries += copy.rows->size();
  }
  if (own.empty()) return;
  ForEachItem(parallel_for, own.size(),
              entries * kCyclesPerReadEntry / own.size(), [&](int64_t i) {
                if (own[i]->groups) return;
                FindDistinct(resource.waiting[own[i]->table]->rows(),
                             *own[i]->rows, own[i]->found.get());
              });
  std::vector<Work> works;
  for (CaughtUp* copy : own) {
    const TableView& view = views[copy->table];
    copy->found->values.Resize(copy->num_distinct() * view.dim);
    works.push_back(WorkToCatchUp(view, copy->num_distinct()));
  }
  ForEachPiece(parallel_for, works, [&](const Piece& piece) {
    const CaughtUp& copy = *own[piece.owner];
    const TableView& view = views[copy.table];
    const GrowingTable* const growing = resource.growing[copy.table].get();
    const WaitingRows& waiting = resource.waiting[copy.table]->rows();
    const int32_t* const rows = copy.distinct();
    const auto waits = [&](int64_t i) {
      return !growing || (rows[i] >= 0 && rows[i] < view.num_rows);
    };
    ReadInTurn(
        view, waiting, piece.begin, piece.end,
        [&](int64_t i) { return waits(i) ? rows[i] : 0; },
        [&](int64_t i) {
          float* const values = copy.found->values.data() + i * view.dim;
          if (waits(i)) {
            ReadCaughtUp(view, waiting, rows[i], values);
          } else {
            ReadRow(growing->rows(), rows[i], view.dim, values);
          }
        });
  });
}

}  // namespace tpu_embedding
