#include "sparse_core/coo_lists.h"

namespace tpu_embedding {

using tensorflow::OpKernelConstruction;
using tensorflow::OpKernelContext;
using tensorflow::Tensor;
using tensorflow::TensorShape;

absl::Status HostOpTable::Read(OpKernelConstruction* context) {
  TF_RETURN_IF_ERROR(context->GetAttr("table_name", &name));
  TF_RETURN_IF_ERROR(context->GetAttr("num_replica", &num_replicas));
  TF_RETURN_IF_ERROR(context->GetAttr("num_sc_per_chip", &num_cores));
  return context->GetAttr("table_vocab_size", &rows);
}

absl::Status HostOpBuffers::Read(OpKernelConstruction* context) {
  int64_t num_replicas = 1;
  TF_RETURN_IF_ERROR(context->GetAttr("num_replica", &num_replicas));
  TF_RETURN_IF_ERROR(context->GetAttr("num_sc_per_chip", &num_cores));
  num_shards = num_cores * num_replicas;
  TF_RETURN_IF_ERROR(
      context->GetAttr("max_minibatches_per_sc", &max_minibatches));
  return context->GetAttr("max_ids_per_chip_per_sample",
                          &max_ids_per_chip_per_sample);
}

absl::Status MakeCooView(const Tensor& rows, const Tensor& columns,
                         const Tensor& gains, CooView* view) {
  if (rows.NumElements() != columns.NumElements() ||
      rows.NumElements() != gains.NumElements()) {
    return absl::InvalidArgumentError(
        absl::StrCat("Row ids, column ids and gains must have one size, but ",
                     "have ", rows.NumElements(), ", ", columns.NumElements(),
                     " and ", gains.NumElements(), "."));
  }
  *view = {rows.flat<int32_t>().data(), columns.flat<int32_t>().data(),
           gains.flat<float>().data(), rows.NumElements()};
  return absl::OkStatus();
}

absl::Status AppendCoo(const HostOpTable& table, const CooView& coo,
                       int64_t begin, int64_t end, int64_t samples,
                       CsrEntries* entries) {
  const int64_t shards = table.num_shards();
  const int64_t num_tokens = entries->place.num_tokens;
  for (int64_t i = begin; i < end; ++i) {
    const int64_t row = coo.columns[i];
    if (row < 0 || row >= table.rows || coo.rows[i] < 0) {
      return absl::InvalidArgumentError(absl::StrCat(
          "Table ", table.name, ": sample ", coo.rows[i], " has row ", row,
          ", but rows must be in [0, ", table.rows, ")."));
    }
    const int64_t key = row % shards * num_tokens + row / shards;
    entries->Append(
        static_cast<uint32_t>(key),
        {static_cast<int32_t>(coo.rows[i] % samples), coo.gains[i]});
  }
  return absl::OkStatus();
}

absl::Status StartCsr(OpKernelContext* context, const HostOpBuffers& buffers,
                      int64_t capacity, const CsrLayout& layout,
                      CsrArrays* arrays) {
  Tensor *pointers, *samples, *tokens, *gains;
  TF_RETURN_IF_ERROR(context->allocate_output(
      0, TensorShape({buffers.row_pointers()}), &pointers));
  TF_RETURN_IF_ERROR(
      context->allocate_output(1, TensorShape({capacity}), &samples));
  TF_RETURN_IF_ERROR(
      context->allocate_output(2, TensorShape({capacity}), &tokens));
  TF_RETURN_IF_ERROR(
      context->allocate_output(3, TensorShape({capacity}), &gains));
  const int64_t sizes[] = {layout.row_pointers_size, layout.ids_size,
                           layout.cells.num_minibatches};
  for (int i = 0; i < 3; ++i) {
    Tensor* size = nullptr;
    TF_RETURN_IF_ERROR(context->allocate_output(4 + i, {}, &size));
    size->scalar<int32_t>()() = static_cast<int32_t>(sizes[i]);
  }
  *arrays = {pointers->flat<int32_t>().data(), samples->flat<int32_t>().data(),
             tokens->flat<int32_t>().data(), gains->flat<float>().data(),
             nullptr};
  WriteFrame(layout, *arrays);
  return absl::OkStatus();
}

}  // namespace tpu_embedding
