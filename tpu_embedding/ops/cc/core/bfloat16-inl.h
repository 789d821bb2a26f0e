// Rounds rows of bfloat16 stochastically. int8 uses the same random bits.

#ifndef TPU_EMBEDDING_OPS_CC_CORE_BFLOAT16_INL_H_
#define TPU_EMBEDDING_OPS_CC_CORE_BFLOAT16_INL_H_

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <type_traits>

#include "core/bfloat16.h"
#include "core/element.h"
#include "core/simd.h"

namespace tpu_embedding {

// Rows are rounded by this many; their random bits then take half the time.
constexpr int kRowsAtOnce = 4;
constexpr int64_t kRandomBlocks = 8;
constexpr int64_t kRandomColumns = 64;  // of kRandomBlocks blocks of 128 bits
constexpr int64_t kWordColumns = 16;    // of one word of each

constexpr uint32_t kSign = 0x80000000;
constexpr uint32_t kInfinity = 0x7F800000;
constexpr uint32_t kLargest =
    0x7F7FFFFF;  // the bfloat16 0x7F7F and what is cut
constexpr uint32_t kLargestOfSum = kLargest - 0xFFFF;  // with any random bits
constexpr uint32_t kQuiet = 0x00400000;  // keeps a NaN a NaN, whatever is cut

// One word of each of kRandomBlocks blocks, for rows that fill a register.
template <class F32xN>
using RandomWords = std::conditional_t<kWidth<F32xN> == 16, U32x16, U32x8>;

TPU_EMBEDDING_INLINE void NumberLanes(U32x8* lanes) {
  *lanes = U32x8{0, 1, 2, 3, 4, 5, 6, 7};
}
TPU_EMBEDDING_INLINE void NumberLanes(U32x16* lanes) {
  *lanes = U32x16{0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};
}

// Generates the bits of kRowsAtOnce rows. With one row alone each word would
// wait for the word before it.
template <class Words>
class Threefry {
 public:
  // Writes the blocks `first`, `first` + 1, ... of the rows, word by word.
  TPU_EMBEDDING_INLINE static void Run(const Rounding& rounding, uint32_t first,
                                       const uint32_t* rows, uint16_t* bits) {
    for (int r = 0; r < kRowsAtOnce; r += kCount * kRowsOfWords) {
      Threefry state(rounding, first, rows + r);
      state.OddRounds<1>();
      state.EvenRounds<2>();
      state.OddRounds<3>();
      state.EvenRounds<4>();
      state.OddRounds<5>();
      for (int word = 0; word < 4; ++word) {
        std::memcpy(bits + (word * kRowsAtOnce + r) * kWordColumns,
                    state.words_[word], sizeof(state.words_[word]));
      }
    }
  }

 private:
  static constexpr int kRowsOfWords = sizeof(Words) / (4 * kRandomBlocks);
  // Two vectors of each of the four words leave registers of AVX2 free.
  static constexpr int kCount = 2;

  TPU_EMBEDDING_INLINE Threefry(const Rounding& rounding, uint32_t first,
                                const uint32_t* rows)
      : key_{static_cast<uint32_t>(rounding.seed),
             static_cast<uint32_t>(rounding.seed >> 32),
             static_cast<uint32_t>(rounding.step),
             static_cast<uint32_t>(rounding.step >> 32)} {
    key_[4] = 0x1BD11BDA ^ key_[0] ^ key_[1] ^ key_[2] ^ key_[3];
    Words lanes;
    NumberLanes(&lanes);
    const Words block = lanes % kRandomBlocks;
    const Words later = Words{} - lanes / kRandomBlocks;  // all bits or none
    for (int k = 0; k < kCount; ++k) {
      const uint32_t* own = rows + k * kRowsOfWords;
      const uint32_t step = own[kRowsOfWords - 1] - own[0];
      words_[0][k] = block + (first + key_[0]);
      words_[1][k] = (later & step) + (own[0] + key_[1]);
      words_[2][k] = Words{} + key_[2];
      words_[3][k] = Words{} + key_[3];
    }
  }

  // Runs four rounds, then adds the key; this is key addition number kNumber.
  template <int kNumber>
  TPU_EMBEDDING_INLINE void OddRounds() {
    Mix<10, 26>(1, 3);
    Mix<11, 21>(3, 1);
    Mix<13, 27>(1, 3);
    Mix<23, 5>(3, 1);
    AddKey<kNumber>();
  }
  template <int kNumber>
  TPU_EMBEDDING_INLINE void EvenRounds() {
    Mix<6, 20>(1, 3);
    Mix<17, 11>(3, 1);
    Mix<25, 10>(1, 3);
    Mix<18, 20>(3, 1);
    AddKey<kNumber>();
  }

  // Runs one round: word 0 is mixed with `with_0`, word 2 with `with_2`.
  template <int kOf0, int kOf2>
  TPU_EMBEDDING_INLINE void Mix(int with_0, int with_2) {
    for (int k = 0; k < kCount; ++k) {
      MixTwo<kOf0>(&words_[0][k], &words_[with_0][k]);
      MixTwo<kOf2>(&words_[2][k], &words_[with_2][k]);
    }
  }
  template <int kBits>
  TPU_EMBEDDING_INLINE static void MixTwo(Words* a, Words* b) {
    *a += *b;
    *b = ((*b << kBits) | (*b >> (32 - kBits))) ^ *a;
  }

  template <int kNumber>
  TPU_EMBEDDING_INLINE void AddKey() {
    for (int k = 0; k < kCount; ++k) {
      words_[0][k] += key_[kNumber % 5];
      words_[1][k] += key_[(kNumber + 1) % 5];
      words_[2][k] += key_[(kNumber + 2) % 5];
      words_[3][k] += key_[(kNumber + 3) % 5] + kNumber;
    }
  }

  uint32_t key_[5];
  Words words_[4][kCount];
};

// Calls rows.RoundBlock(r, begin, size, random) for each block of columns of
// each row. The bits of a row are every kRowsAtOnce-th run of kWordColumns.
template <class Words, class Rows>
TPU_EMBEDDING_INLINE void ForRandomBlocks(const Rounding& rounding,
                                          const Rows& rows, int64_t dim) {
  uint32_t numbers[kRowsAtOnce];
  std::copy_n(rows.rows, kRowsAtOnce, numbers);
  for (int64_t begin = 0; begin < dim; begin += kRandomColumns) {
    uint16_t random[kRowsAtOnce * kRandomColumns];
    Threefry<Words>::Run(rounding, begin / kRandomColumns * kRandomBlocks,
                         numbers, random);
    const int64_t size = std::min(dim - begin, kRandomColumns);
    for (int r = 0; r < kRowsAtOnce; ++r) {
      rows.template RoundBlock<Words>(r, begin, size,
                                      random + r * kWordColumns);
    }
  }
}

TPU_EMBEDDING_INLINE BFloat16 Round(float value, uint16_t random) {
  uint32_t bits;
  std::memcpy(&bits, &value, sizeof(bits));
  const uint32_t size = bits & ~kSign;
  const uint32_t finite = std::min(size + random, kLargest);
  const uint32_t other = size == kInfinity ? size : size | kQuiet;
  const uint32_t rounded = size < kInfinity ? finite : other;
  return {static_cast<uint16_t>((rounded | (bits & kSign)) >> 16)};
}

// The functions below round columns of one row. They use every kRowsAtOnce-th
// run of kWordColumns in `random`.

// Rounds one column per lane; right only if `largest` stays <= kLargestOfSum.
template <class Words>
TPU_EMBEDDING_INLINE void RoundLanes(const float* values,
                                     const uint16_t* random, BFloat16* out,
                                     Words* largest) {
  using Halves = std::conditional_t<sizeof(Words) == 64, U16x16, U16x8>;
  Words bits;
  Halves added;
  std::memcpy(&bits, values, sizeof(bits));
  std::memcpy(&added, random, sizeof(added));
  const Words size = bits & ~kSign;
  *largest = size > *largest ? size : *largest;
  const Words sum = bits + __builtin_convertvector(added, Words);
  const Halves rounded = __builtin_convertvector(sum >> 16, Halves);
  std::memcpy(out, &rounded, sizeof(rounded));
}

// Rounds values of any magnitude in [begin, end); `begin` must start a run.
TPU_EMBEDDING_INLINE void RoundRuns(const float* __restrict values,
                                    const uint16_t* __restrict random,
                                    int64_t begin, int64_t end,
                                    BFloat16* __restrict out) {
  for (; begin < end; begin += kWordColumns) {
    const uint16_t* const own = random + begin * (kRowsAtOnce - 1);
    const int64_t stop = std::min(begin + kWordColumns, end);
    for (int64_t d = begin; d < stop; ++d) out[d] = Round(values[d], own[d]);
  }
}

template <class Words>
TPU_EMBEDDING_INLINE void RoundColumns(const float* values,
                                       const uint16_t* random, int64_t size,
                                       BFloat16* out) {
  constexpr int64_t kLanes = sizeof(Words) / sizeof(uint32_t);
  const int64_t whole = size / kWordColumns * kWordColumns;
  Words largest = {};
  for (int64_t d = 0; d < whole; d += kLanes) {
    const int64_t run = d / kWordColumns * kWordColumns;
    RoundLanes(values + d, random + d + run * (kRowsAtOnce - 1), out + d,
               &largest);
  }
  RoundRuns(values, random, whole, size, out);
  uint32_t lanes[kLanes];
  std::memcpy(lanes, &largest, sizeof(lanes));
  if (*std::max_element(lanes, lanes + kLanes) > kLargestOfSum) {
    RoundRuns(values, random, 0, whole, out);
  }
}

// Rows and their numbers. Fewer rows than kRowsAtOnce repeat the last one.
struct RowsToRound {
  const float* values[kRowsAtOnce];
  int64_t rows[kRowsAtOnce];
  BFloat16* out[kRowsAtOnce];

  TPU_EMBEDDING_INLINE void StoreInto(int r, BFloat16* table, int64_t row,
                                      int64_t dim) {
    out[r] = table + row * dim;
  }

  template <class Words>
  TPU_EMBEDDING_INLINE void RoundBlock(int r, int64_t begin, int64_t size,
                                       const uint16_t* random) const {
    RoundColumns<Words>(values[r] + begin, random, size, out[r] + begin);
  }
};

// A body of simd.h. In each row, out[d] becomes one of the two bfloat16 around
// values[d]: the one farther from 0 with a probability of 2^-16 times the lower
// 16 bits. Values that a bfloat16 can hold stay as they are, finite values stay
// finite, and a NaN stays a NaN.
//
// 16 random bits are added to the lower half of the float32, which is then cut
// off. The bits come from Threefry4x32-20 (Salmon et al., "Parallel random
// numbers: as easy as 1, 2, 3", SC 2011) with
//   key     seed (low word, high word), step (low word, high word)
//   counter 8 * (d / 64) + d / 2 % 8, row, 0, 0
// Column d takes word d / 16 % 4 of the four: the lower half if d is even, else
// the upper. Eight blocks side by side, word by word, thus hold the bits of 64
// columns. Threefry adds, rotates and xors words of 32 bits, which every CPU
// does on many at once; the multiplications of Philox took twice as long.
struct RoundBody {
  template <class F32xN>
  TPU_EMBEDDING_INLINE static void Run(const RowsToRound& rows, int64_t dim,
                                       const Rounding& rounding) {
    ForRandomBlocks<RandomWords<F32xN>>(rounding, rows, dim);
  }
};

}  // namespace tpu_embedding

#endif  // TPU_EMBEDDING_OPS_CC_CORE_BFLOAT16_INL_H_
