// XlaSparseDenseMatmulGradWithCsrInput updates a table by a user-defined rule.

#include <algorithm>
#include <cstdint>
#include <vector>

#include "absl/strings/str_cat.h"
#include "core/update-inl.h"
#include "runtime/registration.h"
#include "sparse_core/combiner.h"
#include "sparse_core/inline_function.h"
#include "sparse_core/sparse_core_op.h"
#include "tensorflow/core/framework/op_kernel.h"
#include "tensorflow/core/framework/tensor_util.h"

namespace tpu_embedding {
namespace {

using tensorflow::OpInputList;
using tensorflow::OpKernelConstruction;
using tensorflow::OpKernelContext;
using tensorflow::Tensor;

// custom_computation(gradient [1, D], the row of each table, the
// hyperparameters) -> the new rows. The row of a vector is [1].
class CustomUpdateOp : public SparseCoreOp {
 public:
  explicit CustomUpdateOp(OpKernelConstruction* context)
      : SparseCoreOp(context),
        rule_(context, context->HasAttr("custom_computation")
                           ? "custom_computation"
                           : "optimizer_custom_computation") {}

 protected:
  absl::Status ComputeAll(const Contexts& contexts) override {
    Tensors parts;
    for (OpKernelContext* context : contexts) {
      OpInputList tables;
      TF_RETURN_IF_ERROR(context->input_list("tables", &tables));
      parts.push_back(&tables[0]);
    }
    CsrFrame frame;
    TableGradientSums sums;
    TF_RETURN_IF_ERROR(FrameOf(contexts, parts, &frame));
    TF_RETURN_IF_ERROR(CheckSlots(contexts, frame));
    const int64_t dim = parts[0]->dim_size(1);
    TF_RETURN_IF_ERROR(ReadGradients(contexts, dim, &frame, &sums));
    for (size_t device = 0; device < contexts.size(); ++device) {
      const RowGroups groups = sums.RowsOf(device, frame.num_rows);
      // Each replica's kernel has a function of its own.
      const auto& kernel =
          static_cast<const CustomUpdateOp&>(contexts[device]->op_kernel());
      TF_RETURN_IF_ERROR(kernel.UpdateDevice(contexts[device],
                                             {&groups, sums.samples()}, dim));
    }
    return absl::OkStatus();
  }

 private:
  static absl::Status CheckSlots(const Contexts& contexts,
                                 const CsrFrame& frame) {
    for (OpKernelContext* context : contexts) {
      OpInputList tables;
      TF_RETURN_IF_ERROR(context->input_list("tables", &tables));
      for (const Tensor& table : tables) {
        if (table.dims() > 0 && table.dims() <= 2 &&
            table.dim_size(0) == frame.num_rows) {
          continue;
        }
        return absl::InvalidArgumentError(absl::StrCat(
            "Table ", frame.table, ": a slot has the shape ",
            table.shape().DebugString(), ", but must have one entry for each ",
            "of the ", frame.num_rows, " rows."));
      }
    }
    return absl::OkStatus();
  }

  absl::Status UpdateDevice(OpKernelContext* context,
                            const TableGradients& gradients,
                            int64_t dim) const {
    OpInputList tables, hyperparameters;
    TF_RETURN_IF_ERROR(context->input_list("tables", &tables));
    TF_RETURN_IF_ERROR(
        context->input_list("hyperparameters", &hyperparameters));
    std::vector<Tensor*> updated;
    for (int i = 0; i < tables.size(); ++i) {
      updated.emplace_back();
      TF_RETURN_IF_ERROR(
          context->allocate_output(i, tables[i].shape(), &updated.back()));
      updated.back()->flat<float>() = tables[i].flat<float>();
    }
    for (int64_t g = 0; g < gradients.groups->num_rows(); ++g) {
      // The tensors are new each time: the function may hand its arguments on.
      Tensor gradient(tensorflow::DT_FLOAT, {1, dim});
      SumGradients<F32x4>(gradients, g, dim, gradient.flat<float>().data());
      std::vector<Tensor> arguments = {gradient};
      const int64_t row = gradients.groups->rows[g];
      for (const Tensor* table : updated) {
        arguments.push_back(
            tensorflow::tensor::DeepCopy(table->Slice(row, row + 1)));
      }
      for (const Tensor& value : hyperparameters) arguments.push_back(value);
      std::vector<Tensor> rows;
      TF_RETURN_IF_ERROR(rule_.Call(context, arguments, &rows));
      TF_RETURN_IF_ERROR(Store(rows, row, updated));
    }
    return absl::OkStatus();
  }

  absl::Status Store(const std::vector<Tensor>& rows, int64_t row,
                     const std::vector<Tensor*>& tables) const {
    if (rows.size() != tables.size()) {
      return absl::InvalidArgumentError(absl::StrCat(
          name(), ": the custom computation returned ", rows.size(),
          " tensors for ", tables.size(), " tables and slots."));
    }
    for (size_t i = 0; i < rows.size(); ++i) {
      Tensor place = tables[i]->Slice(row, row + 1);
      if (rows[i].dtype() != tensorflow::DT_FLOAT ||
          rows[i].shape() != place.shape()) {
        return absl::InvalidArgumentError(absl::StrCat(
            name(), ": the custom computation returned ", rows[i].DebugString(),
            " for a row of the shape ", place.shape().DebugString(), "."));
      }
      // A row need not be aligned as an Eigen tensor demands.
      const float* const from = rows[i].flat<float>().data();
      float* const to = place.unaligned_flat<float>().data();
      std::copy(from, from + rows[i].NumElements(), to);
    }
    return absl::OkStatus();
  }

  const InlineFunction rule_;
};

SOFTWARE_TPU_KERNEL(XlaSparseDenseMatmulGradWithCsrInput, CustomUpdateOp);
SOFTWARE_TPU_KERNEL(XlaSparseDenseMatmulCustomCombinerOnTcGradWithCsrInput,
                    WithCombiner<CustomUpdateOp>);

}  // namespace
}  // namespace tpu_embedding
