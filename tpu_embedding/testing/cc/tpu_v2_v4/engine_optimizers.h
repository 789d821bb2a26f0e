// The optimizers of a TPUEmbeddingConfiguration.

#ifndef TPU_EMBEDDING_TESTING_CC_TPU_V2_V4_ENGINE_OPTIMIZERS_H_
#define TPU_EMBEDDING_TESTING_CC_TPU_V2_V4_ENGINE_OPTIMIZERS_H_

#include <string>
#include <vector>

#include "absl/status/status.h"
#include "tensorflow/core/protobuf/tpu/optimization_parameters.pb.h"
#include "tpu_v2_v4/engine/config.h"

namespace tpu_embedding {

struct EngineOptimizer {
  tensorflow::tpu::OptimizationParameters::ParametersCase kind;
  const char* rule;                // its name in the core
  const char* op;                  // in the names of its load and retrieve ops
  std::vector<const char*> slots;  // the inputs of its load op
  // Reads from the field what the header of the rule lists. Null if the core
  // has no rule. Errors name a field of the optimizer's message.
  absl::Status (*read)(const tensorflow::tpu::OptimizationParameters& from,
                       EngineTable* table);

  // Returns the field's name in OptimizationParameters.
  std::string name() const;
};

// Returns one row for each optimizer that has load and retrieve ops.
const std::vector<EngineOptimizer>& EngineOptimizers();

// Sets the optimizer of `table` with its slots and constants.
absl::Status ReadOptimizer(const tensorflow::tpu::OptimizationParameters& from,
                           EngineTable* table);

}  // namespace tpu_embedding

#endif  // TPU_EMBEDDING_TESTING_CC_TPU_V2_V4_ENGINE_OPTIMIZERS_H_
