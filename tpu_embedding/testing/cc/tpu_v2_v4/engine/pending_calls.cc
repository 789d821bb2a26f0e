#include "tpu_v2_v4/engine/pending_calls.h"

#include <algorithm>

#include "core/text.h"

namespace tpu_embedding {

void PendingCalls::Submit(const std::shared_ptr<Call>& call,
                          Clock::time_point now) {
  Ended ended;
  {
    std::lock_guard<std::mutex> lock(mutex_);
    Outcome outcome;
    if (!closed_.empty()) {
      outcome = {Outcome::kWrongOrder, closed_};
    } else if (call->cancelled) {
      outcome = {Outcome::kCancelled, "The call was cancelled."};
    } else {
      outcome = call->attempt();
    }
    if (outcome.kind == Outcome::kWaits) {
      call->opened = now;
      call->waits_for = outcome.text;
      waiting_.push_back(call);
    } else {
      ended.emplace_back(call, std::move(outcome));
      TryAll(&ended);
    }
  }
  Tell(ended);
}

Outcome PendingCalls::Run(const Attempt& attempt) {
  Ended ended;
  Outcome outcome;
  {
    std::lock_guard<std::mutex> lock(mutex_);
    if (!closed_.empty()) return {Outcome::kWrongOrder, closed_};
    outcome = attempt();
    TryAll(&ended);
  }
  Tell(ended);
  return outcome;
}

void PendingCalls::Cancel(const std::shared_ptr<Call>& call) {
  Ended ended;
  {
    std::lock_guard<std::mutex> lock(mutex_);
    call->cancelled = true;
    const auto found = std::find(waiting_.begin(), waiting_.end(), call);
    if (found == waiting_.end()) return;
    waiting_.erase(found);
    ended.emplace_back(
        call, Outcome{Outcome::kCancelled,
                      Concat("The call was cancelled. ", call->waits_for)});
  }
  Tell(ended);
}

void PendingCalls::CheckTime(Clock::time_point now) {
  Ended ended;
  {
    std::lock_guard<std::mutex> lock(mutex_);
    // A call may be waiting for a program that has failed in the meantime.
    TryAll(&ended);
    const std::chrono::duration<double> seconds = timeout_;
    for (auto call = waiting_.begin(); call != waiting_.end();) {
      if (now - (*call)->opened < timeout_) {
        ++call;
        continue;
      }
      ended.emplace_back(
          *call,
          Outcome{Outcome::kTimedOut, Concat((*call)->waits_for, " Waited for ",
                                             seconds.count(), " seconds.")});
      call = waiting_.erase(call);
    }
  }
  Tell(ended);
}

void PendingCalls::Close(const std::string& reason) {
  Ended ended;
  {
    std::lock_guard<std::mutex> lock(mutex_);
    closed_ = reason;
    for (const auto& call : waiting_) {
      ended.emplace_back(call, Outcome{Outcome::kWrongOrder, reason});
    }
    waiting_.clear();
  }
  Tell(ended);
}

void PendingCalls::TryAll(Ended* ended) {
  bool changed = true;
  while (changed) {
    changed = false;
    for (auto call = waiting_.begin(); call != waiting_.end();) {
      Outcome outcome = (*call)->attempt();
      if (outcome.kind == Outcome::kWaits) {
        (*call)->waits_for = std::move(outcome.text);
        ++call;
        continue;
      }
      changed = true;
      ended->emplace_back(*call, std::move(outcome));
      call = waiting_.erase(call);
    }
  }
}

void PendingCalls::Tell(const Ended& ended) {
  for (const auto& [call, outcome] : ended) call->done(outcome);
}

}  // namespace tpu_embedding
