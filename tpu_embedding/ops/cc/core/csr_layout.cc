#include "core/csr_layout.h"

#include <algorithm>

namespace tpu_embedding {

CsrLayout LayOut(const CsrCells& cells, const std::vector<int64_t>& counts,
                 int64_t capacity) {
  CsrLayout layout;
  layout.cells = cells;
  layout.starts.reserve(cells.size());
  layout.ends.reserve(cells.size());
  int64_t next = 0;
  for (const int64_t count : counts) {
    const int64_t kept = std::min(count, capacity - next);
    layout.starts.push_back(next);
    layout.ends.push_back(next + kept);
    layout.dropped_ids += count - kept;
    layout.required_ids += AlignCsr(count);
    next = AlignCsr(next + kept);
  }
  layout.ids_size = next;
  layout.row_pointers_size =
      cells.num_cores * cells.num_minibatches * PaddedShards(cells.num_shards);
  return layout;
}

void WriteFrame(const CsrLayout& layout, const CsrArrays& arrays) {
  const CsrCells& cells = layout.cells;
  const int64_t padding = PaddedShards(cells.num_shards) - cells.num_shards;
  int32_t* pointer = arrays.row_pointers;
  for (int64_t cell = 0; cell < cells.size(); ++cell) {
    const int64_t end = layout.ends[cell];
    const int64_t next = AlignCsr(end);
    *pointer++ = static_cast<int32_t>(end);
    std::fill(arrays.sample_ids + end, arrays.sample_ids + next, kFillId);
    std::fill(arrays.token_ids + end, arrays.token_ids + next, kFillId);
    std::fill(arrays.gains + end, arrays.gains + next, kFillGain);
    if (arrays.positions) {
      std::fill(arrays.positions + end, arrays.positions + next, kFillId);
    }
    if ((cell + 1) % cells.num_shards == 0) {
      pointer = std::fill_n(pointer, padding, static_cast<int32_t>(next));
    }
  }
}

}  // namespace tpu_embedding
