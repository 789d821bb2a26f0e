#include "software_tpu/updates.h"

#include <charconv>
#include <cstdlib>

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
#include "core/optimizers/sgd.h"
#include "core/update-inl.h"

namespace tpu_embedding {
namespace {

struct NamedUpdate {
  std::string_view name;
  UpdateFn update;
};

template <class Rule>
constexpr NamedUpdate Named() {
  return {Rule::kName, &Update<Rule>};
}

// One row for each rule that an op of a TPU may ask for.
constexpr NamedUpdate kUpdates[] = {
    Named<Sgd>(),
    Named<Adagrad>(),
    Named<AdagradMomentum>(),
    Named<Adam>(),
    Named<Ftrl>(),
    Named<Momentum>(),
    Named<RmsProp>(),
    Named<CenteredRmsProp>(),
    Named<Adadelta>(),
    Named<ProximalAdagrad>(),
    Named<ProximalYogi>(),
    Named<FrequencyEstimator>(),
};

}  // namespace

UpdateFn UpdateOf(std::string_view name) {
  for (const NamedUpdate& named : kUpdates) {
    if (named.name == name) return named.update;
  }
  return nullptr;
}

float OneMinus(float value) {
  char text[32];
  const auto [end, error] = std::to_chars(text, text + sizeof(text) - 1, value);
  *end = '\0';
  return static_cast<float>(1.0 - std::strtod(text, nullptr));
}

}  // namespace tpu_embedding
