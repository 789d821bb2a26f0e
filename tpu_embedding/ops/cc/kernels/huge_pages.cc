#include "kernels/huge_pages.h"

#include <sys/mman.h>

#include <cstdint>

namespace tpu_embedding {
namespace {

constexpr uintptr_t kHugePage = uintptr_t{2} << 20;

// Linux 6.1 has it: huge pages now, for memory that is already in use. The
// headers of Debian 12 know the name, those of manylinux do not.
[[maybe_unused]] constexpr int kCollapse = 25;

}  // namespace

void HugePages::Advise(size_t index, const tensorflow::Tensor& value) {
  const void* data = value.data();
  if (known_[index].exchange(data) == data) return;
  const auto address = reinterpret_cast<uintptr_t>(data);
  const uintptr_t begin = (address + kHugePage - 1) & ~(kHugePage - 1);
  const uintptr_t end = (address + value.TotalBytes()) & ~(kHugePage - 1);
  if (begin >= end) return;
#ifdef MADV_HUGEPAGE  // Linux
  madvise(reinterpret_cast<void*>(begin), end - begin, MADV_HUGEPAGE);
  madvise(reinterpret_cast<void*>(begin), end - begin, kCollapse);
#endif
}

}  // namespace tpu_embedding
