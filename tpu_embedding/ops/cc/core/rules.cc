#include "core/rules.h"

#include "core/optimizers/adadelta.h"
#include "core/optimizers/adagrad.h"
#include "core/optimizers/adagrad_momentum.h"
#include "core/optimizers/adam.h"
#include "core/optimizers/centered_rms_prop.h"
#include "core/optimizers/frequency_estimator.h"
#include "core/optimizers/ftrl.h"
#include "core/optimizers/momentum.h"
#include "core/optimizers/proximal_adagrad.h"
#include "core/optimizers/proximal_yogi.h"
#include "core/optimizers/rms_prop.h"
#include "core/optimizers/rowwise_adagrad.h"
#include "core/optimizers/sgd.h"
#include "core/update-inl.h"

namespace tpu_embedding {
namespace {

template <class Rule, class... Elements>
constexpr RuleEntry EntryOf(std::variant<Elements*...>*) {
  return {Rule::kName,
          Rule::kNumSlots,
          Rule::kSlotsPerRow,
          Rule::kNumHyperparameters,
          {&Update<Rule, Elements>...}};
}

template <class Rule>
constexpr RuleEntry Entry() {
  return EntryOf<Rule>(static_cast<TableData*>(nullptr));
}

// One row for each optimizer; the one place that lists them.
constexpr RuleEntry kRules[] = {
    Entry<Sgd>(),
    Entry<Adagrad>(),
    Entry<RowwiseAdagrad>(),
    Entry<Adam>(),
    Entry<Ftrl>(),
    Entry<AdagradMomentum>(),
    Entry<Momentum>(),
    Entry<RmsProp>(),
    Entry<CenteredRmsProp>(),
    Entry<Adadelta>(),
    Entry<ProximalAdagrad>(),
    Entry<ProximalYogi>(),
    Entry<FrequencyEstimator>(),
};

}  // namespace

const RuleEntry* FindRule(std::string_view name) {
  for (const RuleEntry& entry : kRules) {
    if (name == entry.name) return &entry;
  }
  return nullptr;
}

}  // namespace tpu_embedding
