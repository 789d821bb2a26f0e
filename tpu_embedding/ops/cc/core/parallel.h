// How the core asks its host for threads.

#ifndef TPU_EMBEDDING_OPS_CC_CORE_PARALLEL_H_
#define TPU_EMBEDDING_OPS_CC_CORE_PARALLEL_H_

#include <cstdint>
#include <functional>

namespace tpu_embedding {

using Range = std::function<void(int64_t begin, int64_t end)>;

// Calls `body` on disjoint ranges that cover [0, total) and returns when all
// are done. `cost` is the rough number of CPU cycles of one unit. The kernels
// pass TensorFlow's own worker pool, tests pass a loop or std::thread.
using ParallelFor =
    std::function<void(int64_t total, int64_t cost, const Range& body)>;

}  // namespace tpu_embedding

#endif  // TPU_EMBEDDING_OPS_CC_CORE_PARALLEL_H_
