// Huge pages under tables and slots.

#ifndef TPU_EMBEDDING_OPS_CC_KERNELS_HUGE_PAGES_H_
#define TPU_EMBEDDING_OPS_CC_KERNELS_HUGE_PAGES_H_

#include <atomic>
#include <cstddef>
#include <deque>

#include "tensorflow/core/framework/tensor.h"

namespace tpu_embedding {

// Asks the kernel to put huge pages under the buffers of variables, once for
// each buffer. Random rows of a large table miss the TLB with small pages: on
// tables of 1.8 GB a lookup took 1.5 times as long. Where the kernel does
// not support it, only speed is lost. Thread-safe.
class HugePages {
 public:
  explicit HugePages(size_t num_buffers) : known_(num_buffers) {}

  // Advises the buffer of the variable with number `index`, unless that was
  // the one at the last call.
  void Advise(size_t index, const tensorflow::Tensor& value);

 private:
  std::deque<std::atomic<const void*>> known_;
};

}  // namespace tpu_embedding

#endif  // TPU_EMBEDDING_OPS_CC_KERNELS_HUGE_PAGES_H_
