// Calls a function in an attribute of an op from the op's kernel.

#ifndef TPU_EMBEDDING_TESTING_CC_SPARSE_CORE_INLINE_FUNCTION_H_
#define TPU_EMBEDDING_TESTING_CC_SPARSE_CORE_INLINE_FUNCTION_H_

#include <map>
#include <mutex>
#include <vector>

#include "tensorflow/core/framework/function.h"
#include "tensorflow/core/framework/op_kernel.h"

namespace tpu_embedding {

class InlineFunction {
 public:
  InlineFunction(tensorflow::OpKernelConstruction* context, const char* name) {
    OP_REQUIRES_OK(context, context->GetAttr(name, &function_));
  }

  // Calls the function in this thread and waits for it: if all threads of a
  // pool waited for each other's work, it would never end.
  absl::Status Call(tensorflow::OpKernelContext* context,
                    const std::vector<tensorflow::Tensor>& arguments,
                    std::vector<tensorflow::Tensor>* results) const;

 private:
  using Library = tensorflow::FunctionLibraryRuntime;

  absl::Status Instantiate(Library* library, Library::Handle* handle) const;

  tensorflow::NameAttrList function_;
  mutable std::mutex mutex_;
  mutable std::map<Library*, Library::Handle> handles_;
};

}  // namespace tpu_embedding

#endif  // TPU_EMBEDDING_TESTING_CC_SPARSE_CORE_INLINE_FUNCTION_H_
