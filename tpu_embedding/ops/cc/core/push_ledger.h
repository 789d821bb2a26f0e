// Records which pushes of gradients a parameter server has taken, so that a
// function that runs again after a worker was lost changes the tables once.
//
// A coordinator numbers the functions that it schedules, and a random number
// identifies each run of a function. A run pushes any number of times, in
// order; the n-th push of a function is taken from the run that makes it first.

#ifndef TPU_EMBEDDING_OPS_CC_CORE_PUSH_LEDGER_H_
#define TPU_EMBEDDING_OPS_CC_CORE_PUSH_LEDGER_H_

#include <algorithm>
#include <cstdint>
#include <functional>
#include <map>
#include <mutex>
#include <optional>
#include <string>
#include <vector>

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

  // Calls `take`, unless the push was taken before; `*repeated` tells whether
  // it was. A push whose `take` fails can be made again.
  Error Admit(const Push& push, const std::function<Error()>& take,
              bool* repeated) {
    std::lock_guard<std::mutex> lock(mutex_);
    Source& source = sources_[push.source];
    if (source.functions.empty()) {
      source.functions.resize(window_);
      source.newest = push.number;
    }
    if (push.number <= source.newest - window_) {
      return "A push of scheduled function " + std::to_string(push.number) +
             " arrived after function " + std::to_string(source.newest) +
             " had pushed. A server remembers only the last " +
             std::to_string(window_) +
             " functions, so it cannot tell whether this push was already "
             "applied. Call join() before that many functions have been "
             "scheduled.";
    }
    source.newest = std::max(source.newest, push.number);
    const uint64_t slot = static_cast<uint64_t>(push.number) % window_;
    Function& function = source.functions[slot];
    // Another number in the slot belongs to a function before the window.
    if (function.number != push.number) function = Function(push.number);
    int64_t& done = function.PushesOf(push.run);
    *repeated = done < function.taken;
    if (!*repeated) {
      if (Error error = take()) return error;
      function.taken = done + 1;
    }
    ++done;
    return std::nullopt;
  }

 private:
  struct Run {
    int64_t run = 0;
    int64_t pushes = 0;
  };

  struct Function {
    explicit Function(int64_t its_number = 0) : number(its_number) {}

    int64_t number;
    int64_t taken = 0;  // pushes
    std::optional<Run> first;
    std::vector<Run> others;  // only if a worker was lost

    int64_t& PushesOf(int64_t run) {
      if (!first) first = Run{run};
      if (first->run == run) return first->pushes;
      for (Run& other : others) {
        if (other.run == run) return other.pushes;
      }
      return others.emplace_back(Run{run}).pushes;
    }
  };

  // The memory of all functions is allocated at once: small allocations between
  // those of tensors would keep the allocator from reusing freed memory.
  struct Source {
    int64_t newest = 0;
    std::vector<Function> functions;  // by number % window
  };

  const int64_t window_;
  std::mutex mutex_;
  std::map<int64_t, Source> sources_;
};

}  // namespace tpu_embedding

#endif  // TPU_EMBEDDING_OPS_CC_CORE_PUSH_LEDGER_H_
