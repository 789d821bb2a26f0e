// TpuEmbeddingPrepare turns raw features of one replica into a prepared batch.

#include <memory>
#include <utility>
#include <vector>

#include "core/batch_pool.h"
#include "core/prepared_batch.h"
#include "kernels/batch_variant.h"
#include "kernels/feature_inputs.h"
#include "kernels/kernel_util.h"
#include "kernels/plan.h"
#include "tensorflow/core/framework/common_shape_fns.h"
#include "tensorflow/core/framework/dataset_stateful_op_allowlist.h"
#include "tensorflow/core/framework/op.h"
#include "tensorflow/core/framework/op_kernel.h"
#include "tensorflow/core/framework/shape_inference.h"

namespace tpu_embedding {
namespace {

using tensorflow::OpKernelConstruction;
using tensorflow::OpKernelContext;

REGISTER_OP("TpuEmbeddingPrepare")
    .Input("inputs: types")
    .Output("batch: variant")
    .Attr("types: list({int32, int64, float}) >= 1")
    .Attr("plan: string")
    .Attr("call: string")
    .SetIsStateful()  // Only so that its variant is not folded into a constant.
    .SetShapeFn(tensorflow::shape_inference::ScalarShape)
    .Doc(R"doc(
Checks the features of one replica and groups their ids for lookup and update.
It has no state. Errors in values are raised by the op that takes the batch.

inputs: the tensors of one feature after the other. A feature has its ids (the
  dense tensor, or the values); if it is sparse, its indices and dense_shape;
  if it is ragged, its row_splits; its weights, if it has them; and, if the
  weights came with their own indices or row_splits, these, which must equal
  those of the ids.
batch: a scalar that the other ops take.
plan: the record of the embedding (engines/host/batches.py).
call: the record of this call: whether an update may follow, and for each
  feature its kind, whether it has weights and these a structure of their own,
  and its declared output shape.
)doc");

class PrepareOp : public tensorflow::OpKernel {
 public:
  explicit PrepareOp(OpKernelConstruction* context) : OpKernel(context) {
    OP_REQUIRES_OK(context, ReadPlan(context, &plan_));
    OP_REQUIRES_OK(context, inputs_.Read(context, plan_->features));
  }

  void Compute(OpKernelContext* context) override {
    const std::shared_ptr<PreparedBatch> batch = pool_->Take();
    absl::Status status = Prepare(context, batch.get());
    OP_REQUIRES_OK(
        context,
        Wrap(context, 0, BatchVariant(plan_, batch, std::move(status))));
  }

 private:
  absl::Status Prepare(OpKernelContext* context, PreparedBatch* batch) const {
    std::vector<FeatureInput> inputs;
    TF_RETURN_IF_ERROR(inputs_.ReadInputs(context, &inputs));
    return WithinMemory([&] {
      return InvalidArgument(PrepareBatch(inputs_.specs(), plan_->table_map,
                                          inputs, inputs_.training(),
                                          WorkerPool(context), batch));
    });
  }

  SharedPlan plan_;
  FeatureInputs inputs_;
  const std::shared_ptr<BatchPool<PreparedBatch>> pool_ =
      std::make_shared<BatchPool<PreparedBatch>>();
};

REGISTER_KERNEL_BUILDER(
    Name("TpuEmbeddingPrepare").Device(tensorflow::DEVICE_CPU), PrepareOp);

ALLOW_STATEFUL_OP_FOR_DATASET_FUNCTIONS("TpuEmbeddingPrepare");

}  // namespace
}  // namespace tpu_embedding
