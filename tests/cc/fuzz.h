// What the fuzz targets share: they read a problem out of arbitrary bytes.

#ifndef TPU_EMBEDDING_TESTS_CC_FUZZ_H_
#define TPU_EMBEDDING_TESTS_CC_FUZZ_H_

#include <cstdint>
#include <cstdlib>
#include <iostream>

namespace tpu_embedding::fuzz {

// The targets. Each tries one input and returns whether it was accepted; else
// it was refused with an error.
bool FuzzFeatures(const uint8_t* data, size_t size);
bool FuzzCsr(const uint8_t* data, size_t size);

// Reads a problem out of bytes; behind their end it reads zeros.
class Bytes {
 public:
  Bytes(const uint8_t* data, size_t size) : data_(data), size_(size) {}

  bool empty() const { return next_ >= size_; }
  uint8_t Byte() { return next_ < size_ ? data_[next_++] : 0; }

  // Mostly small numbers, sometimes one from the edges of int64.
  int64_t Number(int64_t low, int64_t high) {
    return low + Byte() % (high - low + 1);
  }
  int64_t AnyNumber(int64_t usual) {
    if (usual > 1000) usual = 1000;
    const uint8_t what = Byte();
    if (what < 224) return usual > 0 ? what % usual : what;
    if (what < 240) return usual + what - 232;
    int64_t value = 0;
    for (int i = 0; i < 8; ++i) value = value << 8 | Byte();
    const int64_t edges[] = {
        value,     -1,        INT64_MAX,        INT64_MIN,
        INT32_MAX, INT32_MIN, int64_t{1} << 32, int64_t{1} << 62};
    return edges[what % 8];
  }

 private:
  const uint8_t* data_;
  size_t size_;
  size_t next_ = 0;
};

// Ends the program, so that a sanitizer or libFuzzer keeps the input.
inline void Require(bool holds, const char* what) {
  if (holds) return;
  std::cerr << "not true: " << what << std::endl;
  std::abort();
}

}  // namespace tpu_embedding::fuzz

#endif  // TPU_EMBEDDING_TESTS_CC_FUZZ_H_
