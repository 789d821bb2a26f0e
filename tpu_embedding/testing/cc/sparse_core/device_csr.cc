#include "sparse_core/device_csr.h"

#include "absl/strings/str_cat.h"

namespace tpu_embedding {

using tensorflow::OpKernelContext;
using tensorflow::Tensor;

namespace {

// Row pointers and partitions begin at multiples of this number.
constexpr int64_t kAlignment = 8;

int64_t Align(int64_t size) {
  return (size + kAlignment - 1) / kAlignment * kAlignment;
}

absl::Status Vector(OpKernelContext* context, const char* name,
                    const Tensor** vector) {
  TF_RETURN_IF_ERROR(context->input(name, vector));
  if ((*vector)->dims() == 1) return absl::OkStatus();
  return absl::InvalidArgumentError(
      absl::StrCat("`", name, "` must be a vector, but has the shape ",
                   (*vector)->shape().DebugString(), "."));
}

absl::Status Invalid(const CsrFrame& frame, const Partition& partition,
                     const std::string& problem) {
  return absl::InvalidArgumentError(absl::StrCat(
      "Table ", frame.table, ", entries of SparseCore ", partition.sparse_core,
      " for rows of SparseCore ", partition.target, ": ", problem));
}

}  // namespace

absl::Status DeviceCsr::Read(OpKernelContext* context, const CsrFrame& frame) {
  num_sparse_cores_ = frame.num_sparse_cores;
  samples_per_core_ = frame.samples_per_core();
  rows_per_core_ = frame.rows_per_core();
  max_valency_ = frame.max_valency;
  TF_RETURN_IF_ERROR(ReadTensors(context, frame));
  // The ops with a combiner take positions, and no minibatches.
  TF_RETURN_IF_ERROR(max_valency_ > 0 ? ReadPositions(context, frame)
                                      : ReadMinibatches(context, frame));
  TF_RETURN_IF_ERROR(Cut(frame));
  for (const Partition& partition : partitions_) {
    TF_RETURN_IF_ERROR(Check(partition, frame));
  }
  return absl::OkStatus();
}

absl::Status DeviceCsr::ReadTensors(OpKernelContext* context,
                                    const CsrFrame& frame) {
  const Tensor *pointers, *samples, *tokens, *gains;
  TF_RETURN_IF_ERROR(Vector(context, "row_pointers", &pointers));
  TF_RETURN_IF_ERROR(Vector(context, "sorted_sample_ids", &samples));
  TF_RETURN_IF_ERROR(Vector(context, "sorted_token_ids", &tokens));
  TF_RETURN_IF_ERROR(Vector(context, "sorted_gains", &gains));
  if (samples->shape() != tokens->shape() ||
      samples->shape() != gains->shape()) {
    return absl::InvalidArgumentError(absl::StrCat(
        "Table ", frame.table, ": sample ids, token ids and gains must have ",
        "one size, but there are ", samples->NumElements(), ", ",
        tokens->NumElements(), " and ", gains->NumElements(), "."));
  }
  pointers_ = pointers->flat<int32_t>().data();
  num_pointers_ = pointers->NumElements();
  samples_ = samples->flat<int32_t>().data();
  tokens_ = tokens->flat<int32_t>().data();
  gains_ = gains->flat<float>().data();
  num_entries_ = samples->NumElements();
  return absl::OkStatus();
}

absl::Status DeviceCsr::ReadMinibatches(OpKernelContext* context,
                                        const CsrFrame& frame) {
  const Tensor* minibatches;
  TF_RETURN_IF_ERROR(
      context->input("num_minibatches_per_physical_sparse_core", &minibatches));
  if (minibatches->NumElements() != 1 || minibatches->flat<int32_t>()(0) < 1) {
    return absl::InvalidArgumentError(absl::StrCat(
        "Table ", frame.table, ": the number of minibatches must be one ",
        "number > 0, but is ", minibatches->DebugString(), "."));
  }
  num_minibatches_ = minibatches->flat<int32_t>()(0);
  return absl::OkStatus();
}

absl::Status DeviceCsr::ReadPositions(OpKernelContext* context,
                                      const CsrFrame& frame) {
  const Tensor* positions;
  TF_RETURN_IF_ERROR(Vector(context, "sorted_pos_ids", &positions));
  if (positions->NumElements() != num_entries_) {
    return absl::InvalidArgumentError(absl::StrCat(
        "Table ", frame.table, ": there are ", num_entries_, " entries, but ",
        positions->NumElements(), " positions."));
  }
  positions_ = positions->flat<int32_t>().data();
  return absl::OkStatus();
}

absl::Status DeviceCsr::Cut(const CsrFrame& frame) {
  const int64_t stride = Align(frame.num_targets());
  const int64_t needed = frame.num_sparse_cores * num_minibatches_ * stride;
  if (num_pointers_ < needed) {
    return absl::InvalidArgumentError(absl::StrCat(
        "Table ", frame.table, ": ", frame.num_sparse_cores, " SparseCores x ",
        num_minibatches_, " minibatches x ", frame.num_targets(),
        " partitions (padded to ", stride, ") need ", needed,
        " row pointers, but there are ", num_pointers_, "."));
  }
  int64_t begin = 0;
  for (int64_t block = 0; block * stride < needed; ++block) {
    for (int64_t target = 0; target < frame.num_targets(); ++target) {
      const Partition partition = {block / num_minibatches_, target, begin,
                                   pointers_[block * stride + target]};
      if (partition.end < begin || partition.end > num_entries_) {
        return Invalid(
            frame, partition,
            absl::StrCat("they begin at ", begin,
                         ", and the row pointer must be from there "
                         "to the number of entries, ",
                         num_entries_, ", but is ", partition.end, "."));
      }
      if (partition.end > begin) partitions_.push_back(partition);
      begin = Align(partition.end);
    }
  }
  return absl::OkStatus();
}

absl::Status DeviceCsr::Check(const Partition& partition,
                              const CsrFrame& frame) const {
  int64_t num_unique = 0;
  for (int64_t i = partition.begin; i < partition.end; ++i) {
    if (samples_[i] < 0 || samples_[i] >= samples_per_core_) {
      return Invalid(frame, partition,
                     absl::StrCat("sample id ", samples_[i], " is not in [0, ",
                                  samples_per_core_, ")."));
    }
    if (tokens_[i] < 0 || tokens_[i] >= rows_per_core_) {
      return Invalid(frame, partition,
                     absl::StrCat("token id ", tokens_[i], " is not in [0, ",
                                  rows_per_core_, ")."));
    }
    if (positions_ && (positions_[i] < 0 || positions_[i] >= max_valency_)) {
      return Invalid(
          frame, partition,
          absl::StrCat("position ", positions_[i], " is not in [0, ",
                       max_valency_, "), the combiner's max_valency."));
    }
    const bool first = i == partition.begin;
    if (!first && tokens_[i] < tokens_[i - 1]) {
      return Invalid(frame, partition,
                     absl::StrCat("token ids must ascend, but ", tokens_[i],
                                  " follows ", tokens_[i - 1], "."));
    }
    num_unique += first || tokens_[i] != tokens_[i - 1];
  }
  const int64_t num_ids = partition.end - partition.begin;
  if (num_ids > frame.max_ids) {
    return Invalid(frame, partition,
                   absl::StrCat("there are ", num_ids,
                                " ids, but max_ids_per_sparse_core is ",
                                frame.max_ids, "."));
  }
  if (num_unique > frame.max_unique_ids) {
    return Invalid(frame, partition,
                   absl::StrCat("there are ", num_unique,
                                " unique ids, but max_unique_ids_per_sparse_"
                                "core is ",
                                frame.max_unique_ids, "."));
  }
  return absl::OkStatus();
}

}  // namespace tpu_embedding
