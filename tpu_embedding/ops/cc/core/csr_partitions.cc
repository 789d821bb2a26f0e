#include "core/csr_partitions.h"

#include <algorithm>

namespace tpu_embedding {
namespace {

// Merges what one sample has twice; returns how many entries are left.
int64_t MergeSamples(CsrEntries* entries) {
  auto* order = entries->order.data();
  auto* payloads = entries->payloads.data();
  int64_t kept = 0;
  for (int64_t i = 0; i < entries->size; ++i) {
    const KeyedEntry<uint32_t> entry = order[i];
    if (kept > 0 && order[kept - 1].key == entry.key &&
        payloads[order[kept - 1].entry].sample ==
            payloads[entry.entry].sample) {
      payloads[order[kept - 1].entry].gain += payloads[entry.entry].gain;
    } else {
      order[kept++] = entry;
    }
  }
  return kept;
}

}  // namespace

Partitions SortIntoPartitions(const TablePlace& place, CsrEntries* entries) {
  entries->order.Truncate(entries->size);
  RadixSort<uint32_t>(place.num_keys(), &entries->order);
  if (!entries->keep_positions) {
    entries->size = MergeSamples(entries);
    entries->order.Truncate(entries->size);
  }
  Partitions partitions;
  partitions.begins.resize(place.num_shards + 1);
  partitions.unique.resize(place.num_shards);
  const auto* order = entries->order.data();
  int64_t i = 0;
  for (int64_t shard = 0; shard < place.num_shards; ++shard) {
    partitions.begins[shard] = i;
    const uint64_t bound = uint64_t(shard + 1) * place.num_tokens;
    int64_t unique = 0;
    for (; i < entries->size && order[i].key < bound; ++i) {
      unique +=
          i == partitions.begins[shard] || order[i].key != order[i - 1].key;
    }
    partitions.unique[shard] = unique;
  }
  partitions.begins[place.num_shards] = i;
  return partitions;
}

int64_t LowerBound(const CsrEntries& entries, int64_t begin, int64_t end,
                   uint64_t key) {
  const auto* order = entries.order.data();
  const auto* found = std::lower_bound(
      order + begin, order + end, key,
      [](const KeyedEntry<uint32_t>& e, uint64_t k) { return e.key < k; });
  return found - order;
}

}  // namespace tpu_embedding
