// Carries what a worker throws to its caller.

#ifndef TPU_EMBEDDING_OPS_CC_CORE_WORKER_FAILURE_H_
#define TPU_EMBEDDING_OPS_CC_CORE_WORKER_FAILURE_H_

#include <exception>
#include <functional>
#include <mutex>
#include <new>
#include <stdexcept>
#include <string>
#include <utility>

namespace tpu_embedding {

// Copying a std::exception_ptr needs the libstdc++ of GCC 12, which not every
// system that TensorFlow runs on has. This class carries the one kind of
// exception that callers tell apart, std::bad_alloc, and the text of all
// others.
class WorkerFailure {
 public:
  // Runs `body` in any thread, and keeps what it throws.
  template <class Body>
  void Guard(const Body& body) {
    try {
      body();
    } catch (const std::bad_alloc&) {
      Keep([] { throw std::bad_alloc(); });
    } catch (const std::exception& error) {
      Keep([text = std::string(error.what())] {
        throw std::runtime_error(text);
      });
    } catch (...) {
      Keep([] {
        throw std::runtime_error(
            "A worker threw something other than a std::exception.");
      });
    }
  }

  // Throws what the last body that failed threw: std::bad_alloc, or its text as
  // a std::runtime_error.
  void Rethrow() const {
    if (rethrow_) rethrow_();
  }

 private:
  void Keep(std::function<void()> rethrow) {
    const std::lock_guard<std::mutex> lock(mutex_);
    rethrow_ = std::move(rethrow);
  }

  std::mutex mutex_;
  std::function<void()> rethrow_;
};

}  // namespace tpu_embedding

#endif  // TPU_EMBEDDING_OPS_CC_CORE_WORKER_FAILURE_H_
