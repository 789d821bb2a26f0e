#include "core/row_groups.h"

#include <algorithm>
#include <utility>

#include "core/radix_sort.h"

namespace tpu_embedding {
namespace {

// The entries in one part of a large table: sorting so few stays in the
// second-level cache (an entry took 5 ns instead of 7, and 9 instead of 15).
constexpr int64_t kEntriesPerPart = 8192;
// Tables of fewer entries are not cut.
constexpr int64_t kLargeTable = 4 * kEntriesPerPart;
// There are at most 2^8 parts: a thread writes to that many places at once.
constexpr int kMaxPartBits = 8;
// How many entries a thread distributes at a time, and rough cycles for one.
constexpr int64_t kEntriesPerChunk = 16384;
constexpr int64_t kCyclesPerMove = 8;
constexpr int64_t kCyclesPerSort = 30;

PlainEntry MakeEntry(PlainEntry*, int32_t row, uint32_t sample, float) {
  return {row, sample};
}
RowEntry MakeEntry(RowEntry*, int32_t row, uint32_t sample, float gain) {
  return {row, sample, gain};
}

uint64_t RowOf(const PlainEntry& entry) { return entry.row(); }
uint64_t RowOf(const RowEntry& entry) { return entry.row; }
uint32_t SampleOf(const PlainEntry& entry) { return entry.sample(); }
uint32_t SampleOf(const RowEntry& entry) { return entry.sample; }
void SetGain(const PlainEntry&, float*) {}
void SetGain(const RowEntry& entry, float* gain) { *gain = entry.gain; }

// The buffers in which a thread sorts.
template <class Entry>
struct SortSpace {
  Buffer<Entry> sorted;
  Buffer<Entry> scratch;
};

// Calls visit(entry) for the samples [begin, end) of a feature. With `numbers`
// entries have their own number instead of their sample's.
template <class Entry, class Visit>
void VisitEntries(const FeatureEntries& entries, int64_t begin, int64_t end,
                  uint32_t first_sample, bool numbers, const Visit& visit) {
  const FeatureCsr& csr = *entries.csr;
  // No write of `visit` can change these pointers.
  const int64_t* offsets = csr.offsets.data();
  const int32_t* rows = entries.rows->data();
  const float* gains = csr.gains.size() ? csr.gains.data() : nullptr;
  int64_t i = offsets[begin];
  for (int64_t s = begin; s < end; ++s) {
    const float sample_gain = csr.sample_gains.size() ? csr.sample_gains[s] : 1;
    for (const int64_t last = offsets[s + 1]; i < last; ++i) {
      visit(MakeEntry(static_cast<Entry*>(nullptr), rows[i],
                      numbers ? i : first_sample + s,
                      gains ? gains[i] : sample_gain));
    }
  }
}

// Sorts the entries of `source` (see RadixSort), whose rows differ only in low
// bits, which are below `bound`, and writes the groups from entry `first` on.
// Returns the number of rows. Does not write starts[first], so that threads can
// work side by side.
template <class Entry, class Source>
int64_t SortPart(uint64_t bound, int64_t size, const Source& source,
                 int64_t first, SortSpace<Entry>* space, RowGroups* groups) {
  if (size == 0) return 0;
  const uint64_t mask =
      bound > 1 ? ~uint64_t{0} >> __builtin_clzll(bound - 1) : 0;
  RadixSort(
      Digits(bound, size), size, source,
      [mask](const Entry& entry) { return RowOf(entry) & mask; },
      &space->sorted, &space->scratch);
  const Entry* entries = space->sorted.data();
  int32_t* rows = groups->rows.data() + first;
  int64_t* ends = groups->starts.data() + first + 1;
  uint32_t* samples = groups->samples.data() + first;
  float* gains = groups->gains.data() + (groups->gains.size() ? first : 0);
  int64_t row = 0;
  // There are no branches, as nobody can predict where a new row begins.
  for (int64_t i = 0; i < size; ++i) {
    samples[i] = SampleOf(entries[i]);
    SetGain(entries[i], gains + i);
    rows[row] = static_cast<int32_t>(RowOf(entries[i]));
    ends[row] = first + i + 1;
    row += i + 1 == size || RowOf(entries[i]) != RowOf(entries[i + 1]);
  }
  return row;
}

// Turns one table's features into groups. A large table is cut into parts of
// neighbouring rows, which are sorted side by side.
template <class Entry>
class Grouping {
 public:
  Grouping(const TableEntries& table, Buffer<Entry>* space)
      : table_(table), space_(space) {
    for (const FeatureEntries& own : table.features) size_ += own.rows->size();
    const bool has_gains = std::is_same_v<Entry, RowEntry>;
    table.groups->rows.Resize(size_);
    table.groups->starts.Resize(size_ + 1);
    table.groups->samples.Resize(size_);
    table.groups->gains.Resize(has_gains ? size_ : 0);
    table.groups->sample_gains.Resize(0);
    table.groups->places.Resize(table.places ? size_ : 0);
    if (!has_gains) CopySampleGains();
    table.groups->starts[0] = 0;
    if (size_ >= kLargeTable) Cut();
    num_rows_.resize(num_parts());
  }

  int64_t num_chunks() const { return chunks_.size(); }
  int64_t num_parts() const { return int64_t{1} << part_bits_; }
  int64_t part_size(int64_t part) const {
    return is_cut() ? first_[part + 1] - first_[part] : size_;
  }

  void Count(int64_t c) {
    int64_t* counts = &places_[c * num_parts()];
    Visit(c, [=](const Entry& entry) { ++counts[RowOf(entry) >> shift_]; });
  }

  // Turns counts into places: by part, and within a part by chunk.
  void SetPlaces() {
    if (!is_cut()) return;
    int64_t next = 0;
    for (int64_t part = 0; part < num_parts(); ++part) {
      first_.push_back(next);
      for (int64_t c = 0; c < num_chunks(); ++c) {
        next += std::exchange(places_[c * num_parts() + part], next);
      }
    }
    first_.push_back(next);
    space_->Resize(size_);
  }

  void HandOut(int64_t c) {
    int64_t* places = &places_[c * num_parts()];
    Entry* to = space_->data();
    Visit(c, [=](const Entry& entry) {
      to[places[RowOf(entry) >> shift_]++] = entry;
    });
  }

  void Sort(int64_t part, SortSpace<Entry>* space) {
    if (is_cut()) {
      const Entry* begin = space_->data() + first_[part];
      const auto source = [=](const auto& visit) {
        std::for_each(begin, begin + part_size(part), visit);
      };
      num_rows_[part] = SortPart(uint64_t{1} << shift_, part_size(part), source,
                                 first_[part], space, table_.groups);
      return;
    }
    const auto source = [this](const auto& visit) {
      uint32_t first_sample = 0;
      for (const FeatureEntries& own : table_.features) {
        const int64_t samples = own.csr->num_samples();
        VisitEntries<Entry>(own, 0, samples, first_sample, table_.places,
                            visit);
        first_sample += samples;
      }
    };
    num_rows_[0] = SortPart(table_.vocabulary_size, size_, source, 0, space,
                            table_.groups);
  }

  // Closes the gaps between the rows of the parts.
  void Close() {
    RowGroups& groups = *table_.groups;
    int64_t next = num_rows_[0];
    for (int64_t part = 1; part < num_parts(); ++part) {
      const int32_t* rows = groups.rows.data() + first_[part];
      const int64_t* ends = groups.starts.data() + first_[part] + 1;
      std::copy(rows, rows + num_rows_[part], groups.rows.data() + next);
      std::copy(ends, ends + num_rows_[part], groups.starts.data() + next + 1);
      next += num_rows_[part];
    }
    groups.rows.Truncate(next);
    groups.starts.Truncate(next + 1);
  }

  bool wants_places() const { return table_.places; }
  // Notes the place of each entry, and turns its number into its sample.
  void FindPlaces() {
    RowGroups& groups = *table_.groups;
    const FeatureCsr& csr = *table_.features[0].csr;
    groups.sample_of.Resize(size_);
    for (int64_t s = 0; s < csr.num_samples(); ++s) {
      std::fill(groups.sample_of.data() + csr.offsets[s],
                groups.sample_of.data() + csr.offsets[s + 1], s);
    }
    for (int64_t row = 0; row < groups.num_rows(); ++row) {
      for (int64_t i = groups.starts[row]; i < groups.starts[row + 1]; ++i) {
        const uint32_t entry = groups.samples[i];
        groups.places[entry] = row;
        groups.samples[i] = groups.sample_of[entry];
      }
    }
  }

 private:
  struct Chunk {
    FeatureEntries entries;
    int64_t begin;  // samples [begin, end) of the feature
    int64_t end;
    uint32_t first_sample;
  };

  bool is_cut() const { return part_bits_ > 0; }

  // Copies samples' gains; a feature without any gets 1 if others have some.
  void CopySampleGains() {
    const auto has = [](const FeatureEntries& own) {
      return own.csr->sample_gains.size() > 0;
    };
    const auto& features = table_.features;
    if (std::none_of(features.begin(), features.end(), has)) return;
    int64_t size = 0;
    for (const FeatureEntries& own : features) size += own.csr->num_samples();
    table_.groups->sample_gains.Resize(size);
    float* next = table_.groups->sample_gains.data();
    for (const FeatureEntries& own : features) {
      const int64_t samples = own.csr->num_samples();
      if (has(own)) {
        std::copy_n(own.csr->sample_gains.data(), samples, next);
      } else {
        std::fill_n(next, samples, 1.0f);
      }
      next += samples;
    }
  }

  void Cut() {
    const uint64_t bound = table_.vocabulary_size;
    const int key_bits = bound > 1 ? 64 - __builtin_clzll(bound - 1) : 0;
    while (part_bits_ < std::min(key_bits, kMaxPartBits) &&
           size_ >> part_bits_ > kEntriesPerPart) {
      ++part_bits_;
    }
    shift_ = key_bits - part_bits_;
    if (!is_cut()) return;
    uint32_t first_sample = 0;
    for (const FeatureEntries& own : table_.features) {
      const int64_t samples = own.csr->num_samples();
      const int64_t count = own.rows->size() / kEntriesPerChunk + 1;
      for (int64_t c = 0; c < count; ++c) {
        chunks_.push_back({own, samples * c / count, samples * (c + 1) / count,
                           first_sample});
      }
      first_sample += samples;
    }
    places_.resize(num_chunks() * num_parts());
  }

  template <class Visitor>
  void Visit(int64_t c, const Visitor& visit) const {
    const Chunk& chunk = chunks_[c];
    VisitEntries<Entry>(chunk.entries, chunk.begin, chunk.end,
                        chunk.first_sample, table_.places, visit);
  }

  const TableEntries& table_;
  Buffer<Entry>* space_;
  int64_t size_ = 0;
  int part_bits_ = 0;
  int shift_ = 0;
  std::vector<Chunk> chunks_;
  std::vector<int64_t> places_;    // by chunk and part, where the next one goes
  std::vector<int64_t> first_;     // by part, its first entry
  std::vector<int64_t> num_rows_;  // by part
};

// The work on one item of one table.
struct Task {
  int64_t table;
  int64_t item;
  int64_t size;
};

template <class Entry>
void RunGroupings(std::vector<Grouping<Entry>>* groupings,
                  const ParallelFor& parallel_for) {
  std::vector<Grouping<Entry>>& tables = *groupings;
  std::vector<Task> chunks;
  for (size_t t = 0; t < tables.size(); ++t) {
    for (int64_t c = 0; c < tables[t].num_chunks(); ++c) {
      chunks.push_back({static_cast<int64_t>(t), c, 0});
    }
  }
  const int64_t cost = kCyclesPerMove * kEntriesPerChunk;
  ForEachItem(parallel_for, chunks.size(), cost, [&](int64_t i) {
    tables[chunks[i].table].Count(chunks[i].item);
  });
  for (auto& table : tables) table.SetPlaces();
  ForEachItem(parallel_for, chunks.size(), cost, [&](int64_t i) {
    tables[chunks[i].table].HandOut(chunks[i].item);
  });
  std::vector<Task> parts;
  int64_t total = 0;
  for (size_t t = 0; t < tables.size(); ++t) {
    for (int64_t part = 0; part < tables[t].num_parts(); ++part) {
      const int64_t size = tables[t].part_size(part);
      parts.push_back({static_cast<int64_t>(t), part, size});
      total += size;
    }
  }
  std::stable_sort(
      parts.begin(), parts.end(),
      [](const Task& a, const Task& b) { return a.size > b.size; });
  const int64_t num_parts = parts.size();
  ForEachItemWith<SortSpace<Entry>>(
      parallel_for, num_parts,
      num_parts ? kCyclesPerSort * total / num_parts : 0,
      [&](int64_t i, SortSpace<Entry>* space) {
        tables[parts[i].table].Sort(parts[i].item, space);
      });
  for (auto& table : tables) table.Close();
  std::vector<Grouping<Entry>*> asked;
  for (auto& table : tables) {
    if (table.wants_places()) asked.push_back(&table);
  }
  ForEachItem(parallel_for, asked.size(), kCyclesPerMove * total,
              [&](int64_t i) { asked[i]->FindPlaces(); });
}

bool HasGains(const TableEntries& table) {
  return std::any_of(
      table.features.begin(), table.features.end(),
      [](const FeatureEntries& own) { return own.csr->gains.size() > 0; });
}

}  // namespace

void GroupByRow(const std::vector<TableEntries>& tables,
                const ParallelFor& parallel_for) {
  std::vector<Grouping<PlainEntry>> plain;
  std::vector<Grouping<RowEntry>> weighted;
  for (const TableEntries& table : tables) {
    if (HasGains(table)) {
      weighted.emplace_back(table, &table.groups->space);
    } else {
      plain.emplace_back(table, &table.groups->plain_space);
    }
  }
  if (!plain.empty()) RunGroupings(&plain, parallel_for);
  if (!weighted.empty()) RunGroupings(&weighted, parallel_for);
}

void GroupByRow(const Buffer<RowEntry>& entries, int64_t vocabulary_size,
                RowGroups* groups) {
  const int64_t size = entries.size();
  groups->rows.Resize(size);
  groups->starts.Resize(size + 1);
  groups->samples.Resize(size);
  groups->gains.Resize(size);
  groups->sample_gains.Resize(0);
  groups->starts[0] = 0;
  const auto source = [&entries](const auto& visit) {
    std::for_each(entries.data(), entries.data() + entries.size(), visit);
  };
  SortSpace<RowEntry> space;
  const int64_t num_rows =
      SortPart(vocabulary_size, size, source, 0, &space, groups);
  groups->rows.Truncate(num_rows);
  groups->starts.Truncate(num_rows + 1);
}

}  // namespace tpu_embedding
