// TpuEmbeddingToStacks and TpuEmbeddingFromStacks convert a prepared batch to
// plain tensors, one stack of tables after the other, and back.

#include "core/stacks.h"

#include <algorithm>
#include <limits>
#include <memory>
#include <utility>
#include <vector>

#include "kernels/batch_variant.h"
#include "kernels/channel.h"
#include "kernels/kernel_util.h"
#include "kernels/plan.h"
#include "tensorflow/core/common_runtime/dma_helper.h"
#include "tensorflow/core/framework/allocation_description.pb.h"
#include "tensorflow/core/framework/common_shape_fns.h"
#include "tensorflow/core/framework/dataset_stateful_op_allowlist.h"
#include "tensorflow/core/framework/op.h"
#include "tensorflow/core/framework/op_kernel.h"
#include "tensorflow/core/framework/shape_inference.h"

namespace tpu_embedding {
namespace {

using tensorflow::OpInputList;
using tensorflow::OpKernelConstruction;
using tensorflow::OpKernelContext;
using tensorflow::OpOutputList;
using tensorflow::Tensor;
using tensorflow::TensorShape;
using tensorflow::shape_inference::InferenceContext;

absl::Status StackShapes(InferenceContext* context) {
  const int refusal = context->num_outputs() - 1;
  for (int i = 0; i < refusal; ++i) {
    context->set_output(i, context->Vector(InferenceContext::kUnknownDim));
  }
  context->set_output(refusal, context->Scalar());
  return absl::OkStatus();
}

REGISTER_OP("TpuEmbeddingToStacks")
    .Input("batch: variant")
    .Input("looked_up: num_looked_up * variant")
    .Output("row_pointers: num_stacks * int32")
    .Output("sample_ids: num_stacks * int32")
    .Output("token_ids: token_types")
    .Output("gains: num_stacks * float")
    .Output("output_shapes: num_features * int64")
    .Output("refusal: string")
    .Attr("num_looked_up: int >= 0")
    .Attr("num_stacks: int >= 1")
    .Attr("token_types: list({int32, int64}) >= 1")
    .Attr("num_features: int >= 1")
    .Attr("raises: bool")
    .SetShapeFn(StackShapes)
    .Doc(R"doc(
Converts a batch to plain tensors.

looked_up: what a lookup of the batch in this process returned, or none. Its
  rows are not evicted while the row pointers of a growing table exist.
row_pointers: for each stack [samples + 1], where the entries of a sample begin.
sample_ids, token_ids, gains: for each stack [entries]. A token is a row of the
  stack, int32, or for a growing table an id, int64.
output_shapes: for each feature the shape of its activations without the
  embedding axis.
refusal: "", or for a refused batch, which has no samples here, a code and a
  text.
raises: whether a refused batch is an error.
)doc");

REGISTER_OP("TpuEmbeddingFromStacks")
    .Input("row_pointers: num_stacks * int32")
    .Input("token_ids: token_types")
    .Input("gains: num_stacks * float")
    .Input("shapes: num_features * int64")
    .Input("refusal: string")
    .Output("batch: variant")
    .Attr("num_stacks: int >= 1")
    .Attr("token_types: list({int32, int64}) >= 1")
    .Attr("num_features: int >= 1")
    .Attr("plan: string")
    .Attr("training: bool")
    .SetIsStateful()  // Only so that its variant is not folded into a constant.
    .SetShapeFn(tensorflow::shape_inference::ScalarShape)
    .Doc(R"doc(
Undoes TpuEmbeddingToStacks. Nothing in the inputs is trusted; errors in values
are raised by the op that takes the batch.

shapes: for each feature its output shape, or [number of samples].
refusal: as for TpuEmbeddingToStacks.
training: whether the batch is for an update.
)doc");

// Holds the values of a tensor, and keeps alive the batch that was looked up.
class OfLookedUp : public tensorflow::TensorBuffer {
 public:
  OfLookedUp(SharedBatch own_batch, Tensor values)
      : TensorBuffer(values.data()),
        batch(std::move(own_batch)),
        values_(std::move(values)) {}

  size_t size() const override { return values_.TotalBytes(); }
  TensorBuffer* root_buffer() override { return this; }
  void FillAllocationDescription(
      tensorflow::AllocationDescription* description) const override {
    description->set_requested_bytes(size());
    description->set_allocator_name("tpu_embedding");
  }

  const SharedBatch batch;

 private:
  const Tensor values_;
};

// Checks the types of the tokens of each stack.
absl::Status CheckTokens(const std::vector<StackPlan>& stacks,
                         const tensorflow::DataTypeVector& types) {
  TF_RETURN_IF_ERROR(CheckLength("token_types", types.size(), stacks.size()));
  for (size_t k = 0; k < stacks.size(); ++k) {
    if ((types[k] == tensorflow::DT_INT64) == stacks[k].grows) continue;
    return absl::InvalidArgumentError(absl::StrCat(
        "Stacked table ", stacks[k].name, ": the token ids are ",
        tensorflow::DataTypeString(types[k]),
        ". Token ids of growing tables must be int64, all others int32. Pass "
        "the second output of embedding_lookup unchanged."));
  }
  return absl::OkStatus();
}

class ToStacksOp : public tensorflow::OpKernel {
 public:
  explicit ToStacksOp(OpKernelConstruction* context) : OpKernel(context) {
    OP_REQUIRES_OK(context, context->GetAttr("raises", &raises_));
    OP_REQUIRES_OK(context, context->GetAttr("token_types", &types_));
  }

  void Compute(OpKernelContext* context) override {
    const BatchVariant* variant = nullptr;
    OP_REQUIRES_OK(context, Unwrap(context->input(0), nullptr, &variant));
    Tensor* refusal = nullptr;
    OP_REQUIRES_OK(context, context->allocate_output("refusal", {}, &refusal));
    refusal->scalar<tensorflow::tstring>()() = Refusal(variant->status);
    PreparedBatch nothing;
    if (!variant->status.ok()) {
      OP_REQUIRES(context, !raises_, variant->status);
      nothing = WithoutSamples(*variant->plan);
    }
    const PreparedBatch& batch =
        variant->status.ok() ? *variant->batch : nothing;
    SharedBatch looked_up;
    OP_REQUIRES_OK(context, ReadLookedUp(context, &looked_up));
    const std::vector<StackPlan>& stacks = variant->plan->stacks;
    OpOutputList pointers, shapes;
    OP_REQUIRES_OK(context, context->output_list("row_pointers", &pointers));
    OP_REQUIRES_OK(context, context->output_list("output_shapes", &shapes));
    OP_REQUIRES_OK(context,
                   CheckLength("stacks", stacks.size(), pointers.size()));
    OP_REQUIRES_OK(context, CheckTokens(stacks, types_));
    OP_REQUIRES_OK(
        context, CheckLength("features", batch.features.size(), shapes.size()));
    for (size_t k = 0; k < stacks.size(); ++k) {
      OP_REQUIRES_OK(context, Write(context, k, stacks[k], batch, looked_up));
    }
    for (int f = 0; f < shapes.size(); ++f) {
      const std::vector<int64_t>& shape = batch.features[f].output_shape;
      Tensor* output = nullptr;
      OP_REQUIRES_OK(
          context,
          shapes.allocate(f, TensorShape({static_cast<int64_t>(shape.size())}),
                          &output));
      std::copy(shape.begin(), shape.end(), output->flat<int64_t>().data());
    }
  }

 private:
  static PreparedBatch WithoutSamples(const Plan& plan) {
    PreparedBatch batch;
    batch.features.resize(plan.features.size());
    for (FeatureCsr& feature : batch.features) {
      feature.output_shape = {0};
      feature.offsets.Resize(1);
      feature.offsets[0] = 0;
    }
    return batch;
  }

  static absl::Status Write(OpKernelContext* context, int index,
                            const StackPlan& stack, const PreparedBatch& batch,
                            const SharedBatch& looked_up) {
    std::vector<const FeatureCsr*> features;
    int64_t samples = 0;
    int64_t entries = 0;
    for (const int f : stack.features) {
      features.push_back(&batch.features[f]);
      samples += batch.features[f].num_samples();
      entries += batch.features[f].num_entries();
    }
    if (std::max(samples, entries) >= std::numeric_limits<int32_t>::max()) {
      return absl::InvalidArgumentError(
          absl::StrCat("Stacked table ", stack.name, ": a batch of ", samples,
                       " samples and ", entries,
                       " ids. Both numbers must fit int32: cut the ",
                       "batch into smaller ones."));
    }
    const auto allocate = [&](const char* name, int64_t size, auto** data) {
      using Value = std::remove_reference_t<decltype(**data)>;
      OpOutputList list;
      Tensor* tensor = nullptr;
      TF_RETURN_IF_ERROR(context->output_list(name, &list));
      TF_RETURN_IF_ERROR(list.allocate(index, TensorShape({size}), &tensor));
      *data = tensor->flat<Value>().data();
      return absl::OkStatus();
    };
    StackOutput output;
    Tensor pointers;
    TF_RETURN_IF_ERROR(context->allocate_temp(
        tensorflow::DT_INT32, TensorShape({samples + 1}), &pointers));
    output.row_pointers = pointers.flat<int32_t>().data();
    TF_RETURN_IF_ERROR(allocate("sample_ids", entries, &output.sample_ids));
    TF_RETURN_IF_ERROR(allocate("gains", entries, &output.gains));
    if (stack.grows) {
      TF_RETURN_IF_ERROR(allocate("token_ids", entries, &output.ids));
    } else {
      TF_RETURN_IF_ERROR(allocate("token_ids", entries, &output.token_ids));
    }
    WriteStack(stack.stacked, features, output);
    if (stack.grows && looked_up) {
      pointers = Tensor(pointers.dtype(), pointers.shape(),
                        tensorflow::core::RefCountPtr<tensorflow::TensorBuffer>(
                            new OfLookedUp(looked_up, pointers)));
    }
    OpOutputList list;
    TF_RETURN_IF_ERROR(context->output_list("row_pointers", &list));
    list.set(index, pointers);
    return absl::OkStatus();
  }

  bool raises_ = true;
  tensorflow::DataTypeVector types_;
};

class FromStacksOp : public tensorflow::OpKernel {
 public:
  explicit FromStacksOp(OpKernelConstruction* context) : OpKernel(context) {
    OP_REQUIRES_OK(context, ReadPlan(context, &plan_));
    OP_REQUIRES_OK(context, context->GetAttr("training", &training_));
    tensorflow::DataTypeVector types;
    OP_REQUIRES_OK(context, context->GetAttr("token_types", &types));
    OP_REQUIRES_OK(context, CheckTokens(plan_->stacks, types));
    int64_t num_stacks = 0;
    int64_t num_features = 0;
    OP_REQUIRES_OK(context, context->GetAttr("num_stacks", &num_stacks));
    OP_REQUIRES_OK(context, context->GetAttr("num_features", &num_features));
    OP_REQUIRES_OK(context,
                   CheckLength("stacks", num_stacks, plan_->stacks.size()));
    OP_REQUIRES_OK(
        context, CheckLength("features", num_features, plan_->features.size()));
  }

  void Compute(OpKernelContext* context) override {
    auto batch = std::make_shared<PreparedBatch>();
    absl::Status status = Refused(context);
    if (status.ok()) status = Read(context, batch.get());
    if (status.ok() && training_) {
      status = WithinMemory([&] {
        GroupRows(plan_->table_map, WorkerPool(context), batch.get());
        return absl::OkStatus();
      });
    }
    OP_REQUIRES_OK(context, Wrap(context, 0,
                                 BatchVariant(plan_, std::move(batch),
                                              std::move(status))));
  }

 private:
  static absl::Status Refused(OpKernelContext* context) {
    const Tensor* refusal = nullptr;
    TF_RETURN_IF_ERROR(context->input("refusal", &refusal));
    TF_RETURN_IF_ERROR(CheckScalar("refusal", *refusal));
    return FromRefusal(refusal->scalar<tensorflow::tstring>()());
  }

  absl::Status Read(OpKernelContext* context, PreparedBatch* batch) const {
    OpInputList pointers, tokens, gains, shapes;
    TF_RETURN_IF_ERROR(context->input_list("row_pointers", &pointers));
    TF_RETURN_IF_ERROR(context->input_list("token_ids", &tokens));
    TF_RETURN_IF_ERROR(context->input_list("gains", &gains));
    TF_RETURN_IF_ERROR(context->input_list("shapes", &shapes));
    batch->features.resize(plan_->features.size());
    batch->vocabulary_sizes = plan_->table_map.vocabulary_sizes;
    batch->trains = true;
    for (int f = 0; f < shapes.size(); ++f) {
      const auto axes = shapes[f].flat<int64_t>();
      batch->features[f].output_shape.assign(axes.data(),
                                             axes.data() + axes.size());
    }
    const std::vector<StackPlan>& stacks = plan_->stacks;
    std::vector<Error> errors(stacks.size());
    for (const Tensor& values : pointers) {
      const auto* known = dynamic_cast<const OfLookedUp*>(
          tensorflow::DMAHelper::buffer(&values));
      if (known) batch->looked_up = known->batch;
    }
    const auto read = [&](int64_t begin, int64_t end) {
      for (int64_t k = begin; k < end; ++k) {
        const StackInput input = {stacks[k].name,
                                  pointers[k].flat<int32_t>().data(),
                                  pointers[k].NumElements(),
                                  Data<int32_t>(tokens[k]),
                                  Data<int64_t>(tokens[k]),
                                  tokens[k].NumElements(),
                                  gains[k].flat<float>().data(),
                                  gains[k].NumElements()};
        std::vector<FeatureCsr*> features;
        for (const int f : stacks[k].features) {
          features.push_back(&batch->features[f]);
        }
        errors[k] = ReadStack(stacks[k].stacked, input, features);
      }
    };
    // Rough cycles for copying one stack of a large batch.
    constexpr int64_t kCyclesPerStack = 100000;
    TF_RETURN_IF_ERROR(WithinMemory([&] {
      WorkerPool(context)(stacks.size(), kCyclesPerStack, read);
      return absl::OkStatus();
    }));
    for (const Error& error : errors) {
      TF_RETURN_IF_ERROR(InvalidArgument(error));
    }
    return absl::OkStatus();
  }

  // Returns the data, or null if it is of another type.
  template <class T>
  static const T* Data(const Tensor& tokens) {
    return tokens.dtype() == tensorflow::DataTypeToEnum<T>::value
               ? tokens.flat<T>().data()
               : nullptr;
  }

  SharedPlan plan_;
  bool training_ = false;
};

REGISTER_KERNEL_BUILDER(
    Name("TpuEmbeddingToStacks").Device(tensorflow::DEVICE_CPU), ToStacksOp);
REGISTER_KERNEL_BUILDER(
    Name("TpuEmbeddingFromStacks").Device(tensorflow::DEVICE_CPU),
    FromStacksOp);

ALLOW_STATEFUL_OP_FOR_DATASET_FUNCTIONS("TpuEmbeddingFromStacks");

}  // namespace
}  // namespace tpu_embedding
