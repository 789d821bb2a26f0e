#include "core/rules.h"

#include "core/optimizers/all.h"
#include "core/update-inl.h"

namespace tpu_embedding {
namespace {

template <class Rule, class... Tables>
constexpr RuleEntry EntryOf(std::variant<Tables...>*) {
  return {Rule::kName,
          Rule::kNumSlots,
          Rule::kSlotsPerRow,
          Rule::kNumHyperparameters,
          {&Update<Rule, Tables>...}};
}

template <class Rule>
constexpr RuleEntry Entry() {
  return EntryOf<Rule>(static_cast<TableData*>(nullptr));
}

template <class... Rules>
constexpr std::array<RuleEntry, sizeof...(Rules)> Entries(RuleList<Rules...>) {
  return {Entry<Rules>()...};
}

constexpr auto kRules = Entries(AllRules());

}  // namespace

const RuleEntry* FindRule(std::string_view name) {
  for (const RuleEntry& entry : kRules) {
    if (name == entry.name) return &entry;
  }
  return nullptr;
}

}  // namespace tpu_embedding
