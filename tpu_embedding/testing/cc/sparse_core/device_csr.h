// The partitioned CSR of one replica, as the SparseCore ops take it.
//
// A device's samples are divided over its SparseCores. The entries of each are
// partitioned by which SparseCore of the whole system holds their row:
//
//   row_pointers   [SparseCore][minibatch][target], the targets padded to 8
//   token, sample  a partition ends at its pointer, and the next one begins at
//   and gain         the next multiple of 8; what is between has no meaning
//
// A sample is numbered within its SparseCore, a token (row) within its target.

#ifndef TPU_EMBEDDING_TESTING_CC_SPARSE_CORE_DEVICE_CSR_H_
#define TPU_EMBEDDING_TESTING_CC_SPARSE_CORE_DEVICE_CSR_H_

#include <cstdint>
#include <limits>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "tensorflow/core/framework/op_kernel.h"

namespace tpu_embedding {

// The properties that a CSR must have.
struct CsrFrame {
  std::string table;  // for messages
  int64_t num_replicas = 1;
  int64_t num_sparse_cores = 1;  // of each device
  int64_t num_samples = 0;       // of the replica
  int64_t num_rows = 0;          // of the table's part on one device
  int64_t max_valency = 0;  // > 0: entries have positions, as combiners need
  int64_t max_ids = std::numeric_limits<int64_t>::max();
  int64_t max_unique_ids = std::numeric_limits<int64_t>::max();

  int64_t num_targets() const { return num_replicas * num_sparse_cores; }
  int64_t samples_per_core() const { return num_samples / num_sparse_cores; }
  int64_t rows_per_core() const { return num_rows / num_sparse_cores; }
};

struct Partition {
  int64_t sparse_core;  // of the replica: whose samples these are
  int64_t target;       // of the system: whose rows these are
  int64_t begin;
  int64_t end;
};

// All that is read later is checked here, so that a step fails before it has
// changed anything.
class DeviceCsr {
 public:
  // Reads the inputs by their names.
  absl::Status Read(tensorflow::OpKernelContext* context,
                    const CsrFrame& frame);

  const std::vector<Partition>& partitions() const { return partitions_; }
  int64_t num_minibatches() const { return num_minibatches_; }

  // Returns the sample of an entry of `partition`, numbered within the replica.
  int64_t Sample(const Partition& partition, int64_t entry) const {
    return partition.sparse_core * samples_per_core_ + samples_[entry];
  }
  // Returns what the entry's gradient belongs to: a sample or a position in it.
  int64_t Place(const Partition& partition, int64_t entry) const {
    const int64_t sample = Sample(partition, entry);
    return positions_ ? sample * max_valency_ + positions_[entry] : sample;
  }
  // Returns the device that holds the rows of `partition`.
  int64_t Device(const Partition& partition) const {
    return partition.target / num_sparse_cores_;
  }
  // Returns the row of an entry, numbered within that device.
  int64_t Row(const Partition& partition, int64_t entry) const {
    return partition.target % num_sparse_cores_ * rows_per_core_ +
           tokens_[entry];
  }
  float Gain(int64_t entry) const { return gains_[entry]; }

 private:
  absl::Status ReadTensors(tensorflow::OpKernelContext* context,
                           const CsrFrame& frame);
  absl::Status ReadMinibatches(tensorflow::OpKernelContext* context,
                               const CsrFrame& frame);
  absl::Status ReadPositions(tensorflow::OpKernelContext* context,
                             const CsrFrame& frame);
  absl::Status Cut(const CsrFrame& frame);
  absl::Status Check(const Partition& partition, const CsrFrame& frame) const;

  std::vector<Partition> partitions_;
  int64_t num_minibatches_ = 1;
  int64_t num_sparse_cores_ = 1;
  int64_t samples_per_core_ = 0;
  int64_t max_valency_ = 0;
  int64_t rows_per_core_ = 0;
  const int32_t* pointers_ = nullptr;
  int64_t num_pointers_ = 0;
  int64_t num_entries_ = 0;
  const int32_t* samples_ = nullptr;
  const int32_t* tokens_ = nullptr;
  const int32_t* positions_ = nullptr;
  const float* gains_ = nullptr;
};

}  // namespace tpu_embedding

#endif  // TPU_EMBEDDING_TESTING_CC_SPARSE_CORE_DEVICE_CSR_H_
