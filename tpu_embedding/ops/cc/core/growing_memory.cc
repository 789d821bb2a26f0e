#include "core/growing_memory.h"

#include <sys/mman.h>

#include <algorithm>
#include <cstring>
#include <new>

namespace tpu_embedding {
namespace {

// One huge page, so that tables begin where one can.
constexpr size_t kGranule = size_t{2} << 20;

size_t RoundUp(size_t bytes) {
  return (std::max<size_t>(bytes, 1) + kGranule - 1) / kGranule * kGranule;
}

// Null if the system refuses.
char* Reserve(size_t bytes) {
  void* const found = mmap(nullptr, bytes, PROT_READ | PROT_WRITE,
                           MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  return found == MAP_FAILED ? nullptr : static_cast<char*>(found);
}

}  // namespace

GrowingMemory::GrowingMemory(size_t most) {
  data_ = Reserve(RoundUp(most));
  if (data_) capacity_ = RoundUp(most);
}

GrowingMemory::~GrowingMemory() {
  if (data_) munmap(data_, capacity_);
}

void GrowingMemory::Grow(size_t bytes) {
  if (bytes <= capacity_) return;
  const size_t capacity = RoundUp(std::max(bytes, 2 * capacity_));
  char* const larger = Reserve(capacity);
  if (!larger) throw std::bad_alloc();
  if (data_) {
    std::memcpy(larger, data_, capacity_);
    munmap(data_, capacity_);
  }
  data_ = larger;
  capacity_ = capacity;
}

}  // namespace tpu_embedding
