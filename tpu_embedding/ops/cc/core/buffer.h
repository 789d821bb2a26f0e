// An array whose elements are not initialized and that keeps its storage.

#ifndef TPU_EMBEDDING_OPS_CC_CORE_BUFFER_H_
#define TPU_EMBEDDING_OPS_CC_CORE_BUFFER_H_

#include <cassert>
#include <cstdint>
#include <memory>

namespace tpu_embedding {

// std::vector clears its elements, which costs as much as sorting does for
// the arrays of a large batch; every user of a Buffer writes before it reads.
template <class T>
class Buffer {
 public:
  Buffer() = default;
  explicit Buffer(int64_t capacity)
      : data_(new T[capacity]), capacity_(capacity), size_(capacity) {}

  // Makes room for `size` elements with unspecified values. Storage that is
  // large enough is reused: fresh memory costs a page fault per 4 KiB.
  void Resize(int64_t size) {
    if (size > capacity_) *this = Buffer(size);
    size_ = size;
  }

  // Keeps the first `size` elements; the storage stays.
  void Truncate(int64_t size) {
    assert(size <= capacity_);
    size_ = size;
  }

  int64_t size() const { return size_; }
  T* data() { return data_.get(); }
  const T* data() const { return data_.get(); }
  T& operator[](int64_t i) {
    assert(i < size_);
    return data_[i];
  }
  const T& operator[](int64_t i) const {
    assert(i < size_);
    return data_[i];
  }

 private:
  std::unique_ptr<T[]> data_;
  int64_t capacity_ = 0;
  int64_t size_ = 0;
};

}  // namespace tpu_embedding

#endif  // TPU_EMBEDDING_OPS_CC_CORE_BUFFER_H_
