// Custom combiners: functions of the vectors that samples look up. As on a TPU,
// each is called once for the S samples of a replica:
//
//   combiner(valencies [S], vectors [S, max_valency, D], weights [S,
//   num_weights])
//     -> activations [S, D]
//   vjp(valencies, vectors, weights, gradients [S, D])
//     -> gradients of vectors, or of weights, in their shapes
//
// A combiner without weights does not get that argument.

#ifndef TPU_EMBEDDING_TESTING_CC_SPARSE_CORE_COMBINER_H_
#define TPU_EMBEDDING_TESTING_CC_SPARSE_CORE_COMBINER_H_

#include <cstdint>
#include <optional>
#include <vector>

#include "sparse_core/inline_function.h"
#include "sparse_core/sparse_core_op.h"
#include "tensorflow/core/framework/op_kernel.h"

namespace tpu_embedding {

// The inputs of a combiner, for all samples of a replica.
struct CombinerInputs {
  tensorflow::Tensor valencies;                 // [num_samples]
  tensorflow::Tensor vectors;                   // [num_samples, max_valency, D]
  tensorflow::Tensor weights;                   // [num_weights]
  std::optional<tensorflow::Tensor> gradients;  // [num_samples, D], for a vjp

  // Checks that the inputs belong together.
  absl::Status Check(int64_t max_valency, int64_t num_weights,
                     int64_t dim) const;

  // Calls `function`; its result must have the shape `shape`.
  absl::Status Call(const InlineFunction& function,
                    tensorflow::OpKernelContext* context,
                    const tensorflow::TensorShape& shape,
                    tensorflow::Tensor* result) const;
};

// Computes the combiner's part of an update: the gradients of vectors and of
// weights.
class CombinerGradient {
 public:
  explicit CombinerGradient(tensorflow::OpKernelConstruction* context);

  int64_t max_valency() const { return max_valency_; }
  int64_t num_weights() const { return num_weights_; }

  // Computes the gradients of vectors, [num_samples * max_valency, D].
  absl::Status OfVectors(tensorflow::OpKernelContext* context, int64_t dim,
                         tensorflow::Tensor* result) const;
  // Adds the gradient of one replica's weights to `sum`, [num_weights].
  absl::Status AddOfWeights(tensorflow::OpKernelContext* context, int64_t dim,
                            std::vector<float>* sum) const;

 private:
  absl::Status Read(tensorflow::OpKernelContext* context, int64_t dim,
                    CombinerInputs* inputs) const;

  int max_valency_ = 0;
  int num_weights_ = 0;
  const InlineFunction table_vjp_;
  const InlineFunction weights_vjp_;
};

// Applies SGD: sets the last output of the op to the replica's weights minus
// the rate times `gradient`.
absl::Status UpdateCombinerWeights(tensorflow::OpKernelContext* context,
                                   const std::vector<float>& gradient);

// An update whose table has a custom combiner.
template <class Base>
class WithCombiner : public Base {
 public:
  explicit WithCombiner(tensorflow::OpKernelConstruction* context)
      : Base(context), combiner_(context) {}

 protected:
  absl::Status ComputeAll(const Contexts& contexts) override {
    TF_RETURN_IF_ERROR(Base::ComputeAll(contexts));
    std::vector<float> gradient(combiner_.num_weights(), 0.0f);
    if (!gradient.empty()) {
      for (tensorflow::OpKernelContext* context : contexts) {
        TF_RETURN_IF_ERROR(
            Of(context).AddOfWeights(context, Width(context), &gradient));
      }
    }
    for (tensorflow::OpKernelContext* context : contexts) {
      TF_RETURN_IF_ERROR(UpdateCombinerWeights(context, gradient));
    }
    return absl::OkStatus();
  }

  absl::Status ReadGradients(const Contexts& contexts, int64_t dim,
                             CsrFrame* frame,
                             TableGradientSums* sums) const override {
    for (tensorflow::OpKernelContext* context : contexts) {
      tensorflow::Tensor gradients;
      TF_RETURN_IF_ERROR(Of(context).OfVectors(context, dim, &gradients));
      sums->AddSamples(gradients);
      frame->num_samples = gradients.dim_size(0) / combiner_.max_valency();
    }
    frame->max_valency = combiner_.max_valency();
    TF_RETURN_IF_ERROR(this->SetSamples(frame->num_samples, frame));
    return this->ReadAll(contexts, *frame, &sums->csrs);
  }

 private:
  // Each replica's kernel has functions of its own.
  static const CombinerGradient& Of(tensorflow::OpKernelContext* context) {
    return static_cast<const WithCombiner&>(context->op_kernel()).combiner_;
  }

  static int64_t Width(tensorflow::OpKernelContext* context) {
    const tensorflow::Tensor* gradients;
    return context->input("activation_gradients", &gradients).ok()
               ? gradients->dim_size(1)
               : 0;
  }

  const CombinerGradient combiner_;
};

}  // namespace tpu_embedding

#endif  // TPU_EMBEDDING_TESTING_CC_SPARSE_CORE_COMBINER_H_
