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

namespace tpu_embedding {

struct Partitions {
  int64_t size = 0;
  Buffer<int32_t> samples;
  Buffer<int32_t> tokens;  // of the stack
  Buffer<float> gains;
  Buffer<int32_t> positions;    // in the sample, where they are kept
  std::vector<int64_t> begins;  // [num_shards + 1]
  std::vector<int64_t> unique;  // [num_shards], tokens counted once
};

// Room for a sort; whoever sorts often keeps it.
struct SortScratch {
  Buffer<KeyedEntry<uint32_t>> sorted, between;
};

// Sorts `entries` by key; equal keys stay in the order of input. Entries of one
// sample with one key become one, their gains added, unless positions are
// kept.
void SortIntoPartitions(const TablePlace& place, const CsrEntries& entries,
                        SortScratch* scratch, Partitions* partitions);

// The first of the entries [begin, end) of one shard with a token of at least
// `token`.
int64_t LowerBound(const Partitions& partitions, int64_t begin, int64_t end,
                   int64_t token);

}  // namespace tpu_embedding

#endif  // TPU_EMBEDDING_OPS_CC_CORE_CSR_PARTITIONS_H_
