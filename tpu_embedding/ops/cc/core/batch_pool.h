// A pool that reuses the storage of prepared batches.

#ifndef TPU_EMBEDDING_OPS_CC_CORE_BATCH_POOL_H_
#define TPU_EMBEDDING_OPS_CC_CORE_BATCH_POOL_H_

#include <memory>
#include <mutex>
#include <utility>
#include <vector>

namespace tpu_embedding {

// A batch returns to its pool when its last reference is released. Each batch
// keeps its pool alive. Thread-safe.
template <class Batch>
class BatchPool : public std::enable_shared_from_this<BatchPool<Batch>> {
 public:
  // A step needs one batch, and pipelining one more. Batches beyond these,
  // which a longer queue needed for a while, are freed.
  explicit BatchPool(size_t most_free = 2) : most_free_(most_free) {}

  // Returns a batch to reuse, whose contents the caller must overwrite, or if
  // the pool is empty a new one, constructed from the arguments.
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
