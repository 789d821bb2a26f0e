// Loops over columns whose number the compiler knows, for the dims that many
// tables have: fewer instructions between two rows that are asked for. Not for
// 16 and less, where it unrolls them before it could make vectors of them.

#ifndef TPU_EMBEDDING_OPS_CC_CORE_DIMS_H_
#define TPU_EMBEDDING_OPS_CC_CORE_DIMS_H_

#include <cstdint>

namespace tpu_embedding {

// The dim of a table: a constant, or any.
template <int64_t kDim>
struct FixedDim {
  static constexpr int64_t Of(int64_t) { return kDim; }
};
struct AnyDim {
  static constexpr int64_t Of(int64_t dim) { return dim; }
};

// run(FixedDim<dim>()) or run(AnyDim()). They differ in speed, never in bits.
template <class Run>
void RunForDim(int64_t dim, const Run& run) {
  switch (dim) {
    case 32:
      return run(FixedDim<32>());
    case 64:
      return run(FixedDim<64>());
    case 128:
      return run(FixedDim<128>());
    default:
      return run(AnyDim());
  }
}

}  // namespace tpu_embedding

#endif  // TPU_EMBEDDING_OPS_CC_CORE_DIMS_H_
