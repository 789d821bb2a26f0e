#include "core/csr_partitions.h"

#include <algorithm>

#include "core/radix_sort.h"
#include "core/simd.h"

namespace tpu_embedding {
namespace {

template <class Word>
void Sort(int64_t num_keys, int64_t size, CsrWords* words,
          Buffer<Word>* scratch) {
  RadixSort(Digits(num_keys, size, words->low_bits), size, &words->of<Word>(),
            scratch);
}

// Merges equal entries into one; returns how many entries remain. It has no
// branches: nobody can predict whether two equal ids follow each other.
template <class Word>
int64_t MergeOnes(const Word* words, int64_t size, Word* merged,
                  uint32_t* ends) {
  ends[0] = 0;
  if (size == 0) return 0;
  int64_t last = 0;
  Word before = words[0];
  for (int64_t i = 0; i < size; ++i) {
    const Word word = words[i];
    last += word != before;
    before = word;
    merged[last] = word;
    ends[last + 1] = static_cast<uint32_t>(i + 1);
  }
  return last + 1;
}

// Merges entries with gains in the same way. Entries with positions stay apart.
int64_t MergeGains(const CsrEntries& entries, Partitions* partitions) {
  const uint64_t* const words = entries.words.wide_words.data();
  const CsrPayload* const payloads = entries.payloads.data();
  uint64_t* const merged = partitions->words.wide_words.data();
  float* const gains = partitions->gains.data();
  const bool merge = entries.form == CsrForm::kGains;
  int64_t last = -1;
  uint64_t before = ~uint64_t{0};  // no entry has this word
  float gain = 0.0f;
  for (int64_t i = 0; i < entries.size; ++i) {
    const CsrPayload payload = payloads[static_cast<uint32_t>(words[i])];
    const uint64_t word = (words[i] & ~uint64_t{0xffffffff}) |
                          static_cast<uint32_t>(payload.sample);
    const bool same = merge & (word == before);
    before = word;
    gain = same ? gain + payload.gain : payload.gain;
    last += !same;
    merged[last] = word;
    gains[last] = gain;
  }
  return last + 1;
}

void Merge(const CsrEntries& entries, Partitions* partitions) {
  CsrWords& words = partitions->words;
  if (entries.form == CsrForm::kOnes) {
    partitions->ends.Resize(entries.size + 1);
    partitions->size = WithWord(words, [&](auto word) {
      using Word = decltype(word);
      return MergeOnes(entries.words.data<Word>(), entries.size,
                       words.of<Word>().data(), partitions->ends.data());
    });
    return;
  }
  partitions->gains.Resize(entries.size);
  partitions->size = MergeGains(entries, partitions);
  if (entries.form != CsrForm::kPositions) return;
  partitions->positions.Resize(entries.size);
  for (int64_t i = 0; i < entries.size; ++i) {
    const auto place = static_cast<uint32_t>(entries.words.wide_words[i]);
    partitions->positions[i] = entries.positions[place];
  }
}

// Returns the first of entries [begin, end) with a key of at least `key`. It
// has no branches, because nobody could predict them.
int64_t LowerBound(const CsrWords& words, int64_t begin, int64_t end,
                   uint64_t key) {
  return WithWord(words, [&](auto word) {
    const auto* data = words.data<decltype(word)>();
    int64_t size = end - begin;
    while (size > 0) {
      const int64_t half = (size + 1) / 2;
      begin += (data[begin + half - 1] >> words.low_bits) < key ? half : 0;
      size -= half;
    }
    return begin;
  });
}

// Counts the different keys among entries [begin, end), which are sorted.
struct CountKeys {
  template <class F32xN, class Word>
  TPU_EMBEDDING_INLINE static int64_t Run(const Word* words, int64_t begin,
                                          int64_t end, int low_bits) {
    Word count = begin < end;
    for (int64_t i = begin + 1; i < end; ++i) {
      count += ((words[i] ^ words[i - 1]) >> low_bits) != 0;
    }
    return count;
  }
};

int64_t CountUnique(const CsrWords& words, int64_t begin, int64_t end) {
  return WithWord(words, [&](auto word) {
    return RunOnThisCpu<CountKeys>(words.data<decltype(word)>(), begin, end,
                                   words.low_bits);
  });
}

struct WriteWords {
  template <class F32xN, class Word>
  TPU_EMBEDDING_INLINE static void Run(const Word* words, int low_bits,
                                       int64_t size, int32_t first_sample,
                                       uint32_t shift, int32_t* samples,
                                       int32_t* tokens) {
    const Word mask = (Word{1} << low_bits) - 1;
    for (int64_t i = 0; i < size; ++i) {
      const Word word = words[i];
      samples[i] = static_cast<int32_t>(word & mask) + first_sample;
      const auto key = static_cast<uint32_t>(word >> low_bits);
      tokens[i] = static_cast<int32_t>(key + shift);
    }
  }
};

struct WriteOnes {
  template <class F32xN>
  TPU_EMBEDDING_INLINE static void Run(const uint32_t* ends, int64_t size,
                                       float* gains) {
    for (int64_t i = 0; i < size; ++i) {
      const auto count = static_cast<int32_t>(ends[i + 1] - ends[i]);
      gains[i] = static_cast<float>(count);
    }
  }
};

}  // namespace

void SortIntoPartitions(CsrEntries* entries, SortScratch* scratch,
                        Partitions* partitions) {
  const TablePlace& place = entries->place;
  CsrWords& sorted = entries->words;
  if (sorted.narrow) {
    Sort(place.num_keys(), entries->size, &sorted, &scratch->narrow_words);
  } else {
    Sort(place.num_keys(), entries->size, &sorted, &scratch->wide_words);
  }
  partitions->place = place;
  partitions->form = entries->form;
  partitions->first_sample = entries->first_sample;
  partitions->words.StartLike(sorted, entries->size);
  Merge(*entries, partitions);
  partitions->begins.assign(1, 0);
  partitions->unique.clear();
  for (int64_t shard = 0; shard < place.num_shards; ++shard) {
    const int64_t begin = partitions->begins.back();
    const int64_t end = LowerBound(partitions->words, begin, partitions->size,
                                   (shard + 1) * place.num_tokens);
    partitions->begins.push_back(end);
    partitions->unique.push_back(CountUnique(partitions->words, begin, end));
  }
}

int64_t FirstOfRow(const Partitions& partitions, int64_t shard, int64_t row) {
  const TablePlace& place = partitions.place;
  const int64_t token = (row - shard + place.num_shards - 1) / place.num_shards;
  const int64_t own =
      std::clamp<int64_t>(token - place.row_offset, 0, place.num_tokens);
  return LowerBound(partitions.words, partitions.begins[shard],
                    partitions.begins[shard + 1],
                    shard * place.num_tokens + own);
}

void AddBuckets(const Partitions& partitions, int64_t shard, int64_t width,
                BucketCounts* buckets) {
  int64_t begin = partitions.begins[shard];
  for (int b = 0; b < kNumBuckets; ++b) {
    const int64_t end = FirstOfRow(partitions, shard, (b + 1) * width);
    const int64_t unique = CountUnique(partitions.words, begin, end);
    (*buckets)[b] = (*buckets)[b] + IdCounts{end - begin, unique};
    begin = end;
  }
}

void WriteEntries(const Partitions& partitions, int64_t shard, int64_t begin,
                  int64_t end, int64_t out, const CsrArrays& arrays) {
  const TablePlace& place = partitions.place;
  const CsrWords& words = partitions.words;
  // The shift wraps modulo 2^32, as keys do.
  const auto shift =
      static_cast<uint32_t>(place.row_offset - shard * place.num_tokens);
  const int64_t size = end - begin;
  WithWord(words, [&](auto word) {
    RunOnThisCpu<WriteWords>(words.data<decltype(word)>() + begin,
                             words.low_bits, size, partitions.first_sample,
                             shift, arrays.sample_ids + out,
                             arrays.token_ids + out);
  });
  if (partitions.form == CsrForm::kOnes) {
    RunOnThisCpu<WriteOnes>(partitions.ends.data() + begin, size,
                            arrays.gains + out);
  } else {
    std::copy_n(partitions.gains.data() + begin, size, arrays.gains + out);
  }
  if (arrays.positions) {
    std::copy_n(partitions.positions.data() + begin, size,
                arrays.positions + out);
  }
}

}  // namespace tpu_embedding
