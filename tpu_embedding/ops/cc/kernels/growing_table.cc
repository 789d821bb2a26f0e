#include "kernels/growing_table.h"

#include <algorithm>
#include <cstring>
#include <numeric>
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

// The numbers below 0 are drawn at the head of growing_table.h.
constexpr int32_t kRowOfZeros = -1;
constexpr int32_t WithoutRow(int64_t number) { return -2 - number; }
constexpr int64_t NumberOf(int32_t without_row) { return -2 - without_row; }
constexpr int32_t InFront(int32_t place) { return -2 - place; }

// Memory for so many first values in front of a table: of the ids without a row
// that lookups name at one time.
constexpr int64_t kMaxBorrowedRows = int64_t{1} << 20;

// What found rows for the update of a batch.
const GrowingTable::SharedBatch& LookupOf(
    const GrowingTable::SharedBatch& batch) {
  return batch->looked_up ? batch->looked_up : batch;
}

bool AreEqual(const Buffer<int64_t>& a, const Buffer<int64_t>& b) {
  return a.size() == b.size() &&
         std::equal(a.data(), a.data() + a.size(), b.data());
}

// Arrays of rows that are kept for use again, for each feature.
constexpr size_t kMostSpare = 4;

constexpr int64_t kIdsPerChunk = 2048;
constexpr int64_t kCyclesPerId = 40;
constexpr int64_t kRowsPerChunk = 64;
constexpr int64_t kCyclesPerFirstValue = 10;
constexpr int64_t kCyclesPerUnknown = 400;

uint64_t RandomSalt() {
  std::random_device device;
  return static_cast<uint64_t>(device()) << 32 | device();
}

// The rows that there are, of memory that has room for more.
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
                 new LiveRowsBuffer(memory, row(0), num_rows * row_bytes())));
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
    Array array{nullptr, dtype, width};
    const int64_t bytes = array.row_bytes();
    array.memory =
        std::make_shared<GrowingMemory>(plan.rows * bytes, front * bytes);
    array.memory->Grow(0);
    return array;
  };
  parameters_ =
      reserve(plan.is_bfloat16 ? tensorflow::DT_BFLOAT16 : tensorflow::DT_FLOAT,
              plan.dim, kMaxBorrowedRows);
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
  for (const PeerRequest& request : batch.routed->requests) {
    sources->push_back(&request.features);
  }
}

absl::Status GrowingTable::Run(const std::vector<const GrowingTable*>& tables,
                               const std::vector<Query*>& queries,
                               const ParallelFor& parallel_for) {
  struct Chunk {
    size_t query;
    const int64_t* ids;
    int64_t size;
    int32_t* rows;
    int64_t num_missing;
  };
  std::vector<Chunk> chunks;
  std::vector<absl::Status> statuses(queries.size());
  return WithinMemory([&] {
    for (size_t q = 0; q < queries.size(); ++q) {
      Query& query = *queries[q];
      for (size_t s = query.rows.size(); s < query.sources.size(); ++s) {
        const std::vector<FeatureCsr>& features = *query.sources[s];
        Rows& rows = query.rows.emplace_back(features.size());
        for (const int f : tables[q]->plan_.features) {
          const Buffer<int64_t>& ids = features[f].ids;
          rows[f] = tables[q]->NewRows(ids.size());
          for (int64_t i = 0; i < ids.size(); i += kIdsPerChunk) {
            chunks.push_back({q, ids.data() + i,
                              std::min(kIdsPerChunk, ids.size() - i),
                              rows[f].data() + i, 0});
          }
        }
      }
    }
    ForEachItem(parallel_for, chunks.size(), kIdsPerChunk * kCyclesPerId,
                [&](int64_t c) {
                  Chunk& own = chunks[c];
                  own.num_missing = tables[own.query]->vocabulary_->Find(
                      own.ids, own.size, own.rows);
                });
    int64_t num_missing = 0;
    for (const Chunk& chunk : chunks) {
      queries[chunk.query]->num_missing += chunk.num_missing;
      num_missing += chunk.num_missing;
    }
    if (num_missing == 0) return absl::OkStatus();
    ForEachItem(parallel_for, queries.size(),
                num_missing * kCyclesPerUnknown / queries.size(),
                [&](int64_t q) {
                  statuses[q] = WithinMemory([&] {
                    tables[q]->NumberUnknown(queries[q]);
                    return absl::OkStatus();
                  });
                });
    for (const absl::Status& status : statuses) TF_RETURN_IF_ERROR(status);
    return absl::OkStatus();
  });
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

GrowingTable::Update::~Update() {
  if (!table_) return;
  table_->Return(&rows_);
  for (Query& query : queries_) table_->Return(&query.rows);
  for (const SharedBatch& batch : batches_) table_->ForgetLookup(batch);
}

void GrowingTable::NumberUnknown(Query* query) const {
  if (query->num_missing == 0) return;
  UnknownIds& unknown = query->unknown;
  IdMap places(salt_);
  places.Reserve(query->num_missing);
  for (size_t s = 0; s < query->sources.size(); ++s) {
    for (const int f : plan_.features) {
      const Buffer<int64_t>& ids = (*query->sources[s])[f].ids;
      Buffer<int32_t>& own = query->rows[s][f];
      for (int64_t i = 0; i < own.size(); ++i) {
        if (own[i] != kNoRow) continue;
        const int64_t id = ids[i];
        int32_t place = places.Find(id);
        if (place < 0) {
          place = unknown.ids.size();
          places.Insert(id, place);
          unknown.ids.push_back(id);
          unknown.hits.push_back(0);
        }
        ++unknown.hits[place];
        own[i] = WithoutRow(place);
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

absl::Status GrowingTable::Find(const SharedBatch& batch, Purpose purpose,
                                const std::vector<Search>& searches,
                                const ParallelFor& parallel_for) {
  const absl::Status status =
      FindLocked(batch, purpose, searches, parallel_for);
  if (status.ok() || purpose != Purpose::kTraining) return status;
  for (const Search& search : searches) search.table->Forget(batch);
  return status;
}

absl::Status GrowingTable::FindLocked(const SharedBatch& batch, Purpose purpose,
                                      const std::vector<Search>& searches,
                                      const ParallelFor& parallel_for) {
  const size_t size = searches.size();
  std::vector<std::shared_lock<SharedMutex>> locks;
  std::vector<const GrowingTable*> tables;
  std::vector<Query> queries(size);
  std::vector<Query*> asked;
  for (const Search& search : searches) {
    if (purpose != Purpose::kTraining) break;
    TF_RETURN_IF_ERROR(search.table->Await(batch, parallel_for));
  }
  for (size_t q = 0; q < size; ++q) {
    GrowingTable& own = *searches[q].table;
    locks.emplace_back(own.mutex_);
    searches[q].found->table_ = &own;
    if (own.vocabulary_->num_rows() &&
        !own.parameters_.Holds(*searches[q].parameters)) {
      return absl::FailedPreconditionError(
          absl::StrCat("Table ", own.plan_.name,
                       " was assigned while a lookup began. Look up again."));
    }
    tables.push_back(&own);
    asked.push_back(&queries[q]);
    AddSources(*batch, &queries[q].sources);
  }
  TF_RETURN_IF_ERROR(Run(tables, asked, parallel_for));
  std::vector<std::vector<int32_t>> reads(size);
  std::vector<std::vector<Vocabulary::RowOfId>> first(size);
  struct Chunk {
    size_t query;
    size_t begin;
    size_t end;
  };
  std::vector<Chunk> chunks;
  for (size_t q = 0; q < size; ++q) {
    GrowingTable* const table = searches[q].table;
    TF_RETURN_IF_ERROR(WithinMemory([&] {
      table->Give(batch, purpose, &queries[q]);
      return table->Place(batch, purpose, queries[q], searches[q].found,
                          &reads[q], &first[q]);
    }));
    for (size_t i = 0; i < first[q].size(); i += kRowsPerChunk) {
      chunks.push_back({q, i, std::min(i + kRowsPerChunk, first[q].size())});
    }
  }
  const int64_t dim = size ? tables[0]->plan_.dim : 0;
  ForEachItem(parallel_for, chunks.size(),
              kRowsPerChunk * dim * kCyclesPerFirstValue, [&](int64_t c) {
                const auto& [q, begin, end] = chunks[c];
                for (size_t i = begin; i < end; ++i) {
                  tables[q]->WriteFirst(first[q][i].id, first[q][i].row);
                }
              });
  ForEachItem(parallel_for, size, kIdsPerChunk, [&](int64_t q) {
    if (queries[q].num_missing) {
      for (Rows& rows : queries[q].rows) {
        for (const int f : tables[q]->plan_.features) {
          for (int64_t i = 0; i < rows[f].size(); ++i) {
            if (rows[f][i] < 0) rows[f][i] = reads[q][NumberOf(rows[f][i])];
          }
        }
      }
    }
    searches[q].found->rows_ = std::move(queries[q].rows);
  });
  return absl::OkStatus();
}

void GrowingTable::Give(const SharedBatch& batch, Purpose purpose,
                        Query* query) {
  std::vector<Rows> rows(query->rows.size());
  for (size_t s = 0; s < rows.size() && purpose == Purpose::kTraining; ++s) {
    rows[s].resize(query->rows[s].size());
    for (const int f : plan_.features) {
      const Buffer<int32_t>& own = query->rows[s][f];
      rows[s][f] = NewRows(own.size());
      std::copy_n(own.data(), own.size(), rows[s][f].data());
    }
  }
  const std::lock_guard<std::mutex> lock(front_mutex_);
  const UnknownIds& unknown = query->unknown;
  query->given = vocabulary_->Give(unknown, purpose != Purpose::kEvaluation,
                                   Promised(batch, unknown.ids.size()));
  if (purpose == Purpose::kRepetition) {
    IdMap numbers(salt_);
    numbers.Reserve(unknown.ids.size());
    for (size_t i = 0; i < unknown.ids.size(); ++i) {
      numbers.Insert(unknown.ids[i], i);
    }
    for (const Awaited& known : awaited_) {  // The last one counts.
      for (size_t i = 0; i < known.unknown.ids.size(); ++i) {
        const int32_t number = numbers.Find(known.unknown.ids[i]);
        if (number >= 0) query->given[number] = known.given[i];
      }
    }
  }
  if (purpose != Purpose::kTraining) return;
  const auto known = FindAwaited(batch);
  if (known == awaited_.end()) return;
  *known = {known->batch, true, std::move(rows), unknown, query->given};
}

IdMap GrowingTable::Promised(const SharedBatch& batch, int64_t count) const {
  IdMap promised(salt_);
  if (!vocabulary_->options().Promises()) return promised;
  const auto promises = [&](const Awaited& known) {
    const SharedBatch other = known.batch.lock();
    return other && other != batch;
  };
  int64_t most = 0;
  for (const Awaited& known : awaited_) {
    if (promises(known)) most += known.unknown.ids.size();
  }
  if (vocabulary_->HasRoomFor(most + count)) return promised;
  promised.Reserve(most);
  for (const Awaited& known : awaited_) {
    if (!promises(known)) continue;
    const std::vector<int64_t>& ids = known.unknown.ids;
    std::vector<int32_t> rows(ids.size());
    vocabulary_->Find(ids.data(), ids.size(), rows.data());
    for (size_t i = 0; i < ids.size(); ++i) {
      const bool is_new = rows[i] == kNoRow && promised.Find(ids[i]) < 0;
      if (is_new && known.given[i] == Unknown::kInitializer) {
        promised.Insert(ids[i], 0);
      }
    }
  }
  return promised;
}

absl::Status GrowingTable::Place(const SharedBatch& batch, Purpose purpose,
                                 const Query& query, Found* found,
                                 std::vector<int32_t>* reads,
                                 std::vector<Vocabulary::RowOfId>* first) {
  const std::vector<int64_t>& ids = query.unknown.ids;
  if (ids.empty()) return absl::OkStatus();
  int32_t shared = 0;
  std::vector<int64_t> borrows;
  for (size_t i = 0; i < ids.size(); ++i) {
    if (query.given[i] == Unknown::kInitializer) borrows.push_back(ids[i]);
  }
  const bool has_shared = vocabulary_->options().unknown == Unknown::kShared &&
                          borrows.size() < ids.size();
  // The row that all share may not be there yet.
  const bool borrows_shared = has_shared && vocabulary_->num_rows() == 0;
  if (borrows_shared) borrows.push_back(Vocabulary::kSharedId);
  std::vector<int32_t> rows;
  TF_RETURN_IF_ERROR(Borrow(batch, purpose, borrows, found, &rows));
  for (size_t k = 0; k < rows.size(); ++k)
    first->push_back({rows[k], borrows[k]});
  if (borrows_shared) shared = rows.back();
  size_t next = 0;
  for (size_t i = 0; i < ids.size(); ++i) {
    switch (query.given[i]) {
      case Unknown::kZeros:
        reads->push_back(kRowOfZeros);
        break;
      case Unknown::kInitializer:
        reads->push_back(rows[next++]);
        break;
      case Unknown::kShared:
        reads->push_back(shared);
    }
  }
  return absl::OkStatus();
}

absl::Status GrowingTable::Await(const SharedBatch& batch,
                                 const ParallelFor& parallel_for) {
  Expect(batch);
  std::vector<SharedBatch> pending;
  {
    const std::lock_guard<std::mutex> front(front_mutex_);
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
  return absl::InvalidArgumentError(absl::StrCat(
      status.message(),
      " The update is the pending one, and the batch to be looked up has rows "
      "that it would evict: call `flush` before."));
}

void GrowingTable::Expect(const SharedBatch& batch) {
  const std::lock_guard<std::mutex> lock(front_mutex_);
  const auto is_over = [&](const Awaited& known) {
    const SharedBatch other = known.batch.lock();
    return !other || other == batch;  // The lookup may be repeated.
  };
  awaited_.erase(std::remove_if(awaited_.begin(), awaited_.end(), is_over),
                 awaited_.end());
  awaited_.emplace_back().batch = batch;
}

void GrowingTable::ForgetLookup(const SharedBatch& batch) {
  Forget(LookupOf(batch));
  Forget(batch);
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

void GrowingTable::TakeGiven(const SharedBatch& batch, Query* query) {
  const std::lock_guard<std::mutex> lock(front_mutex_);
  const SharedBatch& lookup = LookupOf(batch);
  const auto known = FindAwaited(lookup);
  if (known == awaited_.end() || !known->is_done) return;
  if (lookup != batch) {  // What came back as tensors may be another batch.
    Sources sources;
    AddSources(*lookup, &sources);
    bool are_equal = sources.size() == query->sources.size();
    for (size_t s = 0; s < sources.size() && are_equal; ++s) {
      for (const int f : plan_.features) {
        are_equal &=
            AreEqual((*sources[s])[f].ids, (*query->sources[s])[f].ids);
      }
    }
    if (!are_equal) return;
  }
  query->rows = std::move(known->rows);
  query->unknown = known->unknown;
  query->given = known->given;
  query->num_missing = known->unknown.ids.size();
  known->is_done = false;
}

GrowingTable::Found::~Found() {
  if (!table_) return;
  table_->Return(&rows_);
  if (!borrowed_.empty()) table_->ReturnFront(borrowed_);
}

absl::Status GrowingTable::Borrow(const SharedBatch& batch, Purpose purpose,
                                  const std::vector<int64_t>& ids, Found* found,
                                  std::vector<int32_t>* rows) {
  if (ids.empty()) return absl::OkStatus();
  const int64_t count = ids.size();
  const int64_t num_rows = vocabulary_->num_rows();
  const int64_t bytes = (num_rows + count) * parameters_.row_bytes();
  const std::lock_guard<std::mutex> lock(front_mutex_);
  if (purpose == Purpose::kTraining && ahead_.batch.expired() &&
      bytes <= static_cast<int64_t>(parameters_.memory->capacity())) {
    ahead_ = {batch, num_rows, ids};
    rows->resize(count);
    std::iota(rows->begin(), rows->end(), num_rows);
    return absl::OkStatus();
  }
  const int64_t num_free = free_places_.size();
  const int64_t used = next_place_ - num_free;
  if (used + count >= kMaxBorrowedRows) {
    return absl::ResourceExhaustedError(
        absl::StrCat("Table ", plan_.name, ": lookups name ", used + count,
                     " ids without a row at one time, of which there may be ",
                     kMaxBorrowedRows - 1, ". Make the batch smaller."));
  }
  for (int64_t i = 0; i < count; ++i) {
    int32_t place = next_place_;
    if (free_places_.empty()) {
      ++next_place_;
    } else {
      place = free_places_.back();
      free_places_.pop_back();
    }
    found->borrowed_.push_back(place);
    rows->push_back(InFront(place));
  }
  return absl::OkStatus();
}

bool GrowingTable::IsAhead(const Vocabulary::RowOfId& created) const {
  const int64_t place = created.row - ahead_.first_row;
  return place >= 0 && place < static_cast<int64_t>(ahead_.ids.size()) &&
         ahead_.ids[place] == created.id;
}

void GrowingTable::ReturnFront(const std::vector<int32_t>& places) {
  const std::lock_guard<std::mutex> lock(front_mutex_);
  free_places_.insert(free_places_.end(), places.rbegin(), places.rend());
}

void GrowingTable::AddRows(const std::vector<Rows>& rows, RowSet* held) const {
  for (const Rows& of_source : rows) {
    for (const int f : plan_.features) {
      for (int64_t i = 0; i < of_source[f].size(); ++i) {
        if (of_source[f][i] >= 0) held->Add(of_source[f][i]);
      }
    }
  }
}

void GrowingTable::AddRowsOf(const int64_t* ids, int64_t size,
                             RowSet* held) const {
  std::vector<int32_t> rows(size);
  vocabulary_->Find(ids, size, rows.data());
  for (const int32_t row : rows) {
    if (row != kNoRow) held->Add(row);
  }
}

Vocabulary::Hold GrowingTable::HoldFor(
    const std::vector<SharedBatch>& batches,
    const std::function<void(RowSet*)>& add_own) const {
  return [this, &batches, add_own](RowSet* held) {
    add_own(held);
    const std::lock_guard<std::mutex> lock(front_mutex_);
    for (const Awaited& known : awaited_) {
      const SharedBatch lookup = known.batch.lock();
      const auto is_own = [&](const SharedBatch& batch) {
        return batch == lookup || LookupOf(batch) == lookup;
      };
      if (!lookup || std::any_of(batches.begin(), batches.end(), is_own)) {
        continue;
      }
      if (known.is_done) {
        AddRows(known.rows, held);
        AddRowsOf(known.unknown.ids.data(), known.unknown.ids.size(), held);
        continue;
      }
      Sources sources;
      AddSources(*lookup, &sources);
      for (const std::vector<FeatureCsr>* features : sources) {
        for (const int f : plan_.features) {
          const Buffer<int64_t>& ids = (*features)[f].ids;
          AddRowsOf(ids.data(), ids.size(), held);
        }
      }
    }
  };
}

Vocabulary::Hold GrowingTable::HoldFor(const Update& update) const {
  return HoldFor(update.batches_, [this, &update](RowSet* held) {
    for (const Query& query : update.queries_) AddRows(query.rows, held);
    for (const std::vector<int32_t>& rows : update.now_) {
      for (const int32_t row : rows) {
        if (row >= 0) held->Add(row);
      }
    }
  });
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
  Query query;
  for (const SharedBatch& batch : batches) AddSources(*batch, &query.sources);
  int64_t num_new = 0;  // at most
  {
    const std::lock_guard<std::mutex> front(front_mutex_);
    for (const SharedBatch& batch : batches) {
      const auto known = FindAwaited(batch);
      if (known != awaited_.end() && known->is_done) {
        num_new += known->unknown.ids.size();
        continue;
      }
      Sources sources;
      AddSources(*batch, &sources);
      for (const std::vector<FeatureCsr>* features : sources) {
        for (const int f : plan_.features) num_new += (*features)[f].ids.size();
      }
    }
  }
  if (vocabulary_->HasRoomFor(num_new)) return absl::OkStatus();
  TF_RETURN_IF_ERROR(Run({this}, {&query}, parallel_for));
  return WithinMemory([&] {
    const auto add = [&](RowSet* held) { AddRows(query.rows, held); };
    Decision decision;
    return InvalidArgument(vocabulary_->Decide(
        query.unknown, IdMap(salt_), HoldFor(batches, add), &decision));
  });
}

absl::Status GrowingTable::Begin(const std::vector<SharedBatch>& batches,
                                 const std::vector<Growth>& growths,
                                 const ParallelFor& parallel_for) {
  std::vector<const GrowingTable*> tables;
  std::vector<Query*> queries;
  for (const Growth& growth : growths) {
    GrowingTable* const table = growth.table;
    const std::vector<Var*>& slots = growth.slots;
    Update* const update = growth.update;
    update->table_ = table;
    update->lock_ = std::unique_lock<SharedMutex>(table->mutex_);
    update->batches_ = batches;
    const int64_t num_rows = table->vocabulary_->num_rows();
    const std::string& name = table->plan_.name;
    TF_RETURN_IF_ERROR(
        CheckLength("slots", slots.size(), table->slots_.size()));
    TF_RETURN_IF_ERROR(
        table->parameters_.Adopt(num_rows, name, growth.parameters));
    for (size_t k = 0; k < slots.size(); ++k) {
      TF_RETURN_IF_ERROR(table->slots_[k].Adopt(num_rows, name, slots[k]));
    }
    update->queries_.resize(batches.size());
    TF_RETURN_IF_ERROR(WithinMemory([&] {
      for (size_t b = 0; b < batches.size(); ++b) {
        Query& query = update->queries_[b];
        AddSources(*batches[b], &query.sources);
        table->TakeGiven(batches[b], &query);
        tables.push_back(table);
        queries.push_back(&query);
      }
      return absl::OkStatus();
    }));
  }
  TF_RETURN_IF_ERROR(Run(tables, queries, parallel_for));
  int64_t num_missing = 0;
  for (const Query* query : queries) num_missing += query->num_missing;
  std::vector<absl::Status> statuses(growths.size());
  ForEachItem(parallel_for, growths.size(),
              (1 + num_missing) * kCyclesPerUnknown / (1 + growths.size()),
              [&](int64_t q) {
                statuses[q] = WithinMemory(
                    [&] { return growths[q].table->Decide(growths[q]); });
              });
  for (const absl::Status& status : statuses) TF_RETURN_IF_ERROR(status);
  return absl::OkStatus();
}

void GrowingTable::FindUnknown(Update* update) const {
  const size_t size = update->queries_.size();
  IdMap numbers(salt_);  // of the ids of several queries
  UnknownIds& all = update->unknown_;
  update->now_.resize(size);
  for (size_t b = 0; b < size; ++b) {
    const UnknownIds& own = update->queries_[b].unknown;
    std::vector<int32_t>& now = update->now_[b];
    now.resize(own.ids.size());
    vocabulary_->Find(own.ids.data(), own.ids.size(), now.data());
    if (size > 1) numbers.Reserve(own.ids.size());
    for (size_t i = 0; i < now.size(); ++i) {
      if (now[i] != kNoRow) continue;
      int32_t number = size > 1 ? numbers.Find(own.ids[i]) : -1;
      if (number < 0) {
        number = all.ids.size();
        if (size > 1) numbers.Insert(own.ids[i], number);
        all.ids.push_back(own.ids[i]);
        all.hits.push_back(0);
      }
      all.hits[number] += own.hits[i];
      now[i] = WithoutRow(number);
    }
  }
}

absl::Status GrowingTable::Decide(const Growth& growth) {
  Update& update = *growth.update;
  for (size_t b = 0; b < update.queries_.size(); ++b) {
    // Where no lookup is known, it is now.
    Query& query = update.queries_[b];
    if (query.given.size() == query.unknown.ids.size()) continue;
    Expect(update.batches_[b]);
    Give(update.batches_[b], Purpose::kTraining, &query);
  }
  FindUnknown(&update);
  const IdMap promised = [&] {
    const std::lock_guard<std::mutex> lock(front_mutex_);
    return Promised(nullptr, update.unknown_.ids.size());
  }();
  TF_RETURN_IF_ERROR(InvalidArgument(vocabulary_->Decide(
      update.unknown_, promised, HoldFor(update), &update.decision_)));
  const int64_t most = vocabulary_->MostRowsAfter(update.decision_);
  const auto grow = [most](const Array& array) {
    array.memory->Grow(most * array.row_bytes());
  };
  grow(parameters_);
  for (const Array& slot : slots_) grow(slot);
  return absl::OkStatus();
}

void GrowingTable::Grow(const std::vector<Growth>& growths,
                        const ParallelFor& parallel_for) {
  int64_t num_missing = 0;
  for (const Growth& own : growths) {
    num_missing += own.update->unknown_.ids.size();
  }
  ForEachItem(parallel_for, growths.size(),
              (1 + num_missing) * kCyclesPerUnknown / (1 + growths.size()),
              [&](int64_t g) { growths[g].table->TakeRows(growths[g]); });
  struct Chunk {
    size_t growth;
    size_t begin;
    size_t end;
  };
  std::vector<Chunk> chunks;
  for (size_t g = 0; g < growths.size(); ++g) {
    const size_t count = growths[g].update->created_.size();
    for (size_t i = 0; i < count; i += kRowsPerChunk) {
      chunks.push_back({g, i, std::min(i + kRowsPerChunk, count)});
    }
  }
  const int64_t dim = growths.empty() ? 0 : growths[0].table->plan_.dim;
  ForEachItem(parallel_for, chunks.size(),
              kRowsPerChunk * dim * kCyclesPerFirstValue, [&](int64_t c) {
                const Growth& own = growths[chunks[c].growth];
                for (size_t i = chunks[c].begin; i < chunks[c].end; ++i) {
                  own.table->WriteCreated(own.update->created_[i]);
                }
              });
  for (const auto& [table, parameters, slots, update] : growths) {
    const int64_t num_rows = update->num_rows_;
    table->parameters_.Show(num_rows, parameters);
    for (size_t k = 0; k < slots.size(); ++k) {
      table->slots_[k].Show(num_rows, slots[k]);
    }
    const std::lock_guard<std::mutex> lock(table->front_mutex_);
    table->pending_.clear();
    table->ahead_ = {};
  }
}

void GrowingTable::TakeRows(const Growth& growth) {
  Update& update = *growth.update;
  std::vector<int32_t> taken;
  vocabulary_->Take(update.unknown_, update.decision_, HoldFor(update), &taken,
                    &update.created_);
  NoteIds(update.created_);
  update.num_rows_ = vocabulary_->num_rows();
  const bool shares = vocabulary_->options().unknown == Unknown::kShared;
  for (size_t b = 0; b < update.queries_.size(); ++b) {
    Query& query = update.queries_[b];
    // What the gradients of each unknown id train.
    std::vector<int32_t> trained(query.unknown.ids.size());
    for (size_t i = 0; i < trained.size(); ++i) {
      int32_t row = update.now_[b][i];
      if (row < 0) row = taken[NumberOf(row)];
      const bool own = query.given[i] == Unknown::kInitializer && row != kNoRow;
      trained[i] = own ? row : shares ? 0 : update.num_rows_;
      if (row == kNoRow || own) continue;
      vocabulary_->CountHits(row, query.unknown.hits[i]);
    }
    for (size_t s = 0; s < query.sources.size(); ++s) {
      Rows& rows = query.rows[s];
      for (const int f : plan_.features) {
        for (int64_t i = 0; i < rows[f].size() && !trained.empty(); ++i) {
          if (rows[f][i] < 0) rows[f][i] = trained[NumberOf(rows[f][i])];
        }
      }
      update.sources_.push_back(query.sources[s]);
      update.rows_.push_back(std::move(rows));
    }
    query.rows.clear();
  }
}

void GrowingTable::WriteCreated(const Vocabulary::RowOfId& created) const {
  if (!IsAhead(created)) WriteFirst(created.id, created.row);
  for (size_t k = 0; k < slots_.size(); ++k) {
    float* const values = reinterpret_cast<float*>(slots_[k].row(created.row));
    std::fill_n(values, slots_[k].width, plan_.first_slots[k]);
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
      array->memory->Grow(num_rows * array->row_bytes());
    }
    for (const auto& consumer : changed_rows_.Consumers()) {
      NoteReplaced(*loaded, consumer.get());
    }
    vocabulary_ = std::move(loaded);
    {
      const std::lock_guard<std::mutex> front(front_mutex_);
      for (Awaited& known : awaited_) {
        known = Awaited{std::move(known.batch), false, {}, {}, {}};
      }
      ahead_ = {};
    }
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
