// Calls that cannot go on yet, and how their waits end.

#ifndef TPU_EMBEDDING_OPS_CC_SOFTWARE_TPU_ENGINE_WAITING_ROOM_H_
#define TPU_EMBEDDING_OPS_CC_SOFTWARE_TPU_ENGINE_WAITING_ROOM_H_

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

// All calls of one engine, one at a time. A call that has to wait is tried
// again, in the order of arrival, whenever another one has changed something.
class WaitingRoom {
 public:
  using Clock = std::chrono::steady_clock;
  using Attempt = std::function<Outcome()>;
  using Done = std::function<void(Outcome)>;

  // One call. Cancel() takes it before, while and after it waits.
  struct Call {
    Attempt attempt;
    Done done;
    Clock::time_point opened;
    std::string waits_for;
    bool cancelled = false;
  };

  explicit WaitingRoom(Clock::duration patience) : patience_(patience) {}

  // Calls `attempt` until it does not wait any more, then once `done`, which
  // no lock is held for.
  void Enter(const std::shared_ptr<Call>& call, Clock::time_point now);

  // An attempt that never waits.
  Outcome Run(const Attempt& attempt);

  // Ends the wait of `call`, or the call before it has begun.
  void Cancel(const std::shared_ptr<Call>& call);

  // Ends the waits that have lasted longer than the patience.
  void CheckTime(Clock::time_point now);

  // Ends all waits, now and later.
  void Close(const std::string& reason);

 private:
  using Calls = std::list<std::shared_ptr<Call>>;
  using Ended = std::vector<std::pair<std::shared_ptr<Call>, Outcome>>;

  // Tries all that wait, until nothing changes any more.
  void TryAll(Ended* ended);
  static void Tell(const Ended& ended);

  const Clock::duration patience_;
  std::mutex mutex_;
  Calls waiting_;
  std::string closed_;  // the reason
};

}  // namespace tpu_embedding

#endif  // TPU_EMBEDDING_OPS_CC_SOFTWARE_TPU_ENGINE_WAITING_ROOM_H_
