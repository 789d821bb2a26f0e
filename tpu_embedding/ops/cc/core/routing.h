// Which process needs what of a batch whose tables are divided over processes.
//
// A table is divided by rows (row r is row r / N of process r % N) or lives
// whole in one process. Of a table divided by rows each distinct row of a batch
// travels to the process that asked for it, once, and is combined there; of a
// whole table the combined samples travel. Gradients of samples travel to the
// owners, which sum them entry by entry in the order of the processes: the same
// sums in the same order as those of one process with N replicas.
//
//   two processes, table divided by rows, this is process 0
//   samples: [5 2] [5] [4]     wanted of process 0: rows 1 2 (ids 2 4)
//                              wanted of process 1: row 2    (id 5)
//   rows of `batch`: positions among what arrives, 1 2 | 2:  [2 0] [2] [1]
//   sent to process 0: samples 0 2, lengths 1 1; to process 1: samples 0 1

#ifndef TPU_EMBEDDING_OPS_CC_CORE_ROUTING_H_
#define TPU_EMBEDDING_OPS_CC_CORE_ROUTING_H_

#include <cstdint>
#include <vector>

#include "core/buffer.h"
#include "core/element.h"
#include "core/feature.h"
#include "core/parallel.h"
#include "core/prepared_batch.h"

namespace tpu_embedding {

// The owner of a table that is divided by rows.
constexpr int kAllProcesses = -1;

// Where the tables are.
struct Placement {
  int rank = 0;             // this process
  int size = 1;             // of the job, in processes
  std::vector<int> owners;  // by table, or kAllProcesses

  bool by_rows(int table) const { return owners[table] == kAllProcesses; }
  bool Holds(int process, int table) const {
    return by_rows(table) || owners[table] == process;
  }
  int64_t RowsOf(int process, int table, int64_t vocabulary_size) const;
};

// The entries of a feature that another process sums gradients for: those of
// a table divided by rows. Of a whole table all samples are sent as they are.
struct SentFeature {
  Buffer<int32_t> samples;  // with an entry there, ascending
  Buffer<int32_t> lengths;  // of the same samples
  Buffer<int32_t> rows;     // positions in `SentTable::rows`
  Buffer<float> gains;      // by entry or by sample, as FeatureCsr has them
};

// What this process asks of one process.
struct Sent {
  std::vector<SentFeature> features;
  std::vector<Buffer<int32_t>> rows;  // by table: distinct, as numbered there
};

// What one process asks of this process.
struct Asked {
  std::vector<FeatureCsr> features;   // rows as numbered here
  std::vector<Buffer<int32_t>> rows;  // by table: distinct
};

struct RoutedBatch {
  // This process's own features. Where a table is divided by rows, a row is a
  // position among the rows that arrive: those of process 0, then 1, ... For
  // training `tables` groups the entries of all processes, in their order.
  PreparedBatch batch;
  bool training = false;
  Placement placement;
  std::vector<int> feature_tables;
  std::vector<Sent> sent;    // by receiver
  std::vector<Asked> asked;  // by sender

  bool by_rows(int feature) const {
    return placement.by_rows(feature_tables[feature]);
  }
  // Whether the samples of `feature` that `process` looks up are all samples.
  bool IsWhole(int process, int feature) const {
    return placement.owners[feature_tables[feature]] == process;
  }
  // Samples of this process's own feature whose gradients go to `process`.
  int64_t NumSent(int process, int feature) const;
  // How many rows of `table` arrive from all processes.
  int64_t NumArriving(int table) const;
};

// Divides a batch: all of `routed` but `asked` and the groups.
void RouteBatch(const PreparedBatch& batch, const TableMap& tables,
                const Placement& placement, bool training,
                const ParallelFor& parallel_for, RoutedBatch* routed);

// The words of the message to `receiver`, and the message.
int64_t MessageWords(const RoutedBatch& routed, int receiver);
void WriteMessage(const RoutedBatch& routed, int receiver, int32_t* words);

struct Message {
  const int32_t* words = nullptr;
  int64_t size = 0;
};

// Reads the messages of all processes into `asked`, and groups the entries.
// Nothing in a message is trusted.
Error ReadMessages(const std::vector<Message>& messages, const TableMap& tables,
                   const ParallelFor& parallel_for, RoutedBatch* routed);

// Reads what a batch asks of one server: the message for it, where all tables
// are divided by rows. `tables` has the rows of the server. Nothing in the
// message is trusted. `rows`: by table those asked for. `batch`: for training
// the samples with an entry there, and their groups.
Error ReadRequest(const Message& message, const TableMap& tables, bool training,
                  const ParallelFor& parallel_for,
                  std::vector<Buffer<int32_t>>* rows, PreparedBatch* batch);

// Copies rows [begin, end) of those asked for to where they travel from;
// `narrow`: rows of float32 as bfloat16.
void GatherRows(const Buffer<int32_t>& rows, const ConstTableData& table,
                int64_t dim, bool narrow, int64_t begin, int64_t end,
                char* out);

}  // namespace tpu_embedding

#endif  // TPU_EMBEDDING_OPS_CC_CORE_ROUTING_H_
