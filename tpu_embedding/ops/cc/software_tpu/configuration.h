// Reads a serialised TPUEmbeddingConfiguration.

#ifndef TPU_EMBEDDING_OPS_CC_SOFTWARE_TPU_CONFIGURATION_H_
#define TPU_EMBEDDING_OPS_CC_SOFTWARE_TPU_CONFIGURATION_H_

#include <string>

#include "absl/status/status.h"
#include "software_tpu/engine/config.h"

namespace tpu_embedding {

// Checks all of `serialized` that an engine acts on. An error names the field.
absl::Status ReadEngineConfig(const std::string& serialized,
                              EngineConfig* config);

}  // namespace tpu_embedding

#endif  // TPU_EMBEDDING_OPS_CC_SOFTWARE_TPU_CONFIGURATION_H_
