// Sorts entries by an integer key, stably, the least significant digit first.

#ifndef TPU_EMBEDDING_OPS_CC_CORE_RADIX_SORT_H_
#define TPU_EMBEDDING_OPS_CC_CORE_RADIX_SORT_H_

#include <algorithm>
#include <cstdint>
#include <utility>
#include <vector>

#include "core/buffer.h"

namespace tpu_embedding {

// Decides how a sort cuts its keys into digits.
class Digits {
 public:
  // Keys are below `bound` and begin above the `low_bits` lowest bits of their
  // number. Wide digits mean few passes, but each pass has to clear and add up
  // its counters, so few entries get narrow digits. A digit has at most 11
  // bits, whose 2048 counters stay in the first-level cache.
  Digits(uint64_t bound, int64_t num_entries, int low_bits = 0)
      : low_bits_(low_bits) {
    const int key_bits = bound > 1 ? BitWidth(bound - 1) : 1;
    const int most = std::clamp(BitWidth(num_entries), 4, 11);
    passes_ = (key_bits + most - 1) / most;
    bits_ = (key_bits + passes_ - 1) / passes_;
  }

  int passes() const { return passes_; }
  int64_t size() const { return int64_t{1} << bits_; }
  int64_t Of(uint64_t number, int pass) const {
    return (number >> (low_bits_ + pass * bits_)) & (size() - 1);
  }

 private:
  static int BitWidth(uint64_t value) {
    return value ? 64 - __builtin_clzll(value) : 0;
  }

  const int low_bits_;
  int passes_;
  int bits_;
};

// Counts the digits of all keys, pass by pass. If the compiler knows the number
// of passes, it unrolls the inner loop, which halves the time.
template <int kPasses, class Source, class Key>
void CountDigits(const Digits& digits, const Source& source, const Key& key,
                 int64_t* counts) {
  const int passes = kPasses ? kPasses : digits.passes();
  source([=](const auto& entry) {
    const uint64_t value = key(entry);
    for (int pass = 0; pass < passes; ++pass) {
      ++counts[pass * digits.size() + digits.Of(value, pass)];
    }
  });
}

// Sorts by the digits of `key(entry)`; equal keys keep their order.
// `source(visit)` calls visit(entry) for each of the `size` entries, in order;
// it is called twice, so that entries need not be stored before they are
// sorted. `scratch` is room to work in.
template <class Entry, class Source, class Key>
void RadixSort(const Digits& digits, int64_t size, const Source& source,
               const Key& key, Buffer<Entry>* sorted, Buffer<Entry>* scratch) {
  const int passes = digits.passes();
  sorted->Resize(size);
  if (passes > 1) scratch->Resize(size);
  std::vector<int64_t> places(passes * digits.size());
  switch (passes) {
    case 1:
      CountDigits<1>(digits, source, key, places.data());
      break;
    case 2:
      CountDigits<2>(digits, source, key, places.data());
      break;
    case 3:
      CountDigits<3>(digits, source, key, places.data());
      break;
    default:
      CountDigits<0>(digits, source, key, places.data());
  }
  for (int pass = 0; pass < passes; ++pass) {
    int64_t* place = &places[pass * digits.size()];
    int64_t next = 0;
    for (int64_t d = 0; d < digits.size(); ++d) {
      next += std::exchange(place[d], next);
    }
    // Passes take turns, so that the last one ends in `sorted`.
    const bool ends_in_sorted = (passes - pass) % 2 == 1;
    Entry* to = (ends_in_sorted ? sorted : scratch)->data();
    const Entry* from = (ends_in_sorted ? scratch : sorted)->data();
    const auto move = [=](const Entry& entry) {
      to[place[digits.Of(key(entry), pass)]++] = entry;
    };
    if (pass == 0) {
      source(move);
    } else {
      std::for_each(from, from + size, move);
    }
  }
}

// Sorts numbers in place.
template <class Word>
void RadixSort(const Digits& digits, int64_t size, Buffer<Word>* words,
               Buffer<Word>* scratch) {
  const auto source = [begin = words->data(), size](const auto& visit) {
    std::for_each(begin, begin + size, visit);
  };
  const auto key = [](Word word) { return uint64_t{word}; };
  // With an even number of passes the sort ends in the buffer it began in.
  if (digits.passes() % 2 == 0) {
    RadixSort(digits, size, source, key, words, scratch);
  } else {
    RadixSort(digits, size, source, key, scratch, words);
    std::swap(*words, *scratch);
  }
}

}  // namespace tpu_embedding

#endif  // TPU_EMBEDDING_OPS_CC_CORE_RADIX_SORT_H_
