// Memory that grows, usually without a copy.

#ifndef TPU_EMBEDDING_OPS_CC_CORE_GROWING_MEMORY_H_
#define TPU_EMBEDDING_OPS_CC_CORE_GROWING_MEMORY_H_

#include <cstddef>

namespace tpu_embedding {

constexpr size_t kHugePage = size_t{2} << 20;

// Asks for huge pages where they fit into this memory. Random rows of a large
// table miss the TLB with small pages: on tables of 1.8 GB a lookup took 1.5
// times as long. On systems without them only speed is lost.
void UseHugePages(const void* data, size_t size);

// Addresses are reserved for all bytes that may ever be needed; a page takes
// memory once it is written. If the system refuses to reserve that many, the
// memory is moved and doubled whenever it is full.
class GrowingMemory {
 public:
  // Reserves `most` bytes, or less if the system refuses, and before them
  // `front` bytes, which lose their values when the memory moves.
  explicit GrowingMemory(size_t most, size_t front = 0);
  ~GrowingMemory();
  GrowingMemory(const GrowingMemory&) = delete;
  GrowingMemory& operator=(const GrowingMemory&) = delete;

  // Makes room for `bytes` bytes; new ones are zeros. Throws std::bad_alloc,
  // having changed nothing, if there is no memory. The bytes get huge pages,
  // which take at most one huge page more than needed.
  void Grow(size_t bytes);

  // Returns where the bytes after the front begin; a huge page begins there.
  char* data() const { return data_; }
  // Returns how many bytes may be written; Grow does not count them as used.
  size_t capacity() const { return capacity_; }

 private:
  // Reserves new memory. Returns whether the system gave it.
  bool Reserve(size_t bytes);

  const size_t front_;
  char* mapped_ = nullptr;
  size_t mapped_size_ = 0;
  char* data_ = nullptr;
  size_t capacity_ = 0;
  size_t used_ = 0;
  size_t huge_ = 0;  // bytes that have huge pages, or get them
};

}  // namespace tpu_embedding

#endif  // TPU_EMBEDDING_OPS_CC_CORE_GROWING_MEMORY_H_
