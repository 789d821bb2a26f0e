// The embedding engine of one configured TPU: its tables, the queue of each
// core, and the order of steps.
//
// A TPU waits if something is missing. Here, instead, a call returns that it
// has to wait, and for what; PendingCalls tries it again after every change and
// ends the wait at a timeout.

#ifndef TPU_EMBEDDING_TESTING_CC_TPU_V2_V4_ENGINE_ENGINE_H_
#define TPU_EMBEDDING_TESTING_CC_TPU_V2_V4_ENGINE_ENGINE_H_

#include <cstdint>
#include <deque>
#include <functional>
#include <memory>
#include <optional>
#include <vector>

#include "core/parallel.h"
#include "tpu_v2_v4/engine/batch.h"
#include "tpu_v2_v4/engine/config.h"
#include "tpu_v2_v4/engine/pending_calls.h"
#include "tpu_v2_v4/engine/tables.h"

namespace tpu_embedding {

// The number of batches that a core holds before an enqueue waits.
constexpr int kQueueCapacity = 64;

// Tells whether the program that a step belongs to has failed.
using Failed = std::function<bool()>;

class Engine {
 public:
  explicit Engine(EngineConfig config);

  const EngineConfig& config() const { return config_; }

  struct Enqueued {
    int core;
    std::shared_ptr<const CoreBatch> batch;
    Failed failed;  // of the program that brought it; null outside of programs
  };

  // Puts the batches into the queues of their cores, all or none.
  Outcome Enqueue(const std::vector<Enqueued>& batches);

  // Notes that the batch that was to come next on `core` is bad. Batches that
  // other cores have for the same step are removed.
  void Refuse(int core);

  // Takes the next batch of each core and writes its activations, by core and
  // output. A training step then owes gradients, until its program fails.
  Outcome Receive(const std::vector<std::vector<float*>>& outputs,
                  const Failed& failed, const ParallelFor& parallel_for);

  // Takes the gradients of the step that owes them. They are applied at once,
  // or, if the engine is pipelined, when the gradients of the next step come.
  Outcome Send(StepGradients gradients, const ParallelFor& parallel_for);

  // Apply what is pending, then do what EngineTables documents.
  void Load(int table, int host, const std::vector<const float*>& values,
            const ParallelFor& parallel_for);
  Outcome Retrieve(int table, int host, const std::vector<float*>& values,
                   const ParallelFor& parallel_for);

 private:
  struct AwaitingGradients {
    int64_t step;
    StepBatches batches;
    Failed failed;
  };
  struct Pending {
    StepBatches batches;
    StepGradients gradients;
  };

  // Drops what a failed program has left behind.
  void Clean();
  Outcome CheckHeads() const;
  void ApplyPending(const ParallelFor& parallel_for);

  const EngineConfig config_;
  EngineTables tables_;
  std::vector<std::deque<Enqueued>> queues_;  // by core
  std::vector<int64_t> num_enqueued_;         // by core, since the beginning
  int64_t num_dequeued_ = 0;                  // steps
  std::optional<AwaitingGradients> awaiting_gradients_;
  std::optional<Pending> pending_;
};

}  // namespace tpu_embedding

#endif  // TPU_EMBEDDING_TESTING_CC_TPU_V2_V4_ENGINE_ENGINE_H_
