// The TPU of this process as its embedding ops see it: one engine at most.

#ifndef TPU_EMBEDDING_OPS_CC_SOFTWARE_TPU_TPU_SYSTEM_H_
#define TPU_EMBEDDING_OPS_CC_SOFTWARE_TPU_TPU_SYSTEM_H_

#include <cstdint>
#include <functional>
#include <memory>
#include <mutex>
#include <string>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/time/time.h"
#include "software_tpu/engine/engine.h"
#include "software_tpu/engine/waiting_room.h"
#include "tensorflow/core/framework/op_kernel.h"

namespace tpu_embedding {

// What one ConfigureTPUEmbedding made.
struct ConfiguredEngine {
  ConfiguredEngine(std::string serialized, EngineConfig config,
                   absl::Duration patience)
      : config(std::move(serialized)),
        engine(std::move(config)),
        room(absl::ToChronoNanoseconds(patience)) {}

  const std::string config;  // serialised
  Engine engine;
  WaitingRoom room;  // all calls of the engine go through it
};

using EnginePtr = std::shared_ptr<ConfiguredEngine>;

class TpuSystem {
 public:
  static TpuSystem& Get();

  // Forgets the engine, as the initialisation of a TPU does. `patience` is how
  // long calls of the next engine wait.
  void Initialize(absl::Duration patience);

  // How often it was called: tells whether what somebody saw is still there.
  int64_t session() const;

  // An error where there is an engine already, or for a bad `config`.
  absl::Status Configure(const std::string& config);

  // The engine; null where none is configured.
  EnginePtr engine() const;

  // The engine that an op with the attribute `config` means; empty means any.
  absl::StatusOr<EnginePtr> Find(const std::string& config) const;

 private:
  TpuSystem() = default;

  mutable std::mutex mutex_;
  absl::Duration patience_ = absl::Seconds(60);
  int64_t session_ = 0;
  EnginePtr engine_;
};

absl::Status StatusOf(const Outcome& outcome);

// Calls `attempt` in the room of `engine` until it does not wait any more, then
// `finish` once. The wait ends when `context` is cancelled, too.
void EnterRoom(const EnginePtr& engine, tensorflow::OpKernelContext* context,
               WaitingRoom::Attempt attempt,
               std::function<void(const absl::Status&)> finish);

}  // namespace tpu_embedding

#endif  // TPU_EMBEDDING_OPS_CC_SOFTWARE_TPU_TPU_SYSTEM_H_
