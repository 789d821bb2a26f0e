#include "tpu_v2_v4/tpu_system.h"

#include <utility>

#include "runtime/watch.h"
#include "tensorflow/core/framework/cancellation.h"
#include "tpu_v2_v4/configuration.h"

namespace tpu_embedding {

using tensorflow::OpKernelContext;

namespace {

// Checks the timeouts of an engine's calls. Each call owns such an object, so
// that nothing is checked while no call waits.
class CallTimeouts : public Timed {
 public:
  explicit CallTimeouts(EnginePtr engine) : engine_(std::move(engine)) {}

  void CheckTime(absl::Time) override {
    engine_->calls.CheckTime(PendingCalls::Clock::now());
  }

 private:
  const EnginePtr engine_;
};

}  // namespace

TpuSystem& TpuSystem::Get() {
  // It is never destroyed, as ops may run while the process exits.
  static TpuSystem* const system = new TpuSystem;
  return *system;
}

void TpuSystem::Initialize(absl::Duration timeout) {
  EnginePtr old;
  {
    std::lock_guard<std::mutex> lock(mutex_);
    old.swap(engine_);
    timeout_ = timeout;
    ++session_;
  }
  if (old) {
    old->calls.Close(
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
      std::make_shared<ConfiguredEngine>(config, std::move(read), timeout_);
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

void SubmitCall(const EnginePtr& engine, OpKernelContext* context,
                PendingCalls::Attempt attempt,
                std::function<void(const absl::Status&)> finish) {
  auto* const manager = context->cancellation_manager();
  const auto token = manager ? manager->get_cancellation_token() : 0;
  auto call = std::make_shared<PendingCalls::Call>();
  const auto clock = std::make_shared<CallTimeouts>(engine);
  call->attempt = std::move(attempt);
  call->done = [manager, token, clock,
                finish = std::move(finish)](const Outcome& outcome) {
    // DeregisterCallback would wait for a running callback, which may be the
    // caller.
    if (manager) manager->TryDeregisterCallback(token);
    finish(StatusOf(outcome));
  };
  const auto cancel = [engine, weak = std::weak_ptr<PendingCalls::Call>(call)] {
    if (const auto alive = weak.lock()) engine->calls.Cancel(alive);
  };
  // Submit() ends a call that is cancelled already.
  if (manager && !manager->RegisterCallback(token, cancel)) cancel();
  WatchTime(clock);
  engine->calls.Submit(call, PendingCalls::Clock::now());
}

}  // namespace tpu_embedding
