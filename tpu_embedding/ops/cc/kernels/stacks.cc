#include "kernels/stacks.h"

#include <algorithm>
#include <limits>
#include <utility>

#include "kernels/kernel_util.h"

namespace tpu_embedding {

using tensorflow::OpInputList;
using tensorflow::OpKernelConstruction;
using tensorflow::OpKernelContext;
using tensorflow::Tensor;

absl::Status Stacks::ReadAttributes(OpKernelConstruction* context) {
  const auto names = GetList<std::string>(context, "stack_names");
  const auto stacks = GetList<int>(context, "feature_stacks");
  const auto tokens = GetList<int64_t>(context, "first_tokens");
  const auto paths = GetList<std::string>(context, "paths");
  tables_.feature_tables = GetList<int>(context, "feature_tables");
  tables_.vocabulary_sizes = GetList<int64_t>(context, "vocabulary_sizes");
  TF_RETURN_IF_ERROR(context->status());
  const int64_t num_features = tables_.feature_tables.size();
  const int64_t num_tables = tables_.vocabulary_sizes.size();
  int64_t num_stacks = 0;
  TF_RETURN_IF_ERROR(context->GetAttr("num_stacks", &num_stacks));
  TF_RETURN_IF_ERROR(CheckLength("stack_names", names.size(), num_stacks));
  TF_RETURN_IF_ERROR(
      CheckLength("feature_stacks", stacks.size(), num_features));
  TF_RETURN_IF_ERROR(CheckLength("first_tokens", tokens.size(), num_features));
  TF_RETURN_IF_ERROR(CheckLength("paths", paths.size(), num_features));
  TF_RETURN_IF_ERROR(CheckIndices("feature_stacks", stacks, num_stacks));
  TF_RETURN_IF_ERROR(
      CheckIndices("feature_tables", tables_.feature_tables, num_tables));
  for (const std::string& name : names) stacks_.push_back({name, {}, {}});
  for (size_t f = 0; f < stacks.size(); ++f) {
    const int64_t rows = tables_.vocabulary_sizes[tables_.feature_tables[f]];
    Stack& stack = stacks_[stacks[f]];
    stack.indices.push_back(f);
    stack.features.push_back({paths[f], tokens[f], rows});
  }
  return absl::OkStatus();
}

absl::Status Stacks::Write(OpKernelContext* context,
                           const PreparedBatch& batch) const {
  for (size_t k = 0; k < stacks_.size(); ++k) {
    TF_RETURN_IF_ERROR(WriteOne(context, k, batch));
  }
  return absl::OkStatus();
}

absl::Status Stacks::WriteOne(OpKernelContext* context, int stack,
                              const PreparedBatch& batch) const {
  std::vector<const FeatureCsr*> batches;
  int64_t samples = 0;
  int64_t entries = 0;
  for (const int f : stacks_[stack].indices) {
    batches.push_back(&batch.features[f]);
    samples += batch.features[f].num_samples();
    entries += batch.features[f].rows.size();
  }
  if (std::max(samples, entries) >= std::numeric_limits<int32_t>::max()) {
    return absl::InvalidArgumentError(absl::StrCat(
        "Stacked table ", stacks_[stack].name, ": a batch of ", samples,
        " samples and ", entries, " ids. Both are numbered by int32; cut the ",
        "batch into smaller ones."));
  }
  const int64_t sizes[] = {samples + 1, entries, entries, entries};
  Tensor* outputs[4];
  for (size_t k = 0; k < 4; ++k) {
    TF_RETURN_IF_ERROR(context->allocate_output(stack + k * stacks_.size(),
                                                {sizes[k]}, &outputs[k]));
  }
  WriteStack(
      stacks_[stack].features, batches,
      {outputs[0]->flat<int32_t>().data(), outputs[1]->flat<int32_t>().data(),
       outputs[2]->flat<int32_t>().data(), outputs[3]->flat<float>().data()});
  return absl::OkStatus();
}

absl::Status Stacks::Read(OpKernelContext* context,
                          std::vector<std::vector<int64_t>> output_shapes,
                          PreparedBatch* batch) const {
  OpInputList pointers, tokens, gains;
  TF_RETURN_IF_ERROR(context->input_list("row_pointers", &pointers));
  TF_RETURN_IF_ERROR(context->input_list("token_ids", &tokens));
  TF_RETURN_IF_ERROR(context->input_list("gains", &gains));
  TF_RETURN_IF_ERROR(CheckLength("shapes", output_shapes.size(),
                                 tables_.feature_tables.size()));
  batch->features.resize(output_shapes.size());
  batch->vocabulary_sizes = tables_.vocabulary_sizes;
  for (size_t f = 0; f < output_shapes.size(); ++f) {
    batch->features[f].output_shape = std::move(output_shapes[f]);
  }
  std::vector<Error> errors(stacks_.size());
  const auto read = [&](int64_t begin, int64_t end) {
    for (int64_t k = begin; k < end; ++k) {
      const StackInput input = {
          stacks_[k].name,           pointers[k].flat<int32_t>().data(),
          pointers[k].NumElements(), tokens[k].flat<int32_t>().data(),
          tokens[k].NumElements(),   gains[k].flat<float>().data(),
          gains[k].NumElements()};
      std::vector<FeatureCsr*> batches;
      for (const int f : stacks_[k].indices) {
        batches.push_back(&batch->features[f]);
      }
      errors[k] = ReadStack(stacks_[k].features, input, batches);
    }
  };
  // Rough cycles for copying one stack of a large batch.
  constexpr int64_t kCyclesPerStack = 100000;
  TF_RETURN_IF_ERROR(WithinMemory([&] {
    WorkerPool(context)(stacks_.size(), kCyclesPerStack, read);
    return absl::OkStatus();
  }));
  for (const Error& error : errors) {
    if (error) return absl::InvalidArgumentError(*error);
  }
  return absl::OkStatus();
}

}  // namespace tpu_embedding
