#include "software_tpu/table_gradients.h"

namespace tpu_embedding {
namespace {

// Each entry as a group of its own, in the order in which it comes.
RowGroups Entries(const DeviceCsr& csr, int64_t device, int64_t num_samples) {
  int64_t size = 0;
  for (const Partition& partition : csr.partitions()) {
    if (csr.Device(partition) == device)
      size += partition.end - partition.begin;
  }
  RowGroups entries;
  entries.rows = Buffer<int64_t>(size);
  entries.starts = Buffer<int64_t>(size + 1);
  entries.samples = Buffer<int64_t>(size);
  entries.gains = Buffer<float>(size);
  entries.num_samples = num_samples;
  int64_t next = 0;
  for (const Partition& partition : csr.partitions()) {
    if (csr.Device(partition) != device) continue;
    for (int64_t i = partition.begin; i < partition.end; ++i, ++next) {
      entries.rows[next] = csr.Row(partition, i);
      entries.starts[next] = next;
      entries.samples[next] = csr.Place(partition, i);
      entries.gains[next] = csr.Gain(i);
    }
  }
  entries.starts[size] = size;
  return entries;
}

}  // namespace

RowGroups TableGradientSums::RowsOf(int64_t device, int64_t num_rows) const {
  std::vector<RowGroups> replicas;
  for (const DeviceCsr& csr : csrs) {
    replicas.push_back(Entries(csr, device, num_samples_));
  }
  std::vector<const RowGroups*> pointers;
  for (const RowGroups& replica : replicas) pointers.push_back(&replica);
  return MergeReplicas(pointers, num_rows);
}

}  // namespace tpu_embedding
