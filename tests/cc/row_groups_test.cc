// The radix sort against std::stable_sort, and the grouping of entries by row
// against a std::map.

#include "core/row_groups.h"

#include <algorithm>
#include <cstdint>
#include <map>
#include <random>
#include <thread>
#include <utility>
#include <vector>

#include "check.h"
#include "core/buffer.h"
#include "core/feature.h"
#include "core/radix_sort.h"

namespace tpu_embedding {
namespace {

std::mt19937_64 generator(20260731);

uint64_t Random(uint64_t below) {
  return std::uniform_int_distribution<uint64_t>(0, below - 1)(generator);
}

// Random keys, descending keys, one key, and the largest key among others.
std::vector<std::vector<uint64_t>> Keys(int64_t size, uint64_t bound) {
  std::vector<uint64_t> random, descending, same, largest;
  for (int64_t i = 0; i < size; ++i) {
    random.push_back(Random(bound));
    descending.push_back(bound - 1 - std::min<uint64_t>(i, bound - 1));
    same.push_back(bound - 1);
    largest.push_back(i % 2 ? bound / 2 : bound - 1);
  }
  return {random, descending, same, largest};
}

struct Keyed {
  uint64_t key;
  int64_t place;
};

void CheckSort(const std::vector<uint64_t>& keys, uint64_t bound) {
  const int64_t size = keys.size();
  std::vector<std::pair<uint64_t, int64_t>> expected(size);
  for (int64_t i = 0; i < size; ++i) expected[i] = {keys[i], i};
  std::stable_sort(
      expected.begin(), expected.end(),
      [](const auto& a, const auto& b) { return a.first < b.first; });
  const auto source = [&keys](const auto& visit) {
    for (size_t i = 0; i < keys.size(); ++i) {
      visit(Keyed{keys[i], static_cast<int64_t>(i)});
    }
  };
  Buffer<Keyed> sorted, scratch;
  RadixSort(
      Digits(bound, size), size, source,
      [](const Keyed& entry) { return entry.key; }, &sorted, &scratch);
  CHECK_EQ(sorted.size(), size);
  for (int64_t i = 0; i < size; ++i) {
    CHECK_EQ(sorted[i].key, expected[i].first);
    CHECK_EQ(sorted[i].place, expected[i].second);
  }
}

void TestRadixSort() {
  const uint64_t one = 1;
  for (int64_t size : {0, 1, 2, 3, 31, 32, 2047, 2048, 2049, 5000}) {
    for (uint64_t bound :
         {one, one << 1, (one << 11) - 1, one << 11, (one << 11) + 1, one << 22,
          (one << 22) + 1, one << 31, one << 40, one << 63}) {
      for (const auto& keys : Keys(size, bound)) CheckSort(keys, bound);
    }
  }
}

// For each row its (sample, gain) pairs, in the order of summation.
using Groups = std::map<int64_t, std::vector<std::pair<int64_t, float>>>;

// Adds the entries of a feature whose first sample has the number `first`.
void AddTo(const FeatureCsr& csr, int64_t first, Groups* groups) {
  for (int64_t s = 0; s < csr.num_samples(); ++s) {
    for (int64_t i = csr.offsets[s]; i < csr.offsets[s + 1]; ++i) {
      (*groups)[csr.rows[i]].push_back({first + s, csr.gain(s, i)});
    }
  }
}

void CheckGroups(const RowGroups& actual, const Groups& expected) {
  CHECK_EQ(actual.num_rows(), expected.size());
  CHECK_EQ(actual.starts.size(), expected.size() + 1);
  CHECK_EQ(actual.starts[0], 0);
  int64_t group = 0;
  int64_t next = 0;
  for (const auto& [row, entries] : expected) {
    CHECK_EQ(actual.rows[group], row);
    CHECK_EQ(actual.starts[group++], next);
    for (const auto& [sample, gain] : entries) {
      CHECK_EQ(actual.samples[next], sample);
      CHECK_EQ(actual.gain(next++), gain);
    }
  }
  CHECK_EQ(actual.starts[group], next);
}

void CheckPlaces(const Buffer<int32_t>& rows, const RowGroups& groups) {
  CHECK_EQ(groups.places.size(), rows.size());
  for (int64_t i = 0; i < rows.size(); ++i) {
    CHECK_EQ(groups.rows[groups.places[i]], rows[i]);
  }
}

// `num_samples` samples of up to four entries; every third row is row 0, so
// that there are long groups too.
FeatureCsr RandomFeature(int64_t num_samples, int64_t vocabulary_size) {
  const auto gains = static_cast<Gains>(Random(3));
  FeatureCsr csr;
  csr.offsets = Buffer<int64_t>(num_samples + 1);
  csr.rows = Buffer<int32_t>(4 * num_samples);
  csr.gains = Buffer<float>(4 * num_samples);
  csr.offsets[0] = 0;
  int64_t size = 0;
  for (int64_t s = 0; s < num_samples; ++s) {
    for (int64_t k = Random(5); k > 0; --k) {
      csr.rows[size] = Random(3) ? Random(vocabulary_size) : 0;
      csr.gains[size++] = static_cast<float>(Random(100)) - 50.0f;
    }
    csr.offsets[s + 1] = size;
  }
  csr.rows.Truncate(size);
  csr.gains.Truncate(gains == Gains::kOfEntries ? size : 0);
  csr.sample_gains.Resize(gains == Gains::kOfSamples ? num_samples : 0);
  for (int64_t s = 0; s < csr.sample_gains.size(); ++s) {
    csr.sample_gains[s] = static_cast<float>(Random(100)) - 50.0f;
  }
  return csr;
}

// Threads that take ranges of one unit in an order of their own.
void Threads(int64_t total, int64_t, const Range& body) {
  std::vector<std::thread> threads;
  for (int64_t t = 0; t < std::min<int64_t>(total, 3); ++t) {
    threads.emplace_back([=, &body] { body(t, t + 1); });
  }
  for (std::thread& thread : threads) thread.join();
}

// Several tables at once, and the same entries as a list.
void CheckTables(int num_features, int64_t num_samples,
                 int64_t vocabulary_size) {
  std::vector<FeatureCsr> features;
  for (int f = 0; f < 2 * num_features; ++f) {
    features.push_back(RandomFeature(num_samples + f, vocabulary_size));
  }
  std::vector<TableEntries> tables(2);
  std::vector<RowGroups> groups(2);
  std::vector<Groups> expected(2);
  for (int t = 0; t < 2; ++t) {
    tables[t].vocabulary_size = vocabulary_size;
    tables[t].groups = &groups[t];
    int64_t samples = 0;
    for (int f = 0; f < num_features; ++f) {
      const FeatureCsr& csr = features[t * num_features + f];
      tables[t].features.push_back(csr);
      AddTo(csr, samples, &expected[t]);
      samples += csr.num_samples();
    }
  }
  for (const bool places : {false, num_features == 1}) {
    for (TableEntries& table : tables) table.places = places;
    GroupByRow(tables, Threads);
    for (int t = 0; t < 2; ++t) {
      CheckGroups(groups[t], expected[t]);
      if (places) CheckPlaces(*tables[t].features[0].rows, groups[t]);
    }
  }
}

void TestGroups() {
  for (int64_t vocabulary_size :
       {int64_t{1}, int64_t{2}, int64_t{7}, int64_t{3000}, kMaxRows}) {
    for (int64_t num_samples : {0, 1, 40, 1000}) {
      for (int num_features : {1, 3}) {
        CheckTables(num_features, num_samples, vocabulary_size);
      }
    }
    // So many that the table is cut into parts.
    CheckTables(2, 12000, vocabulary_size);
  }
}

void TestListedEntries() {
  const FeatureCsr csr = RandomFeature(500, 300);
  Groups expected;
  AddTo(csr, 0, &expected);
  Buffer<RowEntry> entries(csr.rows.size());
  for (int64_t s = 0; s < csr.num_samples(); ++s) {
    for (int64_t i = csr.offsets[s]; i < csr.offsets[s + 1]; ++i) {
      entries[i] = {csr.rows[i], static_cast<uint32_t>(s), csr.gain(s, i)};
    }
  }
  RowGroups groups;
  GroupByRow(entries, 300, &groups);
  CheckGroups(groups, expected);
}

// A table that no feature of the batch names.
void TestNoFeatures() {
  RowGroups groups;
  GroupByRow({{{}, 10, &groups}}, Threads);
  CheckGroups(groups, {});
}

}  // namespace
}  // namespace tpu_embedding

int main() {
  tpu_embedding::TestRadixSort();
  tpu_embedding::TestGroups();
  tpu_embedding::TestListedEntries();
  tpu_embedding::TestNoFeatures();
}
