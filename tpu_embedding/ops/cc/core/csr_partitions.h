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
  std::vector<int64_t> begins;  // [num_shards + 1], into `CsrEntries::order`
  std::vector<int64_t> unique;  // [num_shards], tokens counted once
};

// Sorts `entries` by key; equal keys stay in the order of input. Entries of one
// sample with one key become one, their gains added, unless positions are
// kept. Afterwards `order` holds `size` entries.
Partitions SortIntoPartitions(const TablePlace& place, CsrEntries* entries);

// The first of the entries [begin, end) of `order` with a key of at least
// `key`.
int64_t LowerBound(const CsrEntries& entries, int64_t begin, int64_t end,
                   uint64_t key);

}  // namespace tpu_embedding

#endif  // TPU_EMBEDDING_OPS_CC_CORE_CSR_PARTITIONS_H_
