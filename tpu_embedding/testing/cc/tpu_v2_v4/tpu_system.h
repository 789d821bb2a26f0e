// The TPU of this process, as the embedding ops see it. It has at most one
// engine.

#ifndef TPU_EMBEDDING_TESTING_CC_TPU_V2_V4_TPU_SYSTEM_H_
#define TPU_EMBEDDING_TESTING_CC_TPU_V2_V4_TPU_SYSTEM_H_

#include <cstdint>
#include <functional>
#include <memory>
#include <mutex>
#include <string>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/time/time.h"
#include "tensorflow/core/framework/op_kernel.h"
#include "tpu_v2_v4/engine/engine.h"
#include "tpu_v2_v4/engine/pending_calls.h"

namespace tpu_embedding {

// The result of one ConfigureTPUEmbedding.
struct ConfiguredEngine {
  ConfiguredEngine(std::string serialized, EngineConfig config,
                   absl::Duration timeout)
      : config(std::move(serialized)),
        engine(std::move(config)),
        calls(absl::ToChronoNanoseconds(timeout)) {}

  const std::string config;  // serialized
  Engine engine;
  PendingCalls calls;  // all calls of the engine go through it
};

using EnginePtr = std::shared_ptr<ConfiguredEngine>;

class TpuSystem {
 public:
  static TpuSystem& Get();

  // Discards the engine and its tables, as the initialization of a TPU does.
  // Calls of the next engine wait for at most `timeout`.
  void Initialize(absl::Duration timeout);

  // Returns the number of calls of Initialize(). A caller that remembers it can
  // tell whether its engine still exists.
  int64_t session() const;

  // Fails if there is an engine already or `config` is invalid.
  absl::Status Configure(const std::string& config);

  // Returns the engine, or null if none is configured.
  EnginePtr engine() const;

  // Finds the engine for an op with the attribute `config`; empty means any.
  absl::StatusOr<EnginePtr> Find(const std::string& config) const;

 private:
  TpuSystem() = default;

  mutable std::mutex mutex_;
  absl::Duration timeout_ = absl::Seconds(60);
  int64_t session_ = 0;
  EnginePtr engine_;
};

absl::Status StatusOf(const Outcome& outcome);

// Submits `attempt` to the calls of `engine`, then calls `finish` once with the
// result. The wait also ends when `context` is cancelled.
void SubmitCall(const EnginePtr& engine, tensorflow::OpKernelContext* context,
                PendingCalls::Attempt attempt,
                std::function<void(const absl::Status&)> finish);

}  // namespace tpu_embedding

#endif  // TPU_EMBEDDING_TESTING_CC_TPU_V2_V4_TPU_SYSTEM_H_
