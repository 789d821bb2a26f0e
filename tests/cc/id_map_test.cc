// The map of ids against std::unordered_map, also while it grows.

#include "core/id_map.h"

#include <cstdint>
#include <limits>
#include <random>
#include <unordered_map>
#include <vector>

#include "check.h"

namespace tpu_embedding {
namespace {

constexpr int64_t kLowest = std::numeric_limits<int64_t>::min();
constexpr int64_t kHighest = std::numeric_limits<int64_t>::max();

// Ids of all kinds, among them each that another map might reserve.
int64_t Id(int kind, int64_t i) {
  switch (kind) {
    case 0:
      return i;
    case 1:
      return i << 40;  // the same low bits
    case 2:
      return i % 2 ? kLowest + i : kHighest - i;
    default:
      return -i;
  }
}

void TestAgainstReference() {
  for (int kind = 0; kind < 4; ++kind) {
    std::mt19937_64 random(kind);
    IdMap map(kind);
    std::unordered_map<int64_t, int32_t> expected;
    for (int32_t n = 0; n < 30000; ++n) {
      const int64_t id = Id(kind, random() % 6000);
      const auto found = expected.find(id);
      if (found == expected.end()) {
        CHECK_EQ(map.Find(id), -1);
        map.Reserve(1);
        map.Insert(id, n);
        expected[id] = n;
      } else {
        CHECK_EQ(map.Find(id), found->second);
        if (random() % 3 == 0) {
          map.Erase(id);
          expected.erase(found);
        }
      }
      CHECK_EQ(map.size(), expected.size());
    }
    std::vector<int64_t> ids;
    for (int64_t i = 0; i < 6000; ++i) ids.push_back(Id(kind, i));
    map.FindAll(ids.data(), ids.size(), [&](int64_t i, int32_t number) {
      const auto found = expected.find(ids[i]);
      CHECK_EQ(number, found == expected.end() ? -1 : found->second);
    });
  }
}

// An id that goes and comes again while its first entry awaits its move.
void TestEraseWhileGrowing() {
  IdMap map(7);
  for (int32_t n = 0; n < 100000; ++n) {
    map.Reserve(1);
    map.Insert(n, n);
    if (n % 3) continue;
    map.Erase(n / 2);
    CHECK_EQ(map.Find(n / 2), -1);
    map.Reserve(1);
    map.Insert(n / 2, n);
    CHECK_EQ(map.Find(n / 2), n);
    map.Erase(n / 2);
    map.Reserve(1);
    map.Insert(n / 2, n / 2);
  }
  for (int32_t n = 0; n < 100000; ++n) CHECK_EQ(map.Find(n), n);
}

void TestReserveManyAtOnce() {
  IdMap map(1);
  map.Reserve(5);
  for (int32_t n = 0; n < 5; ++n) map.Insert(n, n);
  map.Reserve(20000);
  for (int32_t n = 5; n < 20005; ++n) map.Insert(n, n);
  for (int32_t n = 0; n < 20005; ++n) CHECK_EQ(map.Find(n), n);
  CHECK_EQ(map.Find(20005), -1);
}

}  // namespace
}  // namespace tpu_embedding

int main() {
  tpu_embedding::TestAgainstReference();
  tpu_embedding::TestEraseWhileGrowing();
  tpu_embedding::TestReserveManyAtOnce();
}
