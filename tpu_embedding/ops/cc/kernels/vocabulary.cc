// TpuEmbeddingReadVocabulary: which id has which row of a growing table.

#include "core/vocabulary.h"

#include <algorithm>
#include <cstdint>
#include <vector>

#include "kernels/growing_table.h"
#include "kernels/kernel_util.h"
#include "kernels/step_queue_resource.h"
#include "tensorflow/core/framework/op.h"
#include "tensorflow/core/framework/op_kernel.h"
#include "tensorflow/core/framework/shape_inference.h"

namespace tpu_embedding {
namespace {

using tensorflow::OpKernelConstruction;
using tensorflow::OpKernelContext;
using tensorflow::Tensor;
using tensorflow::shape_inference::InferenceContext;

REGISTER_OP("TpuEmbeddingReadVocabulary")
    .Input("queue: resource")
    .Output("ids: int64")
    .Output("rows: int64")
    .Output("hits: int64")
    .Output("last_updates: int64")
    .Output("counts: int64")
    .Attr("table: int >= 0")
    .SetIsStateful()
    .SetShapeFn([](InferenceContext* context) {
      for (int i = 0; i < 4; ++i) context->set_output(i, context->Vector(-1));
      context->set_output(4, context->Vector(4));
      return absl::OkStatus();
    })
    .Doc(R"doc(
Reads the vocabulary of a growing table.

ids: ascending, those that have a row.
rows, hits, last_updates: of each; hits and updates are 0 where none is counted.
counts: ids that updates named without a row, admitted, refused; rows evicted.
)doc");

class ReadVocabularyOp : public tensorflow::OpKernel {
 public:
  explicit ReadVocabularyOp(OpKernelConstruction* context) : OpKernel(context) {
    OP_REQUIRES_OK(context, context->GetAttr("table", &table_));
  }

  void Compute(OpKernelContext* context) override {
    QueuePtr resource;
    OP_REQUIRES_OK(context, LookUpQueue(context, &resource));
    OP_REQUIRES_OK(context,
                   CheckIndices("table", {table_}, resource->growing.size()));
    const GrowingTable* const table = resource->growing[table_].get();
    OP_REQUIRES(context, table,
                absl::InvalidArgumentError("The table does not grow."));
    absl::Status status;
    table->Visit([&](const Vocabulary& vocabulary) {
      status = Write(context, vocabulary);
    });
    OP_REQUIRES_OK(context, status);
  }

 private:
  static absl::Status Write(OpKernelContext* context,
                            const Vocabulary& vocabulary) {
    std::vector<int32_t> rows;
    for (int64_t row = 0; row < vocabulary.num_rows(); ++row) {
      if (vocabulary.HasId(row)) rows.push_back(row);
    }
    std::sort(rows.begin(), rows.end(), [&](int32_t a, int32_t b) {
      return vocabulary.id_of(a) < vocabulary.id_of(b);
    });
    const int64_t size = rows.size();
    const auto write = [&](int output, const auto& value_of) {
      Tensor* tensor = nullptr;
      TF_RETURN_IF_ERROR(context->allocate_output(output, {size}, &tensor));
      auto values = tensor->flat<int64_t>();
      for (int64_t i = 0; i < size; ++i) values(i) = value_of(rows[i]);
      return absl::OkStatus();
    };
    TF_RETURN_IF_ERROR(
        write(0, [&](int32_t row) { return vocabulary.id_of(row); }));
    TF_RETURN_IF_ERROR(write(1, [](int32_t row) { return row; }));
    TF_RETURN_IF_ERROR(
        write(2, [&](int32_t row) { return vocabulary.hits_of(row); }));
    TF_RETURN_IF_ERROR(
        write(3, [&](int32_t row) { return vocabulary.last_of(row); }));
    Tensor* counts = nullptr;
    TF_RETURN_IF_ERROR(context->allocate_output(4, {4}, &counts));
    const VocabularyCounts& from = vocabulary.counts();
    const int64_t values[] = {from.unknown, from.admitted, from.refused,
                              from.evicted};
    std::copy(values, values + 4, counts->flat<int64_t>().data());
    return absl::OkStatus();
  }

  int table_ = 0;
};

REGISTER_KERNEL_BUILDER(
    Name("TpuEmbeddingReadVocabulary").Device(tensorflow::DEVICE_CPU),
    ReadVocabularyOp);

}  // namespace
}  // namespace tpu_embedding
