// Decides where a batch is cut into minibatches, so that each of their
// partitions stays within its limits.
//
// The rows of a stacked table fall into 64 buckets of equal width. The splits
// are the nodes of a binary tree over the buckets, as one word: bit 0 cuts at
// bucket 32, bits 1 and 2 at 16 and 48, bits 3 to 6 at 8, 24, 40, 56, and so
// on. The buckets between two cuts form a minibatch.

#ifndef TPU_EMBEDDING_OPS_CC_CORE_CSR_SPLITS_H_
#define TPU_EMBEDDING_OPS_CC_CORE_CSR_SPLITS_H_

#include <array>
#include <cstdint>
#include <vector>

namespace tpu_embedding {

constexpr int kNumBuckets = 64;

// Returns the rows per bucket of a stacked table.
inline int64_t BucketWidth(int64_t rows) {
  return (rows + kNumBuckets - 1) / kNumBuckets;
}

// The numbers of ids and unique ids in a partition, or the limits on them.
struct IdCounts {
  int64_t ids = 0;
  int64_t unique = 0;

  bool Within(const IdCounts& limit) const {
    return ids <= limit.ids && unique <= limit.unique;
  }
  IdCounts operator+(const IdCounts& other) const {
    return {ids + other.ids, unique + other.unique};
  }
};

using BucketCounts = std::array<IdCounts, kNumBuckets>;

// Returns the splits that one partition needs. From the leaves up, neighbours
// are cut apart if the buckets between the nearest cuts on both sides exceed
// the limit. A single bucket above it cannot be cut: see `FirstBucketAbove`.
uint64_t FindSplits(const BucketCounts& buckets, const IdCounts& limit);

// Returns the first bucket that exceeds the limit, or -1.
int FirstBucketAbove(const BucketCounts& buckets, const IdCounts& limit);

// Returns the first bucket of each minibatch, and 64: [0, 64] without splits.
std::vector<int> MinibatchBounds(uint64_t splits);

}  // namespace tpu_embedding

#endif  // TPU_EMBEDDING_OPS_CC_CORE_CSR_SPLITS_H_
