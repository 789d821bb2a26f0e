// ConvertToSparseCoreCsrWrappedCooTensor, GetMinibatchSplitsWithPhysicalReplica
// and GetMinibatchesInCsrWithPhysicalReplica: sorted partitions -> padded CSR.

#include <algorithm>
#include <cstdint>
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
using tensorflow::Tensor;
using tensorflow::TensorShape;

// Copies entries [begin, ...) of a list into a cell, as many as it holds.
void FillCell(const CooView& coo, int64_t begin, const CsrLayout& layout,
              int64_t cell, const CsrArrays& arrays) {
  const int64_t start = layout.starts[cell];
  const int64_t kept = layout.ends[cell] - start;
  std::copy_n(coo.rows + begin, kept, arrays.sample_ids + start);
  std::copy_n(coo.columns + begin, kept, arrays.token_ids + start);
  std::copy_n(coo.gains + begin, kept, arrays.gains + start);
}

absl::Status CheckCounts(const int32_t* counts, int64_t size, int64_t total) {
  if (counts[0] < 0 || counts[size - 1] > total ||
      !std::is_sorted(counts, counts + size)) {
    return absl::InvalidArgumentError(absl::StrCat(
        "id_counts must not decrease and must lie in [0, ", total, "]."));
  }
  return absl::OkStatus();
}

// Checks the size of an id buffer.
absl::Status CheckCapacity(const std::string& table, int64_t capacity) {
  if (capacity % kCsrAlignment == 0 && capacity <= INT32_MAX) {
    return absl::OkStatus();
  }
  return absl::InvalidArgumentError(IdBufferSizeText(table, capacity));
}

class WrapOp : public tensorflow::OpKernel {
 public:
  explicit WrapOp(OpKernelConstruction* context) : OpKernel(context) {
    OP_REQUIRES_OK(context, table_.Read(context));
    OP_REQUIRES_OK(context, buffers_.Read(context));
    OP_REQUIRES_OK(context,
                   context->GetAttr("sample_count_per_sc", &samples_per_core_));
    OP_REQUIRES_OK(context,
                   context->GetAttr("allow_id_dropping", &allow_dropping_));
  }

  void Compute(OpKernelContext* context) override {
    OpInputList rows, columns, gains, counts;
    OP_REQUIRES_OK(context, context->input_list("sorted_row_ids_list", &rows));
    OP_REQUIRES_OK(context,
                   context->input_list("sorted_col_ids_list", &columns));
    OP_REQUIRES_OK(context, context->input_list("sorted_gains_list", &gains));
    OP_REQUIRES_OK(context, context->input_list("id_counts_list", &counts));
    const Tensor* splits = nullptr;
    OP_REQUIRES_OK(context, context->input("splits", &splits));
    OP_REQUIRES(
        context, splits->NumElements() == 1 && splits->flat<int64_t>()(0) == 0,
        absl::UnimplementedError("splits other than 0 are not built here. Use "
                                 "GetMinibatchesInCsrWithPhysicalReplica."));
    const int64_t shards = table_.num_shards();
    const CsrCells cells{table_.num_cores, 1, shards};
    std::vector<CooView> lists(cells.num_cores);
    std::vector<int64_t> sizes;
    for (int64_t core = 0; core < cells.num_cores; ++core) {
      OP_REQUIRES_OK(context, MakeCooView(rows[core], columns[core],
                                          gains[core], &lists[core]));
      OP_REQUIRES(context, counts[core].NumElements() == shards + 1,
                  absl::InvalidArgumentError(absl::StrCat(
                      "id_counts must have ", shards + 1, " values, got ",
                      counts[core].NumElements())));
      const int32_t* c = counts[core].flat<int32_t>().data();
      OP_REQUIRES_OK(context, CheckCounts(c, shards + 1, lists[core].size));
      for (int64_t s = 0; s < shards; ++s) sizes.push_back(c[s + 1] - c[s]);
    }
    const int64_t capacity = buffers_.max_ids_per_chip_per_sample *
                             samples_per_core_ * cells.num_cores;
    OP_REQUIRES_OK(context, CheckCapacity(table_.name, capacity));
    const CsrLayout layout = LayOut(cells, sizes, capacity);
    OP_REQUIRES(context, allow_dropping_ || layout.dropped_ids == 0,
                absl::InvalidArgumentError(
                    IdBufferText(table_.name, layout.required_ids, capacity)));
    CsrArrays arrays;
    OP_REQUIRES_OK(context,
                   StartCsr(context, buffers_, capacity, layout, &arrays));
    for (int64_t core = 0; core < cells.num_cores; ++core) {
      for (int64_t s = 0; s < shards; ++s) {
        FillCell(lists[core], counts[core].flat<int32_t>()(s), layout,
                 cells.index(core, 0, s), arrays);
      }
    }
  }

 private:
  HostOpTable table_;
  HostOpBuffers buffers_;
  int64_t samples_per_core_ = 1;
  bool allow_dropping_ = false;
};

class SplitsOp : public tensorflow::OpKernel {
 public:
  explicit SplitsOp(OpKernelConstruction* context) : OpKernel(context) {
    OP_REQUIRES_OK(context, table_.Read(context));
    OP_REQUIRES_OK(context, context->GetAttr("sample_count", &samples_));
    OP_REQUIRES(context, samples_ >= table_.num_cores,
                absl::InvalidArgumentError("Each SparseCore needs a sample."));
    // Google's kernel takes this limit if no limits were compiled in.
    const int64_t limit = AlignCsr(4 * (samples_ / table_.num_cores));
    limit_ = {limit, limit};
  }

  void Compute(OpKernelContext* context) override {
    CooView coo;
    OP_REQUIRES_OK(context, MakeCooView(context->input(1), context->input(2),
                                        context->input(3), &coo));
    const int64_t shards = table_.num_shards();
    const int64_t per_core = samples_ / table_.num_cores;
    Result result;
    result.counts.push_back(0);
    for (int64_t core = 0; core < table_.num_cores; ++core) {
      CsrEntries entries;
      entries.Start(table_.place(), {}, coo.size, CsrForm::kGains);
      for (int64_t i = 0; i < coo.size; ++i) {
        if (coo.rows[i] / per_core != core) continue;
        OP_REQUIRES_OK(context,
                       AppendCoo(table_, coo, i, i + 1, per_core, &entries));
      }
      SortScratch scratch;
      Partitions partitions;
      SortIntoPartitions(&entries, &scratch, &partitions);
      for (int64_t s = 0; s < shards; ++s) {
        OP_REQUIRES_OK(context, AddPartition(partitions, s, &result));
      }
    }
    OP_REQUIRES_OK(context, Write(context, result));
  }

 private:
  struct Result {
    std::vector<int32_t> samples, tokens, counts;
    std::vector<float> gains;
    uint64_t splits = 0;
    IdCounts largest;
  };

  absl::Status AddPartition(const Partitions& partitions, int64_t shard,
                            Result* result) const {
    const int64_t out = result->samples.size();
    const int64_t end = out + partitions.counts(shard).ids;
    result->samples.resize(end);
    result->tokens.resize(end);
    result->gains.resize(end);
    WritePartition(partitions, shard, out,
                   {nullptr, result->samples.data(), result->tokens.data(),
                    result->gains.data(), nullptr});
    BucketCounts buckets{};
    AddBuckets(partitions, shard, BucketWidth(table_.rows), &buckets);
    IdCounts total;
    for (const IdCounts& bucket : buckets) {
      total = total + bucket;
      result->counts.push_back(
          static_cast<int32_t>(result->counts.back() + bucket.ids));
    }
    result->largest.ids = std::max(result->largest.ids, total.ids);
    result->largest.unique = std::max(result->largest.unique, total.unique);
    const int above = FirstBucketAbove(buckets, limit_);
    if (above >= 0) {
      return absl::InvalidArgumentError(
          BucketLimitText(table_.name, shard, above, buckets[above].ids,
                          buckets[above].unique));
    }
    result->splits |= FindSplits(buckets, limit_);
    return absl::OkStatus();
  }

  static absl::Status Write(OpKernelContext* context, const Result& result) {
    const auto list = [&](int index, const auto& values) -> absl::Status {
      using Value = typename std::decay_t<decltype(values)>::value_type;
      Tensor* tensor = nullptr;
      TF_RETURN_IF_ERROR(context->allocate_output(
          index, TensorShape({static_cast<int64_t>(values.size())}), &tensor));
      std::copy(values.begin(), values.end(), tensor->flat<Value>().data());
      return absl::OkStatus();
    };
    TF_RETURN_IF_ERROR(list(0, result.samples));
    TF_RETURN_IF_ERROR(list(1, result.tokens));
    TF_RETURN_IF_ERROR(list(2, result.gains));
    TF_RETURN_IF_ERROR(list(4, result.counts));
    Tensor *splits, *ids, *unique;
    TF_RETURN_IF_ERROR(context->allocate_output(3, {}, &splits));
    TF_RETURN_IF_ERROR(context->allocate_output(5, {}, &ids));
    TF_RETURN_IF_ERROR(context->allocate_output(6, {}, &unique));
    splits->scalar<int64_t>()() = static_cast<int64_t>(result.splits);
    ids->scalar<int32_t>()() = static_cast<int32_t>(result.largest.ids);
    unique->scalar<int32_t>()() = static_cast<int32_t>(result.largest.unique);
    return absl::OkStatus();
  }

  HostOpTable table_;
  int64_t samples_ = 1;
  IdCounts limit_;
};

class MinibatchesOp : public tensorflow::OpKernel {
 public:
  explicit MinibatchesOp(OpKernelConstruction* context) : OpKernel(context) {
    OP_REQUIRES_OK(context, table_.Read(context));
    OP_REQUIRES_OK(context, buffers_.Read(context));
    OP_REQUIRES_OK(context, context->GetAttr("sample_count", &samples_));
  }

  void Compute(OpKernelContext* context) override {
    CooView coo;
    OP_REQUIRES_OK(context, MakeCooView(context->input(1), context->input(2),
                                        context->input(3), &coo));
    const Tensor& counts_input = context->input(5);
    const int64_t shards = table_.num_shards();
    const int64_t size = table_.num_cores * shards * kNumBuckets + 1;
    OP_REQUIRES(context,
                context->input(4).NumElements() == 1 &&
                    counts_input.NumElements() == size,
                absl::InvalidArgumentError(absl::StrCat(
                    "There must be one splits and ", size, " id_counts.")));
    const int32_t* counts = counts_input.flat<int32_t>().data();
    OP_REQUIRES_OK(context, CheckCounts(counts, size, coo.size));
    const std::vector<int> bounds =
        MinibatchBounds(context->input(4).flat<int64_t>()(0));
    const CsrCells cells{table_.num_cores,
                         static_cast<int64_t>(bounds.size()) - 1, shards};
    OP_REQUIRES(
        context, cells.num_minibatches <= buffers_.max_minibatches,
        absl::InvalidArgumentError(MinibatchesText(
            table_.name, cells.num_minibatches, buffers_.max_minibatches)));
    std::vector<int64_t> begins, sizes;
    for (int64_t cell = 0; cell < cells.size(); ++cell) {
      const int64_t core = cell / (cells.num_minibatches * shards);
      const int64_t minibatch = cell / shards % cells.num_minibatches;
      const int32_t* buckets =
          counts + (core * shards + cell % shards) * kNumBuckets;
      begins.push_back(buckets[bounds[minibatch]]);
      sizes.push_back(buckets[bounds[minibatch + 1]] - begins.back());
    }
    const int64_t capacity = buffers_.max_ids_per_chip_per_sample * samples_;
    OP_REQUIRES_OK(context, CheckCapacity(table_.name, capacity));
    const CsrLayout layout = LayOut(cells, sizes, capacity);
    OP_REQUIRES(context, layout.dropped_ids == 0,
                absl::InvalidArgumentError(
                    IdBufferText(table_.name, layout.required_ids, capacity)));
    CsrArrays arrays;
    OP_REQUIRES_OK(context,
                   StartCsr(context, buffers_, capacity, layout, &arrays));
    for (int64_t cell = 0; cell < cells.size(); ++cell) {
      FillCell(coo, begins[cell], layout, cell, arrays);
    }
  }

 private:
  HostOpTable table_;
  HostOpBuffers buffers_;
  int64_t samples_ = 1;
};

SOFTWARE_TPU_KERNEL(ConvertToSparseCoreCsrWrappedCooTensor, WrapOp);
SOFTWARE_TPU_KERNEL(GetMinibatchSplitsWithPhysicalReplica, SplitsOp);
SOFTWARE_TPU_KERNEL(GetMinibatchesInCsrWithPhysicalReplica, MinibatchesOp);

}  // namespace
}  // namespace tpu_embedding
