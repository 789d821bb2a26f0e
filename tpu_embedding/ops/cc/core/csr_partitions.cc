#include "core/csr_partitions.h"

#include <algorithm>
#include <limits>
#include <type_traits>

namespace tpu_embedding {
namespace {

// Reads sorted entries one by one; a partition is a run of them.
template <CsrForm kForm>
class Merger {
 public:
  Merger(const CsrEntries& entries, const SortScratch& scratch,
         Partitions* partitions)
      : next_(scratch.sorted.data()),
        end_(next_ + entries.size),
        payloads_(entries.payloads.data()),
        positions_(entries.positions.data()),
        out_(partitions) {}

  // Appends the entries with keys below `bound`, which are all of one shard;
  // returns how many tokens they have. A token is `key + shift`.
  int64_t AppendShard(uint64_t bound, int64_t shift) {
    // Locals, which stay in registers. No branches on the values: that two
    // ids follow each other cannot be foreseen.
    int32_t* const samples = out_->samples.data();
    int32_t* const tokens = out_->tokens.data();
    float* const gains = out_->gains.data();
    int64_t last = out_->size - 1;
    int64_t unique = 0;
    uint32_t key = std::numeric_limits<uint32_t>::max();  // no entry has it
    int32_t sample = 0;
    Gain gain = 0;
    const KeyedEntry<uint32_t>* entry = next_;
    for (; entry < end_ && entry->key < bound; ++entry) {
      const CsrPayload payload = PayloadOf(*entry);
      const bool new_token = entry->key != key;
      const bool merged = kForm != CsrForm::kPositions &&
                          !(new_token | (payload.sample != sample));
      unique += new_token;
      key = entry->key;
      sample = payload.sample;
      gain = AddIf(merged, gain, static_cast<Gain>(payload.gain));
      last += !merged;
      samples[last] = sample;
      tokens[last] = static_cast<int32_t>(key + shift);
      gains[last] = static_cast<float>(gain);
      if (kForm == CsrForm::kPositions) {
        out_->positions[last] = positions_[entry->entry];
      }
    }
    next_ = entry;
    out_->size = last + 1;
    return unique;
  }

 private:
  // Ones are counted: that is faster than to add floats.
  using Gain = std::conditional_t<kForm == CsrForm::kOnes, int32_t, float>;

  // `own`, and `gain` with it if `merged`.
  static int32_t AddIf(bool merged, int32_t gain, int32_t own) {
    return (gain & -int32_t{merged}) + own;
  }
  static float AddIf(bool merged, float gain, float own) {
    return merged ? gain + own : own;
  }

  CsrPayload PayloadOf(const KeyedEntry<uint32_t>& entry) const {
    if (kForm != CsrForm::kOnes) return payloads_[entry.entry];
    return {static_cast<int32_t>(entry.entry), 1.0f};
  }

  const KeyedEntry<uint32_t>* next_;
  const KeyedEntry<uint32_t>* const end_;
  const CsrPayload* const payloads_;
  const int32_t* const positions_;
  Partitions* const out_;
};

template <CsrForm kForm>
void Merge(const TablePlace& place, const CsrEntries& entries,
           const SortScratch& scratch, Partitions* partitions) {
  Merger<kForm> merger(entries, scratch, partitions);
  for (int64_t shard = 0; shard < place.num_shards; ++shard) {
    const int64_t before = shard * place.num_tokens;
    partitions->begins[shard] = partitions->size;
    partitions->unique[shard] = merger.AppendShard(before + place.num_tokens,
                                                   place.first_token - before);
  }
  partitions->begins[place.num_shards] = partitions->size;
}

}  // namespace

void SortIntoPartitions(const TablePlace& place, const CsrEntries& entries,
                        SortScratch* scratch, Partitions* partitions) {
  RadixSort<uint32_t>(place.num_keys(), entries.size, entries.order,
                      &scratch->sorted, &scratch->between);
  partitions->size = 0;
  partitions->samples.Resize(entries.size);
  partitions->tokens.Resize(entries.size);
  partitions->gains.Resize(entries.size);
  partitions->begins.resize(place.num_shards + 1);
  partitions->unique.resize(place.num_shards);
  switch (entries.form) {
    case CsrForm::kOnes:
      Merge<CsrForm::kOnes>(place, entries, *scratch, partitions);
      break;
    case CsrForm::kGains:
      Merge<CsrForm::kGains>(place, entries, *scratch, partitions);
      break;
    case CsrForm::kPositions:
      partitions->positions.Resize(entries.size);
      Merge<CsrForm::kPositions>(place, entries, *scratch, partitions);
      break;
  }
}

int64_t LowerBound(const Partitions& partitions, int64_t begin, int64_t end,
                   int64_t token) {
  const int32_t* tokens = partitions.tokens.data();
  return std::lower_bound(tokens + begin, tokens + end, token) - tokens;
}

}  // namespace tpu_embedding
