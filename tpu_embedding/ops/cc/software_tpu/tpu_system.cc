#include "software_tpu/tpu_system.h"

#include <utility>

#include "software_tpu/configuration.h"
#include "software_tpu/watch.h"
#include "tensorflow/core/framework/cancellation.h"

namespace tpu_embedding {

using tensorflow::OpKernelContext;

namespace {

// Ends the waits in one room while somebody waits.
class RoomClock : public Timed {
 public:
  explicit RoomClock(EnginePtr engine) : engine_(std::move(engine)) {}

  void CheckTime(absl::Time) override {
    engine_->room.CheckTime(WaitingRoom::Clock::now());
  }

 private:
  const EnginePtr engine_;
};

}  // namespace

TpuSystem& TpuSystem::Get() {
  // Never destroyed: ops may run while the process goes down.
  static TpuSystem* const system = new TpuSystem;
  return *system;
}

void TpuSystem::Initialize(absl::Duration patience) {
  EnginePtr old;
  {
    std::lock_guard<std::mutex> lock(mutex_);
    old.swap(engine_);
    patience_ = patience;
    ++session_;
  }
  if (old) {
    old->room.Close(
        "The TPU was initialized again, which ended its embedding engine.");
  }
}

int64_t TpuSystem::session() const {
  std::lock_guard<std::mutex> lock(mutex_);
  return session_;
}

absl::Status TpuSystem::Configure(const std::string& config) {
  EngineConfig read;
  TF_RETURN_IF_ERROR(ReadEngineConfig(config, &read));
  std::lock_guard<std::mutex> lock(mutex_);
  if (engine_) {
    return absl::FailedPreconditionError(
        "The TPU has an embedding engine already. To configure it anew, "
        "initialize the TPU first, which forgets the tables.");
  }
  engine_ =
      std::make_shared<ConfiguredEngine>(config, std::move(read), patience_);
  return absl::OkStatus();
}

EnginePtr TpuSystem::engine() const {
  std::lock_guard<std::mutex> lock(mutex_);
  return engine_;
}

absl::StatusOr<EnginePtr> TpuSystem::Find(const std::string& config) const {
  EnginePtr found = engine();
  if (!found) {
    return absl::FailedPreconditionError(
        "The TPU has no embedding engine: ConfigureTPUEmbedding has not run "
        "since the TPU was initialized.");
  }
  if (!config.empty() && config != found->config) {
    return absl::InvalidArgumentError(
        "The attribute `config` is not what the TPU's embedding engine was "
        "configured with.");
  }
  return found;
}

absl::Status StatusOf(const Outcome& outcome) {
  switch (outcome.kind) {
    case Outcome::kDone:
      break;
    case Outcome::kWrong:
      return absl::InvalidArgumentError(outcome.text);
    case Outcome::kWrongOrder:
      return absl::FailedPreconditionError(outcome.text);
    case Outcome::kCancelled:
      return absl::CancelledError(outcome.text);
    case Outcome::kWaits:
    case Outcome::kTimedOut:
      return absl::DeadlineExceededError(outcome.text);
  }
  return absl::OkStatus();
}

void EnterRoom(const EnginePtr& engine, OpKernelContext* context,
               WaitingRoom::Attempt attempt,
               std::function<void(const absl::Status&)> finish) {
  auto* const manager = context->cancellation_manager();
  const auto token = manager ? manager->get_cancellation_token() : 0;
  auto call = std::make_shared<WaitingRoom::Call>();
  const auto clock = std::make_shared<RoomClock>(engine);
  call->attempt = std::move(attempt);
  call->done = [manager, token, clock,
                finish = std::move(finish)](const Outcome& outcome) {
    // Not the call that waits: the callback may be what brought us here.
    if (manager) manager->TryDeregisterCallback(token);
    finish(StatusOf(outcome));
  };
  const auto cancel = [engine, weak = std::weak_ptr<WaitingRoom::Call>(call)] {
    if (const auto alive = weak.lock()) engine->room.Cancel(alive);
  };
  // A call that is cancelled already finds that out as it enters.
  if (manager && !manager->RegisterCallback(token, cancel)) cancel();
  WatchTime(clock);
  engine->room.Enter(call, WaitingRoom::Clock::now());
}

}  // namespace tpu_embedding
