#include "core/csr_splits.h"

#include <algorithm>

namespace tpu_embedding {
namespace {

// The counts of neighbouring buckets before their first cut and after their
// last one. Without a cut, both count all of these buckets.
struct Section {
  IdCounts head;
  IdCounts tail;
  bool cut = false;
};

Section Join(const Section& left, const Section& right, bool cut) {
  if (cut) return {left.head, right.tail, true};
  const IdCounts middle = left.tail + right.head;
  return {left.cut ? left.head : middle, right.cut ? right.tail : middle,
          left.cut || right.cut};
}

}  // namespace

uint64_t FindSplits(const BucketCounts& buckets, const IdCounts& limit) {
  std::array<Section, kNumBuckets> sections;
  for (int b = 0; b < kNumBuckets; ++b) sections[b] = {buckets[b], buckets[b]};
  uint64_t splits = 0;
  for (int nodes = kNumBuckets / 2; nodes > 0; nodes /= 2) {
    for (int n = 0; n < nodes; ++n) {
      const Section left = sections[2 * n];
      const Section right = sections[2 * n + 1];
      const bool cut = !(left.tail + right.head).Within(limit);
      if (cut) splits |= uint64_t{1} << (nodes - 1 + n);
      sections[n] = Join(left, right, cut);
    }
  }
  return splits;
}

int FirstBucketAbove(const BucketCounts& buckets, const IdCounts& limit) {
  for (int b = 0; b < kNumBuckets; ++b) {
    if (!buckets[b].Within(limit)) return b;
  }
  return -1;
}

std::vector<int> MinibatchBounds(uint64_t splits) {
  std::vector<int> bounds{0, kNumBuckets};
  for (int nodes = 1; nodes < kNumBuckets; nodes *= 2) {
    const int width = kNumBuckets / nodes;
    for (int n = 0; n < nodes; ++n) {
      if (splits >> (nodes - 1 + n) & 1) {
        bounds.push_back(n * width + width / 2);
      }
    }
  }
  std::sort(bounds.begin(), bounds.end());
  return bounds;
}

}  // namespace tpu_embedding
