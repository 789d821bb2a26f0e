#include "kernels/huge_pages.h"

#include "core/growing_memory.h"

namespace tpu_embedding {

void HugePages::Advise(size_t index, const tensorflow::Tensor& value) {
  const void* data = value.data();
  if (known_[index].exchange(data) == data) return;
  UseHugePages(data, value.TotalBytes());
}

}  // namespace tpu_embedding
