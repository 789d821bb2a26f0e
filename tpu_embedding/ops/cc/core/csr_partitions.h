// Entries of one SparseCore sorted into partitions: one for each shard that
// rows have to come from.
//
//   2 shards    sorted:   shard 0: token 3 3 5   shard 1: token 0
//                         sample:        0 2 1                  2
//               begins: [0, 3, 4]   unique: [2, 1]

#ifndef TPU_EMBEDDING_OPS_CC_CORE_CSR_PARTITIONS_H_
#define TPU_EMBEDDING_OPS_CC_CORE_CSR_PARTITIONS_H_

#include <cstdint>
#include <vector>

#include "core/csr_entries.h"
#include "core/csr_layout.h"
#include "core/csr_splits.h"

namespace tpu_embedding {

// Takes few bytes per entry, because all partitions of a table must be known
// before the first one can be written.
struct Partitions {
  TablePlace place;
  CsrForm form = CsrForm::kGains;
  CsrWords words;  // keys over samples, less `first_sample`
  int32_t first_sample = 0;
  // In the form kOnes entries [ends[i], ends[i + 1]) were merged into entry i,
  // and its gain is their number. [size + 1]
  Buffer<uint32_t> ends;
  Buffer<float> gains;        // in the other forms
  Buffer<int32_t> positions;  // in the sample, where they are kept
  int64_t size = 0;
  std::vector<int64_t> begins;  // [num_shards + 1]
  std::vector<int64_t> unique;  // [num_shards], tokens counted once

  IdCounts counts(int64_t shard) const {
    return {begins[shard + 1] - begins[shard], unique[shard]};
  }
};

// The memory of a sort. A caller that sorts often keeps it.
struct SortScratch {
  Buffer<uint32_t> narrow_words;
  Buffer<uint64_t> wide_words;
};

// Sorts `entries` by key; equal keys stay in input order. Entries with the same
// sample and key become one with the sum of their gains, unless positions are
// kept. The words of `entries` are sorted in place.
void SortIntoPartitions(CsrEntries* entries, SortScratch* scratch,
                        Partitions* partitions);

// Returns the first entry of a shard whose row of the stack is at least `row`.
int64_t FirstOfRow(const Partitions& partitions, int64_t shard, int64_t row);

// Counts the ids of one shard in each bucket of `width` rows of the stack, and
// adds the counts to `buckets`.
void AddBuckets(const Partitions& partitions, int64_t shard, int64_t width,
                BucketCounts* buckets);

// Writes entries [begin, end) of one shard to `arrays`, from `out` on.
void WriteEntries(const Partitions& partitions, int64_t shard, int64_t begin,
                  int64_t end, int64_t out, const CsrArrays& arrays);

// Writes all entries of one shard.
inline void WritePartition(const Partitions& partitions, int64_t shard,
                           int64_t out, const CsrArrays& arrays) {
  WriteEntries(partitions, shard, partitions.begins[shard],
               partitions.begins[shard + 1], out, arrays);
}

}  // namespace tpu_embedding

#endif  // TPU_EMBEDDING_OPS_CC_CORE_CSR_PARTITIONS_H_
