// The padded CSR of one stacked table, as the SparseCore ops take it.
//
// For each SparseCore, minibatch and shard there is one partition: its ids
// begin at a multiple of 8, and its row pointer says where they end. Fill
// values pad it to a multiple of 8. The row pointers of a minibatch are padded
// to a multiple of 8 with the padded end of its last partition.
//
//   2 shards of 3 and 1 ids    ids:          a b c - - - - - d - - - - - - -
//                              row pointers: 3 9 16 16 16 16 16 16
//
// docs/formats.md has a drawing of the whole format.

#ifndef TPU_EMBEDDING_OPS_CC_CORE_CSR_LAYOUT_H_
#define TPU_EMBEDDING_OPS_CC_CORE_CSR_LAYOUT_H_

#include <cstdint>
#include <vector>

namespace tpu_embedding {

constexpr int64_t kCsrAlignment = 8;
constexpr int32_t kFillId = 2147483647;
constexpr float kFillGain = 2147483648.0f;

inline int64_t AlignCsr(int64_t size) {
  return (size + kCsrAlignment - 1) / kCsrAlignment * kCsrAlignment;
}

// How the partitions of a table are numbered: cell (core, minibatch, shard).
struct CsrCells {
  int64_t num_cores = 1;
  int64_t num_minibatches = 1;
  int64_t num_shards = 1;

  int64_t size() const { return num_cores * num_minibatches * num_shards; }
  int64_t index(int64_t core, int64_t minibatch, int64_t shard) const {
    return (core * num_minibatches + minibatch) * num_shards + shard;
  }
};

struct CsrLayout {
  CsrCells cells;
  std::vector<int64_t> starts;  // [cells.size()], where the ids begin
  std::vector<int64_t> ends;    // [cells.size()], less what is dropped
  int64_t row_pointers_size = 0;
  int64_t ids_size = 0;      // fill values included
  int64_t required_ids = 0;  // `ids_size` if nothing were dropped
  int64_t dropped_ids = 0;
};

// Where the tensors of a table are to be written. `positions` may be null.
struct CsrArrays {
  int32_t* row_pointers = nullptr;
  int32_t* sample_ids = nullptr;
  int32_t* token_ids = nullptr;
  float* gains = nullptr;
  int32_t* positions = nullptr;
};

// Returns how many row pointers a SparseCore has in one minibatch.
inline int64_t PaddedShards(int64_t num_shards) { return AlignCsr(num_shards); }

// Lays out `counts[cell]` ids per cell. Ids that do not fit into `capacity`, a
// multiple of 8, are dropped: the last ids of the cell that exceeds it, and all
// ids of later cells.
CsrLayout LayOut(const CsrCells& cells, const std::vector<int64_t>& counts,
                 int64_t capacity);

// Writes everything but the entries: the row pointers and the fill values.
void WriteFrame(const CsrLayout& layout, const CsrArrays& arrays);

}  // namespace tpu_embedding

#endif  // TPU_EMBEDDING_OPS_CC_CORE_CSR_LAYOUT_H_
