#include "sparse_core/sparse_core_op.h"

#include "absl/strings/str_cat.h"

namespace tpu_embedding {

using tensorflow::OpKernelConstruction;
using tensorflow::OpKernelContext;
using tensorflow::Tensor;

namespace {

// The float32 values that a SparseCore handles at once, on all generations that
// have one (tpu_generations.py).
constexpr int64_t kLaneWidth = 8;

}  // namespace

absl::Status Inputs(const Contexts& contexts, const char* name,
                    Tensors* tensors) {
  for (OpKernelContext* context : contexts) {
    tensors->emplace_back();
    TF_RETURN_IF_ERROR(context->input(name, &tensors->back()));
  }
  return absl::OkStatus();
}

SparseCoreOp::SparseCoreOp(OpKernelConstruction* context) : BarrierOp(context) {
  OP_REQUIRES_OK(context, context->GetAttr("table_name", &table_));
  // The ops have had this attribute since TensorFlow 2.20.
  if (context->HasAttr("num_sparsecores_per_device")) {
    OP_REQUIRES_OK(context, context->GetAttr("num_sparsecores_per_device",
                                             &num_sparse_cores_));
  }
  if (context->HasAttr("max_ids_per_sparse_core")) {
    OP_REQUIRES_OK(context,
                   context->GetAttr("max_ids_per_sparse_core", &max_ids_));
    OP_REQUIRES_OK(context, context->GetAttr("max_unique_ids_per_sparse_core",
                                             &max_unique_ids_));
  }
}

absl::Status SparseCoreOp::NumSparseCores(const Contexts& contexts,
                                          int64_t* number) const {
  const ReplicaRunner* const runner = ReplicaRunner::Of(contexts[0]);
  if (!runner) {
    *number = num_sparse_cores_;
    if (*number > 0) return absl::OkStatus();
    return absl::InvalidArgumentError(absl::StrCat(
        "Table ", table_, ": `num_sparsecores_per_device` must be given ",
        "outside of SoftwareTPUStrategy.run."));
  }
  *number = runner->barrier().sparse_cores();
  if (*number == 0) {
    return absl::InvalidArgumentError(absl::StrCat(
        "Table ", table_, ": this generation of TPUs has no SparseCores."));
  }
  if (num_sparse_cores_ > 0 && num_sparse_cores_ != *number) {
    return absl::InvalidArgumentError(
        absl::StrCat("Table ", table_, ": `num_sparsecores_per_device` is ",
                     num_sparse_cores_, ", but a device has ", *number, "."));
  }
  return absl::OkStatus();
}

absl::Status SparseCoreOp::FrameOf(const Contexts& contexts,
                                   const Tensors& parts,
                                   CsrFrame* frame) const {
  frame->table = table_;
  frame->num_replicas = contexts.size();
  TF_RETURN_IF_ERROR(NumSparseCores(contexts, &frame->num_sparse_cores));
  if (max_ids_ > 0) frame->max_ids = max_ids_;
  if (max_unique_ids_ > 0) frame->max_unique_ids = max_unique_ids_;
  for (const Tensor* part : parts) {
    if (part->dims() != 2 || part->shape() != parts[0]->shape() ||
        part->dim_size(0) % frame->num_sparse_cores != 0 ||
        part->dim_size(1) % kLaneWidth != 0) {
      return absl::InvalidArgumentError(absl::StrCat(
          "Table ", table_, ": the parts on all devices must be matrices of ",
          "one shape, whose rows are a multiple of the ",
          frame->num_sparse_cores, " SparseCores and whose width is a ",
          "multiple of ", kLaneWidth, ", but there is ",
          part->shape().DebugString(), "."));
    }
    if (part->dtype() != tensorflow::DT_FLOAT) {
      return absl::UnimplementedError(absl::StrCat(
          "Table ", table_, ": the software TPU has no int32 tables."));
    }
  }
  frame->num_rows = parts[0]->dim_size(0);
  return absl::OkStatus();
}

absl::Status SparseCoreOp::SetSamples(int64_t num_samples,
                                      CsrFrame* frame) const {
  frame->num_samples = num_samples;
  if (num_samples % frame->num_sparse_cores == 0) return absl::OkStatus();
  return absl::InvalidArgumentError(absl::StrCat(
      "Table ", table_, ": the samples of a replica must be a multiple of the ",
      frame->num_sparse_cores, " SparseCores, but there are ", num_samples,
      "."));
}

absl::Status SparseCoreOp::ReadAll(const Contexts& contexts,
                                   const CsrFrame& frame,
                                   std::vector<DeviceCsr>* csrs) {
  csrs->resize(contexts.size());
  for (size_t r = 0; r < contexts.size(); ++r) {
    TF_RETURN_IF_ERROR((*csrs)[r].Read(contexts[r], frame));
    if ((*csrs)[r].num_minibatches() != (*csrs)[0].num_minibatches()) {
      return absl::InvalidArgumentError(absl::StrCat(
          "Table ", frame.table, ": replica ", r, " comes with ",
          (*csrs)[r].num_minibatches(), " minibatches, replica 0 with ",
          (*csrs)[0].num_minibatches(), ". All must have the same number."));
    }
  }
  return absl::OkStatus();
}

absl::Status SparseCoreOp::ReadGradients(const Contexts& contexts, int64_t dim,
                                         CsrFrame* frame,
                                         TableGradientSums* sums) const {
  Tensors gradients;
  TF_RETURN_IF_ERROR(Inputs(contexts, "activation_gradients", &gradients));
  for (const Tensor* gradient : gradients) {
    if (gradient->dims() != 2 || gradient->dim_size(1) != dim ||
        gradient->shape() != gradients[0]->shape()) {
      return absl::InvalidArgumentError(absl::StrCat(
          "Table ", table_, ": the gradients of all replicas must be matrices ",
          "of one shape with the table's width, ", dim, ", but there is ",
          gradient->shape().DebugString(), "."));
    }
    sums->AddSamples(*gradient);
  }
  TF_RETURN_IF_ERROR(SetSamples(gradients[0]->dim_size(0), frame));
  return ReadAll(contexts, *frame, &sums->csrs);
}

}  // namespace tpu_embedding
