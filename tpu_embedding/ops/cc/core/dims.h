// Loops over columns whose number is a compile-time constant, for common dims:
// fewer instructions between two rows keep more cache misses in flight. Each
// dim that the rules know as well makes them take a quarter longer to compile.

#ifndef TPU_EMBEDDING_OPS_CC_CORE_DIMS_H_
#define TPU_EMBEDDING_OPS_CC_CORE_DIMS_H_

#include <cstdint>
#include <type_traits>

#include "core/simd.h"

namespace tpu_embedding {

// The dim of a table as a constant; AnyDim stands for any dim.
template <int64_t kDim>
struct FixedDim {
  static constexpr int64_t Of(int64_t) { return kDim; }
};
struct AnyDim {
  static constexpr int64_t Of(int64_t dim) { return dim; }
};

// The dim that a loop compiled with F32xN knows. CPUs without AVX2 are rare, so
// on them all dims share the code for any dim.
template <class F32xN, class Dim>
using DimOn = std::conditional_t<kWidth<F32xN> <= 4, AnyDim, Dim>;

// The dim that the loops of an optimizer's rule know. GCC would unroll loops
// over 16 columns before it vectorizes them.
template <class Dim>
using DimOfRules =
    std::conditional_t<std::is_same_v<Dim, FixedDim<16>>, AnyDim, Dim>;

// Calls run(FixedDim<dim>()) or run(AnyDim()), which differ in speed, never in
// bits.
template <class Run>
void RunForDim(int64_t dim, const Run& run) {
  switch (dim) {
    case 16:
      return run(FixedDim<16>());
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
