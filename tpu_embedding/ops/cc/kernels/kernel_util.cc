#include "kernels/kernel_util.h"

#include <algorithm>
#include <cstring>
#include <new>

#include "absl/container/inlined_vector.h"
#include "core/worker_failure.h"
#include "kernels/plan.h"
#include "tensorflow/core/framework/resource_mgr.h"
#include "tensorflow/core/util/work_sharder.h"

namespace tpu_embedding {

using tensorflow::OpKernelContext;
using tensorflow::Tensor;
using tensorflow::Var;

namespace {

// Returns all variables once, in one global order, so that two ops over the
// same tables cannot wait for each other.
std::vector<Var*> InLockOrder(const std::vector<Variable>& variables,
                              const std::vector<Variable>& more) {
  std::vector<Var*> all;
  all.reserve(variables.size() + more.size());
  for (const auto* list : {&variables, &more}) {
    for (const Variable& variable : *list) all.push_back(variable.get());
  }
  std::sort(all.begin(), all.end());
  all.erase(std::unique(all.begin(), all.end()), all.end());
  return all;
}

absl::Status CopyIfShared(OpKernelContext* context, Var* variable) {
  if (variable->copy_on_read_mode.load()) return absl::OkStatus();
  Tensor* value = variable->tensor();
  if (!value->RefCountIsOne()) {
    Tensor copy;
    TF_RETURN_IF_ERROR(
        context->allocate_temp(value->dtype(), value->shape(), &copy));
    std::memcpy(copy.data(), value->data(), value->TotalBytes());
    *value = copy;
  }
  variable->copy_on_read_mode.store(true);
  return absl::OkStatus();
}

constexpr tensorflow::DataTypeSet kTableTypes =
    tensorflow::ToSet(tensorflow::DT_FLOAT) |
    tensorflow::ToSet(tensorflow::DT_BFLOAT16) |
    tensorflow::ToSet(tensorflow::DT_UINT8);

// Returns the arrays of table `t`, which CheckTables has checked.
std::array<void*, 2> ArraysOf(const std::vector<Variable>& tables,
                              const Plan& plan, size_t t) {
  const int64_t grids = plan.tables[t].grids;
  return {tables[t]->tensor()->data(),
          grids < 0 ? nullptr : tables[grids]->tensor()->data()};
}

}  // namespace

ParallelFor WorkerPool(OpKernelContext* context) {
  const auto* threads = context->device()->tensorflow_cpu_worker_threads();
  return [threads](int64_t total, int64_t cost, const Range& body) {
    WorkerFailure failure;
    const auto guarded = [&](int64_t begin, int64_t end) {
      failure.Guard([&] { body(begin, end); });
    };
    tensorflow::Shard(threads->num_threads, threads->workers, total, cost,
                      guarded);
    failure.Rethrow();
  };
}

absl::Status WithinMemory(const std::function<absl::Status()>& body) {
  try {
    return body();
  } catch (const std::bad_alloc&) {
    return absl::ResourceExhaustedError(
        "There is no memory left to prepare this batch. Nothing has changed. "
        "Make the batch smaller, or free memory.");
  }
}

absl::Status InvalidArgument(const Error& error) {
  return error ? absl::InvalidArgumentError(*error) : absl::OkStatus();
}

absl::Status FailedPrecondition(const Error& error) {
  return error ? absl::FailedPreconditionError(*error) : absl::OkStatus();
}

absl::Status CheckLength(const char* name, int64_t length, int64_t expected) {
  if (length == expected) return absl::OkStatus();
  return absl::InvalidArgumentError(absl::StrCat(
      "A malformed graph: `", name, "` has ", length, " elements, but ",
      expected, " are needed. Trace the function again."));
}

absl::Status CheckIndices(const char* name, const std::vector<int>& indices,
                          int64_t end) {
  for (const int index : indices) {
    if (index < 0 || index >= end) {
      return absl::InvalidArgumentError(
          absl::StrCat("A malformed graph: `", name, "` has the index ", index,
                       ", but there are ", end, ". Trace the function again."));
    }
  }
  return absl::OkStatus();
}

absl::Status CheckScalar(const char* name, const Tensor& tensor) {
  return CheckLength(name, tensor.NumElements(), 1);
}

absl::Status ActivationShape(const std::vector<int64_t>& samples, int64_t dim,
                             tensorflow::TensorShape* shape) {
  // This returns a status; the constructor of a shape would end the process.
  absl::InlinedVector<int64_t, 4> axes(samples.begin(), samples.end());
  axes.push_back(dim);
  return tensorflow::TensorShape::BuildTensorShape(axes, shape);
}

absl::Status ActivationShape(const Plan& plan, size_t feature,
                             const std::vector<int64_t>& samples,
                             const tensorflow::PartialTensorShape& traced,
                             tensorflow::TensorShape* shape) {
  TF_RETURN_IF_ERROR(ActivationShape(samples, plan.dim(feature), shape));
  if (traced.IsCompatibleWith(*shape)) return absl::OkStatus();
  return absl::InvalidArgumentError(absl::StrCat(
      "Feature ", plan.features[feature].path, ": the activations have shape ",
      shape->DebugString(), ", but the function was traced for ",
      traced.DebugString(),
      ". Pass `batch_size` where the size of batches is fixed, or trace a "
      "function for each size."));
}

absl::Status ActivationShapes(
    tensorflow::shape_inference::InferenceContext* context) {
  std::vector<tensorflow::PartialTensorShape> shapes;
  int64_t num_features = 0;
  TF_RETURN_IF_ERROR(context->GetAttr("output_shapes", &shapes));
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

absl::Status LookUpVariables(OpKernelContext* context, const char* name,
                             int dims, tensorflow::DataTypeSet types,
                             const char* rule,
                             std::vector<Variable>* variables) {
  tensorflow::OpInputList handles;
  TF_RETURN_IF_ERROR(context->input_list(name, &handles));
  variables->reserve(handles.size());
  for (const Tensor& handle : handles) {
    TF_RETURN_IF_ERROR(CheckScalar(name, handle));
    Variable variable;
    TF_RETURN_IF_ERROR(tensorflow::LookupResource(
        context, handle.scalar<tensorflow::ResourceHandle>()(), &variable));
    const tensorflow::tf_shared_lock lock(*variable->mu());
    const Tensor& value = *variable->tensor();
    if (!types.Contains(value.dtype()) || value.dims() != dims) {
      return absl::InvalidArgumentError(absl::StrCat(
          rule, ", but ", handle.scalar<tensorflow::ResourceHandle>()().name(),
          " is ", value.DeviceSafeDebugString()));
    }
    variables->push_back(std::move(variable));
  }
  return absl::OkStatus();
}

absl::Status LookUpArrays(OpKernelContext* context,
                          std::vector<Variable>* arrays) {
  return LookUpVariables(
      context, "arrays", 2, kTableTypes,
      "Tables and slots must be float32, bfloat16 or uint8 matrices", arrays);
}

absl::Status LookUpArrays(OpKernelContext* context, const Plan& plan,
                          std::vector<Variable>* tables,
                          std::vector<Variable>* slots) {
  TF_RETURN_IF_ERROR(LookUpArrays(context, tables));
  const size_t num_tables = std::min<size_t>(plan.num_arrays, tables->size());
  for (size_t i = num_tables; i < tables->size(); ++i) {
    Variable& slot = slots->emplace_back(std::move((*tables)[i]));
    const tensorflow::tf_shared_lock lock(*slot->mu());
    if (slot->tensor()->dtype() == tensorflow::DT_FLOAT) continue;
    return absl::InvalidArgumentError(
        absl::StrCat("Slots must be float32 matrices, but one is ",
                     slot->tensor()->DeviceSafeDebugString()));
  }
  tables->resize(num_tables);
  return absl::OkStatus();
}

std::vector<Var*> StoredRows(const std::vector<Variable>& tables,
                             const Plan& plan, size_t t) {
  std::vector<Var*> stored = {tables[t].get()};
  const int64_t grids = plan.tables[t].grids;
  if (grids >= 0 && grids < static_cast<int64_t>(tables.size())) {
    stored.push_back(tables[grids].get());
  }
  return stored;
}

tensorflow::DataType DataTypeOf(RowStorage storage) {
  switch (storage) {
    case RowStorage::kBFloat16:
      return tensorflow::DT_BFLOAT16;
    case RowStorage::kInt8:
      return tensorflow::DT_UINT8;
    default:
      return tensorflow::DT_FLOAT;
  }
}

TableData RowsOf(const std::vector<Variable>& tables, const Plan& plan,
                 size_t t) {
  return TableAt(plan.tables[t].storage, ArraysOf(tables, plan, t));
}

ConstTableData ConstRowsOf(const std::vector<Variable>& tables,
                           const Plan& plan, size_t t) {
  const auto [rows, grids] = ArraysOf(tables, plan, t);
  return TableAt(plan.tables[t].storage,
                 std::array<const void*, 2>{rows, grids});
}

absl::Status CheckTables(const std::vector<Variable>& tables,
                         const Plan& plan) {
  TF_RETURN_IF_ERROR(CheckLength("tables", tables.size(), plan.num_arrays));
  for (size_t t = 0; t < plan.tables.size(); ++t) {
    const TablePlan& table = plan.tables[t];
    const tensorflow::TensorShape& shape = tables[t]->tensor()->shape();
    const tensorflow::DataType dtype = DataTypeOf(table.storage);
    if (tables[t]->tensor()->dtype() != dtype) {
      return absl::InvalidArgumentError(absl::StrCat(
          "A malformed graph: table ", table.name, " must have dtype ",
          tensorflow::DataTypeString(dtype), ". Trace the function again."));
    }
    // The rows of a growing table change; GrowingTable checks them.
    const int64_t rows = table.vocabulary ? shape.dim_size(0) : table.rows;
    if (shape.dim_size(0) != rows || shape.dim_size(1) != table.dim) {
      return absl::InvalidArgumentError(absl::StrCat(
          "Table ", table.name, " has shape ", shape.DebugString(), ", but ",
          table.rows, " rows of width ", table.dim,
          " were checked for. Do not change the shape of a table."));
    }
    if (table.grids < 0) continue;
    const Tensor& grids = *tables[table.grids]->tensor();
    if (grids.dtype() != tensorflow::DT_BFLOAT16 ||
        grids.shape() != tensorflow::TensorShape({rows, 2})) {
      return absl::InvalidArgumentError(absl::StrCat(
          "Table ", table.name, " has scales and offsets of shape ",
          grids.shape().DebugString(), " for ", rows,
          " rows. Do not change the shape of a table."));
    }
  }
  return absl::OkStatus();
}

absl::Status LookUpCounters(OpKernelContext* context,
                            std::vector<Variable>* counters) {
  tensorflow::OpInputList handles;
  TF_RETURN_IF_ERROR(context->input_list("counters", &handles));
  for (const Tensor& handle : handles) {
    TF_RETURN_IF_ERROR(CheckScalar("counters", handle));
    Variable variable;
    TF_RETURN_IF_ERROR(tensorflow::LookupResource(
        context, handle.scalar<tensorflow::ResourceHandle>()(), &variable));
    const tensorflow::tf_shared_lock lock(*variable->mu());
    const Tensor& value = *variable->tensor();
    if (value.dtype() != tensorflow::DT_INT64 || value.dims() != 0) {
      return absl::InvalidArgumentError(
          absl::StrCat("A counter must be an int64 scalar, but it is ",
                       value.DeviceSafeDebugString()));
    }
    counters->push_back(std::move(variable));
  }
  return absl::OkStatus();
}

int64_t AddTo(Var* counter, int64_t number) {
  const tensorflow::mutex_lock lock(*counter->mu());
  const int64_t before = counter->tensor()->scalar<int64_t>()();
  // The buffer is new, because readers of the counter may share the old one.
  Tensor after(tensorflow::DT_INT64, {});
  after.scalar<int64_t>()() = before + number;
  *counter->tensor() = after;
  return before;
}

absl::Status SetBool(OpKernelContext* context, int index, bool value) {
  Tensor* output = nullptr;
  TF_RETURN_IF_ERROR(context->allocate_output(index, {}, &output));
  output->scalar<bool>()() = value;
  return absl::OkStatus();
}

ReadLocks::ReadLocks(const std::vector<Variable>& variables,
                     const std::vector<Variable>& more)
    : variables_(InLockOrder(variables, more)) {
  for (Var* variable : variables_) variable->mu()->lock_shared();
}

ReadLocks::~ReadLocks() {
  for (Var* variable : variables_) variable->mu()->unlock_shared();
}

WriteLocks::WriteLocks(const std::vector<Variable>& variables,
                       const std::vector<Variable>& more)
    : variables_(InLockOrder(variables, more)) {
  for (Var* variable : variables_) variable->mu()->lock();
}

WriteLocks::~WriteLocks() {
  for (Var* variable : variables_) variable->mu()->unlock();
}

absl::Status WriteLocks::MakeWritable(OpKernelContext* context) const {
  for (Var* variable : variables_) {
    TF_RETURN_IF_ERROR(CopyIfShared(context, variable));
  }
  return absl::OkStatus();
}

}  // namespace tpu_embedding
