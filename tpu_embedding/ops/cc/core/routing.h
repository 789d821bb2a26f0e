// Decides which process needs which part of a batch if tables are divided.
//
// A table is divided by rows (row r is row r / N of process r % N; in a growing
// table a hash of the id picks the process) or lives whole in one process. If a
// table is divided by rows, each distinct row of a batch travels once to the
// process that asked for it and is combined there; if a table is whole, the
// combined samples travel. Gradients of samples travel to the owners, which sum
// them entry by entry in the order of the processes: the same sums in the same
// order as those of one process with N replicas.
//
// The owners are the processes that train, or servers. Servers are asked by
// workers, which hold no tables; a server answers one worker at a time.
//
//   two processes, table divided by rows, this is process 0
//   samples: [5 2] [5] [4]     wanted of process 0: rows 1 2 (ids 2 4)
//                              wanted of process 1: row 2    (id 5)
//   rows of `batch`: positions among what arrives, 1 2 | 2:  [2 0] [2] [1]
//   sent to process 0: samples 0 2, lengths 1 1; to process 1: samples 0 1
//
// A message to an owner, in words of 4 bytes:
//
//   words      what
//   1          kMessageVersion
//   1          words of an id: 1, or 2 if a table of the owner grows
//   2          words of the message, these four included (one int64)
//   for each table that is divided by rows:
//     1        n, the distinct rows wanted of this owner
//     n        the rows, as the owner numbers them; of a table that grows 2 n
//              words, the ids
//   for each feature of a table that the owner has whole, and for training of
//   one that is divided by rows:
//     1        s, the samples: all, or those with an entry at this owner
//     1        e, their entries
//     1        how they are multiplied: 0 not at all, 1 by sample, 2 by entry
//     1        the length of every sample, or -1, and then
//     s          the length of each
//     e        rows of a whole table, or positions among the rows wanted; of a
//              table that grows 2 e words, ids
//     0, s, e  the gains, float32

#ifndef TPU_EMBEDDING_OPS_CC_CORE_ROUTING_H_
#define TPU_EMBEDDING_OPS_CC_CORE_ROUTING_H_

#include <cstdint>
#include <vector>

#include "core/buffer.h"
#include "core/element.h"
#include "core/feature.h"
#include "core/id_map.h"
#include "core/parallel.h"
#include "core/prepared_batch.h"

namespace tpu_embedding {

// The owner of a table that is divided by rows.
constexpr int kAllProcesses = -1;

constexpr int32_t kMessageVersion = 1;

// Returns the owner, of `size`, of an id of a growing table divided by rows.
inline int OwnerOf(int64_t id, int size) {
  return static_cast<int>((MixBits(id) >> 32) * size >> 32);
}

// Where the tables are.
struct Placement {
  int rank = 0;             // this owner; without meaning in a worker
  int size = 1;             // owners: the processes of the job, or the servers
  bool served = false;      // the owners are servers
  std::vector<int> owners;  // by table, or kAllProcesses

  bool by_rows(int table) const { return owners[table] == kAllProcesses; }
  bool Holds(int process, int table) const {
    return by_rows(table) || owners[table] == process;
  }
  // Returns how many ask an owner: all processes, or one worker.
  int num_senders() const { return served ? 1 : size; }
  // Returns whether messages to and from `process` stay in this process.
  bool is_own(int process) const { return !served && process == rank; }
};

// The entries of a feature for which another process sums gradients, if the
// table is divided by rows. For a whole table all samples are sent as they are.
struct SentFeature {
  Buffer<int32_t> samples;  // with an entry there, ascending
  Buffer<int32_t> lengths;  // of the same samples
  Buffer<int32_t> rows;     // positions in the `Wanted` of the table
  Buffer<float> gains;      // by entry or by sample, as FeatureCsr has them
};

// What is requested from a table divided by rows: distinct rows, as the owner
// numbers them, or ids if the table grows.
struct Wanted {
  Buffer<int32_t> rows;
  Buffer<int64_t> ids;

  int64_t size() const { return rows.size() + ids.size(); }
  void Clear() {
    rows.Resize(0);
    ids.Resize(0);
  }
};

// What this process asks of one process.
struct Sent {
  std::vector<SentFeature> features;
  std::vector<Wanted> wanted;  // by table
};

// What one process asks of this process.
struct PeerRequest {
  // Rows have this owner's numbers. In evaluation the first feature of a
  // growing table that is divided by rows has one sample with all wanted ids.
  std::vector<FeatureCsr> features;
  std::vector<Wanted> wanted;  // by table
  // The position of each entry in `wanted`, by feature; only for growing tables
  // that are divided by rows.
  std::vector<Buffer<int32_t>> positions;
};

struct RoutedBatch {
  // This process's own features; a server has none. The rows of a table that is
  // divided by rows are positions among those that arrive: from process 0, then
  // 1, ... For training, `tables` groups the entries of all senders, in their
  // order; the groups of a worker are empty.
  PreparedBatch batch;
  bool training = false;
  Placement placement;
  std::vector<int> feature_tables;
  std::vector<bool> growing;  // by table, whether it grows; or none does
  std::vector<Sent> sent;     // by receiver
  std::vector<PeerRequest> requests;  // by sender

  bool by_rows(int feature) const {
    return placement.by_rows(feature_tables[feature]);
  }
  // Returns whether `process` looks up all samples of `feature`.
  bool IsWhole(int process, int feature) const {
    return placement.owners[feature_tables[feature]] == process;
  }
  // Returns how many samples of a local feature send gradients to `process`.
  int64_t NumSent(int process, int feature) const;
  bool grows(int feature) const { return table_grows(feature_tables[feature]); }
  bool table_grows(int table) const {
    return !growing.empty() && growing[table];
  }
  // Returns how many rows of `table` arrive from all processes.
  int64_t NumArriving(int table) const;
};

// Divides a batch: writes all of `routed` but `requests` and the groups.
void RouteBatch(const PreparedBatch& batch, const TableMap& tables,
                const Placement& placement, bool training,
                const ParallelFor& parallel_for, RoutedBatch* routed);

// Count the words of the message to `receiver`, and write the message.
int64_t MessageWords(const RoutedBatch& routed, int receiver);
void WriteMessage(const RoutedBatch& routed, int receiver, int32_t* words);

// A received message, which padding may follow.
struct Message {
  const int32_t* words = nullptr;
  int64_t size = 0;
};

// Reads the messages of all senders into `requests`, and groups the entries.
// `tables` has the rows of this owner. Nothing in a message is trusted.
Error ReadMessages(const std::vector<Message>& messages, const TableMap& tables,
                   const ParallelFor& parallel_for, RoutedBatch* routed);

// Copies the wanted rows [begin, end) to their places in the message from `out`
// on, array by array. If `narrow` is set, rows of float32 become bfloat16.
void GatherRows(const Buffer<int32_t>& rows, const ConstTableData& table,
                int64_t dim, bool narrow, int64_t begin, int64_t end,
                char* out);

}  // namespace tpu_embedding

#endif  // TPU_EMBEDDING_OPS_CC_CORE_ROUTING_H_
