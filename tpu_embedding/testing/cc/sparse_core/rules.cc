#include "sparse_core/rules.h"

#include "runtime/core_rules.h"

namespace tpu_embedding {

using tensorflow::OpKernelConstruction;

namespace {

// Reads attributes one after the other, and keeps the first error.
class Reader {
 public:
  Reader(OpKernelConstruction* context, std::vector<float>* values)
      : context_(context), values_(values) {}

  Reader& Float(const char* name) {
    values_->push_back(Get<float>(name));
    return *this;
  }

  Reader& Bool(const char* name) {
    values_->push_back(Get<bool>(name) ? 1.0f : 0.0f);
    return *this;
  }

  const absl::Status& status() const { return status_; }

 private:
  template <class T>
  T Get(const char* name) {
    T value{};
    status_.Update(context_->GetAttr(name, &value));
    return value;
  }

  OpKernelConstruction* const context_;
  std::vector<float>* const values_;
  absl::Status status_;
};

absl::Status ReadNothing(OpKernelConstruction*, std::vector<float>*) {
  return absl::OkStatus();
}

absl::Status ReadAdagradMomentum(OpKernelConstruction* context,
                                 std::vector<float>* values) {
  return Reader(context, values)
      .Float("beta1")
      .Bool("use_nesterov")
      .Float("exponent")
      .Float("beta2")
      .Float("epsilon")
      .status();
}

absl::Status ReadAdam(OpKernelConstruction* context,
                      std::vector<float>* values) {
  return Reader(context, values)
      .Float("beta1")
      .Float("beta2")
      .Float("epsilon")
      .Bool("use_sum_inside_sqrt")
      .status();
}

absl::Status ReadFtrl(OpKernelConstruction* context,
                      std::vector<float>* values) {
  return Reader(context, values)
      .Float("learning_rate_power")
      .Float("l1_regularization_strength")
      .Float("l2_regularization_strength")
      .Float("beta")
      .Bool("multiply_linear_by_learning_rate")
      .status();
}

}  // namespace

const std::vector<SparseCoreRule>& SparseCoreRules() {
  static const auto* const rules = new std::vector<SparseCoreRule>{
      {"Sgd", {}, UpdateOf("sgd"), &ReadNothing},
      {"Adagrad", {"accumulator"}, UpdateOf("adagrad"), &ReadNothing},
      {"AdagradMomentum",
       {"accumulator", "momenta"},
       UpdateOf("adagrad_momentum"),
       &ReadAdagradMomentum},
      {"Adam", {"momenta", "velocity"}, UpdateOf("adam"), &ReadAdam},
      {"Ftrl", {"accumulator", "linear"}, UpdateOf("ftrl"), &ReadFtrl},
  };
  return *rules;
}

}  // namespace tpu_embedding
