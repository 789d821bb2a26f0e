// TpuEmbeddingDequeue: the next batch of a replica -> activations.

#include <string>
#include <vector>

#include "core/lookup.h"
#include "core/pieces.h"
#include "kernels/kernel_util.h"
#include "kernels/step_queue_resource.h"
#include "tensorflow/core/framework/op.h"
#include "tensorflow/core/framework/op_kernel.h"
#include "tensorflow/core/framework/shape_inference.h"

namespace tpu_embedding {
namespace {

using tensorflow::OpKernelConstruction;
using tensorflow::OpKernelContext;
using tensorflow::PartialTensorShape;
using tensorflow::Tensor;

REGISTER_OP("TpuEmbeddingDequeue")
    .Input("queue: resource")
    .Input("tables: num_tables * resource")
    .Output("activations: num_features * float")
    .Output("apply_now: bool")
    .Attr("num_tables: int >= 1")
    .Attr("num_features: int >= 1")
    .Attr("feature_tables: list(int)")
    .Attr("quantization: list(float)")
    .Attr("output_shapes: list(shape)")
    .Attr("replica: int")
    .SetIsStateful()
    .SetShapeFn([](tensorflow::shape_inference::InferenceContext* context) {
      std::vector<PartialTensorShape> shapes;
      TF_RETURN_IF_ERROR(context->GetAttr("output_shapes", &shapes));
      for (size_t f = 0; f < shapes.size(); ++f) {
        tensorflow::shape_inference::ShapeHandle shape;
        TF_RETURN_IF_ERROR(
            context->MakeShapeFromPartialTensorShape(shapes[f], &shape));
        context->set_output(f, shape);
      }
      context->set_output(shapes.size(), context->Scalar());
      return absl::OkStatus();
    })
    .Doc(R"doc(
Takes the next batch of a replica and looks it up.

tables: the table variables, float32 [vocabulary size, dim].
activations: for each feature [its output shape..., dim].
apply_now: whether the pending update of the step before must be applied now.
feature_tables: for each feature the index of its table.
quantization: for each table (number of buckets or 0, lower, upper).
output_shapes: what is known of the activations' shapes.
)doc");

// Samples in one piece of work, and rough cycles for one.
constexpr int64_t kSamplesPerPiece = 128;
constexpr int64_t kCyclesPerPiece = 50000;

class DequeueOp : public tensorflow::OpKernel {
 public:
  explicit DequeueOp(OpKernelConstruction* context) : OpKernel(context) {
    std::vector<float> numbers;
    OP_REQUIRES_OK(context, context->GetAttr("replica", &replica_));
    OP_REQUIRES_OK(context,
                   context->GetAttr("feature_tables", &feature_tables_));
    OP_REQUIRES_OK(context, context->GetAttr("quantization", &numbers));
    for (size_t i = 0; i + 2 < numbers.size(); i += 3) {
      quantization_.push_back(
          {static_cast<int>(numbers[i]), numbers[i + 1], numbers[i + 2]});
    }
  }

  void Compute(OpKernelContext* context) override {
    QueuePtr resource;
    OP_REQUIRES_OK(context, LookUpQueue(context, &resource));
    std::vector<Variable> tables;
    OP_REQUIRES_OK(context, LookUpVariables(context, "tables", &tables));
    SharedBatch batch;
    OP_REQUIRES_OK(context, FailedPrecondition(
                                resource->queue.Dequeue(replica_, &batch)));
    OP_REQUIRES_OK(context, CheckTableSizes(tables, batch->vocabulary_sizes));
    OP_REQUIRES_OK(context, LookUpAll(context, *batch, tables));
    Tensor* apply_now = nullptr;
    OP_REQUIRES_OK(context, context->allocate_output(feature_tables_.size(),
                                                     {}, &apply_now));
    apply_now->scalar<bool>()() = resource->queue.LookupsAreDone();
  }

 private:
  absl::Status LookUpAll(OpKernelContext* context, const PreparedBatch& batch,
                         const std::vector<Variable>& tables) const {
    const ReadLocks locks(tables);
    std::vector<float*> outputs;
    std::vector<int64_t> sizes;
    for (size_t f = 0; f < batch.features.size(); ++f) {
      const Tensor& table = *tables[feature_tables_[f]]->tensor();
      tensorflow::TensorShape shape(batch.features[f].output_shape);
      shape.AddDim(table.dim_size(1));
      Tensor* output = nullptr;
      TF_RETURN_IF_ERROR(context->allocate_output(f, shape, &output));
      outputs.push_back(output->flat<float>().data());
      sizes.push_back(batch.features[f].num_samples());
    }
    const auto pieces = CutPieces(sizes, kSamplesPerPiece);
    WorkerPool(context)(
        pieces.size(), kCyclesPerPiece, [&](int64_t begin, int64_t end) {
          for (int64_t p = begin; p < end; ++p) {
            const auto [f, first, last] = pieces[p];
            const int table = feature_tables_[f];
            const Tensor& value = *tables[table]->tensor();
            Lookup(batch.features[f], value.flat<float>().data(),
                   value.dim_size(1), quantization_[table], first, last,
                   outputs[f]);
          }
        });
    return absl::OkStatus();
  }

  int replica_ = 0;
  std::vector<int> feature_tables_;
  std::vector<Quantization> quantization_;
};

REGISTER_KERNEL_BUILDER(
    Name("TpuEmbeddingDequeue").Device(tensorflow::DEVICE_CPU), DequeueOp);

}  // namespace
}  // namespace tpu_embedding
