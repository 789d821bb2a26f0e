#include "core/row_groups.h"

#include <limits>
#include <utility>

#include "core/radix_sort.h"

namespace tpu_embedding {
namespace {

// Entries in the order in which their gradients are to be summed.
struct Entries {
  explicit Entries(int64_t capacity)
      : rows(capacity), samples(capacity), gains(capacity) {}

  void Append(int64_t row, int64_t sample, float gain) {
    rows[size] = row;
    samples[size] = sample;
    gains[size++] = gain;
  }

  Buffer<int64_t> rows;
  Buffer<int64_t> samples;
  Buffer<float> gains;
  int64_t size = 0;
};

template <class Word>
RowGroups SortEntries(const Entries& entries, int64_t vocabulary_size) {
  Buffer<KeyedEntry<Word>> order(entries.size);
  for (int64_t i = 0; i < entries.size; ++i) {
    order[i] = {static_cast<Word>(entries.rows[i]), static_cast<Word>(i)};
  }
  RadixSort<Word>(vocabulary_size, &order);

  RowGroups groups;
  groups.rows = Buffer<int64_t>(entries.size);
  groups.starts = Buffer<int64_t>(entries.size + 1);
  groups.samples = Buffer<int64_t>(entries.size);
  groups.gains = Buffer<float>(entries.size);
  int64_t num_rows = 0;
  for (int64_t i = 0; i < entries.size; ++i) {
    if (i == 0 || order[i].key != order[i - 1].key) {
      groups.rows[num_rows] = order[i].key;
      groups.starts[num_rows++] = i;
    }
    groups.samples[i] = entries.samples[order[i].entry];
    groups.gains[i] = entries.gains[order[i].entry];
  }
  groups.starts[num_rows] = entries.size;
  groups.rows.Truncate(num_rows);
  groups.starts.Truncate(num_rows + 1);
  return groups;
}

RowGroups Group(const Entries& entries, int64_t vocabulary_size) {
  // Half-size words move half the bytes; they hold all but giant tables.
  constexpr int64_t kNarrow = std::numeric_limits<uint32_t>::max();
  const bool narrow = vocabulary_size <= kNarrow && entries.size <= kNarrow;
  return narrow ? SortEntries<uint32_t>(entries, vocabulary_size)
                : SortEntries<uint64_t>(entries, vocabulary_size);
}

}  // namespace

RowGroups GroupByRow(const std::vector<const FeatureCsr*>& features,
                     int64_t vocabulary_size) {
  int64_t size = 0;
  for (const FeatureCsr* csr : features) size += csr->rows.size();
  Entries entries(size);
  int64_t num_samples = 0;
  for (const FeatureCsr* csr : features) {
    for (int64_t s = 0; s < csr->num_samples(); ++s, ++num_samples) {
      for (int64_t i = csr->offsets[s]; i < csr->offsets[s + 1]; ++i) {
        entries.Append(csr->rows[i], num_samples, csr->gains[i]);
      }
    }
  }
  RowGroups groups = Group(entries, vocabulary_size);
  groups.num_samples = num_samples;
  return groups;
}

RowGroups MergeReplicas(const std::vector<const RowGroups*>& replicas,
                        int64_t vocabulary_size) {
  int64_t size = 0;
  for (const RowGroups* groups : replicas) size += groups->samples.size();
  Entries entries(size);
  int64_t num_samples = 0;
  for (const RowGroups* groups : replicas) {
    for (int64_t r = 0; r < groups->num_rows(); ++r) {
      for (int64_t i = groups->starts[r]; i < groups->starts[r + 1]; ++i) {
        entries.Append(groups->rows[r], num_samples + groups->samples[i],
                       groups->gains[i]);
      }
    }
    num_samples += groups->num_samples;
  }
  RowGroups merged = Group(entries, vocabulary_size);
  merged.num_samples = num_samples;
  return merged;
}

}  // namespace tpu_embedding
