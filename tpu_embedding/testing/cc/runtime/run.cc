// TpuEmbeddingSoftwareTpuRun runs one function per replica, all together.
//
// It takes the place of TPUReplicate. Each function runs on the device of its
// replica, with a rendezvous of its own: the functions are traced from one
// program, so that their sends and receives have the same names.

#include <atomic>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "runtime/registration.h"
#include "runtime/replica_barrier.h"
#include "tensorflow/core/common_runtime/input_colocation_exemption_registry.h"
#include "tensorflow/core/framework/cancellation.h"
#include "tensorflow/core/framework/common_shape_fns.h"
#include "tensorflow/core/framework/device_base.h"
#include "tensorflow/core/framework/function.h"
#include "tensorflow/core/framework/op.h"
#include "tensorflow/core/framework/op_kernel.h"
#include "tensorflow/core/framework/rendezvous.h"
#include "tensorflow/core/framework/shape_inference.h"

namespace tpu_embedding {
namespace {

using tensorflow::AsyncOpKernel;
using tensorflow::CancellationManager;
using tensorflow::FunctionLibraryRuntime;
using tensorflow::NameAttrList;
using tensorflow::OpKernelConstruction;
using tensorflow::OpKernelContext;
using tensorflow::Tensor;

REGISTER_OP("TpuEmbeddingSoftwareTpuRun")
    .Input("inputs: Tin")
    .Output("outputs: Tout")
    .Attr("Tin: list(type) >= 0")
    .Attr("Tout: list(type) >= 0")
    .Attr("replicas: list(func) >= 1")
    .Attr("devices: list(string) >= 1")
    .Attr("num_inputs: list(int) >= 1")
    .Attr("num_outputs: list(int) >= 1")
    .Attr("sparse_cores: int")
    .Attr("meeting_timeout: float")
    .SetIsStateful()
    .SetShapeFn(tensorflow::shape_inference::UnknownShape)
    .Doc(R"doc(
Runs one function per replica, all at the same time.

replicas, devices: the function of each replica, and the device that it runs on.
num_inputs, num_outputs: how many inputs and outputs belong to each replica.
sparse_cores: how many each device has.
meeting_timeout: seconds that a kernel waits for those of the other replicas.
)doc");

// The functions work on the resources of their own devices.
[[maybe_unused]] const bool exempted = [] {
  tensorflow::InputColocationExemptionRegistry::Global()->Register(
      "TpuEmbeddingSoftwareTpuRun");
  return true;
}();

// All that one execution of the op needs; lives until the last function ends.
struct Execution {
  struct Replica {
    std::unique_ptr<CancellationManager> cancellation;
    tensorflow::core::RefCountPtr<tensorflow::Rendezvous> rendezvous;
    ReplicaRunner::Runner runner;
    std::vector<Tensor> inputs;
    std::vector<Tensor> outputs;
  };

  OpKernelContext* context;
  AsyncOpKernel::DoneCallback done;
  std::shared_ptr<ReplicaBarrier> barrier;
  std::vector<Replica> replicas;
  std::atomic<int> num_running;
  tensorflow::CancellationToken token;

  // Ends the run when the op is cancelled.
  void Register() {
    CancellationManager* const manager = context->cancellation_manager();
    if (!manager) return;
    token = manager->get_cancellation_token();
    const auto cancel = [weak = std::weak_ptr<ReplicaBarrier>(barrier)] {
      const auto alive = weak.lock();
      if (alive) alive->Fail(absl::CancelledError("The run was cancelled."));
    };
    if (!manager->RegisterCallback(token, cancel)) cancel();
  }

  void End() {
    // DeregisterCallback could deadlock: End may run within a callback.
    CancellationManager* const manager = context->cancellation_manager();
    if (manager) manager->TryDeregisterCallback(token);
    const absl::Status status = barrier->status();
    if (!status.ok()) {
      context->SetStatus(status);
    } else {
      int next = 0;
      for (const Replica& replica : replicas) {
        for (const Tensor& output : replica.outputs) {
          context->set_output(next++, output);
        }
      }
    }
    done();
  }
};

class RunOp : public AsyncOpKernel {
 public:
  explicit RunOp(OpKernelConstruction* context) : AsyncOpKernel(context) {
    OP_REQUIRES_OK(context, context->GetAttr("replicas", &functions_));
    OP_REQUIRES_OK(context, context->GetAttr("devices", &devices_));
    OP_REQUIRES_OK(context, context->GetAttr("num_inputs", &num_inputs_));
    OP_REQUIRES_OK(context, context->GetAttr("num_outputs", &num_outputs_));
    OP_REQUIRES_OK(context, context->GetAttr("sparse_cores", &sparse_cores_));
    OP_REQUIRES_OK(context, context->GetAttr("meeting_timeout", &timeout_));
    const size_t size = functions_.size();
    OP_REQUIRES(context,
                devices_.size() == size && num_inputs_.size() == size &&
                    num_outputs_.size() == size,
                absl::InvalidArgumentError(
                    "`replicas`, `devices`, `num_inputs` and `num_outputs` "
                    "must have one entry per replica."));
  }

  ~RunOp() override {
    for (const auto& [library, handles] : handles_) {
      for (const auto handle : handles) {
        library->ReleaseHandle(handle).IgnoreError();
      }
    }
  }

  void ComputeAsync(OpKernelContext* context, DoneCallback done) override {
    std::vector<FunctionLibraryRuntime::Handle> handles;
    OP_REQUIRES_OK_ASYNC(context, Instantiate(context, &handles), done);
    auto execution = Prepare(context, std::move(done));
    auto* const execution_pointer = execution.get();
    execution->Register();
    WatchTime(execution->barrier);
    for (size_t r = 0; r < handles.size(); ++r) {
      Execution::Replica& replica = execution_pointer->replicas[r];
      context->function_library()->Run(
          Options(context, &replica), handles[r], replica.inputs,
          &replica.outputs, [execution, r](const absl::Status& status) {
            execution->barrier->Leave(r, status);
            if (--execution->num_running == 0) execution->End();
          });
    }
  }

 private:
  using Handles = std::vector<FunctionLibraryRuntime::Handle>;

  absl::Status Instantiate(OpKernelContext* context, Handles* handles) {
    std::lock_guard<std::mutex> lock(mutex_);
    FunctionLibraryRuntime* const library = context->function_library();
    if (!library) return absl::InternalError("There is no function library.");
    Handles& known = handles_[library];
    int next = 0;
    for (size_t r = 0; r < functions_.size(); ++r) {
      if (known.size() == r) {
        FunctionLibraryRuntime::Handle handle;
        TF_RETURN_IF_ERROR(InstantiateOne(context, r, next, &handle));
        known.push_back(handle);
      }
      next += num_inputs_[r];
    }
    *handles = known;
    return absl::OkStatus();
  }

  absl::Status InstantiateOne(OpKernelContext* context, int r, int first_input,
                              FunctionLibraryRuntime::Handle* handle) {
    FunctionLibraryRuntime* const library = context->function_library();
    FunctionLibraryRuntime::InstantiateOptions options;
    options.target = devices_[r];
    options.is_multi_device_function = true;
    options.lib_def = library->GetFunctionLibraryDefinition();
    for (int i = 0; i < num_inputs_[r]; ++i) {
      const Tensor& input = context->input(first_input + i);
      options.input_devices.push_back(
          input.dtype() == tensorflow::DT_RESOURCE
              ? input.scalar<tensorflow::ResourceHandle>()().device()
              : devices_[r]);
    }
    return library->Instantiate(functions_[r].name(),
                                tensorflow::AttrSlice(&functions_[r].attr()),
                                options, handle);
  }

  std::shared_ptr<Execution> Prepare(OpKernelContext* context,
                                     DoneCallback done) const {
    auto execution = std::make_shared<Execution>();
    execution->context = context;
    execution->done = std::move(done);
    execution->num_running = functions_.size();
    execution->replicas.resize(functions_.size());
    execution->barrier = std::make_shared<ReplicaBarrier>(
        devices_, sparse_cores_, absl::Seconds(timeout_),
        // The pointer is weak, as the execution owns the barrier.
        [weak = std::weak_ptr<Execution>(execution)] {
          const auto alive = weak.lock();
          if (!alive) return;
          for (auto& replica : alive->replicas) {
            replica.cancellation->StartCancel();
          }
        });
    int next = 0;
    for (size_t r = 0; r < functions_.size(); ++r) {
      Execution::Replica& replica = execution->replicas[r];
      // This is not a child of the op's manager, which it may briefly outlive.
      replica.cancellation = std::make_unique<CancellationManager>();
      replica.rendezvous.reset(tensorflow::NewLocalRendezvous());
      replica.runner = ReplicaRunner(*context->runner(), r, execution->barrier);
      for (int i = 0; i < num_inputs_[r]; ++i) {
        replica.inputs.push_back(context->input(next++));
      }
    }
    return execution;
  }

  FunctionLibraryRuntime::Options Options(OpKernelContext* context,
                                          Execution::Replica* replica) const {
    FunctionLibraryRuntime::Options options(context->step_id());
    options.rendezvous = replica->rendezvous.get();
    options.cancellation_manager = replica->cancellation.get();
    options.collective_executor = context->collective_executor();
    options.step_container = context->step_container();
    options.stats_collector = context->stats_collector();
    options.runner = &replica->runner;
    options.source_device = context->device()->name();
    return options;
  }

  std::vector<NameAttrList> functions_;
  std::vector<std::string> devices_;
  std::vector<int> num_inputs_;
  std::vector<int> num_outputs_;
  int sparse_cores_;
  float timeout_;
  std::mutex mutex_;
  std::map<FunctionLibraryRuntime*, Handles> handles_;
};

SOFTWARE_TPU_KERNEL(TpuEmbeddingSoftwareTpuRun, RunOp);

}  // namespace
}  // namespace tpu_embedding
