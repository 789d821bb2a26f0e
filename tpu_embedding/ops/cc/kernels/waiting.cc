// TpuEmbeddingCaughtUpRows reads rows that wait for their gradients,
// TpuEmbeddingCatchUp passes over all of them, and TpuEmbeddingAdvance counts
// the steps that they wait.

#include "kernels/waiting.h"

#include <algorithm>
#include <map>
#include <utility>

#include "core/distinct.h"
#include "core/pieces.h"
#include "kernels/plan.h"
#include "tensorflow/core/framework/common_shape_fns.h"
#include "tensorflow/core/framework/op.h"
#include "tensorflow/core/framework/resource_mgr.h"
#include "tensorflow/core/framework/shape_inference.h"

namespace tpu_embedding {
namespace {

using tensorflow::OpKernelConstruction;
using tensorflow::OpKernelContext;
using tensorflow::Tensor;
using tensorflow::shape_inference::InferenceContext;
using tensorflow::shape_inference::ShapeHandle;

absl::Status GetDoubles(const Record& record, const char* name,
                        std::vector<double>* values) {
  Tensor tensor;
  TF_RETURN_IF_ERROR(record.Get(name, &tensor));
  if (tensor.dtype() != tensorflow::DT_DOUBLE) {
    return absl::InvalidArgumentError(
        absl::StrCat("A malformed graph: `", name, "` is not float64."));
  }
  const auto flat = tensor.flat<double>();
  values->assign(flat.data(), flat.data() + flat.size());
  return absl::OkStatus();
}

// The locked table of an op, and its waiting rows.
struct LockedTable {
  WaitingTables waiting;            // of one table
  std::vector<Variable> variables;  // the table, then its slots
  std::unique_ptr<ReadLocks> read_locks;
  std::unique_ptr<WriteLocks> write_locks;
  TableView view;

  absl::Status LookUp(OpKernelContext* context,
                      const std::vector<IdleRule>& rules, bool writes) {
    TF_RETURN_IF_ERROR(waiting.LookUp(context, rules, writes));
    TF_RETURN_IF_ERROR(LookUpArrays(context, &variables));
    if (writes) {
      write_locks = std::make_unique<WriteLocks>(variables);
      TF_RETURN_IF_ERROR(write_locks->MakeWritable(context));
    } else {
      read_locks = std::make_unique<ReadLocks>(variables);
    }
    return MakeView(rules[0].fades.size());
  }

 private:
  absl::Status MakeView(size_t num_slots) {
    Tensor* const table = variables[0]->tensor();
    if (table->dtype() != tensorflow::DT_FLOAT) {
      return absl::InvalidArgumentError(
          "A malformed graph: a table with waiting rows is not float32.");
    }
    view.parameters = static_cast<float*>(table->data());
    view.num_rows = table->dim_size(0);
    view.dim = table->dim_size(1);
    TF_RETURN_IF_ERROR(
        CheckLength("sinces", waiting[0].num_rows(), view.num_rows));
    for (size_t k = 1; k <= num_slots; ++k) {
      if (k >= variables.size() ||
          variables[k]->tensor()->dtype() != tensorflow::DT_FLOAT ||
          variables[k]->tensor()->shape() != table->shape()) {
        return absl::InvalidArgumentError(
            "A slot is missing or does not have the shape of its table. Do not "
            "change the shape of a slot.");
      }
      view.slots.push_back(variables[k]->tensor()->flat<float>().data());
    }
    return absl::OkStatus();
  }
};

// An op of one table, whose rule is in the attribute `idle`.
class WaitingOp : public tensorflow::OpKernel {
 public:
  explicit WaitingOp(OpKernelConstruction* context) : OpKernel(context) {
    OP_REQUIRES_OK(context, ReadIdleRules(context, &rules_));
    OP_REQUIRES_OK(context, CheckLength("idle", rules_.size(), 1));
  }

 protected:
  std::vector<IdleRule> rules_;  // of the table
};

// Reads the rows that an input names, each in [0, num_rows).
template <class Number>
absl::Status ReadRows(const Tensor& tensor, int64_t num_rows,
                      std::vector<int64_t>* rows) {
  const auto numbers = tensor.flat<Number>();
  rows->assign(numbers.data(), numbers.data() + numbers.size());
  for (size_t i = 0; i < rows->size(); ++i) {
    const int64_t row = (*rows)[i];
    if (row >= 0 && row < num_rows) continue;
    return absl::InvalidArgumentError(absl::StrCat(
        "indices[", i, "] = ", row, " is not in [0, ", num_rows, ")"));
  }
  return absl::OkStatus();
}

REGISTER_OP("TpuEmbeddingCaughtUpRows")
    .Input("arrays: num_arrays * resource")
    .Input("clocks: resource")
    .Input("sinces: resource")
    .Input("histories: resource")
    .Input("rows: row_type")
    .Output("values: num_outputs * float")
    .Attr("num_arrays: int >= 1")
    .Attr("num_outputs: int >= 1")
    .Attr("row_type: {int32, int64}")
    .Attr("dim: int >= 1")
    .Attr("idle: string")
    .SetIsStateful()
    .SetShapeFn([](InferenceContext* context) {
      int64_t dim = 0;
      TF_RETURN_IF_ERROR(context->GetAttr("dim", &dim));
      ShapeHandle shape;
      TF_RETURN_IF_ERROR(
          context->Concatenate(context->input(context->num_inputs() - 1),
                               context->Vector(dim), &shape));
      for (int i = 0; i < context->num_outputs(); ++i) {
        context->set_output(i, shape);
      }
      return absl::OkStatus();
    })
    .Doc(R"doc(
Reads rows as they would be if no step had left them out. Writes nothing.

arrays: the variables of one table, float32 [num_rows, dim], and of its slots.
clocks, sinces, histories: the table's variables of keras/rows/waiting.py.
rows: row numbers in [0, num_rows), of any shape.
values: [rows..., dim] of the table, then of each slot if there are outputs.
idle: a record whose `rules` say what a step without a gradient does. It is no
  list of strings, because eager calls of ops with other lists share a kernel.
)doc");

class CaughtUpRowsOp : public WaitingOp {
 public:
  explicit CaughtUpRowsOp(OpKernelConstruction* context) : WaitingOp(context) {
    if (!context->status().ok()) return;
    OP_REQUIRES_OK(context, context->GetAttr("num_outputs", &num_outputs_));
    const int most = 1 + rules_[0].fades.size();
    OP_REQUIRES_OK(context, CheckIndices("outputs", {num_outputs_ - 1}, most));
  }

  void Compute(OpKernelContext* context) override {
    LockedTable table;
    OP_REQUIRES_OK(context, table.LookUp(context, rules_, false));
    const TableView& view = table.view;
    const Tensor& rows = context->input(context->num_inputs() - 1);
    std::vector<int64_t> numbers;
    OP_REQUIRES_OK(context,
                   rows.dtype() == tensorflow::DT_INT32
                       ? ReadRows<int32_t>(rows, view.num_rows, &numbers)
                       : ReadRows<int64_t>(rows, view.num_rows, &numbers));
    tensorflow::TensorShape shape = rows.shape();
    OP_REQUIRES_OK(context, shape.AddDimWithStatus(view.dim));
    std::vector<float*> outputs;
    for (int i = 0; i < num_outputs_; ++i) {
      Tensor* output = nullptr;
      OP_REQUIRES_OK(context, context->allocate_output(i, shape, &output));
      outputs.push_back(output->flat<float>().data());
    }
    Read(WorkerPool(context), view, table.waiting[0], numbers, outputs);
  }

 private:
  // Reads rows. Those that repeat are caught up once.
  static void Read(const ParallelFor& parallel_for, const TableView& view,
                   const WaitingRows& waiting, const std::vector<int64_t>& rows,
                   const std::vector<float*>& outputs) {
    const int64_t count = rows.size();
    std::vector<int64_t> first(count), distinct;
    FirstPlaces places;
    places.Start(count);
    for (int64_t i = 0; i < count; ++i) {
      first[i] = places.Of(rows, i);
      if (first[i] != i) continue;
      waiting.PrefetchSince(rows[i]);
      distinct.push_back(i);
    }
    const Work work = WorkToCatchUp(view, distinct.size());
    ForEachPiece(parallel_for, {work}, [&](const Piece& piece) {
      ReadInTurn(
          view, waiting, piece.begin, piece.end,
          [&](int64_t i) { return rows[distinct[i]]; },
          [&](int64_t i) {
            ReadRow(view, waiting, rows[distinct[i]], distinct[i], outputs);
          });
    });
    for (int64_t i = 0; i < count; ++i) {
      if (first[i] == i) continue;
      for (float* const output : outputs) {
        std::copy_n(output + first[i] * view.dim, view.dim,
                    output + i * view.dim);
      }
    }
  }

  static void ReadRow(const TableView& view, const WaitingRows& waiting,
                      int64_t row, int64_t place,
                      const std::vector<float*>& outputs) {
    std::array<const float*, kMostSlots> slots = {};
    std::array<float*, kMostSlots> slots_out = {};
    for (size_t k = 0; k < view.slots.size(); ++k) {
      slots[k] = view.slots[k] + row * view.dim;
      if (outputs.size() > 1) slots_out[k] = outputs[1 + k] + place * view.dim;
    }
    waiting.CatchUp(waiting.Find(row),
                    std::get<float*>(view.parameters) + row * view.dim,
                    slots.data(), view.dim, outputs[0] + place * view.dim,
                    outputs.size() > 1 ? slots_out.data() : nullptr);
  }

  int num_outputs_ = 1;
};

REGISTER_OP("TpuEmbeddingCatchUp")
    .Input("arrays: num_arrays * resource")
    .Input("clocks: resource")
    .Input("sinces: resource")
    .Input("histories: resource")
    .Attr("num_arrays: int >= 1")
    .Attr("idle: string")
    .SetIsStateful()
    .SetShapeFn(tensorflow::shape_inference::NoOutputs)
    .Doc(R"doc(
Catches all rows of a table and its slots up, unless none waits.

arrays, clocks, sinces, histories, idle: as for
  TpuEmbeddingCaughtUpRows.
)doc");

class CatchUpOp : public WaitingOp {
 public:
  using WaitingOp::WaitingOp;

  void Compute(OpKernelContext* context) override {
    bool waits = false;
    OP_REQUIRES_OK(context, AnyWaits(context, &waits));
    if (!waits) return;
    LockedTable table;
    OP_REQUIRES_OK(context, table.LookUp(context, rules_, true));
    if (table.waiting[0].none_waits()) return;
    CatchUpAll(WorkerPool(context), table.view, &table.waiting[0]);
  }

 private:
  // Finds whether rows wait, without locks that would keep readers out.
  absl::Status AnyWaits(OpKernelContext* context, bool* waits) const {
    WaitingTables waiting;
    TF_RETURN_IF_ERROR(waiting.LookUp(context, rules_, false));
    *waits = !waiting[0].none_waits();
    return absl::OkStatus();
  }
};

REGISTER_OP("TpuEmbeddingAdvance")
    .Input("arrays: num_arrays * resource")
    .Input("clocks: resource")
    .Input("sinces: resource")
    .Input("histories: resource")
    .Input("steps: double")
    .Attr("num_arrays: int >= 1")
    .Attr("idle: string")
    .Attr("updated_all: bool")
    .SetIsStateful()
    .SetShapeFn(tensorflow::shape_inference::NoOutputs)
    .Doc(R"doc(
Counts a step of a table, which is caught up if its history is full.

arrays, clocks, sinces, histories, idle: as for
  TpuEmbeddingCaughtUpRows.
steps: [1, 3]: weight, note and shrinkage of the step.
updated_all: whether the step has updated all rows.
)doc");

class AdvanceOp : public WaitingOp {
 public:
  explicit AdvanceOp(OpKernelConstruction* context) : WaitingOp(context) {
    OP_REQUIRES_OK(context, context->GetAttr("updated_all", &updated_all_));
  }

  void Compute(OpKernelContext* context) override {
    LockedTable table;
    const Tensor& steps = context->input(context->num_inputs() - 1);
    OP_REQUIRES_OK(context, CheckLength("steps", steps.NumElements(), 3));
    OP_REQUIRES_OK(context, table.LookUp(context, rules_, true));
    WaitingRows& waiting = table.waiting[0];
    if (updated_all_) {
      const double* const step = steps.flat<double>().data();
      waiting.Advance(step[0], step[1], step[2]);
      waiting.Restart();
    } else {
      AdvanceTable(WorkerPool(context), steps, 0, table.view, &waiting);
    }
  }

 private:
  bool updated_all_ = false;
};

REGISTER_KERNEL_BUILDER(
    Name("TpuEmbeddingCaughtUpRows").Device(tensorflow::DEVICE_CPU),
    CaughtUpRowsOp);
REGISTER_KERNEL_BUILDER(
    Name("TpuEmbeddingCatchUp").Device(tensorflow::DEVICE_CPU), CatchUpOp);
REGISTER_KERNEL_BUILDER(
    Name("TpuEmbeddingAdvance").Device(tensorflow::DEVICE_CPU), AdvanceOp);

}  // namespace

absl::Status ReadIdleRule(const Record& record, IdleRule* rule) {
  using Move = IdleRule::Move;
  static const auto* moves =
      new std::map<std::string, Move>{{"", Move::kNone},
                                      {"momentum", Move::kMomentum},
                                      {"sign", Move::kSign},
                                      {"root", Move::kRoot},
                                      {"follow", Move::kFollow}};
  std::string move;
  TF_RETURN_IF_ERROR(record.Get("move", &move));
  const auto found = moves->find(move);
  if (found == moves->end()) {
    return absl::InvalidArgumentError(
        absl::StrCat("A malformed graph: `move` is ", move, "."));
  }
  rule->move = found->second;
  std::vector<double> options;  // epsilon_beta, root_fade, epsilon, follow
  TF_RETURN_IF_ERROR(record.Get("name", &rule->name));
  TF_RETURN_IF_ERROR(record.Get("owner", &rule->owner));
  TF_RETURN_IF_ERROR(record.Get("moment", &rule->moment));
  TF_RETURN_IF_ERROR(record.Get("square", &rule->square));
  TF_RETURN_IF_ERROR(record.Get("epsilon_inside", &rule->epsilon_inside));
  TF_RETURN_IF_ERROR(record.Get("decays", &rule->decays));
  TF_RETURN_IF_ERROR(record.Get("powers", &rule->powers));
  TF_RETURN_IF_ERROR(GetDoubles(record, "options", &options));
  TF_RETURN_IF_ERROR(GetDoubles(record, "fades", &rule->fades));
  TF_RETURN_IF_ERROR(GetDoubles(record, "nodes", &rule->nodes));
  TF_RETURN_IF_ERROR(GetDoubles(record, "node_weights", &rule->node_weights));
  TF_RETURN_IF_ERROR(CheckLength("options", options.size(), 7));
  const int slots = rule->fades.size();
  const size_t most = rule->powers ? kMostPowers : kMostNodes;
  if (slots > kMostSlots || rule->nodes.empty() || rule->nodes.size() > most ||
      rule->node_weights.size() % rule->nodes.size() != 0) {
    return absl::InvalidArgumentError(
        "A malformed graph: `idle` has too many slots or nodes.");
  }
  if (slots > 0) {
    TF_RETURN_IF_ERROR(
        CheckIndices("idle", {rule->moment, rule->square}, slots));
  }
  rule->epsilon_beta = options[0];
  rule->root_fade = options[1];
  rule->epsilon = options[2];
  std::copy_n(options.begin() + 3, 4, rule->follow.begin());
  rule->MakeFewFades();
  return absl::OkStatus();
}

absl::Status ReadIdleRules(OpKernelConstruction* context,
                           std::vector<IdleRule>* rules) {
  Record all;
  TF_RETURN_IF_ERROR(all.Read(context, "idle"));
  std::vector<Record> records;
  TF_RETURN_IF_ERROR(all.Get("rules", &records));
  for (const Record& record : records) {
    TF_RETURN_IF_ERROR(ReadIdleRule(record, &rules->emplace_back()));
  }
  return absl::OkStatus();
}

absl::Status WaitingTables::LookUp(OpKernelContext* context,
                                   const std::vector<IdleRule>& rules,
                                   bool writes) {
  std::vector<Variable> clocks, sinces, histories;
  TF_RETURN_IF_ERROR(LookUpVariables(context, "clocks", 1,
                                     tensorflow::ToSet(tensorflow::DT_INT64),
                                     "Clocks must be int64 vectors", &clocks));
  TF_RETURN_IF_ERROR(LookUpVariables(context, "sinces", 1,
                                     tensorflow::ToSet(tensorflow::DT_INT32),
                                     "Sinces must be int32 vectors", &sinces));
  TF_RETURN_IF_ERROR(LookUpVariables(
      context, "histories", 2, tensorflow::ToSet(tensorflow::DT_DOUBLE),
      "Histories must be float64 matrices", &histories));
  if (clocks.empty()) return absl::OkStatus();
  for (const auto* list : {&clocks, &sinces, &histories}) {
    TF_RETURN_IF_ERROR(CheckLength("idle", rules.size(), list->size()));
  }
  for (auto* list : {&clocks, &sinces, &histories}) {
    for (Variable& variable : *list) variables_.push_back(std::move(variable));
  }
  if (writes) {
    write_locks_ = std::make_unique<WriteLocks>(variables_);
    TF_RETURN_IF_ERROR(write_locks_->MakeWritable(context));
  } else {
    read_locks_ = std::make_unique<ReadLocks>(variables_);
  }
  const size_t count = rules.size();
  for (size_t t = 0; t < count; ++t) {
    Tensor* const history = variables_[2 * count + t]->tensor();
    TF_RETURN_IF_ERROR(
        CheckLength("clocks", variables_[t]->tensor()->NumElements(), 3));
    TF_RETURN_IF_ERROR(CheckLength("histories", history->dim_size(1),
                                   2 + rules[t].num_terms()));
    rows_.push_back(std::make_unique<WaitingRows>(
        rules[t],
        WaitingState{variables_[t]->tensor()->flat<int64_t>().data(),
                     variables_[count + t]->tensor()->flat<int32_t>().data(),
                     history->flat<double>().data(), history->dim_size(0),
                     variables_[count + t]->tensor()->NumElements()}));
  }
  return absl::OkStatus();
}

absl::Status CheckStep(const IdleRule& rule, const WaitingRows& waiting,
                       double shrinkage) {
  if (waiting.owner() != rule.owner) {
    return absl::InvalidArgumentError(absl::StrCat(
        rule.name,
        " is no longer trained by the optimizer of this step: another one was "
        "built for it, or te.keras.unconvert changed it back. Train a table "
        "with "
        "one RowSparseOptimizer."));
  }
  if (shrinkage < 1.0) return absl::OkStatus();
  return absl::InvalidArgumentError(
      absl::StrCat("weight_decay * learning_rate must be below 1 for ",
                   rule.name, ". Use a smaller weight_decay, or lazy=True."));
}

void AdvanceTable(const ParallelFor& parallel_for, const Tensor& steps,
                  size_t table, const TableView& view, WaitingRows* waiting) {
  const double* const step = steps.flat<double>().data() + 3 * table;
  waiting->Advance(step[0], step[1], step[2]);
  if (waiting->is_full()) CatchUpAll(parallel_for, view, waiting);
}

void CatchUpAll(const ParallelFor& parallel_for, const TableView& view,
                WaitingRows* waiting, const Rounding& rounding) {
  const Work work = WorkToCatchUp(view, view.num_rows);
  ForEachPiece(parallel_for, {work}, [&](const Piece& piece) {
    CatchUpRows(view, *waiting, rounding, piece.begin, piece.end);
  });
  waiting->Restart();
}

}  // namespace tpu_embedding
