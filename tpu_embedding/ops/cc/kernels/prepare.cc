// TpuEmbeddingPrepare: raw features of one replica -> a prepared batch.

#include <map>
#include <memory>
#include <string>
#include <vector>

#include "core/batch_pool.h"
#include "core/prepared_batch.h"
#include "kernels/batch_variant.h"
#include "kernels/kernel_util.h"
#include "kernels/step_queue_resource.h"
#include "tensorflow/core/framework/op.h"
#include "tensorflow/core/framework/op_kernel.h"
#include "tensorflow/core/framework/shape_inference.h"

namespace tpu_embedding {
namespace {

using tensorflow::OpInputList;
using tensorflow::OpKernelConstruction;
using tensorflow::OpKernelContext;
using tensorflow::Tensor;

REGISTER_OP("TpuEmbeddingPrepare")
    .Input("queue: num_queues * resource")
    .Input("ids: ids_types")
    .Input("structures: num_features * int64")
    .Input("shapes: num_features * int64")
    .Input("weights: num_weights * float")
    .Input("weight_structures: num_weight_structures * int64")
    .Output("batch: variant")
    .Attr("num_queues: int >= 0")
    .Attr("num_features: int >= 1")
    .Attr("num_weights: int >= 0")
    .Attr("num_weight_structures: int >= 0")
    .Attr("ids_types: list({int32, int64})")
    .Attr("has_weights: list(bool)")
    .Attr("has_weight_structure: list(bool)")
    .Attr("kinds: list({'dense', 'sparse', 'ragged'})")
    .Attr("paths: list(string)")
    .Attr("feature_tables: list(int)")
    .Attr("sequence_lengths: list(int)")
    .Attr("declared_shapes: list(shape)")
    .Attr("declared_sources: list(string)")
    .Attr("table_names: list(string)")
    .Attr("vocabulary_sizes: list(int)")
    .Attr("combiners: list({'sum', 'mean', 'sqrtn'})")
    .Attr("invalid_ids: list({'error', 'drop', 'mod'})")
    .Attr("check_numerics: bool")
    .Attr("training: bool")
    .Attr("replica: int")
    .SetIsStateful()
    .SetShapeFn(tensorflow::shape_inference::ScalarShape)
    .Doc(R"doc(
Checks the features of one replica and groups their ids for lookup and update.

queue: none, or the step queue to be told of a failure, where other replicas
  may already have queued their batch of the same step.
ids: for each feature its ids: the dense tensor, or the values.
structures: sparse: indices; ragged: row_splits; dense: empty.
shapes: for each feature the shape of the input; ragged: [number of rows].
weights: of the features that have them, like the ids.
weight_structures: of the weights that came with indices or row_splits of their
  own, which must equal those of the ids.
batch: a scalar that the other ops take.
)doc");

const std::map<std::string, InputKind>& Kinds() {
  static const auto* kinds =
      new std::map<std::string, InputKind>{{"dense", InputKind::kDense},
                                           {"sparse", InputKind::kSparse},
                                           {"ragged", InputKind::kRagged}};
  return *kinds;
}

const std::map<std::string, Combiner>& Combiners() {
  static const auto* combiners =
      new std::map<std::string, Combiner>{{"sum", Combiner::kSum},
                                          {"mean", Combiner::kMean},
                                          {"sqrtn", Combiner::kSqrtn}};
  return *combiners;
}

const std::map<std::string, InvalidIds>& InvalidIdRules() {
  static const auto* rules =
      new std::map<std::string, InvalidIds>{{"error", InvalidIds::kError},
                                            {"drop", InvalidIds::kDrop},
                                            {"mod", InvalidIds::kMod}};
  return *rules;
}

// TensorFlow's int64_t need not be the same type as ours, only the same bits.
const int64_t* Int64s(const Tensor& tensor) {
  return reinterpret_cast<const int64_t*>(tensor.flat<int64_t>().data());
}

template <class T>
std::vector<T> GetList(OpKernelConstruction* context, const char* name) {
  std::vector<T> values;
  context->SetStatus(context->GetAttr(name, &values));
  return values;
}

class PrepareOp : public tensorflow::OpKernel {
 public:
  explicit PrepareOp(OpKernelConstruction* context) : OpKernel(context) {
    tables_.feature_tables = GetList<int>(context, "feature_tables");
    tables_.vocabulary_sizes = GetList<int64_t>(context, "vocabulary_sizes");
    has_weights_ = GetList<bool>(context, "has_weights");
    has_weight_structure_ = GetList<bool>(context, "has_weight_structure");
    OP_REQUIRES_OK(context, context->GetAttr("training", &training_));
    OP_REQUIRES_OK(context, context->GetAttr("replica", &replica_));
    ReadSpecs(context);
  }

  void Compute(OpKernelContext* context) override {
    std::vector<FeatureInput> inputs;
    const std::shared_ptr<PreparedBatch> batch = pool_->Take();
    absl::Status status = ReadInputs(context, &inputs);
    if (status.ok()) {
      status = InvalidArgument(PrepareBatch(specs_, tables_, inputs, training_,
                                            WorkerPool(context), batch.get()));
    }
    if (!status.ok()) OP_REQUIRES_OK(context, TellQueue(context));
    OP_REQUIRES_OK(context, status);
    Tensor* output = nullptr;
    OP_REQUIRES_OK(context, context->allocate_output(0, {}, &output));
    output->scalar<tensorflow::Variant>()() = BatchVariant{batch};
  }

 private:
  void ReadSpecs(OpKernelConstruction* context) {
    const auto paths = GetList<std::string>(context, "paths");
    const auto kinds = GetList<std::string>(context, "kinds");
    const auto lengths = GetList<int64_t>(context, "sequence_lengths");
    const auto names = GetList<std::string>(context, "table_names");
    const auto combiners = GetList<std::string>(context, "combiners");
    const auto rules = GetList<std::string>(context, "invalid_ids");
    const auto shapes =
        GetList<tensorflow::PartialTensorShape>(context, "declared_shapes");
    const auto sources = GetList<std::string>(context, "declared_sources");
    bool check_numerics = false;
    OP_REQUIRES_OK(context,
                   context->GetAttr("check_numerics", &check_numerics));
    if (!context->status().ok()) return;
    for (const int64_t rows : tables_.vocabulary_sizes) {
      OP_REQUIRES(context, rows <= kMostRows,
                  absl::InvalidArgumentError(absl::StrCat(
                      "A table of ", rows, " rows; int32 must number them.")));
    }
    for (size_t f = 0; f < paths.size(); ++f) {
      const int table = tables_.feature_tables[f];
      FeatureSpec spec;
      spec.path = paths[f];
      spec.table = names[table];
      spec.vocabulary_size = tables_.vocabulary_sizes[table];
      spec.kind = Kinds().at(kinds[f]);
      spec.combiner = Combiners().at(combiners[table]);
      spec.invalid_ids = InvalidIdRules().at(rules[table]);
      spec.check_numerics = check_numerics;
      spec.sequence_length = lengths[f];
      spec.shape_known = !shapes[f].unknown_rank();
      spec.declared_source = sources[f];
      if (spec.shape_known) {
        for (const auto& axis : shapes[f]) {
          spec.declared_shape.push_back(axis.size);
        }
      }
      specs_.push_back(std::move(spec));
    }
  }

  absl::Status ReadInputs(OpKernelContext* context,
                          std::vector<FeatureInput>* inputs) const {
    OpInputList ids, structures, shapes;
    TF_RETURN_IF_ERROR(context->input_list("ids", &ids));
    TF_RETURN_IF_ERROR(context->input_list("structures", &structures));
    TF_RETURN_IF_ERROR(context->input_list("shapes", &shapes));
    for (size_t f = 0; f < specs_.size(); ++f) {
      FeatureInput input;
      input.num_ids = ids[f].NumElements();
      if (ids[f].dtype() == tensorflow::DT_INT32) {
        input.ids32 = ids[f].flat<int32_t>().data();
      } else {
        input.ids64 = Int64s(ids[f]);
      }
      input.shape.assign(Int64s(shapes[f]),
                         Int64s(shapes[f]) + shapes[f].NumElements());
      input.structure = Int64s(structures[f]);
      input.structure_size = structures[f].NumElements();
      TF_RETURN_IF_ERROR(CheckStructure(specs_[f], input));
      inputs->push_back(std::move(input));
    }
    return ReadWeights(context, inputs);
  }

  absl::Status ReadWeights(OpKernelContext* context,
                           std::vector<FeatureInput>* inputs) const {
    OpInputList weights, structures;
    TF_RETURN_IF_ERROR(context->input_list("weights", &weights));
    TF_RETURN_IF_ERROR(context->input_list("weight_structures", &structures));
    int next_weights = 0;
    int next_structure = 0;
    for (size_t f = 0; f < specs_.size(); ++f) {
      FeatureInput& input = (*inputs)[f];
      if (has_weight_structure_[f]) {
        const Tensor& structure = structures[next_structure++];
        input.weight_structure = Int64s(structure);
        input.weight_structure_size = structure.NumElements();
      }
      if (!has_weights_[f]) continue;
      const Tensor& values = weights[next_weights++];
      if (values.NumElements() != input.num_ids) {
        return absl::InvalidArgumentError(
            absl::StrCat("Feature ", specs_[f].path, ": ", values.NumElements(),
                         " weights for ", input.num_ids,
                         " ids. Weights have the feature's own structure."));
      }
      input.weights = values.flat<float>().data();
    }
    return absl::OkStatus();
  }

  // The core trusts these sizes.
  static absl::Status CheckStructure(const FeatureSpec& spec,
                                     const FeatureInput& input) {
    const int64_t rank = input.shape.size();
    if (spec.kind == InputKind::kSparse &&
        (rank < 2 || input.structure_size != input.num_ids * rank)) {
      return absl::InvalidArgumentError(absl::StrCat(
          "Feature ", spec.path, ": a sparse input of ", input.num_ids,
          " values and rank ", rank, " has ", input.structure_size,
          " numbers in its indices; it needs rank >= 2 and one index of that ",
          "rank for each value."));
    }
    return absl::OkStatus();
  }

  // Inside strategy.run the other replicas' batches of this step may be
  // queued already; they must not stay.
  absl::Status TellQueue(OpKernelContext* context) const {
    OpInputList queues;
    TF_RETURN_IF_ERROR(context->input_list("queue", &queues));
    if (queues.size() == 0) return absl::OkStatus();
    QueuePtr resource;
    TF_RETURN_IF_ERROR(LookUpQueue(context, &resource));
    resource->queue.FailEnqueue(replica_);
    return absl::OkStatus();
  }

  std::vector<FeatureSpec> specs_;
  TableMap tables_;
  std::vector<bool> has_weights_;
  std::vector<bool> has_weight_structure_;
  bool training_ = false;
  int replica_ = 0;
  const std::shared_ptr<BatchPool> pool_ = std::make_shared<BatchPool>();
};

REGISTER_KERNEL_BUILDER(
    Name("TpuEmbeddingPrepare").Device(tensorflow::DEVICE_CPU), PrepareOp);

}  // namespace
}  // namespace tpu_embedding
