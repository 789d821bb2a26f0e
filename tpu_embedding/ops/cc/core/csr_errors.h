// The texts of errors that concern a whole table of a batch.

#ifndef TPU_EMBEDDING_OPS_CC_CORE_CSR_ERRORS_H_
#define TPU_EMBEDDING_OPS_CC_CORE_CSR_ERRORS_H_

#include <cstdint>
#include <string>

#include "core/text.h"

namespace tpu_embedding {

inline std::string PartitionLimitText(const std::string& table, int64_t shard,
                                      bool unique, int64_t count,
                                      int64_t limit) {
  const char* what = unique ? "unique ids" : "ids";
  const char* option =
      unique ? "max_unique_ids_per_table" : "max_ids_per_table";
  return Concat(
      "Table ", table, ": a SparseCore asks SparseCore ", shard, " for ", count,
      " ", what, ", but the limit is ", limit, " (", option,
      "). Raise the limit (compute_sparse_core_requirements ",
      "tells what a batch needs), make the batch smaller, or spread the ",
      "ids over more devices.");
}

inline std::string IdBufferText(const std::string& table, int64_t required,
                                int64_t capacity) {
  return Concat("Table ", table, ": the batch needs an id buffer of ", required,
                " places, padding included, but there are ", capacity,
                " (max_ids_per_chip_per_sample times the samples). Raise ",
                "max_ids_per_chip_per_sample, make the batch smaller, or set ",
                "allow_id_dropping=True to go on without the ids that do not ",
                "fit.");
}

inline std::string IdBufferSizeText(const std::string& table,
                                    int64_t capacity) {
  return Concat("Table ", table, ": max_ids_per_chip_per_sample times the ",
                "samples is ", capacity, ", which must be a multiple of 8 and ",
                "below 2147483648. Change max_ids_per_chip_per_sample or the ",
                "size of the batch.");
}

inline std::string BucketLimitText(const std::string& table, int64_t shard,
                                   int bucket, int64_t ids, int64_t unique) {
  return Concat(
      "Table ", table, ": a SparseCore asks SparseCore ", shard, " for ", ids,
      " ids, ", unique, " of them unique, in bucket ", bucket,
      " of 64. Minibatches cannot split a bucket. "
      "These numbers exceed the limits of the table (max_ids_per_table, ",
      "max_unique_ids_per_table). Raise them or make the batch "
      "smaller.");
}

inline std::string MinibatchesText(const std::string& table, int64_t count,
                                   int64_t limit) {
  return Concat("Table ", table, ": the batch has to be cut into ", count,
                " minibatches, but at most ", limit, " are allowed ",
                "(max_minibatches). Raise max_ids_per_table and ",
                "max_unique_ids_per_table, or make the batch smaller.");
}

}  // namespace tpu_embedding

#endif  // TPU_EMBEDDING_OPS_CC_CORE_CSR_ERRORS_H_
