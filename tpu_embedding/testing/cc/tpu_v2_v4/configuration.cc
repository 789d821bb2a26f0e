#include "tpu_v2_v4/configuration.h"

#include <cmath>
#include <memory>
#include <set>
#include <string>
#include <utility>

#include "absl/strings/str_cat.h"
#include "core/feature.h"
#include "core/row_options.h"
#include "tensorflow/core/platform/errors.h"
#include "tensorflow/core/protobuf/tpu/tpu_embedding_configuration.pb.h"
#include "tensorflow/core/tpu/tpu_embedding_optimization_parameters_utils.h"
#include "tpu_v2_v4/engine_optimizers.h"

namespace tpu_embedding {
namespace {

using tensorflow::tpu::ClippingLimits;
using tensorflow::tpu::OptimizationParameters;
using tensorflow::tpu::TPUEmbeddingConfiguration;

template <class... Parts>
absl::Status Invalid(const Parts&... parts) {
  return absl::InvalidArgumentError(absl::StrCat(parts...));
}

// Prefixes the text of `status` with `place`.
absl::Status At(const std::string& place, const absl::Status& status) {
  if (status.ok()) return status;
  return absl::Status(status.code(),
                      absl::StrCat("TPUEmbeddingConfiguration: ", place, ": ",
                                   status.message()));
}

absl::Status CheckPositive(const char* field, int64_t value) {
  if (value > 0) return absl::OkStatus();
  return Invalid(field, " is ", value, ", but must be > 0.");
}

absl::Status ReadLimits(const char* field, const ClippingLimits& limits,
                        float* lower, float* upper) {
  if (limits.has_lower()) *lower = limits.lower().value();
  if (limits.has_upper()) *upper = limits.upper().value();
  if (*lower <= *upper) return absl::OkStatus();
  return Invalid("optimization_parameters.", field, " has lower ", *lower,
                 " and upper ", *upper, "; lower must not be above upper.");
}

absl::Status ReadRate(const OptimizationParameters& from, EngineTable* table) {
  const auto& rate = from.learning_rate();
  if (rate.has_constant()) {
    table->rate = rate.constant();
    if (std::isfinite(table->rate)) return absl::OkStatus();
    return Invalid("optimization_parameters.learning_rate.constant is ",
                   table->rate, ", but must be finite.");
  }
  if (!rate.has_dynamic()) {
    return Invalid(
        "optimization_parameters.learning_rate has neither `constant` nor "
        "`dynamic`.");
  }
  table->rate_tag = rate.dynamic().tag();
  if (table->rate_tag >= 0) return absl::OkStatus();
  return Invalid("optimization_parameters.learning_rate.dynamic.tag is ",
                 table->rate_tag, ", but must be >= 0.");
}

absl::Status ReadQuantization(const OptimizationParameters& from,
                              Quantization* quantization) {
  const auto& simulated = from.simulated_quantization();
  if (!simulated.enabled()) return absl::OkStatus();
  const auto& limits = simulated.clipping_limits();
  if (!limits.has_lower() || !limits.has_upper() ||
      !(limits.lower().value() < limits.upper().value()) ||
      simulated.num_buckets() < 2) {
    return Invalid(
        "optimization_parameters.simulated_quantization needs "
        "`clipping_limits` with lower < upper, and `num_buckets` >= 2.");
  }
  *quantization = {simulated.num_buckets(), limits.lower().value(),
                   limits.upper().value()};
  return absl::OkStatus();
}

absl::Status ReadOptions(const OptimizationParameters& from,
                         RowOptions* options) {
  TF_RETURN_IF_ERROR(ReadLimits("clipping_limits", from.clipping_limits(),
                                &options->clip_weight_min,
                                &options->clip_weight_max));
  TF_RETURN_IF_ERROR(
      ReadLimits("gradient_clipping_limits", from.gradient_clipping_limits(),
                 &options->clip_gradient_min, &options->clip_gradient_max));
  options->weight_decay_factor = from.weight_decay_factor();
  options->multiply_decay_by_rate =
      from.multiply_weight_decay_factor_by_learning_rate();
  if (options->weight_decay_factor >= 0.0f &&
      std::isfinite(options->weight_decay_factor)) {
    return absl::OkStatus();
  }
  return Invalid("optimization_parameters.weight_decay_factor is ",
                 options->weight_decay_factor,
                 ", but must be finite and >= 0.");
}

absl::Status ReadTable(const TPUEmbeddingConfiguration::TableDescriptor& from,
                       EngineTable* table) {
  table->name = from.name();
  table->num_rows = from.vocabulary_size();
  table->dim = from.dimension();
  if (table->name.empty()) return Invalid("name is empty.");
  TF_RETURN_IF_ERROR(CheckPositive("vocabulary_size", table->num_rows));
  TF_RETURN_IF_ERROR(CheckPositive("dimension", table->dim));
  if (table->num_rows > kMaxRows) {
    return Invalid("vocabulary_size is ", table->num_rows,
                   ", but must be at most ", kMaxRows, ".");
  }
  const OptimizationParameters& parameters = from.optimization_parameters();
  if (parameters.parameters_case() ==
      OptimizationParameters::PARAMETERS_NOT_SET) {
    return ReadOptimizer(parameters, table);
  }
  TF_RETURN_IF_ERROR(tensorflow::tpu::UseGradientAccumulation(
      parameters, &table->accumulates));
  TF_RETURN_IF_ERROR(ReadRate(parameters, table));
  table->options = std::make_shared<RowOptions>();
  TF_RETURN_IF_ERROR(ReadOptions(parameters, table->options.get()));
  TF_RETURN_IF_ERROR(ReadQuantization(parameters, &table->quantization));
  return ReadOptimizer(parameters, table);
}

absl::Status ReadTables(const TPUEmbeddingConfiguration& from,
                        EngineConfig* config) {
  if (from.table_descriptor().empty()) {
    return At("table_descriptor", Invalid("there is none."));
  }
  std::set<std::string> names;
  for (int t = 0; t < from.table_descriptor_size(); ++t) {
    const std::string place = absl::StrCat("table_descriptor[", t, "]");
    EngineTable table;
    TF_RETURN_IF_ERROR(At(place, ReadTable(from.table_descriptor(t), &table)));
    if (!names.insert(table.name).second) {
      return At(place, Invalid("another table is called ", table.name, "."));
    }
    config->tables.push_back(std::move(table));
  }
  return absl::OkStatus();
}

// Counts the rates that come with the gradients and are numbered by tags.
absl::Status CountRates(EngineConfig* config) {
  std::set<int> tags;
  for (const EngineTable& table : config->tables) {
    if (table.rate_tag >= 0) tags.insert(table.rate_tag);
  }
  config->num_rates = tags.size();
  if (tags.empty() || *tags.rbegin() + 1 == config->num_rates) {
    return absl::OkStatus();
  }
  return At("learning_rate.dynamic.tag",
            Invalid("the largest is ", *tags.rbegin(), ", but there are ",
                    tags.size(), " different ones. They must be 0, 1, 2, ..."));
}

absl::Status ReadFeature(
    const TPUEmbeddingConfiguration::FeatureDescriptor& from, int index,
    int num_tables, EngineOutput* output) {
  output->name =
      from.name().empty() ? absl::StrCat("number ", index) : from.name();
  output->table = from.table_id();
  if (output->table < 0 || output->table >= num_tables) {
    return Invalid("table_id is ", output->table, ", but must be in [0, ",
                   num_tables, ").");
  }
  output->shape.assign(from.input_shape().begin(), from.input_shape().end());
  if (output->shape.empty()) return Invalid("input_shape is empty.");
  int64_t product = 1;
  for (const int64_t axis : output->shape) {
    TF_RETURN_IF_ERROR(CheckPositive("an axis of input_shape", axis));
    product *= axis;
    if (product > kMaxSamples) {
      return Invalid("input_shape has more than ", kMaxSamples, " samples.");
    }
  }
  return absl::OkStatus();
}

absl::Status ReadFeatures(const TPUEmbeddingConfiguration& from,
                          EngineConfig* config) {
  for (int f = 0; f < from.feature_descriptor_size(); ++f) {
    EngineOutput output;
    TF_RETURN_IF_ERROR(At(absl::StrCat("feature_descriptor[", f, "]"),
                          ReadFeature(from.feature_descriptor(f), f,
                                      config->tables.size(), &output)));
    config->outputs.push_back(std::move(output));
  }
  if (from.batch_size_per_tensor_core() != 0) {
    return At("batch_size_per_tensor_core",
              Invalid("it belongs to configurations without "
                      "`feature_descriptor`, and this one has them."));
  }
  for (int t = 0; t < from.table_descriptor_size(); ++t) {
    if (from.table_descriptor(t).num_features() == 0) continue;
    return At(absl::StrCat("table_descriptor[", t, "].num_features"),
              Invalid("it belongs to configurations without "
                      "`feature_descriptor`, and this one has them."));
  }
  return absl::OkStatus();
}

// Reads the older form, in which each table says how many features it has.
absl::Status ReadTableOutputs(const TPUEmbeddingConfiguration& from,
                              EngineConfig* config) {
  config->batch_size = from.batch_size_per_tensor_core();
  TF_RETURN_IF_ERROR(
      At("without feature_descriptor",
         CheckPositive("batch_size_per_tensor_core", config->batch_size)));
  for (int t = 0; t < from.table_descriptor_size(); ++t) {
    const int64_t num_features = from.table_descriptor(t).num_features();
    TF_RETURN_IF_ERROR(At(absl::StrCat("table_descriptor[", t, "]"),
                          CheckPositive("num_features", num_features)));
    const int64_t samples = config->batch_size * num_features;
    if (samples > kMaxSamples) {
      return At(absl::StrCat("table_descriptor[", t, "].num_features"),
                Invalid("there are more than ", kMaxSamples, " samples."));
    }
    config->outputs.push_back({config->tables[t].name, t, {samples}});
  }
  return absl::OkStatus();
}

absl::Status ReadSystem(const TPUEmbeddingConfiguration& from,
                        EngineConfig* config) {
  config->num_hosts = from.num_hosts();
  config->num_cores = from.num_tensor_cores();
  TF_RETURN_IF_ERROR(CheckPositive("num_hosts", config->num_hosts));
  TF_RETURN_IF_ERROR(CheckPositive("num_tensor_cores", config->num_cores));
  if (from.spmd_sharding().enabled()) {
    config->cores_per_replica = from.spmd_sharding().num_cores_per_replica();
    TF_RETURN_IF_ERROR(CheckPositive("spmd_sharding.num_cores_per_replica",
                                     config->cores_per_replica));
    if (config->num_cores % config->cores_per_replica != 0) {
      return Invalid("num_tensor_cores is ", config->num_cores,
                     ", but must be a multiple of "
                     "spmd_sharding.num_cores_per_replica, ",
                     config->cores_per_replica, ".");
    }
  }
  config->sharding = from.sharding_strategy() == TPUEmbeddingConfiguration::MOD
                         ? HostSharding::kMod
                         : HostSharding::kDiv;
  config->pipelined = from.pipeline_execution_with_tensor_core();
  config->training = from.mode() == TPUEmbeddingConfiguration::TRAINING;
  if (config->training || from.mode() == TPUEmbeddingConfiguration::INFERENCE) {
    return absl::OkStatus();
  }
  return Invalid("mode must be TRAINING or INFERENCE.");
}

}  // namespace

absl::Status ReadEngineConfig(const std::string& serialized,
                              EngineConfig* config) {
  TPUEmbeddingConfiguration from;
  if (!from.ParseFromString(serialized)) {
    return Invalid("`config` is not a serialized TPUEmbeddingConfiguration.");
  }
  TF_RETURN_IF_ERROR(ReadTables(from, config));
  TF_RETURN_IF_ERROR(CountRates(config));
  TF_RETURN_IF_ERROR(At("the system", ReadSystem(from, config)));
  return from.feature_descriptor().empty() ? ReadTableOutputs(from, config)
                                           : ReadFeatures(from, config);
}

}  // namespace tpu_embedding
