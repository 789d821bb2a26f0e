#include "runtime/watch.h"

#include <chrono>
#include <condition_variable>
#include <mutex>
#include <thread>
#include <utility>
#include <vector>

#include "absl/time/clock.h"

namespace tpu_embedding {
namespace {

// Watches all waits with one thread. The thread never ends, because other
// threads may need it while the process exits.
class Watch {
 public:
  static Watch& Get() {
    static Watch* const watch = new Watch;
    return *watch;
  }

  void Add(std::weak_ptr<Timed> timed) {
    std::lock_guard<std::mutex> lock(mutex_);
    watched_.push_back(std::move(timed));
    added_.notify_one();
  }

 private:
  static constexpr std::chrono::milliseconds kInterval{50};

  Watch() {
    std::thread([this] { Loop(); }).detach();
  }

  void Loop() {
    while (true) {
      std::vector<std::shared_ptr<Timed>> alive = Wait();
      for (const auto& timed : alive) timed->CheckTime(absl::Now());
      alive.clear();
      std::this_thread::sleep_for(kInterval);
    }
  }

  std::vector<std::shared_ptr<Timed>> Wait() {
    std::unique_lock<std::mutex> lock(mutex_);
    // wait() itself, compiled on Debian 12, needs the libstdc++ of GCC 12.
    added_.wait_until(lock, std::chrono::system_clock::time_point::max(),
                      [this] { return !watched_.empty(); });
    std::vector<std::shared_ptr<Timed>> alive;
    for (const auto& weak : watched_) {
      if (auto timed = weak.lock()) alive.push_back(std::move(timed));
    }
    watched_.assign(alive.begin(), alive.end());
    return alive;
  }

  std::mutex mutex_;
  std::condition_variable added_;
  std::vector<std::weak_ptr<Timed>> watched_;
};

}  // namespace

void WatchTime(const std::shared_ptr<Timed>& timed) { Watch::Get().Add(timed); }

}  // namespace tpu_embedding
