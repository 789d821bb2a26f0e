// ConvertToListOfSparseCoreCooTensors, SortListOfSparseCoreCooTensors and
// GetStatsFromListOfSparseCoreCooTensors: samples -> sorted partitions.

#include <algorithm>
#include <cstdint>
#include <numeric>
#include <string>
#include <vector>

#include "core/csr_errors.h"
#include "core/csr_splits.h"
#include "runtime/registration.h"
#include "sparse_core/coo_lists.h"
#include "tensorflow/core/framework/op_kernel.h"

namespace tpu_embedding {
namespace {

using tensorflow::OpInputList;
using tensorflow::OpKernelConstruction;
using tensorflow::OpKernelContext;
using tensorflow::OpOutputList;
using tensorflow::Tensor;
using tensorflow::TensorShape;

absl::Status ToStatus(const Error& error) {
  return error ? absl::InvalidArgumentError(*error) : absl::OkStatus();
}

class ConvertOp : public tensorflow::OpKernel {
 public:
  explicit ConvertOp(OpKernelConstruction* context) : OpKernel(context) {
    std::string combiner;
    int64_t shards = 1;
    OP_REQUIRES_OK(context, context->GetAttr("sample_count", &samples_));
    OP_REQUIRES_OK(context, context->GetAttr("num_sc_per_chip", &cores_));
    OP_REQUIRES_OK(context, context->GetAttr("row_offset", &row_offset_));
    OP_REQUIRES_OK(context, context->GetAttr("col_offset", &col_offset_));
    OP_REQUIRES_OK(context, context->GetAttr("col_shift", &place_.rotation));
    OP_REQUIRES_OK(context, context->GetAttr("num_sc_shards", &shards));
    OP_REQUIRES_OK(context, context->GetAttr("stacked_table_sample_count",
                                             &stacked_samples_));
    OP_REQUIRES_OK(context, context->GetAttr("combiner", &combiner));
    OP_REQUIRES(context, (shards & (shards - 1)) == 0,
                absl::InvalidArgumentError(absl::StrCat(
                    "num_sc_shards must be a power of two, got ", shards)));
    place_.num_shards = shards;
    // The op does not know the vocabulary, so ids are not checked against it.
    spec_.vocabulary_size = int64_t{1} << 31;
    place_.num_tokens = spec_.vocabulary_size / shards;
    spec_.kind = InputKind::kRagged;
    spec_.path = name();
    spec_.table = "of the op";
    // Google's kernel was seen to scale "custom" as "sqrtn".
    spec_.combiner = combiner == "sum"    ? Combiner::kSum
                     : combiner == "mean" ? Combiner::kMean
                                          : Combiner::kSqrtn;
    const bool known = combiner == "sum" || combiner == "mean" ||
                       combiner == "sqrtn" || combiner == "custom";
    OP_REQUIRES(
        context, known,
        absl::InvalidArgumentError(absl::StrCat(
            "combiner must be sum, mean, sqrtn or custom, got ", combiner)));
  }

  void Compute(OpKernelContext* context) override {
    const Tensor& values = context->input(1);
    const Tensor& weights = context->input(2);
    OP_REQUIRES(context,
                weights.NumElements() == 1 ||
                    values.NumElements() == weights.NumElements(),
                absl::InvalidArgumentError(
                    absl::StrCat(values.NumElements(), " values have ",
                                 weights.NumElements(), " weights.")));
    // One weight is the weight of every value, as in TensorFlow's kernel.
    std::vector<float> same;
    if (weights.NumElements() == 1) {
      same.assign(values.NumElements(), weights.flat<float>()(0));
    }
    std::vector<int64_t> splits;
    OP_REQUIRES_OK(context, ReadSplits(context->input(0), values, &splits));
    FeatureInput input;
    input.ids32 = values.flat<int32_t>().data();
    input.num_ids = values.NumElements();
    input.weights = same.empty() ? weights.flat<float>().data() : same.data();
    input.structure = splits.data();
    input.structure_size = splits.size();
    input.shape = {samples_};
    FeatureRows rows;
    OP_REQUIRES_OK(context, ToStatus(ReadRows(spec_, input, &rows)));
    for (int64_t core = 0; core < cores_; ++core) {
      OP_REQUIRES_OK(context, WriteCore(context, input, rows, core));
    }
  }

 private:
  // Reads row splits from any kind of input.
  absl::Status ReadSplits(const Tensor& structure, const Tensor& values,
                          std::vector<int64_t>* splits) const {
    const auto data = structure.flat<int32_t>();
    const int64_t size = values.NumElements();
    splits->assign(samples_ + 1, 0);
    const bool dense = structure.dims() == 1 && structure.NumElements() == 0;
    const bool fits = structure.dims() == 2 ? structure.dim_size(0) == size
                      : dense ? size == samples_
                              : structure.NumElements() == samples_ + 1;
    if (structure.dims() > 2 || !fits) {
      return absl::InvalidArgumentError(absl::StrCat(
          "indices_or_row_splits of shape ", structure.shape().DebugString(),
          " do not go with ", size, " values and ", samples_, " samples."));
    }
    if (dense) {
      std::iota(splits->begin(), splits->end(), 0);
    } else if (structure.dims() == 1) {
      std::copy_n(data.data(), samples_ + 1, splits->begin());
    } else {
      const int64_t rank = structure.dim_size(1);
      for (int64_t i = 0; i < size; ++i) {
        const int64_t row = data(i * rank);
        if (row < 0 || row >= samples_ || (i && row < data((i - 1) * rank))) {
          return absl::InvalidArgumentError(absl::StrCat(
              "Index ", i, " has row ", row, "; rows must be in [0, ", samples_,
              ") and in order."));
        }
        ++(*splits)[row + 1];
      }
      std::partial_sum(splits->begin(), splits->end(), splits->begin());
    }
    return absl::OkStatus();
  }

  absl::Status WriteCore(OpKernelContext* context, const FeatureInput& input,
                         const FeatureRows& rows, int64_t core) const {
    const int64_t count = samples_ / cores_;
    const SampleRange range{
        core * count, (core + 1) * count,
        core * (stacked_samples_ / cores_) + row_offset_ / cores_};
    CsrEntries entries;
    entries.Start(place_, {}, CountEntries(input, rows, range),
                  CsrForm::kGains);
    TF_RETURN_IF_ERROR(
        ToStatus(AppendEntries(spec_, input, rows, range, 0, &entries)));
    Tensor *samples, *columns, *gains;
    const TensorShape shape({entries.size});
    TF_RETURN_IF_ERROR(context->allocate_output(core, shape, &samples));
    TF_RETURN_IF_ERROR(
        context->allocate_output(cores_ + core, shape, &columns));
    TF_RETURN_IF_ERROR(
        context->allocate_output(2 * cores_ + core, shape, &gains));
    for (int64_t i = 0; i < entries.size; ++i) {
      const int64_t key = entries.words.wide_words[i] >> 32;
      samples->flat<int32_t>()(i) = entries.payloads[i].sample;
      columns->flat<int32_t>()(i) =
          static_cast<int32_t>(key % place_.num_tokens * place_.num_shards +
                               key / place_.num_tokens + col_offset_);
      gains->flat<float>()(i) = entries.payloads[i].gain;
    }
    return absl::OkStatus();
  }

  FeatureSpec spec_;
  TablePlace place_;
  int64_t samples_ = 1, cores_ = 1, row_offset_ = 0, col_offset_ = 0;
  int64_t stacked_samples_ = 1;
};

// Sorts one SparseCore's lists, for the two ops below.
class ListOp : public tensorflow::OpKernel {
 public:
  explicit ListOp(OpKernelConstruction* context) : OpKernel(context) {
    std::vector<int64_t> samples;
    OP_REQUIRES_OK(context, context->GetAttr("sample_count_list", &samples));
    samples_ = std::accumulate(samples.begin(), samples.end(), int64_t{0});
    OP_REQUIRES_OK(context, table_.Read(context));
    OP_REQUIRES(context, samples_ > 0 && table_.rows <= INT32_MAX,
                absl::InvalidArgumentError(
                    "There must be samples, and fewer than 2^31 rows."));
  }

 protected:
  absl::Status Sort(OpKernelContext* context, Partitions* partitions) const {
    OpInputList rows, columns, gains;
    TF_RETURN_IF_ERROR(context->input_list("row_ids_list", &rows));
    TF_RETURN_IF_ERROR(context->input_list("col_ids_list", &columns));
    TF_RETURN_IF_ERROR(context->input_list("gains_list", &gains));
    int64_t size = 0;
    for (const Tensor& list : rows) size += list.NumElements();
    CsrEntries entries;
    entries.Start(table_.place(), {}, size, CsrForm::kGains);
    for (int i = 0; i < rows.size(); ++i) {
      CooView coo;
      TF_RETURN_IF_ERROR(MakeCooView(rows[i], columns[i], gains[i], &coo));
      TF_RETURN_IF_ERROR(
          AppendCoo(table_, coo, 0, coo.size, samples_, &entries));
    }
    SortScratch scratch;
    SortIntoPartitions(&entries, &scratch, partitions);
    return absl::OkStatus();
  }

  HostOpTable table_;
  int64_t samples_ = 1;  // of one SparseCore, through all features
};

class SortOp : public ListOp {
 public:
  explicit SortOp(OpKernelConstruction* context) : ListOp(context) {
    OP_REQUIRES_OK(context,
                   context->GetAttr("max_ids_per_sparse_core", &limit_.ids));
    OP_REQUIRES_OK(context, context->GetAttr("max_unique_ids_per_sparse_core",
                                             &limit_.unique));
  }

  void Compute(OpKernelContext* context) override {
    Partitions partitions;
    OP_REQUIRES_OK(context, Sort(context, &partitions));
    for (int64_t s = 0; s < table_.num_shards(); ++s) {
      const IdCounts counts = partitions.counts(s);
      if (counts.Within(limit_)) continue;
      const bool unique = counts.ids <= limit_.ids;
      OP_REQUIRES(
          context, false,
          absl::InvalidArgumentError(PartitionLimitText(
              table_.name, s, unique, unique ? counts.unique : counts.ids,
              unique ? limit_.unique : limit_.ids)));
    }
    Tensor *samples, *tokens, *gains, *counts;
    const TensorShape shape({partitions.size});
    OP_REQUIRES_OK(context, context->allocate_output(0, shape, &samples));
    OP_REQUIRES_OK(context, context->allocate_output(1, shape, &tokens));
    OP_REQUIRES_OK(context, context->allocate_output(2, shape, &gains));
    OP_REQUIRES_OK(context,
                   context->allocate_output(
                       3, TensorShape({table_.num_shards() + 1}), &counts));
    const CsrArrays arrays{nullptr, samples->flat<int32_t>().data(),
                           tokens->flat<int32_t>().data(),
                           gains->flat<float>().data(), nullptr};
    for (int64_t s = 0; s < table_.num_shards(); ++s) {
      WritePartition(partitions, s, partitions.begins[s], arrays);
    }
    std::copy(partitions.begins.begin(), partitions.begins.end(),
              counts->flat<int32_t>().data());
  }

 private:
  IdCounts limit_;
};

class StatsOp : public ListOp {
 public:
  using ListOp::ListOp;

  void Compute(OpKernelContext* context) override {
    Partitions partitions;
    OP_REQUIRES_OK(context, Sort(context, &partitions));
    IdCounts largest;
    for (int64_t s = 0; s < table_.num_shards(); ++s) {
      const IdCounts counts = partitions.counts(s);
      largest.ids = std::max(largest.ids, counts.ids);
      largest.unique = std::max(largest.unique, counts.unique);
    }
    Tensor *ids, *unique;
    OP_REQUIRES_OK(context, context->allocate_output(0, {}, &ids));
    OP_REQUIRES_OK(context, context->allocate_output(1, {}, &unique));
    ids->scalar<int32_t>()() = static_cast<int32_t>(largest.ids);
    unique->scalar<int32_t>()() = static_cast<int32_t>(largest.unique);
  }
};

SOFTWARE_TPU_KERNEL(ConvertToListOfSparseCoreCooTensors, ConvertOp);
SOFTWARE_TPU_KERNEL(SortListOfSparseCoreCooTensors, SortOp);
SOFTWARE_TPU_KERNEL(GetStatsFromListOfSparseCoreCooTensors, StatsOp);

}  // namespace
}  // namespace tpu_embedding
