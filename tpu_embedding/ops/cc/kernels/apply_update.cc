// TpuEmbeddingApplyUpdate: the ready step's gradients -> tables and slots.

#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "core/pieces.h"
#include "core/prepared_batch.h"
#include "core/rules.h"
#include "core/update.h"
#include "kernels/huge_pages.h"
#include "kernels/kernel_util.h"
#include "kernels/step_queue_resource.h"
#include "tensorflow/core/framework/op.h"
#include "tensorflow/core/framework/op_kernel.h"
#include "tensorflow/core/framework/shape_inference.h"

namespace tpu_embedding {
namespace {

using tensorflow::OpKernelConstruction;
using tensorflow::OpKernelContext;
using tensorflow::Tensor;

REGISTER_OP("TpuEmbeddingApplyUpdate")
    .Input("queue: resource")
    .Input("tables: num_tables * resource")
    .Input("slots: num_slots * resource")
    .Input("step: int64")
    .Attr("num_tables: int >= 1")
    .Attr("num_slots: int >= 0")
    .Attr("feature_tables: list(int)")
    .Attr("rules: list(string)")
    .Attr("hyperparameters: list(float)")
    .Attr("hyperparameter_counts: list(int)")
    .Attr("row_options: list(float)")
    .Attr("multiply_decay_by_rate: list(bool)")
    .Attr("all_rows: list(bool)")
    .Attr("rounding_seeds: list(int)")
    .SetIsStateful()
    .SetShapeFn(tensorflow::shape_inference::NoOutputs)
    .Doc(R"doc(
Applies the update of the step that all replicas have handed gradients in for.
Does nothing where no such step is.

tables, slots: variables, updated in place; the slots table by table.
step: the number of updates before this one, for the rounding of bfloat16.
feature_tables: for each feature the index of its table.
rules: by table the name of its optimizer's rule.
hyperparameters, hyperparameter_counts: the rules' constants, table by table.
row_options: by table (smallest gradient, largest gradient, smallest weight,
  largest weight, weight decay factor).
all_rows: by table, whether rows without gradient are updated too.
rounding_seeds: by table, for those that are bfloat16 (core/bfloat16.h).
)doc");

// Rough cycles for one entry and for one row, without those for their width.
constexpr int64_t kCyclesPerEntry = 20;
constexpr int64_t kCyclesPerRow = 50;

struct TableRule {
  const RuleEntry* entry = nullptr;
  std::vector<float> hyperparameters;
  RowOptions options;
  uint64_t rounding_seed = 0;
  std::vector<int> features;
};

// What one table's update needs while the op runs.
struct TableWork {
  TableView view;
  RowGroups merged;                   // of several replicas
  std::vector<const float*> samples;  // gradient of each sample, or null
  TableGradients gradients;
  RuleArguments arguments;
};

class ApplyUpdateOp : public tensorflow::OpKernel {
 public:
  explicit ApplyUpdateOp(OpKernelConstruction* context) : OpKernel(context) {
    OP_REQUIRES_OK(context, ReadRules(context));
    int num_slots = 0;
    OP_REQUIRES_OK(context, context->GetAttr("num_slots", &num_slots));
    huge_pages_ = std::make_unique<HugePages>(NumTables() + num_slots);
  }

  void Compute(OpKernelContext* context) override {
    QueuePtr resource;
    OP_REQUIRES_OK(context, LookUpQueue(context, &resource));
    std::vector<Variable> tables, slots;
    OP_REQUIRES_OK(context, LookUpTables(context, &tables));
    OP_REQUIRES_OK(context, LookUpSlots(context, &slots));
    const Tensor* count = nullptr;
    OP_REQUIRES_OK(context, context->input("step", &count));
    OP_REQUIRES_OK(context, CheckScalar("step", *count));
    if (!resource->queue.IsReady()) return;
    std::vector<tensorflow::Var*> all;
    for (const Variable& variable : tables) all.push_back(variable.get());
    for (const Variable& variable : slots) all.push_back(variable.get());
    const WriteLocks locks(all);
    OP_REQUIRES_OK(context, locks.MakeWritable(context));
    for (size_t i = 0; i < all.size(); ++i) {
      huge_pages_->Advise(i, *all[i]->tensor());
    }
    std::vector<TableWork> work(NumTables());
    OP_REQUIRES_OK(context, MakeViews(tables, slots, &work));
    // Last, so that whatever fails before leaves the step where it is.
    std::optional<BatchQueue::Step> step;
    OP_REQUIRES_OK(context, TakeStep(&resource->queue, tables, &step));
    if (!step) return;
    for (int t = 0; t < NumTables(); ++t) {
      work[t].arguments = {rules_[t].hyperparameters,
                           Rate(*step, t),
                           {rules_[t].rounding_seed,
                            static_cast<uint64_t>(count->flat<int64_t>()(0))}};
      CollectGradients(*step, t, &work[t]);
    }
    const ParallelFor parallel_for = WorkerPool(context);
    if (step->replicas.size() > 1) MergeReplicas(*step, parallel_for, &work);
    Run(parallel_for, work);
  }

 private:
  int NumTables() const { return rules_.size(); }

  // The step that is ready, which stays there if its batches are of other
  // tables than these.
  absl::Status TakeStep(BatchQueue* queue, const std::vector<Variable>& tables,
                        std::optional<BatchQueue::Step>* step) const {
    absl::Status status;
    queue->TakeReady(
        [&](const BatchQueue::Step& ready) {
          for (const BatchQueue::Part& part : ready.replicas) {
            status.Update(CheckPart(part, tables));
          }
          return status.ok();
        },
        step);
    return status;
  }

  absl::Status CheckPart(const BatchQueue::Part& part,
                         const std::vector<Variable>& tables) const {
    const PreparedBatch& batch = *part.batch;
    TF_RETURN_IF_ERROR(
        CheckLength("features", batch.features.size(), num_features_));
    TF_RETURN_IF_ERROR(CheckLength("tables", batch.tables.size(), NumTables()));
    return CheckTableSizes(tables, batch.vocabulary_sizes);
  }

  // All replicas but one hand in zeros.
  static float Rate(const BatchQueue::Step& step, int table) {
    float rate = 0.0f;
    for (const BatchQueue::Part& part : step.replicas) {
      rate += part.gradients.rates.flat<float>()(table);
    }
    return rate;
  }

  absl::Status ReadRules(OpKernelConstruction* context) {
    std::vector<std::string> names;
    std::vector<float> numbers, options;
    std::vector<int> counts;
    std::vector<int64_t> rounding_seeds;
    std::vector<bool> decay_by_rate, all_rows;
    TableMap tables;
    TF_RETURN_IF_ERROR(context->GetAttr("rules", &names));
    TF_RETURN_IF_ERROR(context->GetAttr("hyperparameters", &numbers));
    TF_RETURN_IF_ERROR(context->GetAttr("hyperparameter_counts", &counts));
    TF_RETURN_IF_ERROR(context->GetAttr("row_options", &options));
    TF_RETURN_IF_ERROR(
        context->GetAttr("multiply_decay_by_rate", &decay_by_rate));
    TF_RETURN_IF_ERROR(context->GetAttr("all_rows", &all_rows));
    TF_RETURN_IF_ERROR(context->GetAttr("rounding_seeds", &rounding_seeds));
    TF_RETURN_IF_ERROR(
        context->GetAttr("feature_tables", &tables.feature_tables));
    int64_t num_tables = 0;
    TF_RETURN_IF_ERROR(context->GetAttr("num_tables", &num_tables));
    num_features_ = tables.feature_tables.size();
    TF_RETURN_IF_ERROR(CheckLength("rules", names.size(), num_tables));
    TF_RETURN_IF_ERROR(
        CheckLength("hyperparameter_counts", counts.size(), num_tables));
    TF_RETURN_IF_ERROR(
        CheckLength("row_options", options.size(), 5 * num_tables));
    TF_RETURN_IF_ERROR(CheckLength("multiply_decay_by_rate",
                                   decay_by_rate.size(), num_tables));
    TF_RETURN_IF_ERROR(CheckLength("all_rows", all_rows.size(), num_tables));
    TF_RETURN_IF_ERROR(
        CheckLength("rounding_seeds", rounding_seeds.size(), num_tables));
    TF_RETURN_IF_ERROR(
        CheckIndices("feature_tables", tables.feature_tables, num_tables));
    auto next = numbers.begin();
    for (int64_t t = 0; t < num_tables; ++t) {
      TableRule rule;
      rule.entry = FindRule(names[t]);
      if (!rule.entry) {
        return absl::InvalidArgumentError(absl::StrCat(
            "There is no update rule named ", names[t],
            ". If the Python package has this rule, the compiled library is "
            "older than the package. Rebuild the library: run `make ops` in a "
            "checkout, or reinstall the package."));
      }
      TF_RETURN_IF_ERROR(CheckLength("hyperparameter_counts", counts[t],
                                     rule.entry->num_hyperparameters));
      if (numbers.end() - next < counts[t]) {
        return CheckLength("hyperparameters", numbers.size(),
                           next - numbers.begin() + counts[t]);
      }
      rule.hyperparameters.assign(next, next + counts[t]);
      next += counts[t];
      const float* o = &options[t * 5];
      rule.options = {o[0],       o[1], o[2], o[3], o[4], decay_by_rate[t],
                      all_rows[t]};
      rule.rounding_seed = rounding_seeds[t];
      rule.features = tables.FeaturesOf(t);
      rules_.push_back(std::move(rule));
    }
    return CheckLength("hyperparameters", numbers.size(),
                       next - numbers.begin());
  }

  absl::Status MakeViews(const std::vector<Variable>& tables,
                         const std::vector<Variable>& slots,
                         std::vector<TableWork>* work) const {
    size_t next = 0;
    for (int t = 0; t < NumTables(); ++t) {
      Tensor* table = tables[t]->tensor();
      TableView& view = (*work)[t].view;
      view.parameters = DataOf(table);
      view.num_rows = table->dim_size(0);
      view.dim = table->dim_size(1);
      const int64_t width = rules_[t].entry->slots_per_row ? 1 : view.dim;
      const tensorflow::TensorShape shape({view.num_rows, width});
      for (int k = 0; k < rules_[t].entry->num_slots; ++k, ++next) {
        if (next >= slots.size() || slots[next]->tensor()->shape() != shape) {
          return absl::InvalidArgumentError(absl::StrCat(
              "Table ", t, ": a slot is missing or is not of shape ",
              shape.DebugString(), ". Do not change the shape of a slot."));
        }
        view.slots.push_back(slots[next]->tensor()->flat<float>().data());
      }
    }
    return absl::OkStatus();
  }

  // Points at the gradient of every sample, replica by replica and feature by
  // feature: the order in which the row groups number samples.
  void CollectGradients(const BatchQueue::Step& step, int t,
                        TableWork* work) const {
    const int64_t dim = work->view.dim;
    for (const BatchQueue::Part& part : step.replicas) {
      for (int f : rules_[t].features) {
        const auto& gradient = part.gradients.features[f];
        const float* data = gradient ? gradient->flat<float>().data() : nullptr;
        const int64_t step_width = data ? dim : 0;
        const int64_t first = work->samples.size();
        work->samples.resize(first + part.batch->features[f].num_samples());
        for (size_t s = first; s < work->samples.size(); ++s) {
          work->samples[s] = data;
          data += step_width;
        }
      }
    }
    work->gradients = {&step.replicas[0].batch->tables[t],
                       work->samples.data()};
  }

  // Groups the batches of all replicas as if they were one.
  void MergeReplicas(const BatchQueue::Step& step,
                     const ParallelFor& parallel_for,
                     std::vector<TableWork>* work) const {
    std::vector<TableEntries> tables(NumTables());
    for (int t = 0; t < NumTables(); ++t) {
      for (const BatchQueue::Part& part : step.replicas) {
        for (int f : rules_[t].features) {
          tables[t].features.push_back(&part.batch->features[f]);
        }
      }
      tables[t].vocabulary_size = (*work)[t].view.num_rows;
      tables[t].groups = &(*work)[t].merged;
      (*work)[t].gradients.groups = &(*work)[t].merged;
    }
    GroupByRow(tables, parallel_for);
  }

  static int64_t Cycles(const RuleEntry& rule, const TableWork& work,
                        int64_t rows) {
    const int64_t slots = rule.slots_per_row ? 0 : rule.num_slots;
    const int64_t width = work.view.dim * (1 + slots);
    return work.gradients.groups->samples.size() *
               (kCyclesPerEntry + work.view.dim / 4) +
           rows * (kCyclesPerRow + width);
  }

  void Run(const ParallelFor& parallel_for,
           const std::vector<TableWork>& work) const {
    std::vector<Work> works;
    for (int t = 0; t < NumTables(); ++t) {
      const int64_t rows = rules_[t].options.all_rows
                               ? work[t].view.num_rows
                               : work[t].gradients.groups->num_rows();
      works.push_back({rows, Cycles(*rules_[t].entry, work[t], rows)});
    }
    ForEachPiece(parallel_for, works, [&](const Piece& piece) {
      const int64_t t = piece.owner;
      const UpdateFn update =
          rules_[t].entry->UpdateOf(work[t].view.parameters);
      update(work[t].arguments, rules_[t].options, work[t].gradients,
             work[t].view, piece.begin, piece.end);
    });
  }

  std::vector<TableRule> rules_;
  int64_t num_features_ = 0;
  std::unique_ptr<HugePages> huge_pages_;
};

REGISTER_KERNEL_BUILDER(
    Name("TpuEmbeddingApplyUpdate").Device(tensorflow::DEVICE_CPU),
    ApplyUpdateOp);

}  // namespace
}  // namespace tpu_embedding
