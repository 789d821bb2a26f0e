// A mutex that readers share.
//
// The system that compiles the wheels would make std::shared_mutex need glibc
// 2.34, and std::condition_variable the library of g++ 12.

#ifndef TPU_EMBEDDING_OPS_CC_CORE_SHARED_MUTEX_H_
#define TPU_EMBEDDING_OPS_CC_CORE_SHARED_MUTEX_H_

#include <pthread.h>

#include <mutex>

namespace tpu_embedding {

// Works with std::unique_lock and std::shared_lock. Readers that arrive while a
// writer waits let the writer go first.
class SharedMutex {
 public:
  SharedMutex() = default;
  ~SharedMutex() { pthread_cond_destroy(&changed_); }
  SharedMutex(const SharedMutex&) = delete;
  SharedMutex& operator=(const SharedMutex&) = delete;

  void lock() {
    const std::lock_guard<std::mutex> guard(mutex_);
    while (writing_) Wait();
    writing_ = true;
    while (readers_ > 0) Wait();
  }
  void unlock() {
    const std::lock_guard<std::mutex> guard(mutex_);
    writing_ = false;
    pthread_cond_broadcast(&changed_);
  }
  void lock_shared() {
    const std::lock_guard<std::mutex> guard(mutex_);
    while (writing_) Wait();
    ++readers_;
  }
  void unlock_shared() {
    const std::lock_guard<std::mutex> guard(mutex_);
    if (--readers_ == 0) pthread_cond_broadcast(&changed_);
  }

 private:
  void Wait() { pthread_cond_wait(&changed_, mutex_.native_handle()); }

  std::mutex mutex_;
  pthread_cond_t changed_ = PTHREAD_COND_INITIALIZER;
  bool writing_ = false;  // a writer is in, or waits for the readers to leave
  int readers_ = 0;
};

}  // namespace tpu_embedding

#endif  // TPU_EMBEDDING_OPS_CC_CORE_SHARED_MUTEX_H_
