#include "kernels/lookup_all.h"

#include "core/pieces.h"

namespace tpu_embedding {
namespace {

using tensorflow::OpKernelConstruction;
using tensorflow::OpKernelContext;
using tensorflow::Tensor;

// Rough cycles for one feature of a batch: for each id and each sample a fixed
// part, and one for the width.
int64_t Cycles(const FeatureCsr& csr, int64_t dim) {
  return (csr.rows.size() + csr.num_samples()) * (20 + dim / 2);
}

}  // namespace

absl::Status BatchLookup::ReadAttributes(OpKernelConstruction* context) {
  std::vector<float> numbers;
  TF_RETURN_IF_ERROR(context->GetAttr("feature_tables", &feature_tables_));
  TF_RETURN_IF_ERROR(context->GetAttr("quantization", &numbers));
  int64_t num_tables = 0;
  int64_t num_features = 0;
  TF_RETURN_IF_ERROR(context->GetAttr("num_tables", &num_tables));
  TF_RETURN_IF_ERROR(context->GetAttr("num_features", &num_features));
  TF_RETURN_IF_ERROR(
      CheckLength("feature_tables", feature_tables_.size(), num_features));
  TF_RETURN_IF_ERROR(
      CheckIndices("feature_tables", feature_tables_, num_tables));
  TF_RETURN_IF_ERROR(
      CheckLength("quantization", numbers.size(), 3 * num_tables));
  for (size_t i = 0; i < numbers.size(); i += 3) {
    // Without a NaN, too, an integer must be able to hold it.
    if (!(numbers[i] >= 0.0f && numbers[i] < 2147483648.0f)) {
      return absl::InvalidArgumentError(absl::StrCat(
          "A malformed graph: `quantization` with ", numbers[i], " buckets."));
    }
    quantization_.push_back(
        {static_cast<int>(numbers[i]), numbers[i + 1], numbers[i + 2]});
  }
  huge_pages_ = std::make_unique<HugePages>(quantization_.size());
  return absl::OkStatus();
}

absl::Status BatchLookup::Run(OpKernelContext* context,
                              const PreparedBatch& batch,
                              const std::vector<Variable>& tables) const {
  TF_RETURN_IF_ERROR(
      CheckLength("features", batch.features.size(), feature_tables_.size()));
  const ReadLocks locks(tables);
  TF_RETURN_IF_ERROR(CheckTableSizes(tables, batch.vocabulary_sizes));
  for (size_t t = 0; t < tables.size(); ++t) {
    huge_pages_->Advise(t, *tables[t]->tensor());
  }
  std::vector<float*> outputs;
  std::vector<Work> works;
  for (size_t f = 0; f < batch.features.size(); ++f) {
    const Tensor& table = *tables[feature_tables_[f]]->tensor();
    tensorflow::TensorShape shape;
    TF_RETURN_IF_ERROR(ActivationShape(batch.features[f].output_shape,
                                       table.dim_size(1), &shape));
    Tensor* output = nullptr;
    TF_RETURN_IF_ERROR(context->allocate_output(f, shape, &output));
    outputs.push_back(output->flat<float>().data());
    works.push_back({batch.features[f].num_samples(),
                     Cycles(batch.features[f], table.dim_size(1))});
  }
  ForEachPiece(WorkerPool(context), works, [&](const Piece& piece) {
    const int64_t f = piece.owner;
    const int table = feature_tables_[f];
    const Tensor& value = *tables[table]->tensor();
    Lookup(batch.features[f], DataOf(value), value.dim_size(1),
           quantization_[table], piece.begin, piece.end, outputs[f]);
  });
  return absl::OkStatus();
}

absl::Status ActivationShapes(
    tensorflow::shape_inference::InferenceContext* context) {
  std::vector<tensorflow::PartialTensorShape> shapes;
  TF_RETURN_IF_ERROR(context->GetAttr("output_shapes", &shapes));
  int64_t num_features = 0;
  TF_RETURN_IF_ERROR(context->GetAttr("num_features", &num_features));
  TF_RETURN_IF_ERROR(CheckLength("output_shapes", shapes.size(), num_features));
  for (size_t f = 0; f < shapes.size(); ++f) {
    tensorflow::shape_inference::ShapeHandle shape;
    TF_RETURN_IF_ERROR(
        context->MakeShapeFromPartialTensorShape(shapes[f], &shape));
    context->set_output(f, shape);
  }
  return absl::OkStatus();
}

absl::Status ActivationShapesThenScalar(
    tensorflow::shape_inference::InferenceContext* context) {
  TF_RETURN_IF_ERROR(ActivationShapes(context));
  context->set_output(context->num_outputs() - 1, context->Scalar());
  return absl::OkStatus();
}

}  // namespace tpu_embedding
