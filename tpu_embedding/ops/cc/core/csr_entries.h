// From the samples of one feature to entries with a place in a stacked table.
//
// A stacked table is cut over all SparseCores of all devices: row r lives on
// shard r % num_shards, at r / num_shards there (its token). Within a stack a
// table may be rotated, so that the first rows of all tables do not crowd on
// one shard: id i is on shard (i + shift) % num_shards.
//
//   4 shards, shift 1     id:     0  1  2  3  4
//                         shard:  1  2  3  0  1
//                         token:  0  0  0  0  1   (+ first_token)

#ifndef TPU_EMBEDDING_OPS_CC_CORE_CSR_ENTRIES_H_
#define TPU_EMBEDDING_OPS_CC_CORE_CSR_ENTRIES_H_

#include <cstdint>
#include <string>

#include "core/buffer.h"
#include "core/feature.h"
#include "core/feature_rows.h"
#include "core/radix_sort.h"

namespace tpu_embedding {

// Where a table lies in its stack.
struct TablePlace {
  int64_t num_shards = 1;
  int64_t shift = 0;
  int64_t first_token = 0;  // of the table on each shard
  int64_t num_tokens = 0;   // rows of the table on each shard

  uint64_t num_keys() const { return uint64_t(num_shards) * num_tokens; }
};

struct CsrPayload {
  int32_t sample;  // within the SparseCore's part of the batch
  float gain;
};

// Entries of one table and one SparseCore. An entry's key is
// shard * num_tokens + token, so that keys order entries as the hardware
// wants them.
struct CsrEntries {
  explicit CsrEntries(int64_t capacity, bool keep_positions = false)
      : order(capacity),
        payloads(capacity),
        positions(keep_positions ? capacity : 0),
        keep_positions(keep_positions) {}

  // By key once sorted; `entry` indexes the arrays below.
  Buffer<KeyedEntry<uint32_t>> order;
  Buffer<CsrPayload> payloads;
  Buffer<int32_t> positions;  // in the sample, in input order, if kept
  bool keep_positions;
  int64_t size = 0;
};

// Samples [begin, end) of a feature; `first_sample` is what the first of them
// is called in `CsrPayload::sample`.
struct SampleRange {
  int64_t begin = 0;
  int64_t end = 0;
  int64_t first_sample = 0;
};

// How many entries the samples have, before any is dropped or merged.
int64_t CountEntries(const FeatureInput& input, const FeatureRows& rows,
                     const SampleRange& range);

// Appends the entries of the samples. Ids are checked. An id that follows
// itself in a sample makes one entry, unless positions are kept; the gain is
// the sum of the weights times the reciprocal of the divisor, in float32 and
// in this order, as Google's op computes it. `max_valency` is the most entries
// that a sample may have, or 0.
Error AppendEntries(const FeatureSpec& spec, const FeatureInput& input,
                    const FeatureRows& rows, const TablePlace& place,
                    const SampleRange& range, int64_t max_valency,
                    CsrEntries* entries);

// Checks the ids and weights of a whole input: those that the samples of a
// sequence leave out too.
Error CheckEntries(const FeatureSpec& spec, const FeatureInput& input,
                   const FeatureRows& rows);

}  // namespace tpu_embedding

#endif  // TPU_EMBEDDING_OPS_CC_CORE_CSR_ENTRIES_H_
