#include "core/row_groups.h"

#include "core/radix_sort.h"

namespace tpu_embedding {
namespace {

// Sorts what `source` hands over (see RadixSort) and finds the rows.
template <class Source>
void Group(int64_t size, const Source& source, int64_t vocabulary_size,
           RowGroups* groups) {
  const auto row_of = [](const RowEntry& entry) {
    return static_cast<uint64_t>(entry.row);
  };
  RadixSort(vocabulary_size, size, source, row_of, &groups->entries,
            &groups->scratch);
  groups->rows.Resize(size);
  groups->starts.Resize(size + 1);
  const RowEntry* entries = groups->entries.data();
  int64_t num_rows = 0;
  for (int64_t i = 0; i < size; ++i) {
    if (i == 0 || entries[i].row != entries[i - 1].row) {
      groups->rows[num_rows] = entries[i].row;
      groups->starts[num_rows++] = i;
    }
  }
  groups->starts[num_rows] = size;
  groups->rows.Truncate(num_rows);
  groups->starts.Truncate(num_rows + 1);
}

}  // namespace

void GroupByRow(const std::vector<const FeatureCsr*>& features,
                int64_t vocabulary_size, RowGroups* groups) {
  int64_t size = 0;
  groups->num_samples = 0;
  for (const FeatureCsr* csr : features) {
    size += csr->rows.size();
    groups->num_samples += csr->num_samples();
  }
  const auto source = [&features](const auto& visit) {
    uint32_t sample = 0;
    for (const FeatureCsr* csr : features) {
      // Plain pointers, which no write of `visit` can change.
      const int64_t* end = csr->offsets.data() + 1;
      const int32_t* rows = csr->rows.data();
      const float* gains = csr->gains.size() ? csr->gains.data() : nullptr;
      const int64_t num_samples = csr->num_samples();
      int64_t i = 0;
      for (int64_t s = 0; s < num_samples; ++s, ++sample) {
        for (const int64_t last = end[s]; i < last; ++i) {
          visit(RowEntry{rows[i], sample, gains ? gains[i] : 1.0f});
        }
      }
    }
  };
  Group(size, source, vocabulary_size, groups);
}

void MergeReplicas(const std::vector<const RowGroups*>& replicas,
                   int64_t vocabulary_size, RowGroups* merged) {
  int64_t size = 0;
  merged->num_samples = 0;
  for (const RowGroups* groups : replicas) {
    size += groups->entries.size();
    merged->num_samples += groups->num_samples;
  }
  const auto source = [&replicas](const auto& visit) {
    uint32_t first = 0;
    for (const RowGroups* groups : replicas) {
      for (int64_t i = 0; i < groups->entries.size(); ++i) {
        RowEntry entry = groups->entries[i];
        entry.sample += first;
        visit(entry);
      }
      first += groups->num_samples;
    }
  };
  Group(size, source, vocabulary_size, merged);
}

}  // namespace tpu_embedding
