// TpuEmbeddingPreprocess: raw features of one replica -> stacked batches.

#include <algorithm>
#include <vector>

#include "kernels/feature_inputs.h"
#include "kernels/kernel_util.h"
#include "kernels/stacks.h"
#include "tensorflow/core/framework/op.h"
#include "tensorflow/core/framework/op_kernel.h"
#include "tensorflow/core/framework/shape_inference.h"

namespace tpu_embedding {
namespace {

using tensorflow::OpKernelConstruction;
using tensorflow::OpKernelContext;
using tensorflow::Tensor;
using tensorflow::shape_inference::InferenceContext;

absl::Status Vectors(InferenceContext* context) {
  for (int i = 0; i < context->num_outputs(); ++i) {
    context->set_output(i, context->Vector(InferenceContext::kUnknownDim));
  }
  return absl::OkStatus();
}

REGISTER_OP("TpuEmbeddingPreprocess")
    .Input("ids: ids_types")
    .Input("structures: num_features * int64")
    .Input("shapes: num_features * int64")
    .Input("weights: num_weights * float")
    .Input("weight_structures: num_weight_structures * int64")
    .Output("row_pointers: num_stacks * int32")
    .Output("sample_ids: num_stacks * int32")
    .Output("token_ids: num_stacks * int32")
    .Output("gains: num_stacks * float")
    .Output("output_shapes: num_features * int64")
    .Attr("num_stacks: int >= 1")
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
    .Attr("stack_names: list(string)")
    .Attr("feature_stacks: list(int)")
    .Attr("first_tokens: list(int)")
    .SetShapeFn(Vectors)
    .Doc(R"doc(
Checks the features of one replica and lays them out in stacks.

row_pointers: for each stack [samples + 1], where the entries of a sample begin.
sample_ids, token_ids, gains: for each stack [entries]. A token is a row of the
  stack.
output_shapes: for each feature the shape of its activations without the
  embedding axis.
feature_stacks: for each feature the index of its stack.
first_tokens: for each feature the token of row 0 of its table.
The others are those of TpuEmbeddingPrepare.
)doc");

class PreprocessOp : public tensorflow::OpKernel {
 public:
  explicit PreprocessOp(OpKernelConstruction* context) : OpKernel(context) {
    OP_REQUIRES_OK(context, inputs_.ReadAttributes(context));
    OP_REQUIRES_OK(context, stacks_.ReadAttributes(context));
  }

  void Compute(OpKernelContext* context) override {
    PreparedBatch batch;
    OP_REQUIRES_OK(context,
                   inputs_.Prepare(context, /*training=*/false, &batch));
    OP_REQUIRES_OK(context, stacks_.Write(context, batch));
    const int first = context->num_outputs() - batch.features.size();
    for (size_t f = 0; f < batch.features.size(); ++f) {
      const std::vector<int64_t>& shape = batch.features[f].output_shape;
      Tensor* output = nullptr;
      OP_REQUIRES_OK(
          context,
          context->allocate_output(
              first + f, {static_cast<int64_t>(shape.size())}, &output));
      std::copy(shape.begin(), shape.end(), output->flat<int64_t>().data());
    }
  }

 private:
  FeatureInputs inputs_;
  Stacks stacks_;
};

REGISTER_KERNEL_BUILDER(
    Name("TpuEmbeddingPreprocess").Device(tensorflow::DEVICE_CPU),
    PreprocessOp);

}  // namespace
}  // namespace tpu_embedding
