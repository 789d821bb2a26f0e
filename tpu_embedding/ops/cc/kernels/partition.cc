// TpuEmbeddingPartition: raw features of one replica -> the padded, partitioned
// CSR of each stacked table, as the SparseCore ops take it.

#include <algorithm>
#include <cstdint>
#include <map>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "core/batch_pool.h"
#include "core/csr.h"
#include "kernels/feature_inputs.h"
#include "kernels/kernel_util.h"
#include "tensorflow/core/framework/op.h"
#include "tensorflow/core/framework/op_kernel.h"
#include "tensorflow/core/framework/shape_inference.h"

namespace tpu_embedding {
namespace {

using tensorflow::OpKernelConstruction;
using tensorflow::OpKernelContext;
using tensorflow::OpOutputList;
using tensorflow::Tensor;
using tensorflow::TensorShape;
using tensorflow::shape_inference::InferenceContext;

// The tables' sizes are known before any batch where the tensors are padded.
absl::Status PartitionShape(InferenceContext* context) {
  bool padded = false;
  int64_t cores = 0, replicas = 0, per_sample = 0, minibatches = 0;
  std::vector<int64_t> samples;
  std::vector<bool> positions;
  TF_RETURN_IF_ERROR(context->GetAttr("padded", &padded));
  TF_RETURN_IF_ERROR(context->GetAttr("num_sparse_cores", &cores));
  TF_RETURN_IF_ERROR(context->GetAttr("num_replicas", &replicas));
  TF_RETURN_IF_ERROR(context->GetAttr("max_minibatches", &minibatches));
  TF_RETURN_IF_ERROR(
      context->GetAttr("max_ids_per_chip_per_sample", &per_sample));
  TF_RETURN_IF_ERROR(context->GetAttr("stack_samples", &samples));
  TF_RETURN_IF_ERROR(context->GetAttr("keep_positions", &positions));
  int64_t num_tables = 0;
  int64_t num_positions = 0;
  TF_RETURN_IF_ERROR(context->GetAttr("num_tables", &num_tables));
  TF_RETURN_IF_ERROR(context->GetAttr("num_positions", &num_positions));
  TF_RETURN_IF_ERROR(CheckLength("stack_samples", samples.size(), num_tables));
  TF_RETURN_IF_ERROR(
      CheckLength("keep_positions", positions.size(), num_tables));
  TF_RETURN_IF_ERROR(
      CheckLength("sorted_pos_ids", num_positions,
                  std::count(positions.begin(), positions.end(), true)));
  const int64_t pointers = cores * minibatches * PaddedShards(cores * replicas);
  const auto vector = [&](int64_t size) {
    return padded && size >= 0 ? context->Vector(size)
                               : context->Vector(InferenceContext::kUnknownDim);
  };
  int output = 0;
  for (size_t t = 0; t < samples.size(); ++t) {
    context->set_output(output++, vector(pointers));
  }
  for (int list = 0; list < 3; ++list) {
    for (const int64_t count : samples) {
      context->set_output(output++, vector(count * per_sample));
    }
  }
  for (size_t t = 0; t < samples.size(); ++t) {
    if (positions[t]) {
      context->set_output(output++, vector(samples[t] * per_sample));
    }
  }
  for (size_t t = 0; t < 3 * samples.size(); ++t) {
    context->set_output(output++, context->Scalar());
  }
  int64_t num_features = 0;
  TF_RETURN_IF_ERROR(context->GetAttr("num_features", &num_features));
  context->set_output(output++, context->Vector(num_features));
  while (output < context->num_outputs()) {
    context->set_output(output++, context->Vector(samples.size()));
  }
  return absl::OkStatus();
}

REGISTER_OP("TpuEmbeddingPartition")
    .Input("ids: ids_types")
    .Input("structures: num_features * int64")
    .Input("shapes: num_features * int64")
    .Input("weights: num_weights * float")
    .Input("weight_structures: num_weight_structures * int64")
    .Input("splits: int64")
    .Output("row_pointers: num_tables * int32")
    .Output("sorted_sample_ids: num_tables * int32")
    .Output("sorted_token_ids: num_tables * int32")
    .Output("sorted_gains: num_tables * float")
    .Output("sorted_pos_ids: num_positions * int32")
    .Output("row_pointers_sizes: num_tables * int32")
    .Output("ids_sizes: num_tables * int32")
    .Output("num_minibatches: num_tables * int32")
    .Output("dropped_ids: int64")
    .Output("required_ids: int64")
    .Output("max_ids: int64")
    .Output("max_unique_ids: int64")
    .Output("own_splits: int64")
    .Attr("num_features: int >= 1")
    .Attr("num_weights: int >= 0")
    .Attr("num_weight_structures: int >= 0")
    .Attr("num_tables: int >= 1")
    .Attr("num_positions: int >= 0")
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
    .Attr("samples: list(int)")
    .Attr("sample_offsets: list(int)")
    .Attr("row_offsets: list(int)")
    .Attr("shifts: list(int)")
    .Attr("max_valencies: list(int)")
    .Attr("stack_names: list(string)")
    .Attr("stack_sizes: list(int)")
    .Attr("stack_features: list(int)")
    .Attr("stack_rows: list(int)")
    .Attr("stack_samples: list(int)")
    .Attr("max_ids_per_partition: list(int)")
    .Attr("max_unique_ids_per_partition: list(int)")
    .Attr("keep_positions: list(bool)")
    .Attr("num_sparse_cores: int >= 1")
    .Attr("num_replicas: int >= 1")
    .Attr("max_ids_per_chip_per_sample: int >= 1")
    .Attr("allow_id_dropping: bool")
    .Attr("max_minibatches: int >= 1")
    .Attr("minibatching: bool")
    .Attr("padded: bool")
    .SetShapeFn(PartitionShape)
    .Doc(R"doc(
Sorts the features of one replica into partitions for the SparseCores.

ids, structures, shapes, weights, weight_structures: as TpuEmbeddingPrepare.
splits: per stacked table, cuts into minibatches that other replicas need.
row_pointers: per stacked table, where each partition ends.
sorted_sample_ids, sorted_token_ids, sorted_gains: the entries of the
  partitions. With `padded` the tensors have the size of the id buffer and what
  lies past `ids_sizes` is not set; else they end there. The same holds for
  row_pointers and `row_pointers_sizes`.
sorted_pos_ids: of the tables that keep positions.
dropped_ids: entries left out for want of room: for each feature those of its
  unstacked table, whichever of its features they are of.
required_ids: the size of the id buffer that would have held all, per stacked
  table.
max_ids, max_unique_ids: of the fullest partition before cuts, per stacked table.
own_splits: the splits that were asked for and those that this batch needs.
)doc");

// The stacked tables, from attributes that list one value per table.
absl::Status ReadTables(OpKernelConstruction* context, CsrSetup* setup) {
  const auto names = GetList<std::string>(context, "stack_names");
  const auto sizes = GetList<int64_t>(context, "stack_sizes");
  const auto features = GetList<int>(context, "stack_features");
  const auto rows = GetList<int64_t>(context, "stack_rows");
  const auto samples = GetList<int64_t>(context, "stack_samples");
  const auto ids = GetList<int64_t>(context, "max_ids_per_partition");
  const auto unique = GetList<int64_t>(context, "max_unique_ids_per_partition");
  const auto positions = GetList<bool>(context, "keep_positions");
  TF_RETURN_IF_ERROR(context->status());
  int64_t num_tables = 0;
  TF_RETURN_IF_ERROR(context->GetAttr("num_tables", &num_tables));
  for (const auto& [name, length] : std::map<const char*, size_t>{
           {"stack_names", names.size()},
           {"stack_sizes", sizes.size()},
           {"stack_rows", rows.size()},
           {"stack_samples", samples.size()},
           {"max_ids_per_partition", ids.size()},
           {"max_unique_ids_per_partition", unique.size()},
           {"keep_positions", positions.size()}}) {
    TF_RETURN_IF_ERROR(CheckLength(name, length, num_tables));
  }
  TF_RETURN_IF_ERROR(
      CheckIndices("stack_features", features, setup->features.size()));
  int64_t next = 0;
  const int64_t num_features = features.size();
  for (int64_t t = 0; t < num_tables; ++t) {
    if (sizes[t] < 0 || sizes[t] > num_features - next) {
      return CheckLength("stack_features", num_features, next + sizes[t]);
    }
    CsrTable table;
    table.name = names[t];
    table.rows = rows[t];
    table.samples = samples[t];
    table.features.assign(features.begin() + next,
                          features.begin() + next + sizes[t]);
    table.limit = {ids[t], unique[t]};
    table.keep_positions = positions[t];
    next += sizes[t];
    setup->tables.push_back(std::move(table));
  }
  return absl::OkStatus();
}

absl::Status ReadPlaces(OpKernelConstruction* context,
                        const std::vector<FeatureSpec>& specs,
                        CsrSetup* setup) {
  const auto samples = GetList<int64_t>(context, "samples");
  const auto sample_offsets = GetList<int64_t>(context, "sample_offsets");
  const auto row_offsets = GetList<int64_t>(context, "row_offsets");
  const auto shifts = GetList<int64_t>(context, "shifts");
  const auto valencies = GetList<int64_t>(context, "max_valencies");
  TF_RETURN_IF_ERROR(context->status());
  for (const auto& [name, length] :
       std::map<const char*, size_t>{{"samples", samples.size()},
                                     {"sample_offsets", sample_offsets.size()},
                                     {"row_offsets", row_offsets.size()},
                                     {"shifts", shifts.size()},
                                     {"max_valencies", valencies.size()}}) {
    TF_RETURN_IF_ERROR(CheckLength(name, length, specs.size()));
  }
  for (size_t f = 0; f < specs.size(); ++f) {
    setup->features.push_back({specs[f], samples[f], sample_offsets[f],
                               row_offsets[f], shifts[f], valencies[f]});
  }
  return absl::OkStatus();
}

class PartitionOp : public tensorflow::OpKernel {
 public:
  explicit PartitionOp(OpKernelConstruction* context) : OpKernel(context) {
    OP_REQUIRES_OK(context, features_.ReadAttributes(context));
    OP_REQUIRES_OK(context, context->status());
    OP_REQUIRES_OK(context, context->GetAttr("padded", &padded_));
    OP_REQUIRES_OK(context, ReadSetup(context));
    OP_REQUIRES_OK(context, ReadPlaces(context, features_.specs(), &setup_));
    OP_REQUIRES_OK(context, ReadTables(context, &setup_));
    OP_REQUIRES_OK(context, InvalidArgument(CompleteSetup(&setup_)));
  }

  void Compute(OpKernelContext* context) override {
    std::vector<FeatureInput> inputs;
    OP_REQUIRES_OK(context, features_.ReadInputs(context, &inputs));
    const Tensor* splits_input = nullptr;
    OP_REQUIRES_OK(context, context->input("splits", &splits_input));
    const int64_t num_tables = setup_.tables.size();
    OP_REQUIRES(context, splits_input->NumElements() == num_tables,
                absl::InvalidArgumentError(absl::StrCat(
                    "splits must have one value for each of the ", num_tables,
                    " stacked tables, got ", splits_input->NumElements())));
    std::vector<uint64_t> splits(num_tables);
    for (int64_t t = 0; t < num_tables; ++t) {
      splits[t] = splits_input->flat<int64_t>()(t);
    }
    const std::shared_ptr<CsrBatch> pooled = pool_->Take(setup_);
    CsrBatch& batch = *pooled;
    const ParallelFor pool = WorkerPool(context);
    OP_REQUIRES_OK(
        context, WithinMemory([&] {
          return InvalidArgument(batch.Prepare(inputs, splits, pool));
        }));
    std::vector<CsrArrays> arrays(num_tables);
    OP_REQUIRES_OK(context, AllocateTables(context, batch, &arrays));
    batch.Write(arrays, pool);
    OP_REQUIRES_OK(context, WriteSizes(context, batch));
    OP_REQUIRES_OK(context, WriteDropped(context, batch));
    OP_REQUIRES_OK(context, WriteStatistics(context, batch));
  }

 private:
  absl::Status ReadSetup(OpKernelConstruction* context) {
    TF_RETURN_IF_ERROR(context->GetAttr("num_sparse_cores", &setup_.num_cores));
    TF_RETURN_IF_ERROR(context->GetAttr("num_replicas", &setup_.num_replicas));
    TF_RETURN_IF_ERROR(context->GetAttr("max_ids_per_chip_per_sample",
                                        &setup_.max_ids_per_chip_per_sample));
    TF_RETURN_IF_ERROR(
        context->GetAttr("allow_id_dropping", &setup_.allow_id_dropping));
    TF_RETURN_IF_ERROR(
        context->GetAttr("max_minibatches", &setup_.max_minibatches));
    return context->GetAttr("minibatching", &setup_.minibatching);
  }

  absl::Status AllocateTables(OpKernelContext* context, const CsrBatch& batch,
                              std::vector<CsrArrays>* arrays) const {
    OpOutputList pointers, samples, tokens, gains, positions;
    TF_RETURN_IF_ERROR(context->output_list("row_pointers", &pointers));
    TF_RETURN_IF_ERROR(context->output_list("sorted_sample_ids", &samples));
    TF_RETURN_IF_ERROR(context->output_list("sorted_token_ids", &tokens));
    TF_RETURN_IF_ERROR(context->output_list("sorted_gains", &gains));
    TF_RETURN_IF_ERROR(context->output_list("sorted_pos_ids", &positions));
    const auto allocate = [](OpOutputList* list, int index, int64_t size,
                             auto** data) -> absl::Status {
      using Value = std::remove_reference_t<decltype(**data)>;
      Tensor* tensor = nullptr;
      TF_RETURN_IF_ERROR(list->allocate(index, TensorShape({size}), &tensor));
      *data = tensor->flat<Value>().data();
      return absl::OkStatus();
    };
    int next_positions = 0;
    for (size_t t = 0; t < setup_.tables.size(); ++t) {
      const CsrTable& table = setup_.tables[t];
      const CsrLayout& layout = batch.result(t).layout;
      const int64_t size = padded_ ? setup_.IdCapacity(table) : layout.ids_size;
      CsrArrays& a = (*arrays)[t];
      TF_RETURN_IF_ERROR(allocate(
          &pointers, t,
          padded_ ? setup_.RowPointersCapacity() : layout.row_pointers_size,
          &a.row_pointers));
      TF_RETURN_IF_ERROR(allocate(&samples, t, size, &a.sample_ids));
      TF_RETURN_IF_ERROR(allocate(&tokens, t, size, &a.token_ids));
      TF_RETURN_IF_ERROR(allocate(&gains, t, size, &a.gains));
      if (table.keep_positions) {
        TF_RETURN_IF_ERROR(
            allocate(&positions, next_positions++, size, &a.positions));
      }
    }
    return absl::OkStatus();
  }

  absl::Status WriteSizes(OpKernelContext* context,
                          const CsrBatch& batch) const {
    const auto write = [&](const char* name, auto value_of) -> absl::Status {
      OpOutputList list;
      TF_RETURN_IF_ERROR(context->output_list(name, &list));
      for (int t = 0; t < list.size(); ++t) {
        Tensor* tensor = nullptr;
        TF_RETURN_IF_ERROR(list.allocate(t, {}, &tensor));
        tensor->scalar<int32_t>()() =
            static_cast<int32_t>(value_of(batch.result(t).layout));
      }
      return absl::OkStatus();
    };
    TF_RETURN_IF_ERROR(write("row_pointers_sizes", [](const CsrLayout& layout) {
      return layout.row_pointers_size;
    }));
    TF_RETURN_IF_ERROR(write(
        "ids_sizes", [](const CsrLayout& layout) { return layout.ids_size; }));
    return write("num_minibatches", [](const CsrLayout& layout) {
      return layout.cells.num_minibatches;
    });
  }

  absl::Status WriteDropped(OpKernelContext* context,
                            const CsrBatch& batch) const {
    const int64_t num_features = setup_.features.size();
    Tensor* dropped = nullptr;
    TF_RETURN_IF_ERROR(context->allocate_output(
        "dropped_ids", TensorShape({num_features}), &dropped));
    for (int f = 0; f < num_features; ++f) {
      dropped->flat<int64_t>()(f) = batch.dropped_ids(f);
    }
    return absl::OkStatus();
  }

  absl::Status WriteStatistics(OpKernelContext* context,
                               const CsrBatch& batch) const {
    const int64_t num_tables = setup_.tables.size();
    const auto write = [&](const char* name, auto value_of) -> absl::Status {
      Tensor* tensor = nullptr;
      TF_RETURN_IF_ERROR(
          context->allocate_output(name, TensorShape({num_tables}), &tensor));
      for (int64_t t = 0; t < num_tables; ++t) {
        tensor->flat<int64_t>()(t) = value_of(batch.result(t));
      }
      return absl::OkStatus();
    };
    TF_RETURN_IF_ERROR(write("required_ids", [](const CsrResult& result) {
      return result.layout.required_ids;
    }));
    TF_RETURN_IF_ERROR(write(
        "max_ids", [](const CsrResult& result) { return result.largest.ids; }));
    TF_RETURN_IF_ERROR(write("max_unique_ids", [](const CsrResult& result) {
      return result.largest.unique;
    }));
    return write("own_splits",
                 [](const CsrResult& result) { return result.splits; });
  }

  FeatureInputs features_;
  CsrSetup setup_;
  bool padded_ = true;
  // Calls of tf.data run side by side; each has a batch of its own.
  const std::shared_ptr<BatchPool<CsrBatch>> pool_ =
      std::make_shared<BatchPool<CsrBatch>>();
};

REGISTER_KERNEL_BUILDER(
    Name("TpuEmbeddingPartition").Device(tensorflow::DEVICE_CPU), PartitionOp);

}  // namespace
}  // namespace tpu_embedding
