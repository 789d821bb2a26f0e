// Every optimizer's rule by name, compiled once for all libraries.

#ifndef TPU_EMBEDDING_OPS_CC_CORE_RULES_H_
#define TPU_EMBEDDING_OPS_CC_CORE_RULES_H_

#include <array>
#include <string_view>
#include <variant>

#include "core/element.h"
#include "core/update.h"

namespace tpu_embedding {

struct RuleEntry {
  std::string_view name;
  int num_slots;
  bool slots_per_row;  // of width 1, else of the table's
  int num_hyperparameters;
  // One for each alternative of TableData, in their order.
  std::array<UpdateFn, std::variant_size_v<TableData>> updates;

  UpdateFn UpdateOf(const TableData& table) const {
    return updates[table.index()];
  }
};

// The rule called `name`; null where there is none.
const RuleEntry* FindRule(std::string_view name);

}  // namespace tpu_embedding

#endif  // TPU_EMBEDDING_OPS_CC_CORE_RULES_H_
