// Memory that grows, as a rule without a copy.

#ifndef TPU_EMBEDDING_OPS_CC_CORE_GROWING_MEMORY_H_
#define TPU_EMBEDDING_OPS_CC_CORE_GROWING_MEMORY_H_

#include <cstddef>

namespace tpu_embedding {

// Addresses are reserved for all that may ever be needed; a page takes memory
// once it is written. Where the system refuses to reserve so much, the memory
// doubles when it is full, and moves.
class GrowingMemory {
 public:
  // Reserves `most` bytes, or less if the system refuses.
  explicit GrowingMemory(size_t most);
  ~GrowingMemory();
  GrowingMemory(const GrowingMemory&) = delete;
  GrowingMemory& operator=(const GrowingMemory&) = delete;

  // Gives room for `bytes`, of which those that are new are zeros. Throws
  // std::bad_alloc if there is none, and nothing has changed.
  void Grow(size_t bytes);

  char* data() const { return data_; }

 private:
  char* data_ = nullptr;
  size_t capacity_ = 0;
};

}  // namespace tpu_embedding

#endif  // TPU_EMBEDDING_OPS_CC_CORE_GROWING_MEMORY_H_
