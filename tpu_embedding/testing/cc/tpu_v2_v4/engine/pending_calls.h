// Manages calls of the engine that have to wait, and ends their waits.

#ifndef TPU_EMBEDDING_TESTING_CC_TPU_V2_V4_ENGINE_PENDING_CALLS_H_
#define TPU_EMBEDDING_TESTING_CC_TPU_V2_V4_ENGINE_PENDING_CALLS_H_

#include <chrono>
#include <functional>
#include <list>
#include <memory>
#include <mutex>
#include <string>
#include <utility>
#include <vector>

namespace tpu_embedding {

// How a call ended, or what it waits for.
struct Outcome {
  enum Kind { kDone, kWaits, kTimedOut, kCancelled, kWrong, kWrongOrder };

  Kind kind = kDone;
  std::string text;

  bool done() const { return kind == kDone; }
};

// Runs all calls of one engine, one at a time. A call that has to wait is tried
// again, in the order of submission, whenever another call has changed
// something.
class PendingCalls {
 public:
  using Clock = std::chrono::steady_clock;
  using Attempt = std::function<Outcome()>;
  using Done = std::function<void(Outcome)>;

  // One call. It can be cancelled before, while and after it waits.
  struct Call {
    Attempt attempt;
    Done done;
    Clock::time_point opened;
    std::string waits_for;
    bool cancelled = false;
  };

  explicit PendingCalls(Clock::duration timeout) : timeout_(timeout) {}

  // Calls `attempt` until it does not have to wait any more, then `done`, once
  // and without a lock.
  void Submit(const std::shared_ptr<Call>& call, Clock::time_point now);

  // Runs an attempt that never waits.
  Outcome Run(const Attempt& attempt);

  // Ends the wait of `call`, or the whole call if it has not begun yet.
  void Cancel(const std::shared_ptr<Call>& call);

  // Ends the waits that have lasted as long as the timeout.
  void CheckTime(Clock::time_point now);

  // Ends all waits, now and later.
  void Close(const std::string& reason);

 private:
  using Calls = std::list<std::shared_ptr<Call>>;
  using Ended = std::vector<std::pair<std::shared_ptr<Call>, Outcome>>;

  // Tries all that wait, until nothing changes any more.
  void TryAll(Ended* ended);
  static void Tell(const Ended& ended);

  const Clock::duration timeout_;
  std::mutex mutex_;
  Calls waiting_;
  std::string closed_;  // the reason
};

}  // namespace tpu_embedding

#endif  // TPU_EMBEDDING_TESTING_CC_TPU_V2_V4_ENGINE_PENDING_CALLS_H_
