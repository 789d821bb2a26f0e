// LoadTPUEmbedding...Parameters and RetrieveTPUEmbedding...Parameters of every
// optimizer, and Load- and RetrieveAllTPUEmbeddingParameters.

#include <algorithm>
#include <cmath>
#include <limits>
#include <string>
#include <vector>

#include "absl/strings/str_cat.h"
#include "runtime/registration.h"
#include "runtime/workers.h"
#include "tensorflow/core/framework/op_kernel.h"
#include "tensorflow/core/tpu/tpu_embedding_optimization_parameters_utils.h"
#include "tpu_v2_v4/engine_optimizers.h"
#include "tpu_v2_v4/tpu_system.h"

namespace tpu_embedding {
namespace {

using tensorflow::OpInputList;
using tensorflow::OpKernel;
using tensorflow::OpKernelConstruction;
using tensorflow::OpKernelContext;
using tensorflow::OpOutputList;
using tensorflow::Tensor;
using tensorflow::TensorShape;

constexpr char kLoad[] = "LoadTPUEmbedding";
constexpr char kRetrieve[] = "RetrieveTPUEmbedding";
constexpr char kSuffix[] = "Parameters";

// Returns the shape of one table's part on one host.
TensorShape PartShape(const EngineConfig& config, int table, int host) {
  return {HostRows(config, table).Count(host), config.tables[table].dim};
}

// Has what all of these ops have in common.
class ParametersOp : public OpKernel {
 public:
  explicit ParametersOp(OpKernelConstruction* context) : OpKernel(context) {
    OP_REQUIRES_OK(context, context->GetAttr("num_shards", &num_shards_));
    OP_REQUIRES_OK(context, context->GetAttr("shard_id", &shard_));
    OP_REQUIRES_OK(context, context->GetAttr("config", &config_));
  }

  void Compute(OpKernelContext* context) final {
    const auto engine = TpuSystem::Get().Find(config_);
    OP_REQUIRES_OK(context, engine.status());
    OP_REQUIRES_OK(context, CheckShard((*engine)->engine.config()));
    OP_REQUIRES_OK(context, Move(context, engine->get()));
  }

 protected:
  virtual absl::Status Move(OpKernelContext* context,
                            ConfiguredEngine* engine) = 0;

  int shard() const { return shard_; }

 private:
  absl::Status CheckShard(const EngineConfig& config) const {
    if (num_shards_ != config.num_hosts) {
      return absl::InvalidArgumentError(absl::StrCat(
          "`num_shards` is ", num_shards_,
          ", but the configuration has `num_hosts` ", config.num_hosts, "."));
    }
    if (shard_ >= 0 && shard_ < num_shards_) return absl::OkStatus();
    return absl::InvalidArgumentError(absl::StrCat(
        "`shard_id` is ", shard_, ", but must be in [0, ", num_shards_, ")."));
  }

  int num_shards_;
  int shard_;
  std::string config_;
};

// The ops of one optimizer.
class OneTableOp : public ParametersOp {
 public:
  explicit OneTableOp(OpKernelConstruction* context) : ParametersOp(context) {
    OP_REQUIRES_OK(context, context->GetAttr("table_id", &id_));
    OP_REQUIRES_OK(context, context->GetAttr("table_name", &name_));
    OP_REQUIRES(
        context, (id_ >= 0) != !name_.empty(),
        absl::InvalidArgumentError("Give one of `table_id` and `table_name`."));
    for (const EngineOptimizer& optimizer : EngineOptimizers()) {
      const std::string ends = absl::StrCat(optimizer.op, kSuffix);
      if (type_string() == kLoad + ends || type_string() == kRetrieve + ends) {
        optimizer_ = &optimizer;
      }
    }
  }

 protected:
  absl::Status FindTable(const EngineConfig& config, int* table) const {
    const int number = config.tables.size();
    *table = id_;
    for (int t = 0; t < number && !name_.empty(); ++t) {
      if (config.tables[t].name == name_) *table = t;
    }
    if (*table < 0 || *table >= number) {
      return absl::InvalidArgumentError(
          absl::StrCat("The configuration has no table ",
                       name_.empty() ? absl::StrCat(id_) : name_, "."));
    }
    const EngineTable& found = config.tables[*table];
    if (found.optimizer == optimizer_->name()) return absl::OkStatus();
    return absl::InvalidArgumentError(
        absl::StrCat(type_string(), " is for ", optimizer_->name(),
                     ", but the optimizer of table ", found.name, " is ",
                     found.optimizer, "."));
  }

  int num_values() const { return 1 + optimizer_->slots.size(); }

 private:
  int id_;
  std::string name_;
  const EngineOptimizer* optimizer_ = nullptr;
};

// Fails unless `value` has the shape of the part `name` of `table`.
absl::Status CheckShape(const EngineConfig& config, int table, int host,
                        const std::string& name, const TensorShape& expected,
                        const Tensor& value) {
  if (value.shape() == expected) return absl::OkStatus();
  return absl::InvalidArgumentError(absl::StrCat(
      "Table ", config.tables[table].name, ": `", name, "` has the shape ",
      value.shape().DebugString(), ", but shard ", host, " of ",
      config.num_hosts, " has ", expected.DebugString(), "."));
}

class LoadOp : public OneTableOp {
 public:
  using OneTableOp::OneTableOp;

 protected:
  absl::Status Move(OpKernelContext* context,
                    ConfiguredEngine* engine) override {
    const EngineConfig& config = engine->engine.config();
    int table;
    TF_RETURN_IF_ERROR(FindTable(config, &table));
    std::vector<const float*> values;
    for (int k = 0; k < num_values(); ++k) {
      const Tensor& value = context->input(k);
      const std::string name =
          k ? config.tables[table].slots[k - 1] : "parameters";
      TF_RETURN_IF_ERROR(CheckShape(config, table, shard(), name,
                                    PartShape(config, table, shard()), value));
      values.push_back(value.flat<float>().data());
    }
    return StatusOf(engine->calls.Run([&] {
      engine->engine.Load(table, shard(), values, Workers(context));
      return Outcome();
    }));
  }
};

class RetrieveOp : public OneTableOp {
 public:
  using OneTableOp::OneTableOp;

 protected:
  absl::Status Move(OpKernelContext* context,
                    ConfiguredEngine* engine) override {
    const EngineConfig& config = engine->engine.config();
    int table;
    TF_RETURN_IF_ERROR(FindTable(config, &table));
    std::vector<float*> values;
    for (int k = 0; k < num_values(); ++k) {
      Tensor* value;
      TF_RETURN_IF_ERROR(context->allocate_output(
          k, PartShape(config, table, shard()), &value));
      values.push_back(value->flat<float>().data());
    }
    return StatusOf(engine->calls.Run([&] {
      return engine->engine.Retrieve(table, shard(), values, Workers(context));
    }));
  }
};

// Loads or retrieves all tables at once. The ops have a list for each part:
// parameters, then the slots, and after them the sums of gradients of a table
// that accumulates them. This engine has no such sums between steps. Tables
// with fewer parts have empty ones.
class AllTablesOp : public ParametersOp {
 public:
  using ParametersOp::ParametersOp;

 protected:
  static constexpr int kNumParts = 8;

  static std::string ListName(int part) {
    return part ? absl::StrCat("auxiliary", part) : "parameters";
  }

  static int NumValues(const EngineTable& table) {
    return 1 + table.slots.size();
  }

  static bool IsSum(const EngineTable& table, int part) {
    return table.accumulates && part == NumValues(table);
  }

  TensorShape ShapeOf(const EngineConfig& config, int table, int part) const {
    const EngineTable& from = config.tables[table];
    if (part < NumValues(from) || IsSum(from, part)) {
      return PartShape(config, table, shard());
    }
    return {0, 0};
  }

  static absl::Status CheckNumber(const EngineConfig& config, int number) {
    const int tables = config.tables.size();
    if (number == tables) return absl::OkStatus();
    return absl::InvalidArgumentError(
        absl::StrCat("`NumTables` is ", number, ", but the configuration has ",
                     tables, " tables."));
  }
};

class LoadAllOp : public AllTablesOp {
 public:
  using AllTablesOp::AllTablesOp;

 protected:
  absl::Status Move(OpKernelContext* context,
                    ConfiguredEngine* engine) override {
    const EngineConfig& config = engine->engine.config();
    std::vector<std::vector<const float*>> values(config.tables.size());
    for (int part = 0; part < kNumParts; ++part) {
      OpInputList list;
      TF_RETURN_IF_ERROR(context->input_list(ListName(part), &list));
      TF_RETURN_IF_ERROR(CheckNumber(config, list.size()));
      for (size_t t = 0; t < values.size(); ++t) {
        const EngineTable& table = config.tables[t];
        TF_RETURN_IF_ERROR(CheckShape(config, t, shard(), ListName(part),
                                      ShapeOf(config, t, part), list[t]));
        if (IsSum(table, part)) TF_RETURN_IF_ERROR(CheckSum(table, list[t]));
        if (part >= NumValues(table)) continue;
        values[t].push_back(list[t].flat<float>().data());
      }
    }
    return StatusOf(engine->calls.Run([&] {
      for (size_t t = 0; t < values.size(); ++t) {
        engine->engine.Load(t, shard(), values[t], Workers(context));
      }
      return Outcome();
    }));
  }

 private:
  // Checks that a sum is empty: its initial value is a subnormal number, not 0.
  static absl::Status CheckSum(const EngineTable& table, const Tensor& sum) {
    const auto values = sum.flat<float>();
    const bool empty = std::all_of(
        values.data(), values.data() + values.size(), [](float value) {
          return std::fabs(value) < std::numeric_limits<float>::min();
        });
    if (empty) return absl::OkStatus();
    return absl::InvalidArgumentError(absl::StrCat(
        "Table ", table.name, ": the sums of gradients after its slots are ",
        "not 0, but the software TPU keeps none between steps."));
  }
};

class RetrieveAllOp : public AllTablesOp {
 public:
  using AllTablesOp::AllTablesOp;

 protected:
  absl::Status Move(OpKernelContext* context,
                    ConfiguredEngine* engine) override {
    const EngineConfig& config = engine->engine.config();
    std::vector<std::vector<float*>> values(config.tables.size());
    for (int part = 0; part < kNumParts; ++part) {
      OpOutputList list;
      TF_RETURN_IF_ERROR(context->output_list(ListName(part), &list));
      TF_RETURN_IF_ERROR(CheckNumber(config, list.size()));
      for (size_t t = 0; t < values.size(); ++t) {
        Tensor* value;
        TF_RETURN_IF_ERROR(list.allocate(t, ShapeOf(config, t, part), &value));
        if (IsSum(config.tables[t], part)) {
          value->flat<float>().setConstant(
              tensorflow::tpu::GradientAccumulatorInitialValue());
        } else if (part < NumValues(config.tables[t])) {
          values[t].push_back(value->flat<float>().data());
        }
      }
    }
    return StatusOf(engine->calls.Run([&] {
      Outcome outcome;
      for (size_t t = 0; t < values.size() && outcome.done(); ++t) {
        outcome =
            engine->engine.Retrieve(t, shard(), values[t], Workers(context));
      }
      return outcome;
    }));
  }
};

SOFTWARE_TPU_KERNEL(LoadAllTPUEmbeddingParameters, LoadAllOp);
SOFTWARE_TPU_KERNEL(RetrieveAllTPUEmbeddingParameters, RetrieveAllOp);

[[maybe_unused]] const bool registered_parameters = [] {
  for (const EngineOptimizer& optimizer : EngineOptimizers()) {
    RegisterWhereMissing<LoadOp>(
        absl::StrCat(kLoad, optimizer.op, kSuffix).c_str());
    RegisterWhereMissing<RetrieveOp>(
        absl::StrCat(kRetrieve, optimizer.op, kSuffix).c_str());
  }
  return true;
}();

}  // namespace
}  // namespace tpu_embedding
