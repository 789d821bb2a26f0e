// Checks the inputs of one enqueue op and makes them ready for lookup.

#ifndef TPU_EMBEDDING_TESTING_CC_TPU_V2_V4_ENGINE_BATCH_H_
#define TPU_EMBEDDING_TESTING_CC_TPU_V2_V4_ENGINE_BATCH_H_

#include <cstdint>
#include <vector>

#include "core/feature.h"
#include "core/parallel.h"
#include "core/prepared_batch.h"
#include "tpu_v2_v4/engine/config.h"

namespace tpu_embedding {

// One input of an enqueue op, as the op has it.
struct EnqueueInput {
  int table = -1;                  // -1: the table of the output
  const int32_t* ids32 = nullptr;  // one of the two is set
  const int64_t* ids64 = nullptr;
  int64_t num_ids = 0;
  std::vector<float> weights;  // empty: all are 1
  // Structures of rank 1 are row splits, or empty: one id for each sample.
  // Those of rank 2 have `columns` indices for each id.
  std::vector<int64_t> structure;
  int structure_rank = 1;
  int64_t columns = 0;
  int64_t max_sequence_length = 0;
  int64_t num_features = 1;  // rows of the input for each sample of the batch

  int64_t id(int64_t i) const { return ids32 ? ids32[i] : ids64[i]; }
};

// All inputs of one enqueue op.
struct EnqueueInputs {
  std::vector<EnqueueInput> inputs;
  std::vector<Combiner> combiners;  // by table; empty: all are sums
  bool training = false;
};

// One core's batch.
struct CoreBatch {
  bool training = false;
  PreparedBatch prepared;  // its features are the engine's outputs
};

// Checks `enqueued` against `config` and writes `batch`.
Error BuildBatch(const EngineConfig& config, const EnqueueInputs& enqueued,
                 const ParallelFor& parallel_for, CoreBatch* batch);

}  // namespace tpu_embedding

#endif  // TPU_EMBEDDING_TESTING_CC_TPU_V2_V4_ENGINE_BATCH_H_
