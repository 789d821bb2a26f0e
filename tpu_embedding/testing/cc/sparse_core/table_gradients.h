// Collects one step's gradients for a table from all replicas, by the device
// that holds the row.

#ifndef TPU_EMBEDDING_TESTING_CC_SPARSE_CORE_TABLE_GRADIENTS_H_
#define TPU_EMBEDDING_TESTING_CC_SPARSE_CORE_TABLE_GRADIENTS_H_

#include <cstdint>
#include <vector>

#include "core/row_groups.h"
#include "sparse_core/device_csr.h"
#include "tensorflow/core/framework/tensor.h"

namespace tpu_embedding {

class TableGradientSums {
 public:
  // The CSR of each replica.
  std::vector<DeviceCsr> csrs;

  // Adds the gradients of the next replica's activations, [num_samples, dim],
  // or of its looked-up vectors if there is a combiner.
  void AddSamples(const tensorflow::Tensor& gradients) {
    kept_.push_back(gradients);
    num_samples_ = gradients.dim_size(0);
    const int64_t dim = gradients.dim_size(1);
    const float* const data = gradients.flat<float>().data();
    for (int64_t s = 0; s < num_samples_; ++s) {
      samples_.push_back(data + s * dim);
    }
  }

  // Returns the rows of `device` that any entry names, with their entries in
  // the order in which they are to be summed: replica by replica.
  RowGroups RowsOf(int64_t device, int64_t num_rows) const;

  // Returns the gradient of each sample, replica by replica.
  const float* const* samples() const { return samples_.data(); }

 private:
  int64_t num_samples_ = 0;  // of one replica
  std::vector<const float*> samples_;
  std::vector<tensorflow::Tensor> kept_;
};

}  // namespace tpu_embedding

#endif  // TPU_EMBEDDING_TESTING_CC_SPARSE_CORE_TABLE_GRADIENTS_H_
