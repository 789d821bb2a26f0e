// Computes activations: for each sample the sum of rows times gains.

#ifndef TPU_EMBEDDING_OPS_CC_CORE_LOOKUP_H_
#define TPU_EMBEDDING_OPS_CC_CORE_LOOKUP_H_

#include <cstdint>

#include "core/element.h"
#include "core/feature.h"

namespace tpu_embedding {

// Simulated quantization: each value is clipped to [lower, upper] and moved to
// the nearest of `num_buckets` levels before it is combined.
struct Quantization {
  int num_buckets = 0;  // 0: off
  float lower = 0.0f;
  float upper = 0.0f;
};

// Writes out[s, :] for s in [begin, end). `table` is [V, dim] and `out` is
// [num_samples, dim], both row-major.
void Lookup(const FeatureEntries& entries, const ConstTableData& table,
            int64_t dim, const Quantization& quantization, int64_t begin,
            int64_t end, float* out);

// Estimates the cycles to look up one feature of a batch: each id and each
// sample costs a constant plus a number that grows with the width.
inline int64_t LookupCycles(const FeatureEntries& entries, int64_t dim) {
  return (entries.rows->size() + entries.csr->num_samples()) * (20 + dim / 2);
}

}  // namespace tpu_embedding

#endif  // TPU_EMBEDDING_OPS_CC_CORE_LOOKUP_H_
