#include "runtime/core_rules.h"

#include "core/rules.h"

namespace tpu_embedding {

UpdateFn UpdateOf(std::string_view name) {
  const RuleEntry* const rule = FindRule(name);
  // TPUs hold float32, which is the default of `TableData`.
  return rule ? rule->UpdateOf(TableData()) : nullptr;
}

}  // namespace tpu_embedding
