// Promised rows, sweeps through tables of many rows, and memory that grows.
// tests/test_growing.py has all rules, and fuzzes them beside a reference.

#include "core/vocabulary.h"

#include <cstdint>
#include <limits>
#include <string>
#include <vector>

#include "check.h"

namespace tpu_embedding {
namespace {

VocabularyOptions Options(int64_t max_rows) {
  VocabularyOptions options;
  options.table = "films";
  options.max_rows = options.max_candidates = max_rows;
  return options;
}

// One table whose updates name ids once each.
class Table {
 public:
  explicit Table(VocabularyOptions options) : vocabulary(options, 99) {}

  Error Update(const std::vector<int64_t>& ids) {
    UnknownIds unknown;
    std::vector<int32_t> rows = Rows(ids);
    for (size_t i = 0; i < ids.size(); ++i) {
      if (rows[i] != kNoRow) continue;
      unknown.ids.push_back(ids[i]);
      unknown.hits.push_back(1);
    }
    const auto hold = [&](RowSet* held) {
      for (const int32_t row : Rows(ids)) {
        if (row != kNoRow) held->Add(row);
      }
    };
    Decision decision;
    if (Error error =
            vocabulary.Decide(unknown, IdMap(0), hold, 0, &decision)) {
      return error;
    }
    std::vector<int32_t> taken;
    created.clear();
    vocabulary.Take(unknown, decision, hold, 0, &taken, &created);
    RowGroups groups;
    groups.rows.Resize(ids.size());
    groups.starts.Resize(ids.size() + 1);
    groups.starts[0] = 0;
    int64_t count = 0;
    for (const int32_t row : Rows(ids)) {
      if (row == kNoRow) continue;
      groups.rows[count++] = row;
      groups.starts[count] = count;
    }
    vocabulary.CountHits(groups, 0, count);
    return std::nullopt;
  }

  std::vector<int32_t> Rows(const std::vector<int64_t>& ids) const {
    std::vector<int32_t> rows(ids.size());
    vocabulary.Find(ids.data(), ids.size(), rows.data());
    return rows;
  }
  bool Has(int64_t id) const { return Rows({id})[0] != kNoRow; }

  Vocabulary vocabulary;
  std::vector<Vocabulary::RowOfId> created;
};

// An update evicts for the rows that it leaves to others.
void TestPromisedRowsAreFreeAfterwards() {
  VocabularyOptions options = Options(11);
  options.unknown = Unknown::kShared;
  options.shares_when_full = true;
  options.eviction = Eviction::kLeastFrequent;
  options.min_rows = 3;
  Table table(options);
  CHECK_TRUE(!table.Update({1, 2, 3, 4, 5}));
  IdMap promised(3);
  promised.Reserve(5);
  for (const int64_t id : {6, 7, 8, 9, 10}) promised.Insert(id, 0);
  const UnknownIds unknown = {{11}, {1}};
  const auto hold = [](RowSet*) {};
  Decision decision;
  CHECK_TRUE(!table.vocabulary.Decide(unknown, promised, hold, 0, &decision));
  CHECK_EQ(decision.num_admitted, 1);
  std::vector<int32_t> rows;
  table.vocabulary.Take(unknown, decision, hold, 0, &rows, &table.created);
  CHECK_TRUE(table.vocabulary.HasRoomFor(5));
}

// The search for old rows goes on where it stopped, also after an Evict that
// could evict nothing.
void TestEvictWithoutSurplus() {
  VocabularyOptions options = Options(8);
  options.eviction = Eviction::kAge;
  options.max_age = 1;
  options.min_rows = 2;
  Table table(options);
  CHECK_TRUE(!table.Update({1, 2, 3}));
  CHECK_TRUE(!table.Update({2}));
  CHECK_TRUE(!table.Update({2}));  // 1 goes; the search stops before 3.
  CHECK_TRUE(!table.Has(1) && table.Has(3));
  CHECK_EQ(table.vocabulary.Evict([](RowSet*) {}), 0);
  for (int i = 0; i < 3; ++i) CHECK_TRUE(!table.Update({}));
  CHECK_TRUE(!table.Update({4}));
  CHECK_TRUE(!table.Update({4}));
  CHECK_TRUE(!table.Has(3) && table.Has(2));
}

// A table that is larger than a slice, so that a sweep takes several updates.
void TestSweepsInSlices() {
  constexpr int64_t kRows = 200000;
  VocabularyOptions options = Options(kRows);
  options.eviction = Eviction::kLeastRecent;
  options.min_rows = kRows / 2;
  Table table(options);
  std::vector<int64_t> ids(1000);
  for (int64_t step = 0; step < 400; ++step) {
    for (int64_t i = 0; i < 1000; ++i) ids[i] = step * 1000 + i;
    const int64_t before = table.vocabulary.counts().evicted;
    CHECK_TRUE(!table.Update(ids));
    CHECK_LE(table.vocabulary.counts().evicted - before, 8192);
    CHECK_LE(table.vocabulary.num_ids(), kRows);
  }
  CHECK_TRUE(!table.Has(0) && table.Has(399999));
  CHECK_GE(table.vocabulary.num_ids(), kRows / 2);
}

// What a sample chooses: rows used once go, also where each second row is used
// twice, and the table keeps what min_rows says.
void TestLargeTableChoosesBySample() {
  constexpr int64_t kRows = 200000;
  VocabularyOptions options = Options(kRows);
  options.eviction = Eviction::kLeastFrequent;
  options.min_rows = kRows * 6 / 10;
  Table table(options);
  std::vector<int64_t> once, twice, fresh(1000);
  for (int64_t id = 0; id < kRows - 1000; ++id) {
    (id % 2 ? once : twice).push_back(id);
  }
  for (const auto* ids : {&once, &twice, &twice}) {
    CHECK_TRUE(!table.Update(*ids));
  }
  for (int64_t step = 0; step < 20; ++step) {
    for (int64_t i = 0; i < 1000; ++i) fresh[i] = kRows * (step + 1) + i;
    CHECK_TRUE(!table.Update(fresh));
  }
  for (const int64_t id : twice) CHECK_TRUE(table.Has(id));
  CHECK_GE(table.vocabulary.counts().evicted, kRows * 3 / 10);
  CHECK_GE(table.vocabulary.num_ids(), options.min_rows);
}

// Where the system reserves less than is needed, memory moves.
void TestMemoryThatMoves() {
  GrowingMemory memory(1);
  memory.Grow(100);
  memory.data()[99] = 7;
  memory.Grow(size_t{9} << 20);
  CHECK_EQ(memory.data()[99], 7);
  CHECK_EQ(memory.data()[(9 << 20) - 1], 0);
}

// What is before the first byte and after the last one may be written, and a
// huge page begins with the first one.
void TestMemoryAround() {
  GrowingMemory memory(size_t{40} << 20, 1000);
  CHECK_EQ(reinterpret_cast<uintptr_t>(memory.data()) % kHugePage, 0);
  memory.data()[-1000] = 1;
  memory.data()[memory.capacity() - 1] = 2;
  for (const int megabytes : {3, 9, 40}) {
    memory.Grow(size_t{1} * megabytes << 20);
    CHECK_EQ(memory.data()[-1000], 1);
    CHECK_EQ(memory.data()[memory.capacity() - 1], 2);
  }
}

}  // namespace
}  // namespace tpu_embedding

int main() {
  tpu_embedding::TestPromisedRowsAreFreeAfterwards();
  tpu_embedding::TestEvictWithoutSurplus();
  tpu_embedding::TestSweepsInSlices();
  tpu_embedding::TestLargeTableChoosesBySample();
  tpu_embedding::TestMemoryThatMoves();
  tpu_embedding::TestMemoryAround();
}
