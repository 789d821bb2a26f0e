// Records which pushes of gradients a parameter server has taken, so that a
// function that runs again after a worker was lost changes the tables once.
//
// A coordinator numbers the functions that it schedules, and a random number
// identifies each run of a function. A run pushes any number of times, in
// order; the n-th push of a function is taken from the run that makes it first.

#ifndef TPU_EMBEDDING_OPS_CC_CORE_PUSH_LEDGER_H_
#define TPU_EMBEDDING_OPS_CC_CORE_PUSH_LEDGER_H_

#include <cstdint>
#include <functional>
#include <map>
#include <mutex>
#include <string>

#include "core/feature.h"

namespace tpu_embedding {

struct Push {
  int64_t source = 0;  // the coordinator
  int64_t number = 0;  // of the scheduled function, ascending
  int64_t run = 0;     // of one execution of it, random
};

// Thread-safe.
class PushLedger {
 public:
  // The ledger knows the functions with the newest `window` numbers of each
  // source. The push of an older one is an error, because the ledger cannot
  // tell whether it was taken before.
  explicit PushLedger(int64_t window = 1 << 14) : window_(window) {}

  // Calls `take` unless the push was taken before, which sets `*repeated`. A
  // push whose `take` fails can be made again.
  Error Admit(const Push& push, const std::function<Error()>& take,
              bool* repeated) {
    std::lock_guard<std::mutex> lock(mutex_);
    Functions& functions = sources_[push.source];
    if (!functions.empty() &&
        push.number <= functions.rbegin()->first - window_) {
      return "A push of scheduled function " + std::to_string(push.number) +
             " came after function " +
             std::to_string(functions.rbegin()->first) +
             " had pushed. A server remembers the last " +
             std::to_string(window_) +
             " functions, so it cannot tell whether this push was applied "
             "before. Call join() before so many functions have been "
             "scheduled.";
    }
    Function& function = functions[push.number];
    int64_t& done = function.runs[push.run];
    *repeated = done < function.taken;
    if (!*repeated) {
      if (Error error = take()) return error;
      function.taken = done + 1;
    }
    ++done;
    functions.erase(functions.begin(),
                    functions.upper_bound(functions.rbegin()->first - window_));
    return std::nullopt;
  }

 private:
  struct Function {
    int64_t taken = 0;                // pushes
    std::map<int64_t, int64_t> runs;  // by run: its pushes
  };
  using Functions = std::map<int64_t, Function>;

  const int64_t window_;
  std::mutex mutex_;
  std::map<int64_t, Functions> sources_;
};

}  // namespace tpu_embedding

#endif  // TPU_EMBEDDING_OPS_CC_CORE_PUSH_LEDGER_H_
