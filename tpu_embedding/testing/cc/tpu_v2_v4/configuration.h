// Reads a serialized TPUEmbeddingConfiguration.

#ifndef TPU_EMBEDDING_TESTING_CC_TPU_V2_V4_CONFIGURATION_H_
#define TPU_EMBEDDING_TESTING_CC_TPU_V2_V4_CONFIGURATION_H_

#include <string>

#include "absl/status/status.h"
#include "tpu_v2_v4/engine/config.h"

namespace tpu_embedding {

// Checks all of `serialized` that an engine acts on. An error names the field.
absl::Status ReadEngineConfig(const std::string& serialized,
                              EngineConfig* config);

}  // namespace tpu_embedding

#endif  // TPU_EMBEDDING_TESTING_CC_TPU_V2_V4_CONFIGURATION_H_
