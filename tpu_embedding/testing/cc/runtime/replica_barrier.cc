#include "runtime/replica_barrier.h"

#include <algorithm>
#include <mutex>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"

namespace tpu_embedding {

using tensorflow::OpKernelContext;

ReplicaBarrier::ReplicaBarrier(std::vector<std::string> devices,
                               int sparse_cores, absl::Duration timeout,
                               std::function<void()> cancel)
    : devices_(std::move(devices)),
      sparse_cores_(sparse_cores),
      timeout_(timeout),
      cancel_(std::move(cancel)),
      ended_(devices_.size(), false) {}

void ReplicaBarrier::Arrive(const std::string& place, Participant participant,
                            const Work& work) {
  OpKernelContext* const context = participant.context;
  const auto done = participant.done;
  absl::Status over, missing;
  Round complete;
  {
    std::lock_guard<std::mutex> lock(mutex_);
    over = status_;
    if (over.ok()) {
      Round* round = Find(place, participant);
      round->participants[participant.replica] = std::move(participant);
      if (++round->num_arrived == static_cast<int>(devices_.size())) {
        complete = Close(place, round);
      } else if (AnyReplicaEnded()) {
        missing = MissingReplicaError(*round);
      }
    }
  }
  if (!over.ok()) {
    context->SetStatus(over);
    done();
  } else if (!missing.ok()) {
    Fail(missing);
  } else if (complete.num_arrived > 0) {
    Compute(complete, work);
  }
}

void ReplicaBarrier::Compute(const Round& round, const Work& work) {
  Contexts contexts;
  for (const Participant& participant : round.participants) {
    contexts.push_back(participant.context);
  }
  // `this` lives until the last participant is done, as the run owns it.
  work(contexts,
       [this, participants = round.participants](const absl::Status& status) {
         // This comes first, so that the kernels after these do not wait for
         // other replicas.
         if (!status.ok()) Fail(status);
         for (const Participant& participant : participants) {
           if (!status.ok()) participant.context->SetStatus(status);
           participant.done();
         }
       });
}

void ReplicaBarrier::Leave(int replica, const absl::Status& status) {
  if (!status.ok()) {
    Fail(status);
    return;
  }
  absl::Status failed;
  {
    std::lock_guard<std::mutex> lock(mutex_);
    ended_[replica] = true;
    if (!open_.empty()) {
      failed = MissingReplicaError(open_.begin()->second.front());
    }
  }
  if (!failed.ok()) Fail(failed);
}

void ReplicaBarrier::Fail(const absl::Status& status) {
  OpenRounds released;
  {
    std::lock_guard<std::mutex> lock(mutex_);
    if (!status_.ok()) {
      // A replica that fails cancels its ops, and an op may report the
      // cancellation before the replica reports its error.
      if (absl::IsCancelled(status_) && !status.ok()) status_ = status;
      return;
    }
    status_ = status;
    released.swap(open_);
  }
  cancel_();
  for (auto& [place, rounds] : released) {
    for (Round& round : rounds) {
      for (Participant& participant : round.participants) {
        if (!participant.context) continue;
        participant.context->SetStatus(status);
        participant.done();
      }
    }
  }
}

void ReplicaBarrier::CheckTime(absl::Time now) {
  absl::Status failed;
  {
    std::lock_guard<std::mutex> lock(mutex_);
    for (const auto& [place, rounds] : open_) {
      const Round& round = rounds.front();
      if (now - round.opened < timeout_) continue;
      failed = absl::DeadlineExceededError(absl::StrCat(
          Names(round, false), " did not reach ", round.op, " within ",
          absl::FormatDuration(timeout_), ". ", Names(round, true),
          " arrived. All replicas must run the same ops; ",
          "if a replica needs more time, increase the strategy's "
          "`meeting_timeout`."));
      break;
    }
  }
  if (!failed.ok()) Fail(failed);
}

absl::Status ReplicaBarrier::status() const {
  std::lock_guard<std::mutex> lock(mutex_);
  return status_;
}

ReplicaBarrier::Round* ReplicaBarrier::Find(const std::string& place,
                                            const Participant& participant) {
  std::deque<Round>& rounds = open_[place];
  for (Round& round : rounds) {
    if (!round.participants[participant.replica].context) return &round;
  }
  Round round;
  round.opened = absl::Now();
  round.op = absl::StrCat(participant.context->op_kernel().type_string(), " \"",
                          participant.context->op_kernel().name(), "\"");
  round.participants.resize(devices_.size());
  rounds.push_back(std::move(round));
  return &rounds.back();
}

ReplicaBarrier::Round ReplicaBarrier::Close(const std::string& place,
                                            Round* round) {
  std::deque<Round>& rounds = open_[place];
  const auto found =
      std::find_if(rounds.begin(), rounds.end(),
                   [&](const Round& other) { return &other == round; });
  Round closed = std::move(*found);
  rounds.erase(found);
  if (rounds.empty()) open_.erase(place);
  return closed;
}

bool ReplicaBarrier::AnyReplicaEnded() const {
  return std::find(ended_.begin(), ended_.end(), true) != ended_.end();
}

std::string ReplicaBarrier::Names(const Round& round, bool arrived) const {
  std::vector<std::string> names;
  for (size_t r = 0; r < devices_.size(); ++r) {
    if ((round.participants[r].context != nullptr) == arrived) {
      names.push_back(absl::StrCat("Replica ", r, " (", devices_[r], ")"));
    }
  }
  return absl::StrJoin(names, ", ");
}

absl::Status ReplicaBarrier::MissingReplicaError(const Round& round) const {
  return absl::FailedPreconditionError(absl::StrCat(
      Names(round, true), " reached ", round.op,
      ", but a replica has ended without reaching it. Missing: ",
      Names(round, false), ". All replicas must run the same ops."));
}

const ReplicaRunner* ReplicaRunner::Of(const OpKernelContext* context) {
  const Runner* const runner = context->runner();
  return runner ? runner->target<ReplicaRunner>() : nullptr;
}

std::function<bool()> ReplicaRunner::HasFailed(const OpKernelContext* context) {
  const ReplicaRunner* const runner = Of(context);
  if (!runner) return nullptr;
  return [barrier = runner->barrier_] { return !barrier->status().ok(); };
}

void AsyncBarrierOp::ComputeAsync(OpKernelContext* context, DoneCallback done) {
  const ReplicaRunner* const runner = ReplicaRunner::Of(context);
  if (!runner) {
    OP_REQUIRES_OK_ASYNC(context, CheckAlone(), done);
    Begin({context}, [context, done](const absl::Status& status) {
      context->SetStatus(status);
      done();
    });
    return;
  }
  const auto [frame, iteration] = context->frame_iter();
  runner->barrier().Arrive(
      absl::StrCat(name(), "@", frame, ":", iteration),
      {runner->replica(), context, std::move(done)},
      [this](const Contexts& contexts, const Finish& finish) {
        Begin(contexts, finish);
      });
}

}  // namespace tpu_embedding
