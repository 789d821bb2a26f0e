#include "kernels/growing_table.h"

#include <algorithm>
#include <cstring>
#include <random>
#include <shared_mutex>
#include <utility>

#include "core/routing.h"
#include "tensorflow/core/framework/allocation_description.pb.h"
#include "tensorflow/core/framework/tensor.h"

namespace tpu_embedding {
namespace {

using tensorflow::Tensor;
using tensorflow::TensorShape;
using tensorflow::Var;

constexpr int32_t kRowOfZeros = -1;
// Memory for so many first values in front of a table: of the ids without a row
// that lookups name at one time.
constexpr int64_t kMostInFront = int64_t{1} << 20;

constexpr int64_t kIdsPerChunk = 2048;
constexpr int64_t kCyclesPerId = 40;
constexpr int64_t kCyclesPerFirstValue = 60;

uint64_t RandomSalt() {
  std::random_device device;
  return static_cast<uint64_t>(device()) << 32 | device();
}

// The rows that there are, of memory that has room for more.
class RowsThatAre : public tensorflow::TensorBuffer {
 public:
  RowsThatAre(std::shared_ptr<GrowingMemory> memory, char* data, size_t size)
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

void AddCopies(const std::vector<GrowingTable::Rows>& rows,
               std::vector<GrowingTable::Rows>* copies) {
  for (const GrowingTable::Rows& of_source : rows) {
    GrowingTable::Rows& copy = copies->emplace_back(of_source.size());
    for (size_t f = 0; f < of_source.size(); ++f) {
      copy[f].Resize(of_source[f].size());
      std::copy_n(of_source[f].data(), of_source[f].size(), copy[f].data());
    }
  }
}

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
        " columns. Assign values of the shape and dtype that it has."));
  }
  if (num_rows == 0 || Holds(*variable)) return absl::OkStatus();
  std::memcpy(row(0), value.data(), value.TotalBytes());
  Show(num_rows, variable);
  return absl::OkStatus();
}

void GrowingTable::Array::Show(int64_t num_rows, Var* variable) const {
  // A read copies, so that nothing else refers to the memory.
  variable->copy_on_read_mode.store(true);
  *variable->tensor() =
      Tensor(dtype, TensorShape({num_rows, width}),
             tensorflow::core::RefCountPtr<tensorflow::TensorBuffer>(
                 new RowsThatAre(memory, row(0), num_rows * row_bytes())));
}

GrowingTable::GrowingTable(const TablePlan& plan, int table,
                           const ChangedRows& changed_rows)
    : plan_(plan),
      table_(table),
      changed_rows_(changed_rows),
      salt_(RandomSalt()),
      vocabulary_(std::make_unique<Vocabulary>(*plan.vocabulary, salt_)) {
  const auto reserve = [&](tensorflow::DataType dtype, int64_t width,
                           int64_t front) {
    Array array{nullptr, dtype, width, front};
    const int64_t bytes = array.row_bytes();
    array.memory = std::make_shared<GrowingMemory>((front + plan.rows) * bytes);
    array.memory->Grow(front * bytes);
    return array;
  };
  parameters_ =
      reserve(plan.is_bfloat16 ? tensorflow::DT_BFLOAT16 : tensorflow::DT_FLOAT,
              plan.dim, kMostInFront);
  for (size_t k = 0; k < plan.first_slots.size(); ++k) {
    slots_.push_back(reserve(tensorflow::DT_FLOAT,
                             plan.rule->slots_per_row ? 1 : plan.dim, 0));
  }
}

ConstTableData GrowingTable::rows() const {
  const char* const data = parameters_.row(0);
  if (plan_.is_bfloat16) return reinterpret_cast<const BFloat16*>(data);
  return reinterpret_cast<const float*>(data);
}

void GrowingTable::WriteFirst(int64_t id, int64_t row) const {
  const FirstValues& values = vocabulary_->options().first_values;
  char* const data = parameters_.row(row);
  if (plan_.is_bfloat16) {
    values.Write(id, plan_.dim, reinterpret_cast<BFloat16*>(data));
  } else {
    values.Write(id, plan_.dim, reinterpret_cast<float*>(data));
  }
}

void GrowingTable::AddSources(const PreparedBatch& batch, Sources* sources) {
  if (!batch.routed) {
    sources->push_back(&batch.features);
    return;
  }
  for (const Asked& asked : batch.routed->asked) {
    sources->push_back(&asked.features);
  }
}

std::vector<GrowingTable::Rows> GrowingTable::FindRows(
    const Sources& sources, const ParallelFor& parallel_for) const {
  struct Chunk {
    size_t source;
    int feature;
    int64_t begin;
    int64_t end;
  };
  std::vector<Chunk> chunks;
  std::vector<Rows> rows(sources.size());
  for (size_t s = 0; s < sources.size(); ++s) {
    rows[s].resize(sources[s]->size());
    for (const int f : plan_.features) {
      const int64_t size = (*sources[s])[f].ids.size();
      rows[s][f].Resize(size);
      for (int64_t i = 0; i < size; i += kIdsPerChunk) {
        chunks.push_back({s, f, i, std::min(i + kIdsPerChunk, size)});
      }
    }
  }
  ForEachItem(parallel_for, chunks.size(), kIdsPerChunk * kCyclesPerId,
              [&](int64_t c) {
                const auto& [s, f, begin, end] = chunks[c];
                vocabulary_->Find((*sources[s])[f].ids.data() + begin,
                                  end - begin, rows[s][f].data() + begin);
              });
  return rows;
}

// An id without a row gets -2 less its place among those of `unknown`.
void GrowingTable::NumberUnknown(const Sources& sources,
                                 std::vector<Rows>* rows,
                                 UnknownIds* unknown) const {
  IdMap places(salt_);
  for (size_t s = 0; s < sources.size(); ++s) {
    for (const int f : plan_.features) {
      Buffer<int32_t>& own = (*rows)[s][f];
      for (int64_t i = 0; i < own.size(); ++i) {
        if (own[i] != kNoRow) continue;
        const int64_t id = (*sources[s])[f].ids[i];
        int32_t place = places.Find(id);
        if (place < 0) {
          place = unknown->ids.size();
          places.Reserve(1);
          places.Insert(id, place);
          unknown->ids.push_back(id);
          unknown->hits.push_back(0);
        }
        ++unknown->hits[place];
        own[i] = -2 - place;
      }
    }
  }
}

absl::Status GrowingTable::AdoptParameters(Var* parameters) {
  const auto is_ours = [&] {
    return vocabulary_->num_rows() == parameters->tensor()->dim_size(0) &&
           (vocabulary_->num_rows() == 0 || parameters_.Holds(*parameters));
  };
  {
    const tensorflow::tf_shared_lock lock(*parameters->mu());
    if (is_ours()) return absl::OkStatus();
  }
  const tensorflow::mutex_lock lock(*parameters->mu());
  return parameters_.Adopt(vocabulary_->num_rows(), plan_.name, parameters);
}

absl::Status GrowingTable::Find(const SharedBatch& batch, const Var& parameters,
                                const ParallelFor& parallel_for, Found* found) {
  if (batch->trains) TF_RETURN_IF_ERROR(Await(batch, parallel_for));
  const std::shared_lock<SharedMutex> lock(mutex_);
  if (vocabulary_->num_rows() && !parameters_.Holds(parameters)) {
    return absl::FailedPreconditionError(
        absl::StrCat("Table ", plan_.name,
                     " was assigned while a lookup began. Look up again."));
  }
  Sources sources;
  AddSources(*batch, &sources);
  found->rows_ = FindRows(sources, parallel_for);
  if (batch->trains) Keep(batch, found->rows_);
  UnknownIds unknown;
  NumberUnknown(sources, &found->rows_, &unknown);
  Unknown missing = vocabulary_->Missing(batch->trains);
  if (missing == Unknown::kShared && vocabulary_->num_rows() == 0) {
    // The row that all share is not there yet.
    missing = Unknown::kInitializer;
    unknown.ids.assign(unknown.ids.size(), Vocabulary::kSharedId);
  }
  const int64_t count = unknown.ids.size();
  int64_t first = 0;
  if (missing == Unknown::kInitializer && count) {
    TF_RETURN_IF_ERROR(Borrow(count, &first));
    found->borrowed_ = this;
    ForEachItem(parallel_for, count, plan_.dim * kCyclesPerFirstValue,
                [&](int64_t i) { WriteFirst(unknown.ids[i], -2 - first - i); });
  }
  for (Rows& of_source : found->rows_) {
    for (const int f : plan_.features) {
      Buffer<int32_t>& rows = of_source[f];
      for (int64_t i = 0; count && i < rows.size(); ++i) {
        if (rows[i] >= 0) continue;
        rows[i] = missing == Unknown::kInitializer ? rows[i] - first
                  : missing == Unknown::kShared    ? 0
                                                   : kRowOfZeros;
      }
    }
  }
  return absl::OkStatus();
}

absl::Status GrowingTable::Await(const SharedBatch& batch,
                                 const ParallelFor& parallel_for) {
  std::vector<SharedBatch> pending;
  {
    const std::lock_guard<std::mutex> front(front_mutex_);
    awaited_.erase(
        std::remove_if(awaited_.begin(), awaited_.end(),
                       [](const auto& known) { return known.batch.expired(); }),
        awaited_.end());
    awaited_.emplace_back().batch = batch;
    for (const auto& known : pending_) {
      if (SharedBatch part = known.lock()) pending.push_back(std::move(part));
    }
    // After a reset nothing pends.
    if (pending.empty() || pending.size() != pending_.size()) {
      return absl::OkStatus();
    }
  }
  const std::lock_guard<SharedMutex> lock(mutex_);
  const absl::Status status = CheckRoomLocked(pending, parallel_for);
  if (status.ok()) return status;
  Forget(batch);
  return absl::InvalidArgumentError(absl::StrCat(
      status.message(),
      " The update is the pending one, and the batch to be looked up has rows "
      "that it would give up: call `flush` before."));
}

void GrowingTable::Forget(const SharedBatch& batch) {
  const std::lock_guard<std::mutex> lock(front_mutex_);
  const auto known = FindAwaited(batch);
  if (known != awaited_.end()) awaited_.erase(known);
}

std::vector<GrowingTable::Awaited>::iterator GrowingTable::FindAwaited(
    const SharedBatch& batch) {
  return std::find_if(awaited_.begin(), awaited_.end(), [&](const auto& known) {
    return known.batch.lock() == batch;
  });
}

void GrowingTable::Keep(const SharedBatch& batch,
                        const std::vector<Rows>& rows) {
  std::vector<Rows> kept;
  AddCopies(rows, &kept);
  const std::lock_guard<std::mutex> lock(front_mutex_);
  const auto known = FindAwaited(batch);
  if (known == awaited_.end()) return;
  known->rows = std::move(kept);
  known->generation = generation_;
}

bool GrowingTable::AddKept(const SharedBatch& batch, std::vector<Rows>* rows) {
  const std::lock_guard<std::mutex> lock(front_mutex_);
  const auto known = FindAwaited(batch);
  if (known == awaited_.end() || known->generation != generation_) return false;
  AddCopies(known->rows, rows);
  return true;
}

GrowingTable::Found::~Found() {
  if (borrowed_) borrowed_->Return();
}

absl::Status GrowingTable::Borrow(int64_t count, int64_t* first) {
  const std::lock_guard<std::mutex> lock(front_mutex_);
  if (front_used_ + count >= kMostInFront) {
    return absl::ResourceExhaustedError(absl::StrCat(
        "Table ", plan_.name, ": lookups name ", front_used_ + count,
        " ids without a row at one time, of which there may be ",
        kMostInFront - 1, ". Make the batch smaller."));
  }
  *first = front_used_;
  front_used_ += count;
  ++num_lookups_;
  return absl::OkStatus();
}

void GrowingTable::Return() {
  const std::lock_guard<std::mutex> lock(front_mutex_);
  if (--num_lookups_ == 0) front_used_ = 0;
}

Vocabulary::Hold GrowingTable::HoldFor(const std::vector<Rows>& rows) {
  return [this, &rows](RowSet* held) {
    const auto add = [held](const Buffer<int32_t>& own) {
      for (int64_t i = 0; i < own.size(); ++i) {
        if (own[i] >= 0) held->Add(own[i]);
      }
    };
    for (const Rows& of_source : rows) {
      for (const int f : plan_.features) add(of_source[f]);
    }
    const std::lock_guard<std::mutex> lock(front_mutex_);
    for (const auto& known : awaited_) {
      const SharedBatch batch = known.batch.lock();
      if (!batch) continue;
      Sources sources;
      AddSources(*batch, &sources);
      for (const std::vector<FeatureCsr>* features : sources) {
        for (const int f : plan_.features) {
          const Buffer<int64_t>& ids = (*features)[f].ids;
          Buffer<int32_t> own(ids.size());
          vocabulary_->Find(ids.data(), own.size(), own.data());
          add(own);
        }
      }
    }
  };
}

absl::Status GrowingTable::CheckRoom(const std::vector<SharedBatch>& batches,
                                     bool pends,
                                     const ParallelFor& parallel_for) {
  const std::lock_guard<SharedMutex> lock(mutex_);
  TF_RETURN_IF_ERROR(CheckRoomLocked(batches, parallel_for));
  if (!pends) return absl::OkStatus();
  const std::lock_guard<std::mutex> front(front_mutex_);
  pending_.assign(batches.begin(), batches.end());
  return absl::OkStatus();
}

absl::Status GrowingTable::CheckRoomLocked(
    const std::vector<SharedBatch>& batches, const ParallelFor& parallel_for) {
  if (vocabulary_->options().shares_when_full) return absl::OkStatus();
  Sources sources;
  for (const SharedBatch& batch : batches) AddSources(*batch, &sources);
  int64_t num_entries = 0;
  for (const std::vector<FeatureCsr>* features : sources) {
    for (const int f : plan_.features) num_entries += (*features)[f].ids.size();
  }
  if (vocabulary_->HasRoomFor(num_entries)) return absl::OkStatus();
  return WithinMemory([&] {
    std::vector<Rows> rows = FindRows(sources, parallel_for);
    UnknownIds unknown;
    NumberUnknown(sources, &rows, &unknown);
    Decision decision;
    return InvalidArgument(
        vocabulary_->Decide(unknown, HoldFor(rows), &decision));
  });
}

absl::Status GrowingTable::Begin(std::vector<SharedBatch> batches,
                                 Var* parameters,
                                 const std::vector<Var*>& slots,
                                 const ParallelFor& parallel_for,
                                 Update* update) {
  update->lock_ = std::unique_lock<SharedMutex>(mutex_);
  const int64_t num_rows = vocabulary_->num_rows();
  TF_RETURN_IF_ERROR(CheckLength("slots", slots.size(), slots_.size()));
  TF_RETURN_IF_ERROR(parameters_.Adopt(num_rows, plan_.name, parameters));
  for (size_t k = 0; k < slots.size(); ++k) {
    TF_RETURN_IF_ERROR(slots_[k].Adopt(num_rows, plan_.name, slots[k]));
  }
  return WithinMemory([&] {
    update->batches_ = std::move(batches);
    for (const SharedBatch& batch : update->batches_) {
      AddSources(*batch, &update->sources_);
    }
    const bool are_kept = std::all_of(
        update->batches_.begin(), update->batches_.end(),
        [&](const auto& batch) { return AddKept(batch, &update->rows_); });
    if (!are_kept) update->rows_ = FindRows(update->sources_, parallel_for);
    NumberUnknown(update->sources_, &update->rows_, &update->unknown_);
    TF_RETURN_IF_ERROR(InvalidArgument(vocabulary_->Decide(
        update->unknown_, HoldFor(update->rows_), &update->decision_)));
    const int64_t most = vocabulary_->MostRowsAfter(update->decision_);
    const auto grow = [most](const Array& array) {
      array.memory->Grow((array.front + most) * array.row_bytes());
    };
    grow(parameters_);
    for (const Array& slot : slots_) grow(slot);
    return absl::OkStatus();
  });
}

void GrowingTable::Grow(Var* parameters, const std::vector<Var*>& slots,
                        const ParallelFor& parallel_for, Update* update) {
  std::vector<int32_t> taken;
  std::vector<Vocabulary::RowOfId> created;
  vocabulary_->Take(update->unknown_, update->decision_, HoldFor(update->rows_),
                    &taken, &created);
  NoteIds(created);
  ForEachItem(parallel_for, created.size(), plan_.dim * kCyclesPerFirstValue,
              [&](int64_t i) {
                const auto& [row, id] = created[i];
                WriteFirst(id, row);
                for (size_t k = 0; k < slots_.size(); ++k) {
                  float* values = reinterpret_cast<float*>(slots_[k].row(row));
                  std::fill_n(values, slots_[k].width, plan_.first_slots[k]);
                }
              });
  const int64_t num_rows = vocabulary_->num_rows();
  parameters_.Show(num_rows, parameters);
  for (size_t k = 0; k < slots_.size(); ++k) slots_[k].Show(num_rows, slots[k]);
  // What has no row trains the one that is shared, or nothing.
  const VocabularyOptions& options = vocabulary_->options();
  const int32_t instead = options.unknown == Unknown::kShared ? 0 : num_rows;
  if (!options.TrainsAdmitted()) taken.assign(taken.size(), kNoRow);
  std::replace(taken.begin(), taken.end(), kNoRow, instead);
  for (Rows& rows : update->rows_) {
    for (const int f : plan_.features) {
      for (int64_t i = 0; i < rows[f].size(); ++i) {
        if (rows[f][i] < 0) rows[f][i] = taken[-2 - rows[f][i]];
      }
    }
  }
  update->num_rows_ = num_rows;
  for (const SharedBatch& batch : update->batches_) {
    Forget(batch->looked_up ? batch->looked_up : batch);
  }
  const std::lock_guard<std::mutex> lock(front_mutex_);
  pending_.clear();
}

int64_t GrowingTable::Evict() {
  const std::lock_guard<SharedMutex> lock(mutex_);
  const int64_t count = vocabulary_->Evict(HoldFor({}));
  NoteIds({});
  return count;
}

VocabularyCounts GrowingTable::counts() const {
  const std::shared_lock<SharedMutex> lock(mutex_);
  return vocabulary_->counts();
}

std::vector<int64_t> GrowingTable::RowsOf(
    const VocabularySnapshot& snapshot) const {
  std::vector<int64_t> rows = snapshot.rows;
  const bool shares = plan_.vocabulary->unknown == Unknown::kShared;
  if (shares && !snapshot.state.empty() && snapshot.state[0]) rows.push_back(0);
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
                                const std::vector<Var*>& arrays) {
  const std::lock_guard<SharedMutex> lock(mutex_);
  std::vector<const Array*> own = {&parameters_};
  for (const Array& slot : slots_) own.push_back(&slot);
  TF_RETURN_IF_ERROR(CheckLength("values", values.size(), own.size()));
  TF_RETURN_IF_ERROR(CheckLength("arrays", arrays.size(), own.size()));
  const std::vector<int64_t> rows = RowsOf(snapshot);
  const int64_t size = rows.size();
  for (size_t k = 0; k < own.size(); ++k) {
    if (values[k].dtype() == own[k]->dtype &&
        values[k].shape() == TensorShape({size, own[k]->width})) {
      continue;
    }
    return absl::InvalidArgumentError(
        absl::StrCat("Table ", plan_.name, ": the file has values of shape ",
                     values[k].shape().DebugString(), " and dtype ",
                     tensorflow::DataTypeString(values[k].dtype()), " for ",
                     size, " rows of ", own[k]->width, " columns of ",
                     tensorflow::DataTypeString(own[k]->dtype), "."));
  }
  return WithinMemory([&] {
    auto loaded = std::make_unique<Vocabulary>(*plan_.vocabulary, salt_);
    TF_RETURN_IF_ERROR(InvalidArgument(loaded->Load(snapshot)));
    const int64_t num_rows = loaded->num_rows();
    for (const Array* array : own) {
      array->memory->Grow((array->front + num_rows) * array->row_bytes());
    }
    for (const auto& consumer : changed_rows_.Consumers()) {
      NoteReplaced(*loaded, consumer.get());
    }
    vocabulary_ = std::move(loaded);
    ++generation_;
    for (size_t k = 0; k < own.size(); ++k) {
      const int64_t bytes = own[k]->row_bytes();
      const char* from = static_cast<const char*>(values[k].data());
      for (int64_t i = 0; i < size; ++i) {
        std::memcpy(own[k]->row(rows[i]), from + i * bytes, bytes);
      }
      own[k]->Show(num_rows, arrays[k]);
    }
    return absl::OkStatus();
  });
}

void GrowingTable::NoteIds(const std::vector<Vocabulary::RowOfId>& created) {
  const std::vector<Vocabulary::RowOfId> evicted = vocabulary_->TakeEvicted();
  if (!evicted.empty() || !created.empty()) ++generation_;
  for (const auto& consumer : changed_rows_.Consumers()) {
    for (const auto& [row, id] : evicted) consumer->lost[table_].Lose(row, id);
    for (const auto& [row, id] : created) consumer->since[table_]->Set(row);
  }
}

void GrowingTable::NoteReplaced(const Vocabulary& vocabulary,
                                ConsumerRows* consumer) const {
  RowBits& since = *consumer->since[table_];
  ConsumerIds& lost = consumer->lost[table_];
  since.Take(consumer->taken[table_].get());
  std::vector<int64_t> changed = std::move(lost.since);
  changed.insert(changed.end(), lost.taken.begin(), lost.taken.end());
  for (int64_t row = 0; row < vocabulary_->num_rows(); ++row) {
    if (!vocabulary_->HasId(row)) continue;
    const bool is_known = !lost.known || lost.known->Has(row);
    const int64_t id = vocabulary_->IdOf(row);
    int32_t now;
    vocabulary.Find(&id, 1, &now);
    if (since.Has(row) || (is_known && now == kNoRow)) changed.push_back(id);
  }
  RowBits none(since.num_rows());
  none.Take(&since);
  lost = {RowsOfIds(vocabulary), {}, {}};
  for (const int64_t id : changed) Mark(vocabulary, id, consumer);
  for (int64_t row = 0; row < vocabulary.num_rows(); ++row) {
    if (!vocabulary.HasId(row)) continue;
    const int64_t id = vocabulary.IdOf(row);
    int32_t before;
    vocabulary_->Find(&id, 1, &before);
    if (before == kNoRow) since.Set(row);
  }
}

void GrowingTable::Mark(const Vocabulary& vocabulary, int64_t id,
                        ConsumerRows* consumer) const {
  int32_t row;
  vocabulary.Find(&id, 1, &row);
  if (row == kNoRow) {
    consumer->lost[table_].since.push_back(id);
  } else {
    consumer->since[table_]->Set(row);
  }
}

std::unique_ptr<RowBits> GrowingTable::RowsOfIds(
    const Vocabulary& vocabulary) const {
  auto rows = std::make_unique<RowBits>(plan_.rows);
  for (int64_t row = 0; row < vocabulary.num_rows(); ++row) {
    if (vocabulary.HasId(row)) rows->Set(row);
  }
  return rows;
}

void GrowingTable::MarkIds(const int64_t* ids, int64_t size,
                           ConsumerRows* consumer) {
  const std::lock_guard<SharedMutex> lock(mutex_);
  ConsumerIds& lost = consumer->lost[table_];
  if (!lost.known) lost.known = RowsOfIds(*vocabulary_);
  for (int64_t i = 0; i < size; ++i) Mark(*vocabulary_, ids[i], consumer);
}

absl::Status GrowingTable::TakeIds(const Variable& parameters,
                                   ConsumerRows* consumer, Changes* changes) {
  const std::lock_guard<SharedMutex> lock(mutex_);
  RowBits& taken = *consumer->taken[table_];
  ConsumerIds& lost = consumer->lost[table_];
  taken.Take(consumer->since[table_].get());
  std::vector<int64_t> rows;
  taken.ForEach([&](int64_t row) {
    if (!vocabulary_->HasId(row)) return;
    rows.push_back(row);
    if (lost.known) lost.known->Set(row);
  });
  std::sort(rows.begin(), rows.end(), [this](int64_t a, int64_t b) {
    return vocabulary_->IdOf(a) < vocabulary_->IdOf(b);
  });
  for (const int64_t row : rows) changes->ids.push_back(vocabulary_->IdOf(row));
  lost.taken.insert(lost.taken.end(), lost.since.begin(), lost.since.end());
  lost.since.clear();
  std::sort(lost.taken.begin(), lost.taken.end());
  lost.taken.erase(std::unique(lost.taken.begin(), lost.taken.end()),
                   lost.taken.end());
  for (const int64_t id : lost.taken) {  // Some came back.
    int32_t row;
    vocabulary_->Find(&id, 1, &row);
    if (row == kNoRow) changes->deleted.push_back(id);
  }
  changes->size = {vocabulary_->num_ids()};
  const bool shares = plan_.vocabulary->unknown == Unknown::kShared;
  if (shares && vocabulary_->num_rows()) rows.push_back(0);
  return CopyRows(parameters, rows, &changes->rows);
}

void GrowingTable::CommitIds(ConsumerRows* consumer) {
  const std::lock_guard<SharedMutex> lock(mutex_);
  consumer->lost[table_].taken.clear();
}

void GrowingTable::Update::Drop(RowGroups* groups) const {
  const int64_t last = groups->num_rows() - 1;
  if (last < 0 || groups->rows[last] != num_rows_) return;
  groups->rows.Truncate(last);
  groups->starts.Truncate(last + 1);
}

}  // namespace tpu_embedding
