// Saves the ids and rows of a growing table, and replaces them by those of a
// file.

#include <cstring>
#include <shared_mutex>
#include <utility>

#include "kernels/growing_table.h"
#include "tensorflow/core/framework/tensor.h"

namespace tpu_embedding {
namespace {

using tensorflow::Tensor;
using tensorflow::TensorShape;

}  // namespace

std::vector<int64_t> GrowingTable::RowsOf(
    const VocabularySnapshot& snapshot) const {
  std::vector<int64_t> rows = snapshot.rows;
  const bool shares = plan_.vocabulary->unknown == Unknown::kShared;
  if (shares && !snapshot.state.empty() &&
      snapshot.state[VocabularyState::kNumRows])
    rows.push_back(0);
  return rows;
}

absl::Status GrowingTable::CopyRows(const Variable& array,
                                    const std::vector<int64_t>& rows,
                                    Tensor* copied) const {
  const Tensor& from = *array->tensor();
  if (from.dims() != 2 || from.dim_size(0) != vocabulary_->num_rows()) {
    return absl::InvalidArgumentError(absl::StrCat(
        "Table ", plan_.name, " or a slot of it is ",
        from.shape().DebugString(), ", but its vocabulary has ",
        vocabulary_->num_rows(), " rows. Assign values of that shape."));
  }
  const int64_t size = rows.size();
  *copied = Tensor(from.dtype(), TensorShape({size, from.dim_size(1)}));
  const int64_t bytes =
      from.dim_size(1) * tensorflow::DataTypeSize(from.dtype());
  for (int64_t i = 0; i < size; ++i) {
    std::memcpy(static_cast<char*>(copied->data()) + i * bytes,
                static_cast<const char*>(from.data()) + rows[i] * bytes, bytes);
  }
  return absl::OkStatus();
}

absl::Status GrowingTable::Save(const std::vector<Variable>& arrays,
                                VocabularySnapshot* snapshot,
                                std::vector<Tensor>* values) const {
  const std::shared_lock<SharedMutex> lock(mutex_);
  *snapshot = vocabulary_->Save();
  const std::vector<int64_t> rows = RowsOf(*snapshot);
  for (const Variable& array : arrays) {
    TF_RETURN_IF_ERROR(CopyRows(array, rows, &values->emplace_back()));
  }
  return absl::OkStatus();
}

absl::Status GrowingTable::Load(const VocabularySnapshot& snapshot,
                                const std::vector<Tensor>& values,
                                const std::vector<Variable>& arrays) {
  const std::lock_guard<SharedMutex> lock(mutex_);
  TF_RETURN_IF_ERROR(CheckLength("values", values.size(), arrays_.size()));
  TF_RETURN_IF_ERROR(CheckLength("arrays", arrays.size(), arrays_.size()));
  const std::vector<int64_t> rows = RowsOf(snapshot);
  const int64_t size = rows.size();
  for (size_t k = 0; k < arrays_.size(); ++k) {
    const Array& own = arrays_[k];
    if (values[k].dtype() == own.dtype &&
        values[k].shape() == TensorShape({size, own.width})) {
      continue;
    }
    return absl::InvalidArgumentError(
        absl::StrCat("Table ", plan_.name, ": the file has values of shape ",
                     values[k].shape().DebugString(), " and dtype ",
                     tensorflow::DataTypeString(values[k].dtype()), " for ",
                     size, " rows of ", own.width, " columns of ",
                     tensorflow::DataTypeString(own.dtype), "."));
  }
  return WithinMemory([&] {
    auto loaded = std::make_unique<Vocabulary>(*plan_.vocabulary, salt_);
    TF_RETURN_IF_ERROR(InvalidArgument(loaded->Load(snapshot)));
    const int64_t num_rows = loaded->num_rows();
    for (const Array& array : arrays_) {
      array.memory->Grow(num_rows * array.row_bytes());
    }
    for (const auto& consumer : changed_rows_.Consumers()) {
      NoteReplaced(*loaded, consumer.get());
    }
    vocabulary_ = std::move(loaded);
    clock_ = vocabulary_->clock();
    {
      const std::lock_guard<std::mutex> front(front_mutex_);
      for (Awaited& known : awaited_) {
        known = Awaited{std::move(known.batch), false, {}, {}, {}};
      }
      ahead_ = {};
    }
    for (size_t k = 0; k < arrays_.size(); ++k) {
      const int64_t bytes = arrays_[k].row_bytes();
      const char* from = static_cast<const char*>(values[k].data());
      for (int64_t i = 0; i < size; ++i) {
        std::memcpy(arrays_[k].row(rows[i]), from + i * bytes, bytes);
      }
      arrays_[k].Show(num_rows, arrays[k].get());
    }
    return absl::OkStatus();
  });
}

}  // namespace tpu_embedding
