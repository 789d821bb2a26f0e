// TpuEmbeddingPrepare: raw features of one replica -> a prepared batch.

#include <memory>
#include <vector>

#include "core/batch_pool.h"
#include "core/prepared_batch.h"
#include "kernels/batch_variant.h"
#include "kernels/feature_inputs.h"
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

class PrepareOp : public tensorflow::OpKernel {
 public:
  explicit PrepareOp(OpKernelConstruction* context) : OpKernel(context) {
    OP_REQUIRES_OK(context, context->GetAttr("training", &training_));
    OP_REQUIRES_OK(context, context->GetAttr("replica", &replica_));
    OP_REQUIRES_OK(context, inputs_.ReadAttributes(context));
  }

  void Compute(OpKernelContext* context) override {
    const std::shared_ptr<PreparedBatch> batch = pool_->Take();
    const absl::Status status =
        inputs_.Prepare(context, training_, batch.get());
    if (!status.ok()) OP_REQUIRES_OK(context, TellQueue(context));
    OP_REQUIRES_OK(context, status);
    Tensor* output = nullptr;
    OP_REQUIRES_OK(context, context->allocate_output(0, {}, &output));
    output->scalar<tensorflow::Variant>()() = BatchVariant{batch};
  }

 private:
  // Inside strategy.run the other replicas' batches of this step may be
  // queued already; they must not stay.
  absl::Status TellQueue(OpKernelContext* context) const {
    OpInputList queues;
    TF_RETURN_IF_ERROR(context->input_list("queue", &queues));
    if (queues.size() == 0) return absl::OkStatus();
    QueuePtr resource;
    TF_RETURN_IF_ERROR(LookUpQueue(context, &resource, replica_));
    resource->queue.FailEnqueue(replica_);
    return absl::OkStatus();
  }

  FeatureInputs inputs_;
  bool training_ = false;
  int replica_ = 0;
  const std::shared_ptr<BatchPool<PreparedBatch>> pool_ =
      std::make_shared<BatchPool<PreparedBatch>>();
};

REGISTER_KERNEL_BUILDER(
    Name("TpuEmbeddingPrepare").Device(tensorflow::DEVICE_CPU), PrepareOp);

}  // namespace
}  // namespace tpu_embedding
