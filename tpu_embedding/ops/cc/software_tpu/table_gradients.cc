#include "software_tpu/table_gradients.h"

namespace tpu_embedding {
namespace {

// The entries for `device` in the order in which they come.
RowGroups Entries(const DeviceCsr& csr, int64_t device, int64_t num_samples) {
  int64_t size = 0;
  for (const Partition& partition : csr.partitions()) {
    if (csr.Device(partition) == device)
      size += partition.end - partition.begin;
  }
  RowGroups groups;
  groups.entries.Resize(size);
  groups.num_samples = num_samples;
  int64_t next = 0;
  for (const Partition& partition : csr.partitions()) {
    if (csr.Device(partition) != device) continue;
    for (int64_t i = partition.begin; i < partition.end; ++i, ++next) {
      groups.entries[next] = {static_cast<int32_t>(csr.Row(partition, i)),
                              static_cast<uint32_t>(csr.Place(partition, i)),
                              csr.Gain(i)};
    }
  }
  return groups;
}

}  // namespace

RowGroups TableGradientSums::RowsOf(int64_t device, int64_t num_rows) const {
  std::vector<RowGroups> replicas;
  for (const DeviceCsr& csr : csrs) {
    replicas.push_back(Entries(csr, device, num_samples_));
  }
  std::vector<const RowGroups*> pointers;
  for (const RowGroups& replica : replicas) pointers.push_back(&replica);
  RowGroups merged;
  MergeReplicas(pointers, num_rows, &merged);
  return merged;
}

}  // namespace tpu_embedding
