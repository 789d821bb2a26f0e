// The types that the rows of a table are stored as. All arithmetic is float32.

#ifndef TPU_EMBEDDING_OPS_CC_CORE_ELEMENT_H_
#define TPU_EMBEDDING_OPS_CC_CORE_ELEMENT_H_

#include <array>
#include <cstdint>
#include <variant>

namespace tpu_embedding {

// The upper half of a float32.
struct BFloat16 {
  uint16_t bits;
};

// A table of int8: column d of row r is
//   grids[2 * r + 1] + grids[2 * r] * (codes[r * dim + d] - 127.5).
struct ConstInt8Table {
  const uint8_t* codes;   // [V, dim]
  const BFloat16* grids;  // [V, 2], scale and offset
};
struct Int8Table {
  uint8_t* codes;
  BFloat16* grids;

  operator ConstInt8Table() const { return {codes, grids}; }
};

// A table [V, dim], row-major, by how its rows are stored. Code that reads or
// writes rows is a template over the alternative, chosen once for each table.
using TableData = std::variant<float*, BFloat16*, Int8Table>;
using ConstTableData =
    std::variant<const float*, const BFloat16*, ConstInt8Table>;

// The alternatives of TableData, in their order.
enum class RowStorage { kFloat32, kBFloat16, kInt8 };

// Returns the bytes of a row in each array of a table; 0 means no such array.
inline std::array<int64_t, 2> ArrayBytes(RowStorage storage, int64_t dim) {
  switch (storage) {
    case RowStorage::kBFloat16:
      return {2 * dim, 0};
    case RowStorage::kInt8:
      return {dim, 4};
    default:
      return {4 * dim, 0};
  }
}

// Returns the table whose arrays begin at `arrays`.
inline ConstTableData TableAt(RowStorage storage,
                              const std::array<const void*, 2>& arrays) {
  switch (storage) {
    case RowStorage::kBFloat16:
      return static_cast<const BFloat16*>(arrays[0]);
    case RowStorage::kInt8:
      return ConstInt8Table{static_cast<const uint8_t*>(arrays[0]),
                            static_cast<const BFloat16*>(arrays[1])};
    default:
      return static_cast<const float*>(arrays[0]);
  }
}
inline TableData TableAt(RowStorage storage,
                         const std::array<void*, 2>& arrays) {
  switch (storage) {
    case RowStorage::kBFloat16:
      return static_cast<BFloat16*>(arrays[0]);
    case RowStorage::kInt8:
      return Int8Table{static_cast<uint8_t*>(arrays[0]),
                       static_cast<BFloat16*>(arrays[1])};
    default:
      return static_cast<float*>(arrays[0]);
  }
}

}  // namespace tpu_embedding

#endif  // TPU_EMBEDDING_OPS_CC_CORE_ELEMENT_H_
