// Finds and reads rows of tables, however they are stored.

#ifndef TPU_EMBEDDING_OPS_CC_CORE_ROWS_INL_H_
#define TPU_EMBEDDING_OPS_CC_CORE_ROWS_INL_H_

#include <algorithm>
#include <cstdint>
#include <variant>

#include "core/element.h"
#include "core/simd.h"
#include "core/weighted_sum-inl.h"

namespace tpu_embedding {

template <class Element>
constexpr int64_t RowBytes(const Element*, int64_t dim) {
  return dim * static_cast<int64_t>(sizeof(Element));
}
inline int64_t RowBytes(const ConstInt8Table&, int64_t dim) { return dim + 4; }

// Returns a row; `Load(row + d, ...)` reads its columns from d on.
template <class Element>
TPU_EMBEDDING_INLINE const Element* RowAt(const Element* table, int64_t row,
                                          int64_t dim) {
  return table + row * dim;
}
TPU_EMBEDDING_INLINE Int8Row RowAt(const ConstInt8Table& table, int64_t row,
                                   int64_t dim) {
  Int8Row found;
  found.codes = table.codes + row * dim;
  Load(table.grids + 2 * row, &found.scale);
  Load(table.grids + 2 * row + 1, &found.offset);
  return found;
}

template <int kLocality = 3, class Element>
TPU_EMBEDDING_INLINE void PrefetchRow(const Element* table, int64_t row,
                                      int64_t dim) {
  Prefetch<kLocality>(table + row * dim, dim);
}
template <int kLocality = 3>
TPU_EMBEDDING_INLINE void PrefetchRow(const ConstInt8Table& table, int64_t row,
                                      int64_t dim) {
  Prefetch<kLocality>(table.codes + row * dim, dim);
  Prefetch<kLocality>(table.grids + 2 * row, 2);
}

// Sets out[d] to column d of the row, for d < dim. A body of simd.h.
struct ExpandBody {
  template <class F32xN, class Row>
  TPU_EMBEDDING_INLINE static void Run(const Row row, int64_t dim,
                                       float* __restrict out) {
    constexpr int64_t kLanes = kWidth<F32xN>;
    if (dim < kLanes) {
      for (int64_t d = 0; d < dim; ++d) Load(row + d, out + d);
      return;
    }
    for (int64_t d = 0; d < dim; d += kLanes) {
      const int64_t begin = std::min(d, dim - kLanes);
      F32xN columns;
      Load(row + begin, &columns);
      Store(columns, out + begin);
    }
  }
};

// Writes the values of a row, [dim].
template <class AnyTableData>
void ReadRow(const AnyTableData& table, int64_t row, int64_t dim, float* out) {
  std::visit(
      [&](const auto& rows) {
        RunOnThisCpu<ExpandBody>(RowAt(rows, row, dim), dim, out);
      },
      table);
}

}  // namespace tpu_embedding

#endif  // TPU_EMBEDDING_OPS_CC_CORE_ROWS_INL_H_
