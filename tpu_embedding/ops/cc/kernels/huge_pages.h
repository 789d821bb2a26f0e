// Asks for huge pages under tables and slots.

#ifndef TPU_EMBEDDING_OPS_CC_KERNELS_HUGE_PAGES_H_
#define TPU_EMBEDDING_OPS_CC_KERNELS_HUGE_PAGES_H_

#include <atomic>
#include <cstddef>
#include <deque>

#include "tensorflow/core/framework/tensor.h"

namespace tpu_embedding {

// Asks for huge pages under the buffers of variables, once for each buffer.
// Thread-safe.
class HugePages {
 public:
  explicit HugePages(size_t num_buffers) : known_(num_buffers) {}

  // Asks for huge pages under the buffer of the variable with number `index`,
  // unless that buffer is the one of the last call.
  void Advise(size_t index, const tensorflow::Tensor& value);

 private:
  std::deque<std::atomic<const void*>> known_;
};

}  // namespace tpu_embedding

#endif  // TPU_EMBEDDING_OPS_CC_KERNELS_HUGE_PAGES_H_
