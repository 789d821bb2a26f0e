#include "tpu_v2_v4/engine/engine.h"

#include <algorithm>
#include <utility>

#include "core/text.h"

namespace tpu_embedding {
namespace {

// Returns "core 1" or "cores 0, 2".
std::string CoreNames(const std::vector<int>& cores) {
  std::string names = cores.size() == 1 ? "core " : "cores ";
  for (size_t i = 0; i < cores.size(); ++i) {
    names += (i ? ", " : "") + std::to_string(cores[i]);
  }
  return names;
}

}  // namespace

Engine::Engine(EngineConfig config)
    : config_(std::move(config)),
      tables_(&config_),
      queues_(config_.num_cores),
      num_enqueued_(config_.num_cores, 0) {}

Outcome Engine::Enqueue(const std::vector<Enqueued>& batches) {
  Clean();
  for (const Enqueued& enqueued : batches) {
    if (queues_[enqueued.core].size() < kQueueCapacity) continue;
    return {Outcome::kWaits,
            Concat("The queue of core ", enqueued.core, " is full: it holds ",
                   kQueueCapacity, " batches whose activations nobody ",
                   "receives.")};
  }
  for (const Enqueued& enqueued : batches) {
    queues_[enqueued.core].push_back(enqueued);
    ++num_enqueued_[enqueued.core];
  }
  return {};
}

void Engine::Refuse(int core) {
  const int64_t step = num_enqueued_[core];
  for (int other = 0; other < config_.num_cores; ++other) {
    if (num_enqueued_[other] <= step) continue;
    auto& queue = queues_[other];
    queue.erase(queue.end() - (num_enqueued_[other] - step));
    --num_enqueued_[other];
  }
}

void Engine::Clean() {
  if (awaiting_gradients_ && awaiting_gradients_->failed &&
      awaiting_gradients_->failed())
    awaiting_gradients_.reset();
  for (int core = 0; core < config_.num_cores; ++core) {
    auto& queue = queues_[core];
    const auto end = std::remove_if(
        queue.begin(), queue.end(), [](const Enqueued& enqueued) {
          return enqueued.failed && enqueued.failed();
        });
    num_enqueued_[core] -= queue.end() - end;
    queue.erase(end, queue.end());
  }
}

// Checks that each core has a batch.
Outcome Engine::CheckHeads() const {
  std::vector<int> present, missing;
  for (int core = 0; core < config_.num_cores; ++core) {
    (queues_[core].empty() ? missing : present).push_back(core);
  }
  if (!missing.empty()) {
    return {
        Outcome::kWaits,
        Concat("No batch is enqueued for ", CoreNames(missing),
               present.empty() ? std::string(".")
                               : Concat(", only for ", CoreNames(present), "."),
               " A step needs one for each of the ", config_.num_cores,
               " cores.")};
  }
  return {};
}

Outcome Engine::Receive(const std::vector<std::vector<float*>>& outputs,
                        const Failed& failed, const ParallelFor& parallel_for) {
  Clean();
  if (awaiting_gradients_) {
    return {Outcome::kWaits,
            Concat("The gradients of step ", awaiting_gradients_->step,
                   ", which was ",
                   "enqueued for training, have not been sent, and the next ",
                   "step needs them.")};
  }
  if (Outcome heads = CheckHeads(); !heads.done()) return heads;
  if (Error error = tables_.CheckLoaded())
    return {Outcome::kWrongOrder, *error};
  StepBatches batches;
  for (auto& queue : queues_) {
    batches.push_back(queue.front().batch);
    queue.pop_front();
  }
  const int64_t step = num_dequeued_++;
  for (const auto& batch : batches) {
    if (batch->training == batches[0]->training) continue;
    return {Outcome::kWrongOrder,
            Concat("Step ", step, " was enqueued for training on some cores ",
                   "and for inference on others. It is dropped.")};
  }
  const bool training = batches[0]->training;
  if (!training) ApplyPending(parallel_for);
  for (size_t core = 0; core < batches.size(); ++core) {
    tables_.LookUp(*batches[core], outputs[core], parallel_for);
  }
  if (training) awaiting_gradients_ = {step, std::move(batches), failed};
  return {};
}

Outcome Engine::Send(StepGradients gradients, const ParallelFor& parallel_for) {
  if (!awaiting_gradients_) {
    return {Outcome::kWrongOrder,
            "No step owes gradients: a step owes them once, after it was "
            "enqueued for training and its activations were received. A batch "
            "that a program enqueues under a name is for training only if "
            "apply_gradients has that name."};
  }
  // This comes late: a step that fails earlier leaves the pending update alone.
  ApplyPending(parallel_for);
  pending_ = {std::move(awaiting_gradients_->batches), std::move(gradients)};
  awaiting_gradients_.reset();
  if (!config_.pipelined) ApplyPending(parallel_for);
  return {};
}

void Engine::Load(int table, int host, const std::vector<const float*>& values,
                  const ParallelFor& parallel_for) {
  ApplyPending(parallel_for);
  tables_.Load(table, host, values);
}

Outcome Engine::Retrieve(int table, int host, const std::vector<float*>& values,
                         const ParallelFor& parallel_for) {
  if (Error error = tables_.CheckLoaded(table, host)) {
    return {Outcome::kWrongOrder, *error};
  }
  ApplyPending(parallel_for);
  tables_.Retrieve(table, host, values);
  return {};
}

void Engine::ApplyPending(const ParallelFor& parallel_for) {
  if (!pending_) return;
  tables_.Update(pending_->batches, pending_->gradients, parallel_for);
  pending_.reset();
}

}  // namespace tpu_embedding
