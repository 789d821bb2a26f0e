// Batches divided over several processes, all of them in this program: every
// entry arrives at its owner once, in order, and malformed messages are errors.

#include "core/routing.h"

#include <algorithm>
#include <cstdint>
#include <fstream>
#include <random>
#include <string>
#include <thread>
#include <vector>

#include "check.h"
#include "core/parallel.h"
#include "core/wire.h"

namespace tpu_embedding {
namespace {

std::mt19937_64 generator(20260801);

int64_t Random(int64_t below) {
  return std::uniform_int_distribution<int64_t>(0, below - 1)(generator);
}

const ParallelFor kLoop = [](int64_t total, int64_t, const Range& body) {
  if (total) body(0, total);
};

const ParallelFor kThreads = [](int64_t total, int64_t, const Range& body) {
  if (!total) return;
  std::thread other([&] { body(0, total / 2); });
  body(total / 2, total);
  other.join();
};

// Tables of few and of many rows, so that both ways to number rows are taken.
const std::vector<int64_t> kRows = {7, 1, 1000000, 50};
const TableMap kTables = {{0, 2, 0, 1, 3}, kRows};

// Whether each table grows: none, or the last one.
const std::vector<bool> kGrowing[] = {{}, {false, false, false, true}};

std::vector<int> RandomOwners(int size) {
  std::vector<int> owners;
  for (size_t t = 0; t < kRows.size(); ++t) {
    owners.push_back(Random(size + 1) - 1);
  }
  return owners;
}

FeatureCsr RandomFeature(int table, const std::vector<bool>& growing,
                         int kind) {
  FeatureCsr csr;
  const int64_t samples = Random(9);
  csr.output_shape = {samples};
  csr.offsets.Resize(samples + 1);
  csr.offsets[0] = 0;
  for (int64_t s = 0; s < samples; ++s) {
    csr.offsets[s + 1] = csr.offsets[s] + Random(4);
  }
  const int64_t entries = csr.offsets[samples];
  const bool grows = !growing.empty() && growing[table];
  csr.rows.Resize(grows ? 0 : entries);
  csr.ids.Resize(grows ? entries : 0);
  for (int64_t i = 0; i < csr.rows.size(); ++i) {
    csr.rows[i] = Random(kRows[table]);
  }
  for (int64_t i = 0; i < csr.ids.size(); ++i) {
    csr.ids[i] = static_cast<int64_t>(generator());
  }
  csr.gains.Resize(kind == 2 ? entries : 0);
  csr.sample_gains.Resize(kind == 1 ? samples : 0);
  for (int64_t i = 0; i < csr.gains.size(); ++i) csr.gains[i] = 1 + Random(9);
  for (int64_t i = 0; i < csr.sample_gains.size(); ++i) {
    csr.sample_gains[i] = 1 + Random(9);
  }
  return csr;
}

struct Entry {
  int64_t sample;
  int64_t row;  // or id
  float gain;
  bool operator==(const Entry& other) const {
    return sample == other.sample && row == other.row && gain == other.gain;
  }
};

// What process `owner` should get of a feature, with rows of the whole table.
std::vector<Entry> Expected(const FeatureCsr& csr, const Placement& placement,
                            int owner, int table) {
  std::vector<Entry> found;
  for (int64_t s = 0; s < csr.num_samples(); ++s) {
    for (int64_t i = csr.offsets[s]; i < csr.offsets[s + 1]; ++i) {
      const bool there =
          placement.by_rows(table)
              ? (csr.ids.size() ? OwnerOf(csr.ids[i], placement.size)
                                : csr.rows[i] % placement.size) == owner
              : placement.owners[table] == owner;
      const int64_t row = csr.ids.size() ? csr.ids[i] : csr.rows[i];
      if (there) found.push_back({s, row, csr.gain(s, i)});
    }
  }
  return found;
}

// What `owner` got of a feature of the batch `sent`.
std::vector<Entry> EntriesOf(const RoutedBatch& sent,
                             const Placement& placement, int owner, int f,
                             const PeerRequest& request) {
  const FeatureCsr& got = request.features[f];
  const bool by_rows = sent.by_rows(f);
  std::vector<Entry> entries;
  for (int64_t s = 0; s < got.num_samples(); ++s) {
    const int64_t sample =
        by_rows ? sent.sent[owner].features[f].samples[s] : s;
    for (int64_t i = got.offsets[s]; i < got.offsets[s + 1]; ++i) {
      const int64_t row = got.ids.size() ? got.ids[i]
                          : by_rows      ? got.rows[i] * placement.size + owner
                                         : got.rows[i];
      entries.push_back({sample, row, got.gain(s, i)});
    }
  }
  return entries;
}

// The rows that `owner` has of each table, at least one.
TableMap PartOf(const Placement& placement, int owner) {
  TableMap part = kTables;
  for (size_t t = 0; t < kRows.size(); ++t) {
    const int64_t divided =
        (kRows[t] - owner + placement.size - 1) / placement.size;
    const int64_t whole = placement.owners[t] == owner ? kRows[t] : 1;
    part.vocabulary_sizes[t] =
        std::max<int64_t>(1, placement.by_rows(t) ? divided : whole);
  }
  return part;
}

// Messages that are cut or changed are read to their end or refused.
template <class Read>
void CheckDamage(const std::vector<int32_t>& words, const Read& read) {
  const auto message = [](const std::vector<int32_t>& content) {
    return Message{content.data(), static_cast<int64_t>(content.size())};
  };
  std::vector<int32_t> padded = words;
  padded.push_back(0);
  CHECK_TRUE(!read(message(padded)));
  std::vector<int32_t> bad(words.begin(), words.end() - 1);
  CHECK_TRUE(read(message(bad)));
  for (int header = 0; header < 4; ++header) {  // Another release.
    bad = words;
    ++bad[header];
    CHECK_TRUE(read(message(bad)));
  }
  for (size_t i = 0; i < words.size(); ++i) {
    bad = words;
    bad[i] = Random(2) ? 1 << 30 : Random(100) - 50;
    (void)read(message(bad));
  }
}

void CheckJob(int size, bool training, const ParallelFor& parallel_for) {
  const std::vector<bool>& growing = kGrowing[Random(2)];
  const std::vector<int> owners = RandomOwners(size);
  std::vector<PreparedBatch> batches(size);
  std::vector<RoutedBatch> routed(size);
  for (int p = 0; p < size; ++p) {
    for (size_t f = 0; f < kTables.feature_tables.size(); ++f) {
      batches[p].features.push_back(
          RandomFeature(kTables.feature_tables[f], growing, f % 3));
    }
    batches[p].vocabulary_sizes = kRows;
    routed[p].growing = growing;
    RouteBatch(batches[p], kTables, {p, size, false, owners}, training,
               parallel_for, &routed[p]);
  }
  for (int p = 0; p < size; ++p) {
    std::vector<std::vector<int32_t>> words(size);
    std::vector<Message> messages;
    for (int sender = 0; sender < size; ++sender) {
      words[sender].resize(MessageWords(routed[sender], p));
      WriteMessage(routed[sender], p, words[sender].data());
      messages.push_back(
          {words[sender].data(), static_cast<int64_t>(words[sender].size())});
    }
    const Placement& placement = routed[p].placement;
    const TableMap own = PartOf(placement, p);
    CHECK_TRUE(!ReadMessages(messages, own, parallel_for, &routed[p]));
    for (int sender = 0; sender < size; ++sender) {
      for (size_t f = 0; f < kTables.feature_tables.size(); ++f) {
        const int t = kTables.feature_tables[f];
        if (placement.by_rows(t) && !training) continue;
        const PeerRequest& request = routed[p].requests[sender];
        CHECK_TRUE(EntriesOf(routed[sender], placement, p, f, request) ==
                   Expected(batches[sender].features[f], placement, p, t));
        CHECK_TRUE(request.features[f].num_samples() ==
                   routed[sender].NumSent(p, f));
      }
    }
    // Rows that arrive, at their positions, are those of the batch.
    for (size_t f = 0; f < kTables.feature_tables.size(); ++f) {
      const int t = kTables.feature_tables[f];
      if (!placement.by_rows(t)) continue;
      std::vector<int64_t> arriving;
      for (int owner = 0; owner < size; ++owner) {
        const Wanted& wanted = routed[p].sent[owner].wanted[t];
        for (int64_t i = 0; i < wanted.rows.size(); ++i) {
          arriving.push_back(int64_t{wanted.rows[i]} * size + owner);
        }
        arriving.insert(arriving.end(), wanted.ids.data(),
                        wanted.ids.data() + wanted.ids.size());
      }
      CHECK_TRUE(static_cast<int64_t>(arriving.size()) ==
                 routed[p].NumArriving(t));
      const FeatureCsr& csr = batches[p].features[f];
      for (int64_t i = 0; i < csr.num_entries(); ++i) {
        CHECK_TRUE(arriving[routed[p].batch.features[f].rows[i]] ==
                   (csr.ids.size() ? csr.ids[i] : csr.rows[i]));
      }
    }
    const int sender = Random(size);
    CheckDamage(words[sender], [&](const Message& message) {
      std::vector<Message> damaged = messages;
      damaged[sender] = message;
      return ReadMessages(damaged, own, parallel_for, &routed[p]);
    });
  }
}

// What a worker, which owns nothing, asks of servers.
void CheckServers(int size, bool training, const ParallelFor& parallel_for) {
  const std::vector<bool>& growing = kGrowing[Random(2)];
  const std::vector<int> owners = RandomOwners(size);
  PreparedBatch batch;
  for (size_t f = 0; f < kTables.feature_tables.size(); ++f) {
    batch.features.push_back(
        RandomFeature(kTables.feature_tables[f], growing, f % 3));
  }
  batch.vocabulary_sizes = kRows;
  RoutedBatch routed;
  routed.growing = growing;
  RouteBatch(batch, kTables, {0, size, true, owners}, training, parallel_for,
             &routed);
  for (int s = 0; s < size; ++s) {
    const Placement placement{s, size, true, owners};
    const TableMap own = PartOf(placement, s);
    std::vector<int32_t> words(MessageWords(routed, s));
    WriteMessage(routed, s, words.data());
    RoutedBatch served;
    served.placement = placement;
    served.training = training;
    served.feature_tables = kTables.feature_tables;
    served.growing = growing;
    const auto read = [&](const Message& message) {
      return ReadMessages({message}, own, parallel_for, &served);
    };
    CHECK_TRUE(!read({words.data(), static_cast<int64_t>(words.size())}));
    CHECK_TRUE(served.requests.size() == 1);
    for (size_t t = 0; t < kRows.size(); ++t) {
      if (!placement.by_rows(t)) continue;
      const Wanted& wanted = served.requests[0].wanted[t];
      const Wanted& sent = routed.sent[s].wanted[t];
      CHECK_TRUE(wanted.rows.size() == sent.rows.size());
      CHECK_TRUE(wanted.ids.size() == sent.ids.size());
      for (int64_t i = 0; i < wanted.rows.size(); ++i) {
        CHECK_TRUE(wanted.rows[i] == sent.rows[i]);
      }
      for (int64_t i = 0; i < wanted.ids.size(); ++i) {
        CHECK_TRUE(wanted.ids[i] == sent.ids[i]);
      }
    }
    CHECK_TRUE(served.batch.tables.size() == (training ? kRows.size() : 0));
    for (size_t f = 0; f < batch.features.size(); ++f) {
      const int t = kTables.feature_tables[f];
      if (placement.by_rows(t) && !training) continue;
      CHECK_TRUE(EntriesOf(routed, placement, s, f, served.requests[0]) ==
                 Expected(batch.features[f], placement, s, t));
    }
    CheckDamage(words, read);
  }
}

void CheckWire() {
  const std::vector<float> values = {0.0f,        1.0f,        -1.5f,
                                     1.00390625f, 1.01171875f, 3.4e38f};
  std::vector<BFloat16> narrow(values.size());
  std::vector<float> back(values.size());
  ToBFloat16(values.data(), values.size(), narrow.data());
  FromBFloat16(narrow.data(), values.size(), back.data());
  CHECK_TRUE(back[0] == 0.0f && back[1] == 1.0f && back[2] == -1.5f);
  CHECK_TRUE(back[3] == 1.0f && back[4] == 1.015625f);  // ties to even
  CHECK_TRUE(Padded(0) == 0 && Padded(1) == 64 && Padded(64) == 64);
}

// Of this program alone; getrusage begins with the memory of the parent
// process.
int64_t PeakKilobytes() {
  std::ifstream status("/proc/self/status");
  std::string word;
  while (status >> word && word != "VmHWM:") continue;
  int64_t kilobytes = 0;
  CHECK_TRUE(static_cast<bool>(status >> kilobytes));
  return kilobytes;
}

}  // namespace
}  // namespace tpu_embedding

int main() {
  using namespace tpu_embedding;
  for (int round = 0; round < 8; ++round) {
    for (const int size : {1, 2, 3, 5, 16}) {
      CheckJob(size, round % 2, round % 4 < 2 ? kLoop : kThreads);
      CheckServers(size, round % 2, round % 4 < 2 ? kLoop : kThreads);
    }
  }
  // What a damaged message claims to have is not allocated.
  const int64_t before = PeakKilobytes();
  CheckWire();
  CHECK_TRUE(PeakKilobytes() - before < 1 << 20);
  return 0;
}
