// What the rows of a table are stored as. All arithmetic is float32.

#ifndef TPU_EMBEDDING_OPS_CC_CORE_ELEMENT_H_
#define TPU_EMBEDDING_OPS_CC_CORE_ELEMENT_H_

#include <cstdint>
#include <variant>

namespace tpu_embedding {

// The upper half of a float32.
struct BFloat16 {
  uint16_t bits;
};

// A table [V, dim], row-major, by the type of its elements. What reads or
// writes rows is a template over that type and is chosen by this once for a
// table.
using TableData = std::variant<float*, BFloat16*>;
using ConstTableData = std::variant<const float*, const BFloat16*>;

}  // namespace tpu_embedding

#endif  // TPU_EMBEDDING_OPS_CC_CORE_ELEMENT_H_
