// Bits of changed rows: what is set is taken once, also while others set more.

#include "core/changed_rows.h"

#include <algorithm>
#include <memory>
#include <random>
#include <set>
#include <thread>
#include <vector>

#include "check.h"

namespace tpu_embedding {
namespace {

std::vector<int64_t> RowsOf(const RowBits& bits) {
  std::vector<int64_t> rows;
  bits.ForEach([&](int64_t row) { rows.push_back(row); });
  CHECK_EQ(static_cast<int64_t>(rows.size()), bits.Count());
  return rows;
}

void TestRandomRows() {
  std::mt19937_64 generator(20260731);
  for (const int64_t size : {1, 63, 64, 65, 1000}) {
    RowBits since(size), taken(size);
    std::set<int64_t> expected;
    for (int round = 0; round < 20; ++round) {
      for (int k = 0; k < 10; ++k) {
        const int64_t row = generator() % size;
        since.Set(row);
        expected.insert(row);
      }
      taken.Take(&since);
      CHECK_EQ(since.Count(), 0);
      const std::vector<int64_t> rows = RowsOf(taken);
      CHECK_TRUE(std::equal(rows.begin(), rows.end(), expected.begin(),
                            expected.end()));
      if (round % 3) continue;
      RowBits committed(size);
      committed.Take(&taken);
      expected.clear();
    }
  }
}

// An update of the groups [begin, end), of the rows 3, 5 and 70.
void TestObserver() {
  RowGroups groups;
  groups.rows.Resize(3);
  groups.rows[0] = 3, groups.rows[1] = 5, groups.rows[2] = 70;
  const TableGradients gradients{&groups, nullptr};
  const TableView view;
  ChangedRows changed({100, 10});
  const auto consumer = changed.Begin("a");
  CHECK_EQ(changed.Consumers().size(), size_t{1});
  CHECK_TRUE(changed.Begin("a") == consumer);
  MarkingObserver observer(consumer);
  bool applied = false;
  observer.Apply({0, gradients, view, false, 1, 3}, [&] {
    applied = true;
    CHECK_EQ(consumer->since[0]->Count(), 0);
  });
  CHECK_TRUE(applied);
  CHECK_TRUE(RowsOf(*consumer->since[0]) == (std::vector<int64_t>{5, 70}));
  observer.Apply({1, gradients, view, true, 2, 4}, [] {});
  CHECK_TRUE(RowsOf(*consumer->since[1]) == (std::vector<int64_t>{2, 3}));
  changed.End("a");
  CHECK_TRUE(changed.Find("a") == nullptr);
  CHECK_TRUE(changed.Consumers().empty());
}

// A consumer hears of the end of ids that it may have, each once.
void TestLostIds() {
  ConsumerIds lost;
  lost.Lose(3, -7);
  lost.known = std::make_unique<RowBits>(10);
  lost.known->Set(3);
  lost.known->Set(4);
  lost.Lose(5, 50);
  lost.Lose(3, 30);
  lost.Lose(3, 31);
  CHECK_TRUE(lost.since == (std::vector<int64_t>{-7, 30}));
  CHECK_TRUE(RowsOf(*lost.known) == (std::vector<int64_t>{4}));
}

// No bit is lost between threads that set and one that takes.
void TestThreads() {
  constexpr int kThreads = 4;
  constexpr int64_t kRows = 4000;
  RowBits since(kRows), taken(kRows);
  std::vector<std::thread> threads;
  for (int t = 0; t < kThreads; ++t) {
    threads.emplace_back([&, t] {
      for (int64_t row = t; row < kRows; row += kThreads) since.Set(row);
    });
  }
  for (int k = 0; k < 50; ++k) taken.Take(&since);
  for (std::thread& thread : threads) thread.join();
  taken.Take(&since);
  CHECK_EQ(taken.Count(), kRows);
}

}  // namespace
}  // namespace tpu_embedding

int main() {
  tpu_embedding::TestRandomRows();
  tpu_embedding::TestObserver();
  tpu_embedding::TestLostIds();
  tpu_embedding::TestThreads();
}
