// What the op kernels share: threads, variables, attributes.

#ifndef TPU_EMBEDDING_OPS_CC_KERNELS_KERNEL_UTIL_H_
#define TPU_EMBEDDING_OPS_CC_KERNELS_KERNEL_UTIL_H_

#include <cstdint>
#include <functional>
#include <vector>

#include "core/element.h"
#include "core/feature.h"
#include "core/parallel.h"
#include "tensorflow/core/framework/op_kernel.h"
#include "tensorflow/core/framework/resource_var.h"
#include "tensorflow/core/framework/shape_inference.h"
#include "tensorflow/core/framework/tensor_shape.h"

namespace tpu_embedding {

// Returns TensorFlow's CPU worker pool. What a worker throws is thrown again to
// the caller, once all workers are done.
ParallelFor WorkerPool(tensorflow::OpKernelContext* context);

// Make statuses of the core's errors: in values, or in the order of calls.
absl::Status InvalidArgument(const Error& error);
absl::Status FailedPrecondition(const Error& error);

// Returns the status of `body`, or an error if `body` runs out of memory, whose
// exception would end the process in a thread of TensorFlow. `body` must not
// have changed anything by then.
absl::Status WithinMemory(const std::function<absl::Status()>& body);

// Fails unless `length`, that of the list `name`, is `expected`. In a graph
// that was edited by hand the lists of an op may have different lengths.
absl::Status CheckLength(const char* name, int64_t length, int64_t expected);

// Fails unless all of `indices`, the list `name`, are in [0, end).
absl::Status CheckIndices(const char* name, const std::vector<int>& indices,
                          int64_t end);

// Fails unless `tensor`, the input `name`, has one element.
absl::Status CheckScalar(const char* name, const tensorflow::Tensor& tensor);

// Makes the shape of activations: `samples`, then `dim`.
absl::Status ActivationShape(const std::vector<int64_t>& samples, int64_t dim,
                             tensorflow::TensorShape* shape);

// Does the same for feature `feature` of a plan; fails unless the shape fits
// `traced`.
struct Plan;
absl::Status ActivationShape(const Plan& plan, size_t feature,
                             const std::vector<int64_t>& samples,
                             const tensorflow::PartialTensorShape& traced,
                             tensorflow::TensorShape* shape);

// Sets the shapes of an op's first outputs, the activations, by the attribute
// `output_shapes`.
absl::Status ActivationShapes(
    tensorflow::shape_inference::InferenceContext* context);

using Variable = tensorflow::core::RefCountPtr<tensorflow::Var>;

// Looks up the variables behind the resource inputs `name`, of rank `dims` and
// one of `types`. Errors quote `rule`.
absl::Status LookUpVariables(tensorflow::OpKernelContext* context,
                             const char* name, int dims,
                             tensorflow::DataTypeSet types, const char* rule,
                             std::vector<Variable>* variables);

// Looks up the variables behind the resource inputs `arrays`, of tables and
// slots. Each must hold a matrix of one of the types of TableData.
absl::Status LookUpArrays(tensorflow::OpKernelContext* context,
                          std::vector<Variable>* arrays);

// Looks up the variables of all tables: the first array of each, then the
// second ones of those that have two, and then the slots, which must be of
// float32.
absl::Status LookUpArrays(tensorflow::OpKernelContext* context,
                          const Plan& plan, std::vector<Variable>* tables,
                          std::vector<Variable>* slots);

// Returns the variables that store the rows of table `t`.
std::vector<tensorflow::Var*> StoredRows(const std::vector<Variable>& tables,
                                         const Plan& plan, size_t t);

// Returns the type of the first array of a table.
tensorflow::DataType DataTypeOf(RowStorage storage);

// Return the rows of table `t`. CheckTables must have checked the tables.
TableData RowsOf(const std::vector<Variable>& tables, const Plan& plan,
                 size_t t);
ConstTableData ConstRowsOf(const std::vector<Variable>& tables,
                           const Plan& plan, size_t t);

// Fails unless the tables have the dtype of the plan and its shape, for which
// ids were checked. The tables must be locked.
absl::Status CheckTables(const std::vector<Variable>& tables, const Plan& plan);

// Looks up the int64 scalars behind the resource inputs `counters`.
absl::Status LookUpCounters(tensorflow::OpKernelContext* context,
                            std::vector<Variable>* counters);

// Adds to a counter; returns the value before.
int64_t AddTo(tensorflow::Var* counter, int64_t number);

// Writes an output that is one bool.
absl::Status SetBool(tensorflow::OpKernelContext* context, int index,
                     bool value);

// Holds read locks on all of `variables` and `more`, taken in one global order.
class ReadLocks {
 public:
  explicit ReadLocks(const std::vector<Variable>& variables,
                     const std::vector<Variable>& more = {});
  ~ReadLocks();
  ReadLocks(const ReadLocks&) = delete;
  ReadLocks& operator=(const ReadLocks&) = delete;

 private:
  std::vector<tensorflow::Var*> variables_;
};

// Holds write locks on all of `variables` and `more`. Once locked, their
// buffers may be written in place: a tensor read before keeps its value, by
// TensorFlow's contract for sparse updates (the buffer is copied once if it is
// shared, and from then on a read copies).
class WriteLocks {
 public:
  explicit WriteLocks(const std::vector<Variable>& variables,
                      const std::vector<Variable>& more = {});
  ~WriteLocks();
  WriteLocks(const WriteLocks&) = delete;
  WriteLocks& operator=(const WriteLocks&) = delete;

  absl::Status MakeWritable(tensorflow::OpKernelContext* context) const;

 private:
  std::vector<tensorflow::Var*> variables_;
};

}  // namespace tpu_embedding

#endif  // TPU_EMBEDDING_OPS_CC_KERNELS_KERNEL_UTIL_H_
