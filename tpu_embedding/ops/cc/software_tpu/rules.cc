#include "software_tpu/rules.h"

#include <charconv>
#include <cstdlib>

#include "core/optimizers/adagrad.h"
#include "core/optimizers/adagrad_momentum.h"
#include "core/optimizers/adam.h"
#include "core/optimizers/ftrl.h"
#include "core/optimizers/sgd.h"
#include "core/update-inl.h"

namespace tpu_embedding {

using tensorflow::OpKernelConstruction;

namespace {

// Reads attributes one after the other; an error stays.
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

  // 1 - the attribute. The attribute is the float32 nearest to what the user
  // wrote: 1 - 0.999f would be off by 5e-5 of itself. So the shortest decimal
  // that reads back as this float32 is taken for what was written.
  Reader& OneMinus(const char* name) {
    char text[32];
    const auto [end, error] =
        std::to_chars(text, text + sizeof(text) - 1, Get<float>(name));
    *end = '\0';
    values_->push_back(static_cast<float>(1.0 - std::strtod(text, nullptr)));
    return *this;
  }

  Reader& Constant(float value) {
    values_->push_back(value);
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
      .OneMinus("beta2")
      .Float("epsilon")
      .status();
}

absl::Status ReadAdam(OpKernelConstruction* context,
                      std::vector<float>* values) {
  return Reader(context, values)
      .Float("beta1")
      .OneMinus("beta1")
      .Float("beta2")
      .OneMinus("beta2")
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
      .Constant(0.0f)  // allow_zero_accumulator: the op has no such attribute
      .status();
}

}  // namespace

const std::vector<SparseCoreRule>& SparseCoreRules() {
  static const auto* const rules = new std::vector<SparseCoreRule>{
      {"Sgd", {}, &Update<Sgd>, &ReadNothing},
      {"Adagrad", {"accumulator"}, &Update<Adagrad>, &ReadNothing},
      {"AdagradMomentum",
       {"accumulator", "momenta"},
       &Update<AdagradMomentum>,
       &ReadAdagradMomentum},
      {"Adam", {"momenta", "velocity"}, &Update<Adam>, &ReadAdam},
      {"Ftrl", {"accumulator", "linear"}, &Update<Ftrl>, &ReadFtrl},
  };
  return *rules;
}

}  // namespace tpu_embedding
