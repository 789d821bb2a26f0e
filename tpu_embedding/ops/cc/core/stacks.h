// A stack: the batches of several features as one plain CSR, whose rows are
// numbered through the tables of the stack.
//
//   films [[7, 2], [1]] (8 rows) and users [[], [3]]:
//     row_pointers: [ 0,    2, 3, 3, 4 ]
//     sample_ids:   [ 0, 0, 1,      3 ]
//     token_ids:    [ 7, 2, 1,     11 ]
//
// A growing table is a stack of its own, whose tokens are ids.

#ifndef TPU_EMBEDDING_OPS_CC_CORE_STACKS_H_
#define TPU_EMBEDDING_OPS_CC_CORE_STACKS_H_

#include <cstdint>
#include <string>
#include <vector>

#include "core/feature.h"

namespace tpu_embedding {

// One feature of a stack, in the order in which samples are stacked.
struct StackedFeature {
  std::string path;
  int64_t row_offset = 0;  // row 0 of its table
  int64_t vocabulary_size = 0;
};

// Where a stack is written to.
struct StackOutput {
  int32_t* row_pointers = nullptr;  // [num_samples + 1]
  int32_t* sample_ids = nullptr;    // [num_entries]
  int32_t* token_ids = nullptr;     // [num_entries], or null
  int64_t* ids = nullptr;           // [num_entries], for a growing table
  float* gains = nullptr;           // [num_entries]
};

// A stack that comes back from the user and may hold anything.
struct StackInput {
  std::string name;
  const int32_t* row_pointers = nullptr;
  int64_t num_row_pointers = 0;
  const int32_t* token_ids = nullptr;
  const int64_t* ids = nullptr;
  int64_t num_tokens = 0;
  const float* gains = nullptr;
  int64_t num_gains = 0;
};

void WriteStack(const std::vector<StackedFeature>& features,
                const std::vector<const FeatureCsr*>& batches,
                const StackOutput& output);

// Undoes WriteStack. `batches[f]->output_shape` says how many samples feature f
// has; the other fields are written. After an error, they are unspecified.
Error ReadStack(const std::vector<StackedFeature>& features,
                const StackInput& input,
                const std::vector<FeatureCsr*>& batches);

}  // namespace tpu_embedding

#endif  // TPU_EMBEDDING_OPS_CC_CORE_STACKS_H_
