// TensorFlow's CPU worker pool, as the core asks for threads.

#ifndef TPU_EMBEDDING_TESTING_CC_RUNTIME_WORKERS_H_
#define TPU_EMBEDDING_TESTING_CC_RUNTIME_WORKERS_H_

#include "core/parallel.h"
#include "tensorflow/core/framework/op_kernel.h"
#include "tensorflow/core/util/work_sharder.h"

namespace tpu_embedding {

inline ParallelFor Workers(tensorflow::OpKernelContext* context) {
  const auto* threads = context->device()->tensorflow_cpu_worker_threads();
  return [threads](int64_t total, int64_t cost, const Range& body) {
    tensorflow::Shard(threads->num_threads, threads->workers, total, cost,
                      body);
  };
}

}  // namespace tpu_embedding

#endif  // TPU_EMBEDDING_TESTING_CC_RUNTIME_WORKERS_H_
