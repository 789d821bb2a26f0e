// Finds the rules of the core by name.

#ifndef TPU_EMBEDDING_TESTING_CC_RUNTIME_CORE_RULES_H_
#define TPU_EMBEDDING_TESTING_CC_RUNTIME_CORE_RULES_H_

#include <string_view>

#include "core/update.h"

namespace tpu_embedding {

// Returns the update by the rule called `name`, or null if there is none.
UpdateFn UpdateOf(std::string_view name);

}  // namespace tpu_embedding

#endif  // TPU_EMBEDDING_TESTING_CC_RUNTIME_CORE_RULES_H_
