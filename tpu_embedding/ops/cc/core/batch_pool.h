// Prepared batches whose storage is used again.

#ifndef TPU_EMBEDDING_OPS_CC_CORE_BATCH_POOL_H_
#define TPU_EMBEDDING_OPS_CC_CORE_BATCH_POOL_H_

#include <memory>
#include <mutex>
#include <utility>
#include <vector>

namespace tpu_embedding {

// A batch goes back to its pool when its last owner lets go of it. The pool
// lives as long as a batch of it does. Thread-safe.
template <class Batch>
class BatchPool : public std::enable_shared_from_this<BatchPool<Batch>> {
 public:
  // A step takes one batch, and pipelining one more. What a longer queue needed
  // for a while is given back.
  explicit BatchPool(size_t most_free = 2) : most_free_(most_free) {}

  // A batch with the contents of some former one, all to be overwritten; if
  // there is none, a new one that is made of the arguments.
  template <class... Arguments>
  std::shared_ptr<Batch> Take(const Arguments&... arguments) {
    auto batch = Pop();
    if (!batch) batch = std::make_unique<Batch>(arguments...);
    return {batch.release(), [pool = this->shared_from_this()](Batch* used) {
              pool->Return(std::unique_ptr<Batch>(used));
            }};
  }

 private:
  std::unique_ptr<Batch> Pop() {
    const std::lock_guard<std::mutex> lock(mutex_);
    if (free_.empty()) return nullptr;
    auto batch = std::move(free_.back());
    free_.pop_back();
    return batch;
  }

  void Return(std::unique_ptr<Batch> batch) {
    const std::lock_guard<std::mutex> lock(mutex_);
    if (free_.size() < most_free_) free_.push_back(std::move(batch));
  }

  const size_t most_free_;
  std::mutex mutex_;
  std::vector<std::unique_ptr<Batch>> free_;
};

}  // namespace tpu_embedding

#endif  // TPU_EMBEDDING_OPS_CC_CORE_BATCH_POOL_H_
