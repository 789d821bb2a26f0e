// RecvTPUEmbeddingActivations takes a program's activations from the engine,
// and SendTPUEmbeddingGradients gives it the gradients.

#include <cstdint>
#include <cstring>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "runtime/registration.h"
#include "runtime/replica_barrier.h"
#include "runtime/workers.h"
#include "tensorflow/core/framework/op_kernel.h"
#include "tpu_v2_v4/tpu_system.h"

namespace tpu_embedding {
namespace {

using tensorflow::OpInputList;
using tensorflow::OpKernelConstruction;
using tensorflow::OpKernelContext;
using tensorflow::Tensor;
using tensorflow::TensorShape;

// Returns the shape of an output in one replica. Cores share its first axis.
TensorShape ShapeOf(const EngineConfig& config, int output) {
  const EngineOutput& from = config.outputs[output];
  TensorShape shape(from.shape);
  shape.set_dim(0, from.shape[0] * config.cores_per_replica);
  shape.AddDim(config.tables[from.table].dim);
  return shape;
}

// Returns where each core's part of each output begins; `parts` has the outputs
// by replica.
template <class Pointer>
std::vector<std::vector<Pointer>> ByCore(
    const EngineConfig& config,
    const std::vector<std::vector<Pointer>>& parts) {
  std::vector<std::vector<Pointer>> cores;
  for (int core = 0; core < config.num_cores; ++core) {
    cores.push_back(parts[core / config.cores_per_replica]);
    const int64_t place = core % config.cores_per_replica;
    for (size_t o = 0; o < config.outputs.size(); ++o) {
      const EngineOutput& output = config.outputs[o];
      cores.back()[o] +=
          place * output.num_samples() * config.tables[output.table].dim;
    }
  }
  return cores;
}

// Is an op with the attribute `config` that all replicas of a program run.
class ProgramOp : public AsyncBarrierOp {
 public:
  explicit ProgramOp(OpKernelConstruction* context) : AsyncBarrierOp(context) {
    OP_REQUIRES_OK(context, context->GetAttr("config", &config_));
  }

 protected:
  void Begin(const Contexts& contexts, const Finish& finish) final {
    const auto engine = TpuSystem::Get().Find(config_);
    absl::Status status = engine.status();
    if (status.ok()) status = CheckReplicas(**engine, contexts);
    if (!status.ok()) return finish(status);
    RunWith(*engine, contexts, finish);
  }

  virtual void RunWith(const EnginePtr& engine, const Contexts& contexts,
                       const Finish& finish) = 0;

 private:
  static absl::Status CheckReplicas(const ConfiguredEngine& engine,
                                    const Contexts& contexts) {
    const EngineConfig& config = engine.engine.config();
    const int replicas = contexts.size();
    if (replicas == config.num_replicas()) return absl::OkStatus();
    return absl::InvalidArgumentError(absl::StrCat(
        "The program runs on ", replicas, " replicas, but the embedding ",
        "engine is configured with `num_tensor_cores` ", config.num_cores,
        " for ", config.num_replicas(), "."));
  }

  std::string config_;
};

class ReceiveOp : public ProgramOp {
 public:
  using ProgramOp::ProgramOp;

 protected:
  void RunWith(const EnginePtr& engine, const Contexts& contexts,
               const Finish& finish) override {
    const EngineConfig& config = engine->engine.config();
    std::vector<std::vector<float*>> outputs;
    for (OpKernelContext* context : contexts) {
      outputs.emplace_back();
      const absl::Status status = Allocate(config, context, &outputs.back());
      if (!status.ok()) return finish(status);
    }
    const Failed failed = ReplicaRunner::HasFailed(contexts[0]);
    SubmitCall(
        engine, contexts[0],
        [engine, failed, outputs = ByCore(config, outputs),
         workers = Workers(contexts[0])] {
          return engine->engine.Receive(outputs, failed, workers);
        },
        finish);
  }

 private:
  static absl::Status Allocate(const EngineConfig& config,
                               OpKernelContext* context,
                               std::vector<float*>* outputs) {
    const int number = config.outputs.size();
    if (context->num_outputs() != number) {
      return absl::InvalidArgumentError(
          absl::StrCat("`num_outputs` is ", context->num_outputs(),
                       ", but the configuration has ", number, " outputs."));
    }
    for (int o = 0; o < number; ++o) {
      Tensor* output;
      TF_RETURN_IF_ERROR(
          context->allocate_output(o, ShapeOf(config, o), &output));
      outputs->push_back(output->flat<float>().data());
    }
    return absl::OkStatus();
  }
};

class SendOp : public ProgramOp {
 public:
  using ProgramOp::ProgramOp;

 protected:
  void RunWith(const EnginePtr& engine, const Contexts& contexts,
               const Finish& finish) override {
    const EngineConfig& config = engine->engine.config();
    auto kept = std::make_shared<std::vector<Tensor>>();
    std::vector<std::vector<const float*>> parts;
    StepGradients gradients;
    for (OpKernelContext* context : contexts) {
      parts.emplace_back();
      absl::Status status =
          ReadInputs(config, context, kept.get(), &parts.back());
      if (status.ok()) status = ReadRates(config, context, &gradients.rates);
      if (!status.ok()) return finish(status);
    }
    gradients.values = ByCore(config, parts);
    gradients.keep = std::move(kept);
    finish(StatusOf(engine->calls.Run([&] {
      return engine->engine.Send(std::move(gradients), Workers(contexts[0]));
    })));
  }

 private:
  static absl::Status ReadInputs(const EngineConfig& config,
                                 OpKernelContext* context,
                                 std::vector<Tensor>* kept,
                                 std::vector<const float*>* parts) {
    OpInputList inputs;
    TF_RETURN_IF_ERROR(context->input_list("inputs", &inputs));
    const int number = config.outputs.size();
    if (inputs.size() != number) {
      return absl::InvalidArgumentError(
          absl::StrCat("There are ", inputs.size(), " `inputs`, but the ",
                       "configuration has ", number, " outputs."));
    }
    for (int o = 0; o < number; ++o) {
      const TensorShape expected = ShapeOf(config, o);
      if (inputs[o].shape() != expected) {
        return absl::InvalidArgumentError(absl::StrCat(
            "`inputs`[", o, "] has the shape ", inputs[o].shape().DebugString(),
            ", but the activations of ", config.outputs[o].name,
            " have the shape ", expected.DebugString(), "."));
      }
      kept->push_back(inputs[o]);
      parts->push_back(inputs[o].flat<float>().data());
    }
    return absl::OkStatus();
  }

  // Reads the rates, which must be the same in all replicas.
  static absl::Status ReadRates(const EngineConfig& config,
                                OpKernelContext* context,
                                std::vector<float>* rates) {
    OpInputList inputs;
    TF_RETURN_IF_ERROR(context->input_list("learning_rates", &inputs));
    if (inputs.size() != config.num_rates) {
      return absl::InvalidArgumentError(absl::StrCat(
          "There are ", inputs.size(), " `learning_rates`, but the ",
          "configuration has ", config.num_rates, " tags."));
    }
    std::vector<float> own;
    for (const Tensor& rate : inputs) {
      if (rate.NumElements() != 1) {
        return absl::InvalidArgumentError(
            "Each of `learning_rates` must be one number.");
      }
      own.push_back(rate.flat<float>()(0));
    }
    if (rates->empty()) *rates = own;
    // Comparing the rates as bits makes a NaN equal to itself.
    if (own.empty() || std::memcmp(own.data(), rates->data(),
                                   own.size() * sizeof(float)) == 0) {
      return absl::OkStatus();
    }
    return absl::InvalidArgumentError(
        "`learning_rates` differ between replicas.");
  }
};

SOFTWARE_TPU_KERNEL(RecvTPUEmbeddingActivations, ReceiveOp);
SOFTWARE_TPU_KERNEL(SendTPUEmbeddingGradients, SendOp);

}  // namespace
}  // namespace tpu_embedding
