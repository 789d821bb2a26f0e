// Parallel loops, on threads that the caller of the core provides.

#ifndef TPU_EMBEDDING_OPS_CC_CORE_PARALLEL_H_
#define TPU_EMBEDDING_OPS_CC_CORE_PARALLEL_H_

#include <atomic>
#include <cstdint>
#include <functional>

namespace tpu_embedding {

using Range = std::function<void(int64_t begin, int64_t end)>;

// Calls `body` on disjoint ranges that cover [0, total) and returns when all
// are done. `cost` is the rough number of CPU cycles of one unit. The kernels
// pass TensorFlow's worker pool, tests pass a loop or std::thread.
using ParallelFor =
    std::function<void(int64_t total, int64_t cost, const Range& body)>;

// Runs body(i, &space) once for each i in [0, total). A free thread takes the
// next item, so items of very different sizes should begin with the largest.
// Each working thread has its own `Space`, which stays in its caches.
template <class Space>
void ForEachItemWith(const ParallelFor& parallel_for, int64_t total,
                     int64_t cost,
                     const std::function<void(int64_t, Space*)>& body) {
  if (total == 0) return;
  std::atomic<int64_t> next{0};
  parallel_for(total, cost, [&](int64_t, int64_t) {
    Space space;
    for (int64_t i = next++; i < total; i = next++) body(i, &space);
  });
}

// Runs body(i) once for each i in [0, total) in the same way.
inline void ForEachItem(const ParallelFor& parallel_for, int64_t total,
                        int64_t cost,
                        const std::function<void(int64_t)>& body) {
  struct Nothing {};
  ForEachItemWith<Nothing>(parallel_for, total, cost,
                           [&](int64_t i, Nothing*) { body(i); });
}

}  // namespace tpu_embedding

#endif  // TPU_EMBEDDING_OPS_CC_CORE_PARALLEL_H_
