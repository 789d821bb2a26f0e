// Prepared batches whose storage is used again.

#ifndef TPU_EMBEDDING_OPS_CC_CORE_BATCH_POOL_H_
#define TPU_EMBEDDING_OPS_CC_CORE_BATCH_POOL_H_

#include <memory>
#include <mutex>
#include <utility>
#include <vector>

#include "core/prepared_batch.h"

namespace tpu_embedding {

// A batch goes back to its pool when its last owner lets go of it. The pool
// lives as long as a batch of it does. Thread-safe.
class BatchPool : public std::enable_shared_from_this<BatchPool> {
 public:
  // A batch with the contents of some former one, all to be overwritten.
  std::shared_ptr<PreparedBatch> Take() {
    auto batch = Pop();
    if (!batch) batch = std::make_unique<PreparedBatch>();
    return {batch.release(), [pool = shared_from_this()](PreparedBatch* used) {
              pool->Return(std::unique_ptr<PreparedBatch>(used));
            }};
  }

 private:
  // A step takes one, and pipelining one more. What a longer queue needed for
  // a while is given back.
  static constexpr size_t kMostFree = 2;

  std::unique_ptr<PreparedBatch> Pop() {
    const std::lock_guard<std::mutex> lock(mutex_);
    if (free_.empty()) return nullptr;
    auto batch = std::move(free_.back());
    free_.pop_back();
    return batch;
  }

  void Return(std::unique_ptr<PreparedBatch> batch) {
    const std::lock_guard<std::mutex> lock(mutex_);
    if (free_.size() < kMostFree) free_.push_back(std::move(batch));
  }

  std::mutex mutex_;
  std::vector<std::unique_ptr<PreparedBatch>> free_;
};

}  // namespace tpu_embedding

#endif  // TPU_EMBEDDING_OPS_CC_CORE_BATCH_POOL_H_
