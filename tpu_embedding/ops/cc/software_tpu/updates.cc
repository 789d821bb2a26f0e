#include "software_tpu/updates.h"

#include <charconv>
#include <cstdlib>

#include "core/rules.h"

namespace tpu_embedding {

UpdateFn UpdateOf(std::string_view name) {
  const RuleEntry* const rule = FindRule(name);
  // TPUs hold float32, which `TableData` is unless told otherwise.
  return rule ? rule->UpdateOf(TableData()) : nullptr;
}

float OneMinus(float value) {
  char text[32];
  const auto [end, error] = std::to_chars(text, text + sizeof(text) - 1, value);
  *end = '\0';
  return static_cast<float>(1.0 - std::strtod(text, nullptr));
}

}  // namespace tpu_embedding
