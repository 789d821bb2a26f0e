#include "software_tpu/sparse_core_op.h"

#include "absl/strings/str_cat.h"
#include "tensorflow/core/util/work_sharder.h"

namespace tpu_embedding {

using tensorflow::OpKernelConstruction;
using tensorflow::OpKernelContext;
using tensorflow::Tensor;

namespace {

// Float32 values that a SparseCore handles at once, on all generations that
// have one (hardware.py).
constexpr int64_t kLaneWidth = 8;

}  // namespace

ParallelFor Workers(OpKernelContext* context) {
  const auto* threads = context->device()->tensorflow_cpu_worker_threads();
  return [threads](int64_t total, int64_t cost, const Range& body) {
    tensorflow::Shard(threads->num_threads, threads->workers, total, cost,
                      body);
  };
}

SparseCoreOp::SparseCoreOp(OpKernelConstruction* context) : MeetingOp(context) {
  OP_REQUIRES_OK(context, context->GetAttr("table_name", &table_));
  OP_REQUIRES_OK(context, context->GetAttr("num_sparsecores_per_device",
                                           &num_sparse_cores_));
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
  *number = runner->meetings().sparse_cores();
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

absl::Status SparseCoreOp::FrameOf(const Contexts& contexts, const char* input,
                                   CsrFrame* frame) const {
  frame->table = table_;
  frame->num_replicas = contexts.size();
  TF_RETURN_IF_ERROR(NumSparseCores(contexts, &frame->num_sparse_cores));
  if (max_ids_ > 0) frame->max_ids = max_ids_;
  if (max_unique_ids_ > 0) frame->max_unique_ids = max_unique_ids_;
  const Tensor* first = nullptr;
  for (OpKernelContext* context : contexts) {
    const Tensor* table;
    TF_RETURN_IF_ERROR(context->input(input, &table));
    if (!first) first = table;
    if (table->dims() != 2 || table->shape() != first->shape() ||
        table->dim_size(0) % frame->num_sparse_cores != 0 ||
        table->dim_size(1) % kLaneWidth != 0) {
      return absl::InvalidArgumentError(absl::StrCat(
          "Table ", table_, ": the parts on all devices must be matrices of ",
          "one shape, their rows a multiple of the ", frame->num_sparse_cores,
          " SparseCores, their width one of ", kLaneWidth, ", but there is ",
          table->shape().DebugString(), "."));
    }
  }
  frame->num_rows = first->dim_size(0);
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

}  // namespace tpu_embedding
