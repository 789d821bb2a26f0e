// (Dynamic)EnqueueTPUEmbeddingArbitraryTensorBatch and
// (Dynamic)EnqueueTPUEmbeddingRaggedTensorBatch enqueue ids for a core.

#include <cstdint>
#include <map>
#include <memory>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "runtime/registration.h"
#include "runtime/replica_barrier.h"
#include "runtime/workers.h"
#include "tensorflow/core/framework/op_kernel.h"
#include "tpu_v2_v4/engine/batch.h"
#include "tpu_v2_v4/tpu_system.h"

namespace tpu_embedding {
namespace {

using tensorflow::OpInputList;
using tensorflow::OpKernelConstruction;
using tensorflow::OpKernelContext;
using tensorflow::Tensor;

absl::Status ReadCombiner(const std::string& name, Combiner* combiner) {
  static const auto* const known = new std::map<std::string, Combiner>{
      {"sum", Combiner::kSum},
      {"mean", Combiner::kMean},
      {"sqrtn", Combiner::kSqrtn},
  };
  const auto found = known->find(name);
  if (found == known->end()) {
    return absl::InvalidArgumentError(absl::StrCat(
        "`combiners` has \"", name, "\", but must be of sum, mean and sqrtn."));
  }
  *combiner = found->second;
  return absl::OkStatus();
}

absl::Status ReadMode(const Tensor& mode_override, bool configured,
                      bool* training) {
  if (mode_override.NumElements() != 1) {
    return absl::InvalidArgumentError("`mode_override` must be one string.");
  }
  const std::string mode = mode_override.flat<tensorflow::tstring>()(0);
  static const auto* const known = new std::map<std::string, bool>{
      {"train", true}, {"training", true}, {"inference", false}};
  if (mode == "unspecified") {
    *training = configured;
    return absl::OkStatus();
  }
  const auto found = known->find(mode);
  if (found == known->end()) {
    return absl::InvalidArgumentError(
        absl::StrCat("`mode_override` is \"", mode,
                     "\", but must be unspecified, inference or train."));
  }
  *training = found->second;
  return absl::OkStatus();
}

// Returns the values of `tensor` as a type that the engine takes.
template <class To, class From>
std::vector<To> Cast(const Tensor& tensor) {
  const auto values = tensor.flat<From>();
  return std::vector<To>(values.data(), values.data() + values.size());
}

class EnqueueOp : public AsyncBarrierOp {
 public:
  explicit EnqueueOp(OpKernelConstruction* context) : AsyncBarrierOp(context) {
    std::vector<std::string> combiners;
    OP_REQUIRES_OK(context, context->GetAttr("combiners", &combiners));
    for (const std::string& name : combiners) {
      combiners_.emplace_back();
      OP_REQUIRES_OK(context, ReadCombiner(name, &combiners_.back()));
    }
    dynamic_ = !context->HasAttr("device_ordinal");
    if (!dynamic_) {
      OP_REQUIRES_OK(context, context->GetAttr("device_ordinal", &ordinal_));
    }
    OP_REQUIRES_OK(context, context->GetAttr("N", &num_inputs_));
    ragged_ = context->HasAttr("table_ids");
    if (ragged_) OP_REQUIRES_OK(context, ReadRaggedAttributes(context));
  }

 protected:
  void Begin(const Contexts& contexts, const Finish& finish) override {
    const auto found = TpuSystem::Get().Find("");
    if (!found.ok()) return finish(found.status());
    const EnginePtr engine = *found;
    std::vector<Engine::Enqueued> batches;
    std::vector<int> cores;
    absl::Status status = Cores(*engine, contexts, &cores);
    if (!status.ok()) return finish(status);
    status = ReadAll(*engine, contexts, cores, &batches);
    // In a run no replica has queued anything. Outside of runs this core's turn
    // is over, and other cores lose their batches of the same step.
    const bool alone = ReplicaRunner::Of(contexts[0]) == nullptr;
    const Finish refuse = [engine, alone, finish,
                           core = cores[0]](const absl::Status& ended) {
      if (alone && !ended.ok()) {
        engine->calls.Run([&] {
          engine->engine.Refuse(core);
          return Outcome();
        });
      }
      finish(ended);
    };
    if (!status.ok()) return refuse(status);
    SubmitCall(
        engine, contexts[0],
        [engine, batches] { return engine->engine.Enqueue(batches); }, refuse);
  }

 private:
  absl::Status ReadRaggedAttributes(OpKernelConstruction* context) {
    TF_RETURN_IF_ERROR(context->GetAttr("table_ids", &table_ids_));
    TF_RETURN_IF_ERROR(
        context->GetAttr("max_sequence_lengths", &max_sequence_lengths_));
    TF_RETURN_IF_ERROR(context->GetAttr("num_features", &num_features_));
    TF_RETURN_IF_ERROR(CheckLength("table_ids", table_ids_, false));
    TF_RETURN_IF_ERROR(
        CheckLength("max_sequence_lengths", max_sequence_lengths_, true));
    return CheckLength("num_features", num_features_, true);
  }

  absl::Status CheckLength(const char* attribute,
                           const std::vector<int>& values,
                           bool may_be_empty) const {
    const int size = values.size();
    if (size == num_inputs_ || (may_be_empty && size == 0)) {
      return absl::OkStatus();
    }
    return absl::InvalidArgumentError(
        absl::StrCat("`", attribute, "` has ", size, " entries, but there are ",
                     num_inputs_, " inputs."));
  }

  // Returns the op of `context`: attributes may differ between replicas.
  static const EnqueueOp& Own(OpKernelContext* context) {
    return static_cast<const EnqueueOp&>(context->op_kernel());
  }

  // Finds the core of each context. Each must be a different one.
  absl::Status Cores(const ConfiguredEngine& engine, const Contexts& contexts,
                     std::vector<int>* cores) const {
    const int num_cores = engine.engine.config().num_cores;
    std::set<int> taken;
    for (OpKernelContext* context : contexts) {
      int core = Own(context).ordinal_;
      if (dynamic_) {
        const Tensor* ordinal;
        TF_RETURN_IF_ERROR(context->input("device_ordinal", &ordinal));
        if (ordinal->NumElements() != 1) {
          return absl::InvalidArgumentError(
              "`device_ordinal` must be one number.");
        }
        core = ordinal->flat<int32_t>()(0);
      }
      const ReplicaRunner* const runner = ReplicaRunner::Of(context);
      // On a TPU, outside compilation fills it in.
      if (core == -1 && runner &&
          engine.engine.config().cores_per_replica == 1) {
        core = runner->replica();
      }
      if (core < 0 || core >= num_cores || !taken.insert(core).second) {
        return absl::InvalidArgumentError(absl::StrCat(
            "`device_ordinal` is ", core, ", but must be in [0, ", num_cores,
            ") and differ between replicas. -1 stands for the replica's ",
            "own core, inside of SoftwareTPUStrategy.run only."));
      }
      cores->push_back(core);
    }
    return absl::OkStatus();
  }

  absl::Status ReadAll(const ConfiguredEngine& engine, const Contexts& contexts,
                       const std::vector<int>& cores,
                       std::vector<Engine::Enqueued>* batches) const {
    for (size_t r = 0; r < contexts.size(); ++r) {
      auto batch = std::make_shared<CoreBatch>();
      TF_RETURN_IF_ERROR(
          Own(contexts[r])
              .Read(engine.engine.config(), contexts[r], batch.get()));
      batches->push_back(
          {cores[r], std::move(batch), ReplicaRunner::HasFailed(contexts[r])});
    }
    return absl::OkStatus();
  }

  absl::Status Read(const EngineConfig& config, OpKernelContext* context,
                    CoreBatch* batch) const {
    OpInputList structures, ids, weights;
    const Tensor* mode;
    TF_RETURN_IF_ERROR(context->input_list(
        ragged_ ? "sample_splits" : "sample_indices_or_row_splits",
        &structures));
    TF_RETURN_IF_ERROR(context->input_list("embedding_indices", &ids));
    TF_RETURN_IF_ERROR(context->input_list("aggregation_weights", &weights));
    TF_RETURN_IF_ERROR(context->input("mode_override", &mode));
    EnqueueInputs enqueued;
    enqueued.combiners = combiners_;
    TF_RETURN_IF_ERROR(ReadMode(*mode, config.training, &enqueued.training));
    if (enqueued.training) TF_RETURN_IF_ERROR(CheckRules(config));
    for (int i = 0; i < num_inputs_; ++i) {
      EnqueueInput input;
      TF_RETURN_IF_ERROR(ReadStructure(i, structures[i], &input));
      TF_RETURN_IF_ERROR(ReadIds(i, ids[i], &input));
      TF_RETURN_IF_ERROR(ReadWeights(i, weights[i], &input));
      if (ragged_) input.table = table_ids_[i];
      if (!max_sequence_lengths_.empty()) {
        input.max_sequence_length = max_sequence_lengths_[i];
      }
      if (!num_features_.empty()) input.num_features = num_features_[i];
      enqueued.inputs.push_back(std::move(input));
    }
    const Error error = BuildBatch(config, enqueued, Workers(context), batch);
    return error ? absl::InvalidArgumentError(*error) : absl::OkStatus();
  }

  static absl::Status CheckRules(const EngineConfig& config) {
    for (const EngineTable& table : config.tables) {
      if (table.update) continue;
      return absl::UnimplementedError(absl::StrCat(
          "Table ", table.name, ": the software TPU cannot train with the ",
          "optimizer ", table.optimizer, ", whose rule is not published. It ",
          "keeps its slots and looks up for inference."));
    }
    return absl::OkStatus();
  }

  absl::Status ReadStructure(int i, const Tensor& tensor,
                             EnqueueInput* input) const {
    if (tensor.dims() != 1 && (ragged_ || tensor.dims() != 2)) {
      return absl::InvalidArgumentError(absl::StrCat(
          ragged_ ? "`sample_splits`[" : "`sample_indices_or_row_splits`[", i,
          "] has the shape ", tensor.shape().DebugString(),
          ", but must have rank 1", ragged_ ? "." : " or 2."));
    }
    if (ragged_ && tensor.NumElements() == 0) {
      return absl::InvalidArgumentError(
          absl::StrCat("`sample_splits`[", i, "] is empty."));
    }
    input->structure = tensor.dtype() == tensorflow::DT_INT32
                           ? Cast<int64_t, int32_t>(tensor)
                           : Cast<int64_t, int64_t>(tensor);
    input->structure_rank = tensor.dims();
    input->columns = tensor.dims() == 2 ? tensor.dim_size(1) : 0;
    return absl::OkStatus();
  }

  static absl::Status ReadIds(int i, const Tensor& tensor,
                              EnqueueInput* input) {
    if (tensor.dims() != 1) {
      return absl::InvalidArgumentError(absl::StrCat(
          "`embedding_indices`[", i, "] has the shape ",
          tensor.shape().DebugString(), ", but must have rank 1."));
    }
    input->num_ids = tensor.NumElements();
    if (tensor.dtype() == tensorflow::DT_INT32) {
      input->ids32 = tensor.flat<int32_t>().data();
    } else {
      input->ids64 = tensor.flat<int64_t>().data();
    }
    return absl::OkStatus();
  }

  static absl::Status ReadWeights(int i, const Tensor& tensor,
                                  EnqueueInput* input) {
    if (tensor.dims() != 1) {
      return absl::InvalidArgumentError(absl::StrCat(
          "`aggregation_weights`[", i, "] has the shape ",
          tensor.shape().DebugString(), ", but must have rank 1."));
    }
    input->weights = tensor.dtype() == tensorflow::DT_FLOAT
                         ? Cast<float, float>(tensor)
                         : Cast<float, double>(tensor);
    return absl::OkStatus();
  }

  int num_inputs_ = 0;
  std::vector<Combiner> combiners_;
  bool dynamic_ = false;
  int ordinal_ = -1;
  bool ragged_ = false;  // all of the following are of that op
  std::vector<int> table_ids_;
  std::vector<int> max_sequence_lengths_;
  std::vector<int> num_features_;
};

SOFTWARE_TPU_KERNEL(EnqueueTPUEmbeddingArbitraryTensorBatch, EnqueueOp);
SOFTWARE_TPU_KERNEL(DynamicEnqueueTPUEmbeddingArbitraryTensorBatch, EnqueueOp);
SOFTWARE_TPU_KERNEL(EnqueueTPUEmbeddingRaggedTensorBatch, EnqueueOp);
SOFTWARE_TPU_KERNEL(DynamicEnqueueTPUEmbeddingRaggedTensorBatch, EnqueueOp);

}  // namespace
}  // namespace tpu_embedding
