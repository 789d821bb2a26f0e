// The update rules of all optimizers, by name.

#ifndef TPU_EMBEDDING_OPS_CC_CORE_RULES_H_
#define TPU_EMBEDDING_OPS_CC_CORE_RULES_H_

#include <array>
#include <string_view>

#include "core/element.h"
#include "core/update.h"

namespace tpu_embedding {

struct RuleEntry {
  std::string_view name;
  int num_slots;
  bool slots_per_row;  // Slots have width 1, else the width of the table.
  int num_hyperparameters;
  // One function for each alternative of TableData, in their order.
  std::array<UpdateFn, std::variant_size_v<TableData>> updates;

  UpdateFn UpdateOf(const TableData& table) const {
    return updates[table.index()];
  }
};

// Returns the rule called `name`, or null.
const RuleEntry* FindRule(std::string_view name);

}  // namespace tpu_embedding

#endif  // TPU_EMBEDDING_OPS_CC_CORE_RULES_H_
