// Batches come back to their pool, from any thread and after the pool's owner.

#include "core/batch_pool.h"

#include <cstdint>
#include <memory>
#include <thread>
#include <vector>

#include "check.h"
#include "core/prepared_batch.h"

namespace tpu_embedding {
namespace {

void TestStorageIsUsedAgain() {
  const auto pool = std::make_shared<BatchPool<PreparedBatch>>();
  const PreparedBatch* first = pool->Take().get();
  const auto taken = pool->Take();
  CHECK_TRUE(taken.get() == first);
  CHECK_TRUE(pool->Take().get() != first);
}

void TestBatchOutlivesItsPool() {
  auto pool = std::make_shared<BatchPool<PreparedBatch>>();
  const auto batch = pool->Take();
  pool.reset();
  batch->vocabulary_sizes = {1, 2};
  CHECK_EQ(batch->vocabulary_sizes[1], 2);
}

// No two threads hold the same batch at once.
void TestThreads() {
  const auto pool = std::make_shared<BatchPool<PreparedBatch>>();
  std::vector<std::thread> threads;
  for (int64_t t = 0; t < 4; ++t) {
    threads.emplace_back([&pool, t] {
      for (int i = 0; i < 1000; ++i) {
        const auto batch = pool->Take();
        batch->vocabulary_sizes = {t};
        std::this_thread::yield();
        CHECK_EQ(batch->vocabulary_sizes[0], t);
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
}

}  // namespace
}  // namespace tpu_embedding

int main() {
  tpu_embedding::TestStorageIsUsedAgain();
  tpu_embedding::TestBatchOutlivesItsPool();
  tpu_embedding::TestThreads();
}
