// Ends waits that last too long, with one thread.

#ifndef TPU_EMBEDDING_OPS_CC_KERNELS_WATCHDOG_H_
#define TPU_EMBEDDING_OPS_CC_KERNELS_WATCHDOG_H_

#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <functional>
#include <map>
#include <mutex>
#include <thread>
#include <utility>
#include <vector>

namespace tpu_embedding {

// TensorFlow's timeouts of collectives keep two threads asleep for each
// call until its time is over. This is one thread for the whole process.
class Watchdog {
 public:
  // Lives as long as the process: its thread may outlast static destructors.
  static Watchdog& Get() {
    static auto* watchdog = new Watchdog;
    return *watchdog;
  }

  // Calls `expired` on the watchdog's thread, unless `Stop` comes before.
  int64_t Start(std::chrono::seconds timeout, std::function<void()> expired) {
    const std::lock_guard<std::mutex> lock(mutex_);
    if (!running_) std::thread([this] { Run(); }).detach();
    running_ = true;
    const int64_t id = next_++;
    calls_[id] = {std::chrono::steady_clock::now() + timeout,
                  std::move(expired)};
    changed_.notify_one();
    return id;
  }

  void Stop(int64_t id) {
    const std::lock_guard<std::mutex> lock(mutex_);
    calls_.erase(id);
  }

 private:
  using Time = std::chrono::steady_clock::time_point;
  struct Call {
    Time deadline;
    std::function<void()> expired;
  };

  void Run() {
    std::unique_lock<std::mutex> lock(mutex_);
    while (true) {
      const Time now = std::chrono::steady_clock::now();
      Time next = now + std::chrono::hours(1);
      std::vector<std::function<void()>> expired;
      for (auto call = calls_.begin(); call != calls_.end();) {
        if (call->second.deadline > now) {
          next = std::min(next, call->second.deadline);
          ++call;
        } else {
          expired.push_back(std::move(call->second.expired));
          call = calls_.erase(call);
        }
      }
      if (expired.empty()) {
        // This uses the system's clock, because waits on the steady one need
        // glibc 2.30. If the system's clock is set back, this wait is longer.
        changed_.wait_until(lock,
                            std::chrono::system_clock::now() + (next - now));
        continue;
      }
      lock.unlock();
      for (const auto& function : expired) function();
      expired.clear();
      lock.lock();
    }
  }

  std::mutex mutex_;
  std::condition_variable changed_;
  bool running_ = false;
  int64_t next_ = 0;
  std::map<int64_t, Call> calls_;
};

}  // namespace tpu_embedding

#endif  // TPU_EMBEDDING_OPS_CC_KERNELS_WATCHDOG_H_
