#include "tpu_v2_v4/engine_optimizers.h"

#include <cmath>
#include <string>

#include "absl/strings/str_cat.h"
#include "core/row_options.h"
#include "runtime/core_rules.h"
#include "tensorflow/core/platform/errors.h"

namespace tpu_embedding {

using tensorflow::tpu::OptimizationParameters;

namespace {

absl::Status Outside(const char* field, float value, const char* allowed) {
  return absl::InvalidArgumentError(
      absl::StrCat(field, " is ", value, ", but must be ", allowed, "."));
}

absl::Status CheckDecay(const char* field, float value) {
  if (value >= 0.0f && value <= 1.0f) return absl::OkStatus();
  return Outside(field, value, "in [0, 1]");
}

absl::Status CheckNotNegative(const char* field, float value) {
  if (value >= 0.0f && std::isfinite(value)) return absl::OkStatus();
  return Outside(field, value, "finite and >= 0");
}

absl::Status ReadNothing(const OptimizationParameters&, EngineTable*) {
  return absl::OkStatus();
}

absl::Status ReadAdagradMomentum(const OptimizationParameters& from,
                                 EngineTable* table) {
  const auto& p = from.adagrad_momentum();
  TF_RETURN_IF_ERROR(CheckNotNegative("momentum", p.momentum()));
  TF_RETURN_IF_ERROR(CheckDecay("beta2", p.beta2()));
  TF_RETURN_IF_ERROR(CheckNotNegative("epsilon", p.epsilon()));
  if (!(p.exponent() > 0.0f) || !std::isfinite(p.exponent())) {
    return Outside("exponent", p.exponent(), "finite and > 0");
  }
  table->hyperparameters = {p.momentum(), p.use_nesterov() ? 1.0f : 0.0f,
                            p.exponent(), p.beta2(), p.epsilon()};
  return absl::OkStatus();
}

absl::Status ReadFtrl(const OptimizationParameters& from, EngineTable* table) {
  const auto& p = from.ftrl();
  TF_RETURN_IF_ERROR(CheckNotNegative("l1", p.l1()));
  TF_RETURN_IF_ERROR(CheckNotNegative("l2", p.l2()));
  TF_RETURN_IF_ERROR(CheckNotNegative("beta", p.beta()));
  if (!(p.lr_power() <= 0.0f) || !std::isfinite(p.lr_power())) {
    return Outside("lr_power", p.lr_power(), "finite and <= 0");
  }
  table->hyperparameters = {p.lr_power(), p.l1(), p.l2(), p.beta(),
                            p.multiply_linear_by_lr() ? 1.0f : 0.0f};
  return absl::OkStatus();
}

absl::Status ReadAdam(const OptimizationParameters& from, EngineTable* table) {
  const auto& p = from.adam();
  TF_RETURN_IF_ERROR(CheckDecay("beta1", p.beta1()));
  TF_RETURN_IF_ERROR(CheckDecay("beta2", p.beta2()));
  TF_RETURN_IF_ERROR(CheckNotNegative("epsilon", p.epsilon()));
  if (p.use_non_lazy_adam() && !table->accumulates) {
    return absl::InvalidArgumentError(
        "use_non_lazy_adam needs gradient accumulation, but "
        "`gradient_accumulation_status` is DISABLED.");
  }
  table->hyperparameters = {p.beta1(), p.beta2(), p.epsilon(),
                            p.use_sum_inside_sqrt() ? 1.0f : 0.0f};
  table->options->all_rows = p.use_non_lazy_adam();
  return absl::OkStatus();
}

absl::Status ReadMomentum(const OptimizationParameters& from,
                          EngineTable* table) {
  const auto& p = from.momentum();
  TF_RETURN_IF_ERROR(CheckNotNegative("momentum", p.momentum()));
  table->hyperparameters = {p.momentum(), p.use_nesterov() ? 1.0f : 0.0f};
  return absl::OkStatus();
}

// Reads RMSProp, centered or not.
template <class Parameters>
absl::Status ReadRms(const Parameters& p, EngineTable* table) {
  TF_RETURN_IF_ERROR(CheckDecay("rho", p.rho()));
  TF_RETURN_IF_ERROR(CheckNotNegative("momentum", p.momentum()));
  TF_RETURN_IF_ERROR(CheckNotNegative("epsilon", p.epsilon()));
  table->hyperparameters = {p.rho(), p.momentum(), p.epsilon()};
  return absl::OkStatus();
}

absl::Status ReadRmsProp(const OptimizationParameters& from,
                         EngineTable* table) {
  return ReadRms(from.rms_prop(), table);
}

absl::Status ReadCenteredRmsProp(const OptimizationParameters& from,
                                 EngineTable* table) {
  return ReadRms(from.centered_rms_prop(), table);
}

absl::Status ReadAdadelta(const OptimizationParameters& from,
                          EngineTable* table) {
  const auto& p = from.adadelta();
  TF_RETURN_IF_ERROR(CheckDecay("rho", p.rho()));
  TF_RETURN_IF_ERROR(CheckNotNegative("epsilon", p.epsilon()));
  table->hyperparameters = {p.rho(), p.epsilon()};
  return absl::OkStatus();
}

absl::Status ReadProximalAdagrad(const OptimizationParameters& from,
                                 EngineTable* table) {
  const auto& p = from.proximal_adagrad();
  TF_RETURN_IF_ERROR(CheckNotNegative("l1", p.l1()));
  TF_RETURN_IF_ERROR(CheckNotNegative("l2", p.l2()));
  table->hyperparameters = {p.l1(), p.l2()};
  return absl::OkStatus();
}

absl::Status ReadProximalYogi(const OptimizationParameters& from,
                              EngineTable* table) {
  const auto& p = from.proximal_yogi();
  TF_RETURN_IF_ERROR(CheckDecay("beta1", p.beta1()));
  TF_RETURN_IF_ERROR(CheckDecay("beta2", p.beta2()));
  TF_RETURN_IF_ERROR(CheckNotNegative("epsilon", p.epsilon()));
  TF_RETURN_IF_ERROR(CheckNotNegative("l1", p.l1()));
  TF_RETURN_IF_ERROR(CheckNotNegative("l2", p.l2()));
  table->hyperparameters = {p.beta1(), p.beta2(), p.epsilon(), p.l1(), p.l2()};
  return absl::OkStatus();
}

absl::Status ReadFrequencyEstimator(const OptimizationParameters& from,
                                    EngineTable* table) {
  const auto& p = from.frequency_estimator();
  TF_RETURN_IF_ERROR(CheckDecay("tau", p.tau()));
  TF_RETURN_IF_ERROR(CheckNotNegative("max_delta", p.max_delta()));
  TF_RETURN_IF_ERROR(
      CheckNotNegative("outlier_threshold", p.outlier_threshold()));
  if (p.weight_exponent() != 0.0f) {
    return absl::UnimplementedError(
        absl::StrCat("weight_exponent is ", p.weight_exponent(),
                     ", but where it acts is not published: only 0 is known."));
  }
  table->hyperparameters = {p.tau(), p.max_delta(), p.outlier_threshold()};
  return absl::OkStatus();
}

std::string FieldName(OptimizationParameters::ParametersCase kind) {
  const auto* const field =
      OptimizationParameters::descriptor()->FindFieldByNumber(kind);
  return std::string(field->name());
}

}  // namespace

std::string EngineOptimizer::name() const { return FieldName(kind); }

const std::vector<EngineOptimizer>& EngineOptimizers() {
  using P = OptimizationParameters;
  static const auto* const optimizers = new std::vector<EngineOptimizer>{
      {P::kStochasticGradientDescent,
       "sgd",
       "StochasticGradientDescent",
       {},
       &ReadNothing},
      {P::kAdagrad, "adagrad", "Adagrad", {"accumulators"}, &ReadNothing},
      {P::kAdagradMomentum,
       "adagrad_momentum",
       "AdagradMomentum",
       {"accumulators", "momenta"},
       &ReadAdagradMomentum},
      {P::kAdam, "adam", "ADAM", {"momenta", "velocities"}, &ReadAdam},
      {P::kFtrl, "ftrl", "FTRL", {"accumulators", "linears"}, &ReadFtrl},
      {P::kMomentum, "momentum", "Momentum", {"momenta"}, &ReadMomentum},
      {P::kRmsProp, "rms_prop", "RMSProp", {"ms", "mom"}, &ReadRmsProp},
      {P::kCenteredRmsProp,
       "centered_rms_prop",
       "CenteredRMSProp",
       {"ms", "mom", "mg"},
       &ReadCenteredRmsProp},
      {P::kAdadelta,
       "adadelta",
       "Adadelta",
       {"accumulators", "updates"},
       &ReadAdadelta},
      {P::kProximalAdagrad,
       "proximal_adagrad",
       "ProximalAdagrad",
       {"accumulators"},
       &ReadProximalAdagrad},
      {P::kProximalYogi,
       "proximal_yogi",
       "ProximalYogi",
       {"v", "m"},
       &ReadProximalYogi},
      // Its rule is not published.
      {P::kMdlAdagradLight,
       "mdl_adagrad_light",
       "MDLAdagradLight",
       {"accumulators", "weights", "benefits"},
       nullptr},
      {P::kFrequencyEstimator,
       "frequency_estimator",
       "FrequencyEstimator",
       {"last_hit_step"},
       &ReadFrequencyEstimator},
  };
  return *optimizers;
}

absl::Status ReadOptimizer(const OptimizationParameters& from,
                           EngineTable* table) {
  const auto kind = from.parameters_case();
  if (kind == OptimizationParameters::PARAMETERS_NOT_SET) {
    return absl::InvalidArgumentError(
        "optimization_parameters has no optimizer: none of its `parameters` "
        "is set.");
  }
  table->optimizer = FieldName(kind);
  for (const EngineOptimizer& optimizer : EngineOptimizers()) {
    if (optimizer.kind != kind) continue;
    table->slots.assign(optimizer.slots.begin(), optimizer.slots.end());
    if (!optimizer.read) return absl::OkStatus();
    table->update = UpdateOf(optimizer.rule);
    const absl::Status status = optimizer.read(from, table);
    if (status.ok()) return status;
    return absl::Status(status.code(),
                        absl::StrCat("optimization_parameters.",
                                     table->optimizer, ".", status.message()));
  }
  return absl::UnimplementedError(absl::StrCat(
      "optimization_parameters.", table->optimizer,
      ": the software TPU has no such optimizer, as TensorFlow has no ops to "
      "load and retrieve its parameters."));
}

}  // namespace tpu_embedding
