// The memory of a growing table. growing_lookup.cc has its lookups,
// growing_awaited.cc what they hold until their update, growing_update.cc the
// update, growing_saving.cc checkpoints, and growing_changes.cc deltas.

#include "kernels/growing_table.h"

#include <cstring>
#include <shared_mutex>
#include <utility>

#include "core/int8-inl.h"
#include "core/routing.h"
#include "tensorflow/core/framework/allocation_description.pb.h"
#include "tensorflow/core/framework/tensor.h"

namespace tpu_embedding {
namespace {

using tensorflow::Tensor;
using tensorflow::TensorShape;
using tensorflow::Var;

// The number of unused arrays of rows that are kept, for each feature.
constexpr size_t kMostSpare = 4;

// A buffer of the rows that exist, in memory that has room for more.
class LiveRowsBuffer : public tensorflow::TensorBuffer {
 public:
  LiveRowsBuffer(std::shared_ptr<GrowingMemory> memory, char* data, size_t size)
      : TensorBuffer(data), memory_(std::move(memory)), size_(size) {}

  size_t size() const override { return size_; }
  TensorBuffer* root_buffer() override { return this; }
  void FillAllocationDescription(
      tensorflow::AllocationDescription* description) const override {
    description->set_requested_bytes(size_);
    description->set_allocator_name("tpu_embedding");
  }

 private:
  const std::shared_ptr<GrowingMemory> memory_;
  const size_t size_;
};

}  // namespace

bool GrowingTable::Array::Holds(const Var& variable) const {
  return const_cast<Var&>(variable).tensor()->data() == row(0);
}

absl::Status GrowingTable::Array::Adopt(int64_t num_rows,
                                        const std::string& table,
                                        Var* variable) const {
  const Tensor& value = *variable->tensor();
  if (value.dtype() != dtype || value.dims() != 2 ||
      value.dim_size(0) != num_rows || value.dim_size(1) != width) {
    return absl::InvalidArgumentError(absl::StrCat(
        "Table ", table, " or a slot of it is ", value.shape().DebugString(),
        " of ", tensorflow::DataTypeString(value.dtype()),
        ", but its vocabulary has ", num_rows, " rows of ", width,
        " columns. Assign values with the shape and dtype of the table or "
        "slot."));
  }
  if (num_rows == 0 || Holds(*variable)) return absl::OkStatus();
  std::memcpy(row(0), value.data(), value.TotalBytes());
  Show(num_rows, variable);
  return absl::OkStatus();
}

void GrowingTable::Array::Show(int64_t num_rows, Var* variable) const {
  // In this mode reads copy, so that no other tensor refers to the memory.
  variable->copy_on_read_mode.store(true);
  *variable->tensor() =
      Tensor(dtype, TensorShape({num_rows, width}),
             tensorflow::core::RefCountPtr<tensorflow::TensorBuffer>(
                 new LiveRowsBuffer(memory, row(0), num_rows * row_bytes())));
}

GrowingTable::GrowingTable(const TablePlan& plan, int table,
                           const ChangedRows& changed_rows)
    : plan_(plan),
      table_(table),
      changed_rows_(changed_rows),
      salt_(RandomSalt()),
      vocabulary_(std::make_unique<Vocabulary>(*plan.vocabulary, salt_)) {
  // `beside` is how many rows to add in front of the table and at its end.
  const auto reserve = [&](tensorflow::DataType dtype, int64_t width,
                           int64_t beside) {
    Array array{nullptr, dtype, width};
    const int64_t bytes = array.row_bytes();
    array.memory = std::make_shared<GrowingMemory>((plan.rows + beside) * bytes,
                                                   beside * bytes);
    array.memory->Grow(0);
    return array;
  };
  arrays_.push_back(
      reserve(DataTypeOf(plan.storage), plan.dim, kMaxBorrowedRows));
  if (plan.grids >= 0) {
    arrays_.push_back(reserve(tensorflow::DT_BFLOAT16, 2, kMaxBorrowedRows));
  }
  num_stored_ = arrays_.size();
  for (size_t k = 0; k < plan.first_slots.size(); ++k) {
    arrays_.push_back(reserve(tensorflow::DT_FLOAT,
                              plan.rule->slots_per_row ? 1 : plan.dim, 0));
  }
}

absl::Status GrowingTable::AdoptRows(const std::vector<Var*>& stored) {
  TF_RETURN_IF_ERROR(CheckLength("tables", stored.size(), num_stored_));
  for (size_t k = 0; k < num_stored_; ++k) {
    const auto is_ours = [&] {
      return vocabulary_->num_rows() == stored[k]->tensor()->dim_size(0) &&
             (vocabulary_->num_rows() == 0 || arrays_[k].Holds(*stored[k]));
    };
    {
      const tensorflow::tf_shared_lock lock(*stored[k]->mu());
      if (is_ours()) continue;
    }
    const tensorflow::mutex_lock lock(*stored[k]->mu());
    TF_RETURN_IF_ERROR(
        arrays_[k].Adopt(vocabulary_->num_rows(), plan_.name, stored[k]));
  }
  return absl::OkStatus();
}

bool GrowingTable::HoldsRows(const std::vector<Var*>& stored) const {
  for (size_t k = 0; k < stored.size(); ++k) {
    if (!arrays_[k].Holds(*stored[k])) return false;
  }
  return true;
}

ConstTableData GrowingTable::rows() const {
  return TableAt(
      plan_.storage,
      std::array<const void*, 2>{
          arrays_[0].row(0), plan_.grids < 0 ? nullptr : arrays_[1].row(0)});
}

void GrowingTable::WriteFirst(int64_t id, int64_t row) const {
  const FirstValues& values = vocabulary_->options().first_values;
  char* const data = arrays_[0].row(row);
  switch (plan_.storage) {
    case RowStorage::kBFloat16:
      return values.Write(id, plan_.dim, reinterpret_cast<BFloat16*>(data));
    case RowStorage::kInt8: {
      std::vector<float> floats(plan_.dim);
      values.Write(id, plan_.dim, floats.data());
      char* const grid = arrays_[1].row(row);
      std::memset(grid, 0, arrays_[1].row_bytes());  // No old grid is kept.
      Rounding rounding;
      rounding.seed = plan_.rounding_seed;
      RowsToCode rows;
      for (int r = 0; r < kRowsAtOnce; ++r) {
        rows.values[r] = floats.data();
        rows.rows[r] = Rounding::NumberOfId(id);
        rows.codes[r] = reinterpret_cast<uint8_t*>(data);
        rows.grids[r] = reinterpret_cast<BFloat16*>(grid);
      }
      return RunOnThisCpu<CodeBody>(rows, plan_.dim, rounding);
    }
    default:
      return values.Write(id, plan_.dim, reinterpret_cast<float*>(data));
  }
}

Buffer<int32_t> GrowingTable::NewRows(int64_t size) const {
  Buffer<int32_t> rows;
  {
    const std::lock_guard<std::mutex> lock(front_mutex_);
    if (!spare_.empty()) {
      rows = std::move(spare_.back());
      spare_.pop_back();
    }
  }
  rows.Resize(size);
  return rows;
}

void GrowingTable::Return(std::vector<Rows>* rows) {
  const std::lock_guard<std::mutex> lock(front_mutex_);
  for (Rows& of_source : *rows) {
    for (Buffer<int32_t>& own : of_source) {
      if (own.size() && spare_.size() < kMostSpare * plan_.features.size()) {
        spare_.push_back(std::move(own));
      }
    }
  }
}

void GrowingTable::AddSources(const PreparedBatch& batch, Sources* sources) {
  if (!batch.routed) {
    sources->push_back(&batch.features);
    return;
  }
  for (const PeerRequest& request : batch.routed->requests) {
    sources->push_back(&request.features);
  }
}

int64_t GrowingTable::Evict() {
  const std::lock_guard<SharedMutex> lock(mutex_);
  const int64_t count = vocabulary_->Evict(HoldFor({}, [](RowSet*) {}));
  NoteIds({});
  return count;
}

VocabularyCounts GrowingTable::counts() const {
  const std::shared_lock<SharedMutex> lock(mutex_);
  return vocabulary_->counts();
}

}  // namespace tpu_embedding
