// The machine's limit for a lookup: sums the rows of bags, prefetched.

#include <stdint.h>
#include <string.h>

enum { kAhead = 16, kLine = 64 };

void gather(const float* table, int64_t dim, const int32_t* ids, int64_t bags,
            int64_t ids_per_bag, float* sums) {
  const int64_t size = bags * ids_per_bag;
  for (int64_t i = 0; i < size; ++i) {
    if (i + kAhead < size) {
      const char* next = (const char*)(table + ids[i + kAhead] * dim);
      for (int64_t at = 0; at < dim * (int64_t)sizeof(float); at += kLine) {
        __builtin_prefetch(next + at);
      }
    }
    const float* row = table + ids[i] * dim;
    float* sum = sums + i / ids_per_bag * dim;
    if (i % ids_per_bag == 0) memset(sum, 0, dim * sizeof(float));
    for (int64_t d = 0; d < dim; ++d) sum[d] += row[d];
  }
}
