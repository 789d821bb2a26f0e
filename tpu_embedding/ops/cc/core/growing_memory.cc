#include "core/growing_memory.h"

#include <sys/mman.h>

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <new>

namespace tpu_embedding {
namespace {

// Memory smaller than this gets a huge page only once it fills it. Larger
// memory gets the next one earlier: clearing it costs less than 512 faults.
constexpr size_t kLarge = 4 * kHugePage;

// Linux 6.1 can make huge pages of memory that is already in use. The headers
// of Debian 12 know the name, those of manylinux do not.
[[maybe_unused]] constexpr int kCollapse = 25;

size_t RoundUp(size_t bytes) {
  return (bytes + kHugePage - 1) / kHugePage * kHugePage;
}

}  // namespace

void UseHugePages(const void* data, size_t size) {
  const auto address = reinterpret_cast<uintptr_t>(data);
  const uintptr_t begin = RoundUp(address);
  const uintptr_t end = (address + size) / kHugePage * kHugePage;
  if (begin >= end) return;
#ifdef MADV_HUGEPAGE  // Linux
  madvise(reinterpret_cast<void*>(begin), end - begin, MADV_HUGEPAGE);
  madvise(reinterpret_cast<void*>(begin), end - begin, kCollapse);
#endif
}

GrowingMemory::GrowingMemory(size_t most, size_t front)
    : front_(RoundUp(front)) {
  if (!Reserve(most)) Reserve(0);
}

GrowingMemory::~GrowingMemory() {
  if (mapped_) munmap(mapped_, mapped_size_);
}

void GrowingMemory::Grow(size_t bytes) {
  if (!mapped_ || bytes > capacity_) {
    void* const mapped = mapped_;
    const size_t mapped_size = mapped_size_;
    const char* const data = data_;
    const size_t capacity = capacity_;
    if (!Reserve(std::max(bytes, 2 * capacity_))) throw std::bad_alloc();
    if (mapped) {
      std::memcpy(data_, data, capacity);
      munmap(mapped, mapped_size);
    }
    huge_ = 0;
  }
  used_ = std::max(used_, bytes);
  const size_t ahead = used_ < kLarge ? 0 : kHugePage - 1;
  const size_t huge = (used_ + ahead) / kHugePage * kHugePage;
  if (huge <= huge_) return;
  UseHugePages(data_ + huge_, huge - huge_);
  huge_ = huge;
}

bool GrowingMemory::Reserve(size_t bytes) {
  const size_t capacity = std::max(RoundUp(bytes), kHugePage);
  const size_t size = front_ + capacity + kHugePage;
  void* const mapped = mmap(nullptr, size, PROT_READ | PROT_WRITE,
                            MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (mapped == MAP_FAILED) return false;
  mapped_ = static_cast<char*>(mapped);
  mapped_size_ = size;
  data_ = mapped_ + RoundUp(reinterpret_cast<uintptr_t>(mapped_)) -
          reinterpret_cast<uintptr_t>(mapped_) + front_;
  capacity_ = capacity;
  return true;
}

}  // namespace tpu_embedding
