// LoadTPUEmbedding...Parameters and RetrieveTPUEmbedding...Parameters of every
// optimizer.

#include <cstdint>
#include <string>
#include <vector>

#include "absl/strings/str_cat.h"
#include "software_tpu/engine_optimizers.h"
#include "software_tpu/registration.h"
#include "software_tpu/tpu_system.h"
#include "software_tpu/workers.h"
#include "tensorflow/core/framework/op_kernel.h"

namespace tpu_embedding {
namespace {

using tensorflow::OpKernel;
using tensorflow::OpKernelConstruction;
using tensorflow::OpKernelContext;
using tensorflow::Tensor;
using tensorflow::TensorShape;

constexpr char kLoad[] = "LoadTPUEmbedding";
constexpr char kRetrieve[] = "RetrieveTPUEmbedding";
constexpr char kSuffix[] = "Parameters";

// Of one table's part on one host.
TensorShape PartShape(const EngineConfig& config, int table, int host) {
  return {HostRows(config, table).Count(host), config.tables[table].dim};
}

// What all of these ops have in common.
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

// Fails unless `value` is one of the parts of `table`: the parameters, or a
// slot.
absl::Status CheckPart(const EngineConfig& config, int table, int host,
                       int part, const Tensor& value) {
  const TensorShape expected = PartShape(config, table, host);
  if (value.shape() == expected) return absl::OkStatus();
  const EngineTable& found = config.tables[table];
  return absl::InvalidArgumentError(absl::StrCat(
      "Table ", found.name, ": `", part ? found.slots[part - 1] : "parameters",
      "` has the shape ", value.shape().DebugString(), ", but shard ", host,
      " of ", config.num_hosts, " has ", expected.DebugString(), "."));
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
      TF_RETURN_IF_ERROR(CheckPart(config, table, shard(), k, value));
      values.push_back(value.flat<float>().data());
    }
    return StatusOf(engine->room.Run([&] {
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
    return StatusOf(engine->room.Run([&] {
      return engine->engine.Retrieve(table, shard(), values, Workers(context));
    }));
  }
};

[[maybe_unused]] const bool registered = [] {
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
