// Shared code of the host ops of the SparseCores: entries as coordinate lists.

#ifndef TPU_EMBEDDING_TESTING_CC_SPARSE_CORE_COO_LISTS_H_
#define TPU_EMBEDDING_TESTING_CC_SPARSE_CORE_COO_LISTS_H_

#include <cstdint>
#include <string>

#include "core/csr_layout.h"
#include "core/csr_partitions.h"
#include "tensorflow/core/framework/op_kernel.h"

namespace tpu_embedding {

// The attributes that these ops have in common.
struct HostOpTable {
  std::string name;
  int64_t num_replicas = 1;
  int64_t num_cores = 1;
  int64_t rows = 0;

  absl::Status Read(tensorflow::OpKernelConstruction* context);
  int64_t num_shards() const { return num_replicas * num_cores; }
  TablePlace place() const {
    return {num_shards(), 0, 0, (rows + num_shards() - 1) / num_shards()};
  }
};

// One list of entries: samples, rows of the stacked table, gains.
struct CooView {
  const int32_t* rows = nullptr;
  const int32_t* columns = nullptr;
  const float* gains = nullptr;
  int64_t size = 0;
};

// Makes one view of the three tensors, if they belong together.
absl::Status MakeCooView(const tensorflow::Tensor& rows,
                         const tensorflow::Tensor& columns,
                         const tensorflow::Tensor& gains, CooView* view);

// Appends the entries [begin, end) of `coo` to `entries`, which are for
// `table.place()`. Samples are taken modulo `samples`.
absl::Status AppendCoo(const HostOpTable& table, const CooView& coo,
                       int64_t begin, int64_t end, int64_t samples,
                       CsrEntries* entries);

// The sizes of the tensors that an op makes, from its attributes.
struct HostOpBuffers {
  int64_t num_cores = 1;
  int64_t num_shards = 1;
  int64_t max_minibatches = 1;
  int64_t max_ids_per_chip_per_sample = 1;

  absl::Status Read(tensorflow::OpKernelConstruction* context);
  int64_t row_pointers() const {
    return num_cores * max_minibatches * PaddedShards(num_shards);
  }
};

// Allocates the seven outputs of an op that makes a CSR, in their common order,
// and writes all but the entries.
absl::Status StartCsr(tensorflow::OpKernelContext* context,
                      const HostOpBuffers& buffers, int64_t capacity,
                      const CsrLayout& layout, CsrArrays* arrays);

}  // namespace tpu_embedding

#endif  // TPU_EMBEDDING_TESTING_CC_SPARSE_CORE_COO_LISTS_H_
