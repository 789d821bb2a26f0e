#include "core/lookup.h"

#include <algorithm>
#include <cmath>

#include "core/simd.h"

namespace tpu_embedding {
namespace {

// How many entries ahead a row is asked for: far enough to cover a miss to
// memory (~100 ns) with the work of the rows between.
constexpr int64_t kPrefetchDistance = 16;
constexpr int64_t kFloatsPerCacheLine = 16;

TPU_EMBEDDING_INLINE void PrefetchRow(const float* row, int64_t dim) {
  for (int64_t d = 0; d < dim; d += kFloatsPerCacheLine) {
    __builtin_prefetch(row + d, /*rw=*/0, /*locality=*/3);
  }
}

TPU_EMBEDDING_CLONES
void PlainLookup(const FeatureCsr& csr, const float* __restrict table,
                 int64_t dim, int64_t begin, int64_t end,
                 float* __restrict out) {
  const int64_t* rows = csr.rows.data();
  const float* gains = csr.gains.data();
  const int64_t* offsets = csr.offsets.data();
  const int64_t last = offsets[end];
  for (int64_t s = begin; s < end; ++s) {
    float* __restrict sum = out + s * dim;
    std::fill(sum, sum + dim, 0.0f);
    for (int64_t i = offsets[s]; i < offsets[s + 1]; ++i) {
      const int64_t ahead = std::min(i + kPrefetchDistance, last - 1);
      PrefetchRow(table + rows[ahead] * dim, dim);
      const float* __restrict row = table + rows[i] * dim;
      const float gain = gains[i];
      for (int64_t d = 0; d < dim; ++d) sum[d] += gain * row[d];
    }
  }
}

TPU_EMBEDDING_CLONES
void QuantizedLookup(const FeatureCsr& csr, const float* __restrict table,
                     int64_t dim, const Quantization& quantization,
                     int64_t begin, int64_t end, float* __restrict out) {
  const float lower = quantization.lower;
  const float upper = quantization.upper;
  const float step = (upper - lower) / (quantization.num_buckets - 1);
  for (int64_t s = begin; s < end; ++s) {
    float* __restrict sum = out + s * dim;
    std::fill(sum, sum + dim, 0.0f);
    for (int64_t i = csr.offsets[s]; i < csr.offsets[s + 1]; ++i) {
      const float* __restrict row = table + csr.rows[i] * dim;
      for (int64_t d = 0; d < dim; ++d) {
        const float x = std::min(std::max(row[d], lower), upper);
        const float level = std::floor((x - lower) / step + 0.5f);
        sum[d] += csr.gains[i] * (level * step + lower);
      }
    }
  }
}

}  // namespace

void Lookup(const FeatureCsr& csr, const float* table, int64_t dim,
            const Quantization& quantization, int64_t begin, int64_t end,
            float* out) {
  if (quantization.num_buckets) {
    QuantizedLookup(csr, table, dim, quantization, begin, end, out);
  } else {
    PlainLookup(csr, table, dim, begin, end, out);
  }
}

}  // namespace tpu_embedding
