#include "kernels/apply_updates.h"

#include <algorithm>
#include <functional>
#include <memory>
#include <optional>
#include <utility>
#include <vector>

#include "core/changed_rows.h"
#include "core/pieces.h"
#include "core/prepared_batch.h"
#include "core/rules.h"
#include "core/telemetry.h"
#include "core/update.h"
#include "kernels/batch_variant.h"
#include "kernels/kernel_util.h"
#include "kernels/waiting_table.h"

namespace tpu_embedding {
namespace {

// Rough cycles for one entry and for one row, without those for their width.
constexpr int64_t kCyclesPerEntry = 20;
constexpr int64_t kCyclesPerRow = 50;
// Rough cycles for counting the hits of a row.
constexpr int64_t kCyclesPerHit = 10;

// What the update of one table needs while the op runs.
struct TableWork {
  const TableView* view = nullptr;
  RowGroups* merged = nullptr;  // of several replicas, or of a growing table
  GrowingTable* growing = nullptr;
  GrowingTable::Update growth;
  std::vector<const float*> samples;  // gradient of each sample, or null
  TableGradients gradients;
  RuleArguments arguments;
  const RowOptions* options = nullptr;
};

using Observers = std::vector<std::unique_ptr<UpdateObserver>>;

// Makes the rows of new ids in all growing tables, or in none.
absl::Status Grow(const BatchQueue::Update& update,
                  const std::vector<Variable>& tables,
                  const std::vector<Variable>& slots,
                  const StepQueueResource& resource,
                  const ParallelFor& parallel_for,
                  std::vector<TableWork>* work) {
  const Plan& plan = *resource.plan;
  std::vector<SharedBatch> batches;
  for (const BatchQueue::Part& part : update.replicas) {
    batches.push_back(part.batch);
  }
  int64_t clock = 0;
  for (const BatchQueue::Part& part : update.replicas) {
    clock = std::max(clock, part.gradients.clock);
  }
  std::vector<GrowingTable::Growth> growths;
  size_t next = 0;
  for (size_t t = 0; t < plan.tables.size(); ++t) {
    std::vector<tensorflow::Var*> arrays = StoredRows(tables, plan, t);
    for (int k = 0; k < plan.tables[t].rule->num_slots; ++k) {
      arrays.push_back(slots[next++].get());
    }
    GrowingTable* const growing = resource.growing[t].get();
    if (!growing) continue;
    (*work)[t].growing = growing;
    growths.push_back({growing, std::move(arrays), clock, &(*work)[t].growth});
  }
  TF_RETURN_IF_ERROR(GrowingTable::Begin(batches, growths, parallel_for));
  GrowingTable::Grow(growths, parallel_for);
  for (size_t t = 0; t < plan.tables.size(); ++t) {
    WaitingTable* const waiting = resource.waiting[t].get();
    if (!waiting || !resource.growing[t]) continue;
    for (const auto& [row, id] : (*work)[t].growth.created()) {
      waiting->rows().CaughtUp(row);
    }
  }
  return absl::OkStatus();
}

// Appends samples that are contiguous from `data` on; null stands for zeros.
void AddSamples(const float* data, int64_t dim, int64_t count,
                std::vector<const float*>* samples) {
  const int64_t width = data ? dim : 0;
  const size_t first = samples->size();
  samples->resize(first + count);
  for (int64_t s = 0; s < count; ++s) {
    (*samples)[first + s] = data;
    data += width;
  }
}

// Points at the gradients of the samples that all senders have sent.
void CollectRouted(const RoutedBatch& routed, const ReplicaGradients& gradients,
                   const TablePlan& table, std::vector<const float*>* samples) {
  for (size_t sender = 0; sender < routed.requests.size(); ++sender) {
    for (const int f : table.features) {
      AddSamples(gradients.received->features[sender][f], table.dim,
                 routed.requests[sender].features[f].num_samples(), samples);
    }
  }
}

// Points at the gradient of every sample, replica by replica and feature by
// feature: the order in which the row groups number samples.
void CollectGradients(const BatchQueue::Update& update, const TablePlan& table,
                      int t, TableWork* work) {
  for (const BatchQueue::Part& part : update.replicas) {
    if (part.batch->routed) {
      CollectRouted(*part.batch->routed, part.gradients, table, &work->samples);
      continue;
    }
    for (const int f : table.features) {
      const auto& gradient = part.gradients.features[f];
      AddSamples(gradient ? gradient->flat<float>().data() : nullptr, table.dim,
                 part.batch->features[f].num_samples(), &work->samples);
    }
  }
  work->gradients = {&update.replicas[0].batch->tables[t],
                     work->samples.data()};
}

// Groups what TpuEmbeddingPrepare did not: the batches of several replicas as
// if they were one, and entries of growing tables.
void GroupEntries(const Plan& plan, const BatchQueue::Update& update,
                  const ParallelFor& parallel_for,
                  std::vector<TableWork>* work) {
  std::vector<TableEntries> tables;
  for (size_t t = 0; t < plan.tables.size(); ++t) {
    TableWork& own = (*work)[t];
    if (update.replicas.size() == 1 && !own.growing) continue;
    TableEntries& entries = tables.emplace_back();
    const size_t num_sources =
        own.growing ? own.growth.num_sources() : update.replicas.size();
    for (size_t s = 0; s < num_sources; ++s) {
      for (const int f : plan.tables[t].features) {
        entries.features.push_back(
            own.growing
                ? own.growth.entries(s, f)
                : FeatureEntries(update.replicas[s].batch->features[f]));
      }
    }
    entries.vocabulary_size =
        own.growing ? own.growth.num_rows() : plan.tables[t].rows;
    entries.groups = own.merged;
    own.gradients.groups = own.merged;
  }
  GroupByRow(tables, parallel_for);
  for (TableWork& own : *work) {
    if (own.growing) own.growth.Drop(own.merged);
  }
}

int64_t Cycles(const RuleEntry& rule, const TableWork& work, int64_t rows) {
  const int64_t slots = rule.slots_per_row ? 0 : rule.num_slots;
  const int64_t width = work.view->dim * (1 + slots);
  return work.gradients.groups->samples.size() *
             (kCyclesPerEntry + work.view->dim / 4) +
         rows * (kCyclesPerRow + width);
}

// Nests the observers from `next` on, the update innermost, and runs them.
void Observe(const Observers& observers, size_t next, const UpdatePiece& piece,
             const std::function<void()>& update) {
  if (next == observers.size()) return update();
  observers[next]->Apply(piece,
                         [&] { Observe(observers, next + 1, piece, update); });
}

void Run(const Plan& plan, const ParallelFor& parallel_for,
         const std::vector<TableWork>& work, const Observers& observers) {
  std::vector<Work> works;
  works.reserve(work.size());
  for (size_t t = 0; t < work.size(); ++t) {
    const TablePlan& table = plan.tables[t];
    const int64_t rows = UpdatesAllRows(*work[t].options)
                             ? work[t].view->num_rows
                             : work[t].gradients.groups->num_rows();
    works.push_back({rows, Cycles(*table.rule, work[t], rows)});
    for (const auto& observer : observers) {
      observer->Start(t, work[t].gradients.groups->num_rows(), rows);
    }
  }
  std::vector<Work> hits;
  for (const TableWork& own : work) {
    const int64_t rows = own.growing ? own.gradients.groups->num_rows() : 0;
    hits.push_back({rows, rows * kCyclesPerHit});
  }
  ForEachPiece(parallel_for, hits, [&](const Piece& piece) {
    const TableWork& own = work[piece.owner];
    own.growing->CountHits(*own.gradients.groups, piece.begin, piece.end);
  });
  ForEachPiece(parallel_for, works, [&](const Piece& piece) {
    const int64_t t = piece.owner;
    const TablePlan& table = plan.tables[t];
    const auto update = [&] {
      table.rule->UpdateOf(work[t].view->parameters)(
          work[t].arguments, *work[t].options, work[t].gradients, *work[t].view,
          piece.begin, piece.end);
    };
    if (observers.empty()) return update();
    const UpdatePiece seen{
        static_cast<int>(t), work[t].gradients,
        *work[t].view,       UpdatesAllRows(*work[t].options),
        piece.begin,         piece.end};
    Observe(observers, 0, seen, update);
  });
}

// Returns the rate of an update. All replicas but one submit zeros.
float Rate(const BatchQueue::Update& update, int table) {
  float rate = 0.0f;
  for (const BatchQueue::Part& part : update.replicas) {
    rate += part.gradients.rates.flat<float>()(table);
  }
  return rate;
}

// Groups the gradients of an update by row.
void Collect(const Plan& plan, const BatchQueue::Update& update,
             const ParallelFor& parallel_for, std::vector<TableWork>* work) {
  for (size_t t = 0; t < plan.tables.size(); ++t) {
    const TablePlan& table = plan.tables[t];
    (*work)[t].arguments = {
        table.hyperparameters,
        Rate(update, t),
        {table.rounding_seed, static_cast<uint64_t>(update.number)}};
    Rounding& rounding = (*work)[t].arguments.rounding;
    if ((*work)[t].growing) rounding.ids = (*work)[t].growing->ids();
    if (plan.placement.size > 1 && plan.placement.by_rows(t)) {
      rounding.first_row = plan.placement.rank;
      rounding.row_step = plan.placement.size;
    }
    CollectGradients(update, table, t, &(*work)[t]);
  }
  GroupEntries(plan, update, parallel_for, work);
}

// Counts the samples of all replicas, by the feature that has the fewest.
int64_t NumSamples(const BatchQueue::Update& update) {
  int64_t samples = 0;
  for (const BatchQueue::Part& part : update.replicas) {
    const std::vector<FeatureCsr>& features = part.batch->features;
    const auto fewest = std::min_element(
        features.begin(), features.end(), [](const auto& a, const auto& b) {
          return a.num_samples() < b.num_samples();
        });
    if (fewest != features.end()) samples += fewest->num_samples();
  }
  return samples;
}

// Counts samples, except of routed batches: only their senders know those.
void CountSamples(const BatchQueue::Update& update, const Plan& plan,
                  std::vector<CountedUpdate>* counted) {
  for (const BatchQueue::Part& part : update.replicas) {
    if (part.batch->routed) continue;
    for (size_t t = 0; t < plan.tables.size(); ++t) {
      for (const int f : plan.tables[t].features) {
        (*counted)[t].AddSamples(part.batch->features[f]);
      }
    }
  }
}

// Decides before an update whether waiting rows make up for it later, or must
// be caught up first because it updates all rows.
void BeginWaiting(const StepQueueResource& resource,
                  const ParallelFor& parallel_for,
                  std::vector<TableView>* views, std::vector<TableWork>* work) {
  for (size_t t = 0; t < work->size(); ++t) {
    WaitingTable* const waiting = resource.waiting[t].get();
    if (!waiting) continue;
    TableWork& own = (*work)[t];
    TableView& view = (*views)[t];
    if (waiting->TakesStep(own.arguments.rate)) {
      view.waiting = &waiting->rows();
    } else {
      CatchUpTable(parallel_for, resource, t, view);
      view.waiting = nullptr;
      own.options = &waiting->all_rows();
    }
  }
}

// Counts the update as a step of tables with rows that wait.
void EndWaiting(const StepQueueResource& resource,
                const ParallelFor& parallel_for,
                const std::vector<TableView>& views,
                const std::vector<TableWork>& work) {
  for (size_t t = 0; t < work.size(); ++t) {
    WaitingTable* const waiting = resource.waiting[t].get();
    if (!waiting) continue;
    waiting->rounding = work[t].arguments.rounding;
    if (!views[t].waiting) continue;
    waiting->Advance(work[t].arguments.rate);
    if (waiting->rows().is_full()) {
      CatchUpTable(parallel_for, resource, t, views[t]);
    }
  }
}

}  // namespace

absl::Status MakeViews(const StepQueueResource& resource,
                       const std::vector<Variable>& tables,
                       const std::vector<Variable>& slots,
                       std::vector<TableView>* views) {
  const Plan& plan = *resource.plan;
  size_t next = 0;
  for (size_t t = 0; t < plan.tables.size(); ++t) {
    const TablePlan& spec = plan.tables[t];
    if (!spec.rule) {
      return absl::InvalidArgumentError(absl::StrCat(
          "A malformed graph: table ", spec.name, " has no optimizer."));
    }
    TableView& view = (*views)[t];
    view.parameters = RowsOf(tables, plan, t);
    const GrowingTable* const growing = resource.growing[t].get();
    view.num_rows = growing ? growing->num_rows() : spec.rows;
    view.slots.clear();
    view.dim = spec.dim;
    const int64_t width = spec.rule->slots_per_row ? 1 : view.dim;
    const tensorflow::TensorShape shape({view.num_rows, width});
    for (int k = 0; k < spec.rule->num_slots; ++k, ++next) {
      if (next >= slots.size() || slots[next]->tensor()->shape() != shape) {
        return absl::InvalidArgumentError(absl::StrCat(
            "Table ", spec.name, ": a slot is missing or does not have shape ",
            shape.DebugString(), ". Do not change the shape of a slot."));
      }
      view.slots.push_back(slots[next]->tensor()->flat<float>().data());
    }
  }
  return absl::OkStatus();
}

absl::Status ApplyUpdates(tensorflow::OpKernelContext* context,
                          StepQueueResource* resource, const NextUpdate& next,
                          WaitingStep* waiting) {
  const Plan& plan = *resource->plan;
  std::vector<Variable> tables, slots;
  TF_RETURN_IF_ERROR(LookUpArrays(context, plan, &tables, &slots));
  const WriteLocks locks(tables, slots);
  const bool grows =
      std::any_of(resource->growing.begin(), resource->growing.end(),
                  [](const auto& growing) { return !!growing; });
  TF_RETURN_IF_ERROR(CheckTables(tables, plan));
  TF_RETURN_IF_ERROR(locks.MakeWritable(context));
  std::vector<TableView> views(plan.tables.size());
  TF_RETURN_IF_ERROR(MakeViews(*resource, tables, slots, &views));
  size_t slot = 0;
  for (size_t t = 0; t < views.size(); ++t) {
    const size_t first = slot;
    slot += views[t].slots.size();
    if (resource->growing[t]) continue;  // GrowingMemory advises on its pages.
    resource->huge_pages.Advise(t, *tables[t]->tensor());
    for (size_t i = first; i < slot; ++i) {
      resource->huge_pages.Advise(tables.size() + i, *slots[i]->tensor());
    }
  }
  for (size_t t = 0; waiting && t < views.size(); ++t) {
    views[t].waiting = &waiting->tables[t];
    views[t].shrinkage = waiting->steps.matrix<double>()(t, 2);
  }
  // This comes last: whatever fails before leaves the update in the queue.
  while (std::optional<BatchQueue::Update> update = next()) {
    std::vector<TableWork> work(views.size());
    for (size_t t = 0; t < views.size(); ++t) {
      work[t].view = &views[t];
      work[t].merged = &resource->merged[t];
      work[t].options = plan.tables[t].options.get();
    }
    if (grows) {
      // TpuEmbeddingUpdate has checked for all errors but those from concurrent
      // updates in other threads: after such an error the update is discarded.
      TF_RETURN_IF_ERROR(
          Grow(*update, tables, slots, *resource, WorkerPool(context), &work));
      TF_RETURN_IF_ERROR(MakeViews(*resource, tables, slots, &views));
    }
    Observers observers;
    for (auto& consumer : resource->changed_rows.Consumers()) {
      observers.push_back(
          std::make_unique<MarkingObserver>(std::move(consumer)));
    }
    CountingObserver* counting = nullptr;
    if (resource->telemetry.Next(NumSamples(*update))) {
      auto counts = std::make_unique<CountingObserver>(views.size());
      counting = counts.get();
      observers.push_back(std::move(counts));
    }
    Collect(plan, *update, WorkerPool(context), &work);
    BeginWaiting(*resource, WorkerPool(context), &views, &work);
    Run(plan, WorkerPool(context), work, observers);
    EndWaiting(*resource, WorkerPool(context), views, work);
    for (size_t t = 0; waiting && t < views.size(); ++t) {
      AdvanceTable(WorkerPool(context), waiting->steps, t, views[t],
                   &waiting->tables[t]);
    }
    if (!counting) continue;
    CountSamples(*update, plan, &counting->tables);
    resource->telemetry.Add(std::move(counting->tables));
  }
  return absl::OkStatus();
}

}  // namespace tpu_embedding
