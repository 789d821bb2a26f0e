// The loops of bfloat16.h, for callers that run at a known level of CPU.

#ifndef TPU_EMBEDDING_OPS_CC_CORE_BFLOAT16_INL_H_
#define TPU_EMBEDDING_OPS_CC_CORE_BFLOAT16_INL_H_

#include <algorithm>
#include <cstdint>
#include <cstring>

#include "core/bfloat16.h"
#include "core/simd.h"

namespace tpu_embedding {

constexpr int64_t kRandomBlocks = 8;
constexpr int64_t kRandomColumns = 64;  // of kRandomBlocks blocks of 128 bits

constexpr uint32_t kSign = 0x80000000;
constexpr uint32_t kInfinity = 0x7F800000;
constexpr uint32_t kLargest =
    0x7F7FFFFF;                          // the bfloat16 0x7F7F and what is cut
constexpr uint32_t kQuiet = 0x00400000;  // makes a NaN of whatever is cut

// One word of each of kRandomBlocks blocks.
using RandomWords = uint32_t __attribute__((vector_size(4 * kRandomBlocks)));

template <int kBits>
TPU_EMBEDDING_INLINE void RotateLeft(RandomWords* words) {
  *words = (*words << kBits) | (*words >> (32 - kBits));
}

// One round: two mixes of two words.
template <int kFirst, int kSecond>
TPU_EMBEDDING_INLINE void Mix(RandomWords* a, RandomWords* b, RandomWords* c,
                              RandomWords* d) {
  *a += *b;
  RotateLeft<kFirst>(b);
  *b ^= *a;
  *c += *d;
  RotateLeft<kSecond>(d);
  *d ^= *c;
}

class Threefry {
 public:
  // The blocks `first`, `first` + 1, ... of `row`, word by word.
  TPU_EMBEDDING_INLINE static void Run(const Rounding& rounding, uint32_t first,
                                       uint32_t row, uint16_t* bits) {
    Threefry state(rounding, first, row);
    state.OddRounds<1>();
    state.EvenRounds<2>();
    state.OddRounds<3>();
    state.EvenRounds<4>();
    state.OddRounds<5>();
    std::memcpy(bits, state.words_, sizeof(state.words_));
  }

 private:
  TPU_EMBEDDING_INLINE Threefry(const Rounding& rounding, uint32_t first,
                                uint32_t row)
      : key_{static_cast<uint32_t>(rounding.seed),
             static_cast<uint32_t>(rounding.seed >> 32),
             static_cast<uint32_t>(rounding.step),
             static_cast<uint32_t>(rounding.step >> 32)} {
    key_[4] = 0x1BD11BDA ^ key_[0] ^ key_[1] ^ key_[2] ^ key_[3];
    words_[0] = RandomWords{0, 1, 2, 3, 4, 5, 6, 7} + (first + key_[0]);
    words_[1] = RandomWords{} + (row + key_[1]);
    words_[2] = RandomWords{} + key_[2];
    words_[3] = RandomWords{} + key_[3];
  }

  // Four rounds, then the key for the time kNumber.
  template <int kNumber>
  TPU_EMBEDDING_INLINE void OddRounds() {
    RandomWords* const w = words_;
    Mix<10, 26>(w, w + 1, w + 2, w + 3);
    Mix<11, 21>(w, w + 3, w + 2, w + 1);
    Mix<13, 27>(w, w + 1, w + 2, w + 3);
    Mix<23, 5>(w, w + 3, w + 2, w + 1);
    AddKey<kNumber>();
  }
  template <int kNumber>
  TPU_EMBEDDING_INLINE void EvenRounds() {
    RandomWords* const w = words_;
    Mix<6, 20>(w, w + 1, w + 2, w + 3);
    Mix<17, 11>(w, w + 3, w + 2, w + 1);
    Mix<25, 10>(w, w + 1, w + 2, w + 3);
    Mix<18, 20>(w, w + 3, w + 2, w + 1);
    AddKey<kNumber>();
  }
  template <int kNumber>
  TPU_EMBEDDING_INLINE void AddKey() {
    words_[0] += key_[kNumber % 5];
    words_[1] += key_[(kNumber + 1) % 5];
    words_[2] += key_[(kNumber + 2) % 5];
    words_[3] += key_[(kNumber + 3) % 5] + kNumber;
  }

  uint32_t key_[5];
  RandomWords words_[4];
};

TPU_EMBEDDING_INLINE BFloat16 Round(float value, uint16_t random) {
  uint32_t bits;
  std::memcpy(&bits, &value, sizeof(bits));
  const uint32_t size = bits & ~kSign;
  const uint32_t finite = std::min(size + random, kLargest);
  const uint32_t other = size == kInfinity ? size : size | kQuiet;
  const uint32_t rounded = size < kInfinity ? finite : other;
  return {static_cast<uint16_t>((rounded | (bits & kSign)) >> 16)};
}

// Bodies of simd.h, with the arguments of ExpandRow and RoundRow.
struct ExpandBody {
  template <class F32xN>
  TPU_EMBEDDING_INLINE static void Run(const BFloat16* __restrict row,
                                       int64_t dim, float* __restrict out) {
    for (int64_t d = 0; d < dim; ++d) Load(row + d, out + d);
  }
};

struct RoundBody {
  template <class F32xN>
  TPU_EMBEDDING_INLINE static void Run(const float* __restrict values,
                                       int64_t dim, Rounding rounding,
                                       int64_t row, BFloat16* __restrict out) {
    uint16_t random[kRandomColumns];
    for (int64_t begin = 0; begin < dim; begin += kRandomColumns) {
      Threefry::Run(rounding, begin / kRandomColumns * kRandomBlocks, row,
                    random);
      const int64_t size = std::min(dim - begin, kRandomColumns);
      for (int64_t d = 0; d < size; ++d) {
        out[begin + d] = Round(values[begin + d], random[d]);
      }
    }
  }
};

}  // namespace tpu_embedding

#endif  // TPU_EMBEDDING_OPS_CC_CORE_BFLOAT16_INL_H_
