// The step queue as a TensorFlow resource.

#ifndef TPU_EMBEDDING_OPS_CC_KERNELS_STEP_QUEUE_RESOURCE_H_
#define TPU_EMBEDDING_OPS_CC_KERNELS_STEP_QUEUE_RESOURCE_H_

#include <algorithm>
#include <limits>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "core/changed_rows.h"
#include "core/push_ledger.h"
#include "core/row_groups.h"
#include "core/step_queue.h"
#include "core/telemetry.h"
#include "kernels/batch_variant.h"
#include "kernels/growing_table.h"
#include "kernels/huge_pages.h"
#include "kernels/plan.h"
#include "tensorflow/core/framework/op_kernel.h"
#include "tensorflow/core/framework/resource_base.h"
#include "tensorflow/core/framework/resource_mgr.h"
#include "tensorflow/core/framework/tensor.h"

namespace tpu_embedding {

// The gradients of a routed batch that other processes sent.
struct ReceivedGradients {
  std::vector<tensorflow::Tensor> buffers;  // what the pointers point into
  // Gradients of the samples asked for, by sender and feature; null: zeros.
  std::vector<std::vector<const float*>> features;
};

// The gradients and rates that one replica submits.
struct ReplicaGradients {
  // Empty for a feature without a gradient, which counts as zeros.
  std::vector<std::optional<tensorflow::Tensor>> features;
  // The learning rates by table. One replica evaluates the rates, the others
  // submit zeros: their sum is the rate.
  tensorflow::Tensor rates;
  // The last replica's clock, or the largest of all processes; else 0.
  int64_t clock = 0;
  std::shared_ptr<const ReceivedGradients> received;  // of a routed batch
};

using BatchQueue = StepQueue<SharedBatch, ReplicaGradients>;

// Makes the waiting state of each table; null for tables whose rows never wait.
// See kernels/waiting_table.h.
class WaitingTable;
std::vector<std::shared_ptr<WaitingTable>> MakeWaiting(const Plan& plan);

class StepQueueResource : public tensorflow::ResourceBase {
 public:
  explicit StepQueueResource(SharedPlan shared_plan)
      : plan(std::move(shared_plan)),
        queue(plan->num_replicas, plan->capacity, plan->pipelined,
              [this](const SharedBatch& batch) { ForgetLookup(batch); }),
        huge_pages(plan->num_arrays + NumSlots(*plan)),
        merged(plan->tables.size()),
        waiting(MakeWaiting(*plan)),
        changed_rows(RowsOf(*plan)) {
    for (size_t t = 0; t < plan->tables.size(); ++t) {
      const TablePlan& table = plan->tables[t];
      growing.push_back(table.vocabulary ? std::make_unique<GrowingTable>(
                                               table, t, changed_rows)
                                         : nullptr);
    }
  }

  std::string DebugString() const override {
    return "tpu_embedding::StepQueue";
  }

  // Forgets the lookup of a batch past the queue whose gradients were refused:
  // its rows need not stay, however long its tensors exist.
  void ForgetLookup(const SharedBatch& batch) {
    for (const auto& table : growing) {
      if (table && batch) table->ForgetLookup(batch);
    }
  }

  const SharedPlan plan;
  BatchQueue queue;
  PushLedger pushes;     // on a parameter server
  HugePages huge_pages;  // under the tables, then the slots
  // Groups by table for the update that holds all locks; they are reused.
  std::vector<RowGroups> merged;
  const std::vector<std::shared_ptr<WaitingTable>> waiting;
  std::vector<std::unique_ptr<GrowingTable>> growing;  // null: static
  // The batch past the queue whose gradients for growing tables were sent last.
  std::weak_ptr<const PreparedBatch> sent;
  Telemetry telemetry;       // off until TpuEmbeddingStartTelemetry
  ChangedRows changed_rows;  // of no consumer until TpuEmbeddingMarkRows

 private:
  static std::vector<int64_t> RowsOf(const Plan& plan) {
    std::vector<int64_t> rows;
    for (const TablePlan& table : plan.tables) rows.push_back(table.rows);
    return rows;
  }

  static int NumSlots(const Plan& plan) {
    int slots = 0;
    for (const TablePlan& table : plan.tables) {
      if (table.rule) slots += table.rule->num_slots;
    }
    return slots;
  }
};

// Moves what was assigned to growing tables into their memory, before a lookup
// locks the tables.
inline absl::Status AdoptGrowing(const std::vector<Variable>& tables,
                                 StepQueueResource* resource) {
  const size_t size = std::min(tables.size(), resource->growing.size());
  for (size_t t = 0; t < size; ++t) {
    if (!resource->growing[t]) continue;
    TF_RETURN_IF_ERROR(resource->growing[t]->AdoptRows(
        StoredRows(tables, *resource->plan, t)));
  }
  return absl::OkStatus();
}

// Finds the rows of a batch in each growing table; the tables are locked.
inline absl::Status FindGrowing(const SharedBatch& batch,
                                const std::vector<Variable>& tables,
                                const ParallelFor& parallel_for,
                                StepQueueResource* resource,
                                std::vector<GrowingTable::Found>* found) {
  std::vector<GrowingTable::Search> searches;
  for (size_t t = 0; t < resource->growing.size(); ++t) {
    if (!resource->growing[t]) continue;
    searches.push_back({resource->growing[t].get(),
                        StoredRows(tables, *resource->plan, t), &(*found)[t]});
  }
  const auto purpose = batch->trains ? GrowingTable::Purpose::kTraining
                                     : GrowingTable::Purpose::kEvaluation;
  return GrowingTable::Find(batch, purpose, searches, parallel_for);
}

// Fails if an update would find a growing table full. `completed` has its
// batches by replica, or none if the update is not complete.
inline absl::Status CheckRoom(const std::vector<SharedBatch>& completed,
                              int64_t clock, const ParallelFor& parallel_for,
                              const StepQueueResource& resource) {
  for (const auto& growing : resource.growing) {
    if (!growing || completed.empty()) continue;
    TF_RETURN_IF_ERROR(growing->CheckRoom(
        completed, clock, resource.plan->pipelined, parallel_for));
  }
  return absl::OkStatus();
}

// Notes the clock of a complete update that will be applied. Fails if the clock
// goes back; on a server, which gets updates in any order, it stays instead.
inline absl::Status AdvanceClock(const StepQueueResource& resource,
                                 int64_t* clock) {
  int64_t last = 0;
  for (const auto& growing : resource.growing) {
    if (growing && growing->has_clock()) {
      last = std::max(last, growing->clock());
    }
  }
  if (resource.plan->placement.served) *clock = std::max(*clock, last);
  if (*clock < last) {
    return absl::InvalidArgumentError(absl::StrCat(
        "apply_gradients: the clock goes back from ", last, " to ", *clock,
        ". Nothing has changed. Pass a clock that never goes back."));
  }
  for (const auto& growing : resource.growing) {
    if (growing && growing->has_clock()) growing->set_clock(*clock);
  }
  return absl::OkStatus();
}

// Reads the number in the input "clock"; 0 if it is empty.
inline absl::Status ReadClock(tensorflow::OpKernelContext* context,
                              int64_t* clock) {
  const tensorflow::Tensor* input = nullptr;
  TF_RETURN_IF_ERROR(context->input("clock", &input));
  if (input->NumElements() == 0) return absl::OkStatus();
  TF_RETURN_IF_ERROR(CheckScalar("clock", *input));
  *clock = input->scalar<int64_t>()();
  if (0 <= *clock && *clock < std::numeric_limits<int64_t>::max()) {
    return absl::OkStatus();
  }
  return absl::InvalidArgumentError(absl::StrCat(
      "apply_gradients: the clock is ", *clock, ", which must be from 0 to ",
      std::numeric_limits<int64_t>::max() - 1, ". Nothing has changed."));
}

using QueuePtr = tensorflow::core::RefCountPtr<StepQueueResource>;

// Finds the queue behind the first input. It must have the replica `replica`.
inline absl::Status LookUpQueue(tensorflow::OpKernelContext* context,
                                QueuePtr* queue, int replica = 0) {
  TF_RETURN_IF_ERROR(CheckScalar("queue", context->input(0)));
  TF_RETURN_IF_ERROR(tensorflow::LookupResource(
      context, tensorflow::HandleFromInput(context, 0), queue));
  return CheckIndices("replica", {replica}, (*queue)->queue.num_replicas());
}

// Finds the growing table that has the number `table` in the plan.
inline absl::Status LookUpGrowing(const StepQueueResource& resource, int table,
                                  GrowingTable** found) {
  TF_RETURN_IF_ERROR(CheckIndices("table", {table}, resource.growing.size()));
  *found = resource.growing[table].get();
  if (*found) return absl::OkStatus();
  return absl::InvalidArgumentError("A malformed graph: no growing table.");
}

// Reads the number that identifies this run of strategy.run: the input "runs",
// or if that is empty the run of the tf.function that the op is in, which is
// never kOutside.
inline absl::Status ReadRun(tensorflow::OpKernelContext* context,
                            int64_t* run) {
  const tensorflow::Tensor* runs = nullptr;
  TF_RETURN_IF_ERROR(context->input("runs", &runs));
  if (runs->NumElements() == 0) {
    *run = context->step_id();
    if (*run == BatchQueue::kOutside) *run = -1;
    return absl::OkStatus();
  }
  *run = runs->flat<int64_t>()(0);
  return absl::OkStatus();
}

}  // namespace tpu_embedding

#endif  // TPU_EMBEDDING_OPS_CC_KERNELS_STEP_QUEUE_RESOURCE_H_
