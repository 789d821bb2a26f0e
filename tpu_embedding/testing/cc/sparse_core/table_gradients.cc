#include "sparse_core/table_gradients.h"

namespace tpu_embedding {
namespace {

int64_t NumEntries(const DeviceCsr& csr, int64_t device) {
  int64_t size = 0;
  for (const Partition& partition : csr.partitions()) {
    if (csr.Device(partition) == device) {
      size += partition.end - partition.begin;
    }
  }
  return size;
}

}  // namespace

RowGroups TableGradientSums::RowsOf(int64_t device, int64_t num_rows) const {
  int64_t size = 0;
  for (const DeviceCsr& csr : csrs) size += NumEntries(csr, device);
  Buffer<RowEntry> entries(size);
  int64_t next = 0;
  int64_t first_sample = 0;
  for (const DeviceCsr& csr : csrs) {
    for (const Partition& partition : csr.partitions()) {
      if (csr.Device(partition) != device) continue;
      for (int64_t i = partition.begin; i < partition.end; ++i, ++next) {
        const int64_t sample = first_sample + csr.Place(partition, i);
        entries[next] = {static_cast<int32_t>(csr.Row(partition, i)),
                         static_cast<uint32_t>(sample), csr.Gain(i)};
      }
    }
    first_sample += num_samples_;
  }
  RowGroups groups;
  GroupByRow(entries, num_rows, &groups);
  return groups;
}

}  // namespace tpu_embedding
