#include "sparse_core/inline_function.h"

#include <functional>

#include "absl/synchronization/notification.h"

namespace tpu_embedding {

using tensorflow::OpKernelContext;
using tensorflow::Tensor;

absl::Status InlineFunction::Call(OpKernelContext* context,
                                  const std::vector<Tensor>& arguments,
                                  std::vector<Tensor>* results) const {
  Library* const library = context->function_library();
  Library::Handle handle;
  TF_RETURN_IF_ERROR(Instantiate(library, &handle));
  std::function<void(std::function<void()>)> runner =
      [](const std::function<void()>& closure) { closure(); };
  Library::Options options(context->step_id());
  options.create_rendezvous = true;
  options.cancellation_manager = context->cancellation_manager();
  options.step_container = context->step_container();
  options.runner = &runner;
  options.run_all_kernels_inline = true;
  absl::Status status;
  absl::Notification ended;
  library->Run(options, handle, arguments, results,
               [&](const absl::Status& result) {
                 status = result;
                 ended.Notify();
               });
  ended.WaitForNotification();
  return status;
}

absl::Status InlineFunction::Instantiate(Library* library,
                                         Library::Handle* handle) const {
  if (!library) return absl::InternalError("There is no function library.");
  std::lock_guard<std::mutex> lock(mutex_);
  const auto known = handles_.find(library);
  if (known != handles_.end()) {
    *handle = known->second;
    return absl::OkStatus();
  }
  TF_RETURN_IF_ERROR(library->Instantiate(
      function_.name(), tensorflow::AttrSlice(&function_.attr()), handle));
  handles_[library] = *handle;
  return absl::OkStatus();
}

}  // namespace tpu_embedding
