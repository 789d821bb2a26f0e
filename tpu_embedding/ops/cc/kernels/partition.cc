// TpuEmbeddingPartition turns raw features of one replica into the padded,
// partitioned CSR of each stacked table, as the SparseCore ops take it.

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
#include "kernels/plan.h"
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

// Reads one stacked table of the plan, and the limits of its partitions.
absl::Status ReadTable(const Record& record, CsrTable* table) {
  TF_RETURN_IF_ERROR(record.Get("name", &table->name));
  TF_RETURN_IF_ERROR(record.Get("rows", &table->rows));
  TF_RETURN_IF_ERROR(record.Get("samples", &table->samples));
  TF_RETURN_IF_ERROR(record.Get("features", &table->features));
  TF_RETURN_IF_ERROR(record.Get("max_ids", &table->limit.ids));
  TF_RETURN_IF_ERROR(record.Get("max_unique_ids", &table->limit.unique));
  return record.Get("keep_positions", &table->keep_positions);
}

absl::Status ReadPlace(const Record& record, CsrFeature* feature) {
  TF_RETURN_IF_ERROR(ReadFeature(record, &feature->spec));
  TF_RETURN_IF_ERROR(record.Get("samples", &feature->samples));
  TF_RETURN_IF_ERROR(record.Get("sample_offset", &feature->sample_offset));
  TF_RETURN_IF_ERROR(record.Get("row_offset", &feature->row_offset));
  TF_RETURN_IF_ERROR(record.Get("rotation", &feature->rotation));
  return record.Get("max_valency", &feature->max_valency);
}

// Reads what the attribute "plan" records about tables, features and chips.
absl::Status ReadSetup(const std::string& plan, CsrSetup* setup, bool* padded) {
  Record record;
  TF_RETURN_IF_ERROR(record.Parse(plan));
  TF_RETURN_IF_ERROR(record.Get("padded", padded));
  TF_RETURN_IF_ERROR(record.Get("num_sparse_cores", &setup->num_cores));
  TF_RETURN_IF_ERROR(record.Get("num_replicas", &setup->num_replicas));
  TF_RETURN_IF_ERROR(record.Get("max_ids_per_chip_per_sample",
                                &setup->max_ids_per_chip_per_sample));
  TF_RETURN_IF_ERROR(
      record.Get("allow_id_dropping", &setup->allow_id_dropping));
  TF_RETURN_IF_ERROR(record.Get("max_minibatches", &setup->max_minibatches));
  TF_RETURN_IF_ERROR(record.Get("minibatching", &setup->minibatching));
  for (const auto& [name, number] : std::map<const char*, int64_t>{
           {"num_sparse_cores", setup->num_cores},
           {"num_replicas", setup->num_replicas},
           {"max_ids_per_chip_per_sample", setup->max_ids_per_chip_per_sample},
           {"max_minibatches", setup->max_minibatches}}) {
    if (number < 1) return CheckLength(name, number, 1);
  }
  bool check_numerics = false;
  TF_RETURN_IF_ERROR(record.Get("check_numerics", &check_numerics));
  std::vector<Record> tables, features;
  TF_RETURN_IF_ERROR(record.Get("tables", &tables));
  TF_RETURN_IF_ERROR(record.Get("features", &features));
  for (const Record& own : features) {
    CsrFeature feature;
    TF_RETURN_IF_ERROR(ReadPlace(own, &feature));
    feature.spec.check_numerics = check_numerics;
    setup->features.push_back(std::move(feature));
  }
  for (const Record& own : tables) {
    CsrTable table;
    TF_RETURN_IF_ERROR(ReadTable(own, &table));
    TF_RETURN_IF_ERROR(
        CheckIndices("features", table.features, setup->features.size()));
    setup->tables.push_back(std::move(table));
  }
  return absl::OkStatus();
}

absl::Status CheckNumTables(int64_t num_tables, int64_t num_positions,
                            const CsrSetup& setup) {
  TF_RETURN_IF_ERROR(CheckLength("tables", setup.tables.size(), num_tables));
  return CheckLength(
      "sorted_pos_ids", num_positions,
      std::count_if(setup.tables.begin(), setup.tables.end(),
                    [](const CsrTable& t) { return t.keep_positions; }));
}

// Sets the shapes. The sizes of padded tensors are known before any batch.
absl::Status PartitionShape(InferenceContext* context) {
  CsrSetup setup;
  bool padded = false;
  std::string plan;
  int64_t num_tables = 0;
  int64_t num_positions = 0;
  TF_RETURN_IF_ERROR(context->GetAttr("plan", &plan));
  TF_RETURN_IF_ERROR(ReadSetup(plan, &setup, &padded));
  TF_RETURN_IF_ERROR(context->GetAttr("num_tables", &num_tables));
  TF_RETURN_IF_ERROR(context->GetAttr("num_positions", &num_positions));
  TF_RETURN_IF_ERROR(CheckNumTables(num_tables, num_positions, setup));
  const int64_t pointers = setup.num_cores * setup.max_minibatches *
                           PaddedShards(setup.num_cores * setup.num_replicas);
  const auto vector = [&](int64_t size) {
    return padded && size >= 0 ? context->Vector(size)
                               : context->Vector(InferenceContext::kUnknownDim);
  };
  int output = 0;
  for (int64_t t = 0; t < num_tables; ++t) {
    context->set_output(output++, vector(pointers));
  }
  const auto ids = [&](const CsrTable& table) {
    return vector(table.samples * setup.max_ids_per_chip_per_sample);
  };
  for (int list = 0; list < 3; ++list) {
    for (const CsrTable& table : setup.tables) {
      context->set_output(output++, ids(table));
    }
  }
  for (const CsrTable& table : setup.tables) {
    if (table.keep_positions) context->set_output(output++, ids(table));
  }
  for (int64_t t = 0; t < 3 * num_tables; ++t) {
    context->set_output(output++, context->Scalar());
  }
  context->set_output(output++, context->Vector(setup.features.size()));
  while (output < context->num_outputs()) {
    context->set_output(output++, context->Vector(num_tables));
  }
  return absl::OkStatus();
}

REGISTER_OP("TpuEmbeddingPartition")
    .Input("inputs: types")
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
    .Attr("num_tables: int >= 1")
    .Attr("num_positions: int >= 0")
    .Attr("types: list({int32, int64, float}) >= 1")
    .Attr("plan: string")
    .Attr("call: string")
    .SetShapeFn(PartitionShape)
    .Doc(R"doc(
Sorts the features of one replica into partitions for the SparseCores.

inputs, call: as for TpuEmbeddingPrepare.
splits: per stacked table, cuts into minibatches that other replicas need.
row_pointers: per stacked table, where each partition ends.
sorted_sample_ids, sorted_token_ids, sorted_gains: the entries of the
  partitions. With `padded` the tensors have the size of the id buffer and what
  lies past `ids_sizes` is not set; else they end there. The same holds for
  row_pointers and `row_pointers_sizes`.
sorted_pos_ids: the positions of entries, for the tables that keep them.
dropped_ids: for each feature, how many entries of its unstacked table, from any
  feature, did not fit.
required_ids: the size of the id buffer that would have held all, per stacked
  table.
max_ids, max_unique_ids: per stacked table, the counts of the fullest partition
  before cuts.
own_splits: the splits that were asked for and those that this batch needs.
plan: the record of the stacked tables (preprocessing/library_ops.py); with
  `padded` the tensors have the size of the id buffer.
)doc");

class PartitionOp : public tensorflow::OpKernel {
 public:
  explicit PartitionOp(OpKernelConstruction* context) : OpKernel(context) {
    std::string plan;
    OP_REQUIRES_OK(context, context->GetAttr("plan", &plan));
    OP_REQUIRES_OK(context, ReadSetup(plan, &setup_, &padded_));
    int64_t num_tables = 0;
    int64_t num_positions = 0;
    OP_REQUIRES_OK(context, context->GetAttr("num_tables", &num_tables));
    OP_REQUIRES_OK(context, context->GetAttr("num_positions", &num_positions));
    OP_REQUIRES_OK(context, CheckNumTables(num_tables, num_positions, setup_));
    std::vector<FeatureSpec> specs;
    for (const CsrFeature& feature : setup_.features) {
      specs.push_back(feature.spec);
    }
    OP_REQUIRES_OK(context, features_.Read(context, std::move(specs)));
    for (size_t f = 0; f < setup_.features.size(); ++f) {
      setup_.features[f].spec = features_.specs()[f];
    }
    OP_REQUIRES_OK(context, InvalidArgument(CompleteSetup(&setup_)));
  }

  void Compute(OpKernelContext* context) override {
    std::vector<FeatureInput> inputs;
    OP_REQUIRES_OK(context, features_.ReadInputs(context, &inputs));
    const Tensor* splits_input = nullptr;
    OP_REQUIRES_OK(context, context->input("splits", &splits_input));
    const int64_t num_tables = setup_.tables.size();
    OP_REQUIRES(
        context, splits_input->NumElements() == num_tables,
        absl::InvalidArgumentError(absl::StrCat(
            "splits must have one value for each of the ", num_tables,
            " stacked tables. Received: ", splits_input->NumElements())));
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
  // tf.data may run calls of this op side by side; each has its own batch.
  const std::shared_ptr<BatchPool<CsrBatch>> pool_ =
      std::make_shared<BatchPool<CsrBatch>>();
};

REGISTER_KERNEL_BUILDER(
    Name("TpuEmbeddingPartition").Device(tensorflow::DEVICE_CPU), PartitionOp);

}  // namespace
}  // namespace tpu_embedding
