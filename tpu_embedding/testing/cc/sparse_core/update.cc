// XlaSparseDenseMatmulGradWith<Optimizer>And{StaticBufferSize,CsrInput} update
// a table by the gradients of all replicas.

#include <cstdint>
#include <string>
#include <vector>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "core/row_options.h"
#include "runtime/registration.h"
#include "sparse_core/combiner.h"
#include "sparse_core/rules.h"
#include "sparse_core/sparse_core_op.h"
#include "tensorflow/core/framework/op_kernel.h"

namespace tpu_embedding {
namespace {

using tensorflow::OpKernelConstruction;
using tensorflow::OpKernelContext;
using tensorflow::Tensor;

constexpr char kPrefix[] = "XlaSparseDenseMatmulGradWith";
constexpr char kCombinerPrefix[] =
    "XlaSparseDenseMatmulCustomCombinerOnTcGradWith";
constexpr const char* kSuffixes[] = {"AndStaticBufferSize", "AndCsrInput"};

// Rough cycles of one row.
constexpr int64_t kUpdateCyclesPerRow = 400;

class UpdateOp : public SparseCoreOp {
 public:
  explicit UpdateOp(OpKernelConstruction* context) : SparseCoreOp(context) {
    for (const SparseCoreRule& rule : SparseCoreRules()) {
      const std::string part = absl::StrCat("GradWith", rule.optimizer, "And");
      if (absl::StrContains(type_string(), part)) rule_ = &rule;
    }
    OP_REQUIRES(context, rule_,
                absl::InternalError(absl::StrCat("No rule for ", name())));
    OP_REQUIRES_OK(context, rule_->read(context, &hyperparameters_));
    OP_REQUIRES_OK(context, context->GetAttr("clip_weight_min",
                                             &options_.clip_weight_min));
    OP_REQUIRES_OK(context, context->GetAttr("clip_weight_max",
                                             &options_.clip_weight_max));
  }

 protected:
  absl::Status ComputeAll(const Contexts& contexts) override {
    CsrFrame frame;
    Tensors parts;
    TableGradientSums sums;
    TF_RETURN_IF_ERROR(Inputs(contexts, "embedding_table", &parts));
    TF_RETURN_IF_ERROR(FrameOf(contexts, parts, &frame));
    TF_RETURN_IF_ERROR(CheckSlots(contexts, frame));
    TF_RETURN_IF_ERROR(
        ReadGradients(contexts, parts[0]->dim_size(1), &frame, &sums));
    for (size_t device = 0; device < contexts.size(); ++device) {
      TF_RETURN_IF_ERROR(UpdateDevice(contexts[device], sums, device));
    }
    return absl::OkStatus();
  }

 private:
  absl::Status CheckSlots(const Contexts& contexts,
                          const CsrFrame& frame) const {
    for (OpKernelContext* context : contexts) {
      const Tensor *table, *rate;
      TF_RETURN_IF_ERROR(context->input("embedding_table", &table));
      TF_RETURN_IF_ERROR(context->input("learning_rate", &rate));
      if (rate->NumElements() != 1) {
        return absl::InvalidArgumentError(
            absl::StrCat("Table ", frame.table, ": the learning rate must be ",
                         "one number, but is ", rate->DebugString(), "."));
      }
      for (const char* name : rule_->slots) {
        const Tensor* slot;
        TF_RETURN_IF_ERROR(context->input(name, &slot));
        if (slot->shape() != table->shape()) {
          return absl::InvalidArgumentError(absl::StrCat(
              "Table ", frame.table, ": slot `", name, "` has the shape ",
              slot->shape().DebugString(), ", but the table has ",
              table->shape().DebugString(), ". They must be the same."));
        }
      }
    }
    return absl::OkStatus();
  }

  // Writes to copies, because variables may hold the inputs.
  absl::Status UpdateDevice(OpKernelContext* context,
                            const TableGradientSums& sums,
                            int64_t device) const {
    TableView view;
    float* parameters;
    TF_RETURN_IF_ERROR(Copy(context, "embedding_table", 0, &parameters, &view));
    view.parameters = parameters;
    for (size_t k = 0; k < rule_->slots.size(); ++k) {
      view.slots.emplace_back();
      TF_RETURN_IF_ERROR(
          Copy(context, rule_->slots[k], k + 1, &view.slots.back(), &view));
    }
    const Tensor* rate;
    TF_RETURN_IF_ERROR(context->input("learning_rate", &rate));
    const RuleArguments arguments = {hyperparameters_, rate->flat<float>()(0)};
    const RowGroups groups = sums.RowsOf(device, view.num_rows);
    const TableGradients gradients = {&groups, sums.samples()};
    Workers(context)(groups.num_rows(), kUpdateCyclesPerRow,
                     [&](int64_t begin, int64_t end) {
                       rule_->update(arguments, options_, gradients, view,
                                     begin, end);
                     });
    return absl::OkStatus();
  }

  static absl::Status Copy(OpKernelContext* context, const char* input,
                           int output, float** data, TableView* view) {
    const Tensor* from;
    Tensor* to;
    TF_RETURN_IF_ERROR(context->input(input, &from));
    TF_RETURN_IF_ERROR(context->allocate_output(output, from->shape(), &to));
    to->flat<float>() = from->flat<float>();
    *data = to->flat<float>().data();
    view->num_rows = from->dim_size(0);
    view->dim = from->dim_size(1);
    return absl::OkStatus();
  }

  const SparseCoreRule* rule_ = nullptr;
  std::vector<float> hyperparameters_;
  RowOptions options_;
};

[[maybe_unused]] const bool registered_updates = [] {
  for (const SparseCoreRule& rule : SparseCoreRules()) {
    for (const char* suffix : kSuffixes) {
      RegisterWhereMissing<UpdateOp>(
          absl::StrCat(kPrefix, rule.optimizer, suffix).c_str());
    }
    RegisterWhereMissing<WithCombiner<UpdateOp>>(
        absl::StrCat(kCombinerPrefix, rule.optimizer, "AndCsrInput").c_str());
  }
  return true;
}();

}  // namespace
}  // namespace tpu_embedding
