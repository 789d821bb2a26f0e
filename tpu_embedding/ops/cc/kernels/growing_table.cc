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
    Array array{nullptr, dtype, width};
    const int64_t bytes = array.row_bytes();
    array.memory =
        std::make_shared<GrowingMemory>(plan.rows * bytes, front * bytes);
    array.memory->Grow(0);
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

absl::Status GrowingTable::Run(const std::vector<const GrowingTable*>& tables,
                               const ParallelFor& parallel_for,
                               std::vector<Query>* queries) {
  struct Chunk {
    size_t query;
    const int64_t* ids;
    int64_t size;
    int32_t* rows;
    int64_t num_missing;
  };
  std::vector<Chunk> chunks;
  std::vector<absl::Status> statuses(queries->size());
  return WithinMemory([&] {
    for (size_t q = 0; q < queries->size(); ++q) {
      Query& query = (*queries)[q];
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
      (*queries)[chunk.query].num_missing += chunk.num_missing;
      num_missing += chunk.num_missing;
    }
    if (num_missing == 0) return absl::OkStatus();
    ForEachItem(parallel_for, queries->size(),
                num_missing * kCyclesPerUnknown / queries->size(),
                [&](int64_t q) {
                  statuses[q] = WithinMemory([&] {
                    tables[q]->NumberUnknown(&(*queries)[q]);
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
  if (table_) table_->Return(&query_.rows);
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

absl::Status GrowingTable::Find(const SharedBatch& batch,
                                const std::vector<Search>& searches,
                                const ParallelFor& parallel_for) {
  const size_t size = searches.size();
  std::vector<std::shared_lock<SharedMutex>> locks;
  std::vector<const GrowingTable*> tables;
  std::vector<Query> queries(size);
  for (const Search& search : searches) {
    if (!batch->trains) break;
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
    AddSources(*batch, &queries[q].sources);
  }
  TF_RETURN_IF_ERROR(Run(tables, parallel_for, &queries));
  std::vector<Places> places(size);
  struct Chunk {
    size_t query;
    int64_t begin;
    int64_t end;
  };
  std::vector<Chunk> chunks;
  for (size_t q = 0; q < size; ++q) {
    if (batch->trains) searches[q].table->Keep(batch, queries[q]);
    const int64_t count = queries[q].unknown.ids.size();
    if (count == 0) continue;
    TF_RETURN_IF_ERROR(searches[q].table->PlaceUnknown(
        batch, &queries[q].unknown, searches[q].found, &places[q]));
    if (places[q].step == 0) continue;
    for (int64_t i = 0; i < count; i += kRowsPerChunk) {
      chunks.push_back({q, i, std::min(i + kRowsPerChunk, count)});
    }
  }
  const int64_t dim = size ? tables[0]->plan_.dim : 0;
  ForEachItem(parallel_for, chunks.size(),
              kRowsPerChunk * dim * kCyclesPerFirstValue, [&](int64_t c) {
                const auto& [q, begin, end] = chunks[c];
                for (int64_t i = begin; i < end; ++i) {
                  tables[q]->WriteFirst(queries[q].unknown.ids[i],
                                        places[q].first + places[q].step * i);
                }
              });
  ForEachItem(parallel_for, size, kIdsPerChunk, [&](int64_t q) {
    if (queries[q].num_missing) {
      for (Rows& rows : queries[q].rows) {
        for (const int f : tables[q]->plan_.features) {
          for (int64_t i = 0; i < rows[f].size(); ++i) {
            if (rows[f][i] >= 0) continue;
            rows[f][i] = places[q].first + places[q].step * (-2 - rows[f][i]);
          }
        }
      }
    }
    searches[q].found->rows_ = std::move(queries[q].rows);
  });
  return absl::OkStatus();
}

absl::Status GrowingTable::PlaceUnknown(const SharedBatch& batch,
                                        UnknownIds* unknown, Found* found,
                                        Places* places) {
  const Unknown missing = vocabulary_->Missing(batch->trains);
  if (missing == Unknown::kZeros) {
    *places = {kRowOfZeros, 0};
  } else if (missing == Unknown::kInitializer) {
    return Borrow(batch, unknown->ids, found, places);
  } else if (vocabulary_->num_rows()) {
    *places = {0, 0};
  } else {
    // The row that all share is not there yet.
    unknown->ids.assign(unknown->ids.size(), Vocabulary::kSharedId);
    return Borrow(batch, unknown->ids, found, places);
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

void GrowingTable::Keep(const SharedBatch& batch, const Query& query) {
  std::vector<Rows> rows(query.rows.size());
  for (size_t s = 0; s < rows.size(); ++s) {
    rows[s].resize(query.rows[s].size());
    for (const int f : plan_.features) {
      const Buffer<int32_t>& own = query.rows[s][f];
      rows[s][f] = NewRows(own.size());
      std::copy_n(own.data(), own.size(), rows[s][f].data());
    }
  }
  const std::lock_guard<std::mutex> lock(front_mutex_);
  const auto known = FindAwaited(batch);
  if (known == awaited_.end()) return;
  known->rows = std::move(rows);
  known->unknown = query.unknown;
  known->generation = generation_;
}

void GrowingTable::TakeKept(const std::vector<SharedBatch>& batches,
                            Query* query) {
  const std::lock_guard<std::mutex> lock(front_mutex_);
  for (const SharedBatch& batch : batches) {
    const auto known = FindAwaited(batch);
    if (known == awaited_.end() || known->generation != generation_) {
      return;
    }
  }
  for (const SharedBatch& batch : batches) {
    const auto known = FindAwaited(batch);
    known->generation = -1;
    query->num_missing += known->unknown.ids.size();
    for (Rows& rows : known->rows) query->rows.push_back(std::move(rows));
    if (batches.size() == 1) query->unknown = std::move(known->unknown);
  }
  if (batches.size() == 1 || query->num_missing == 0) return;
  // Ids have places among those of all batches.
  for (Rows& rows : query->rows) {
    for (Buffer<int32_t>& own : rows) {
      for (int64_t i = 0; i < own.size(); ++i) {
        own[i] = std::max(own[i], kNoRow);
      }
    }
  }
  NumberUnknown(query);
}

GrowingTable::Found::~Found() {
  if (!table_) return;
  table_->Return(&rows_);
  if (has_borrowed_) table_->ReturnFront();
}

absl::Status GrowingTable::Borrow(const SharedBatch& batch,
                                  const std::vector<int64_t>& ids, Found* found,
                                  Places* places) {
  const int64_t count = ids.size();
  const int64_t num_rows = vocabulary_->num_rows();
  const int64_t bytes = (num_rows + count) * parameters_.row_bytes();
  const std::lock_guard<std::mutex> lock(front_mutex_);
  if (batch->trains && ahead_.batch.expired() &&
      bytes <= static_cast<int64_t>(parameters_.memory->capacity())) {
    ahead_ = {batch, num_rows, ids};
    *places = {num_rows, 1};
    return absl::OkStatus();
  }
  if (front_used_ + count >= kMostInFront) {
    return absl::ResourceExhaustedError(absl::StrCat(
        "Table ", plan_.name, ": lookups name ", front_used_ + count,
        " ids without a row at one time, of which there may be ",
        kMostInFront - 1, ". Make the batch smaller."));
  }
  *places = {-2 - front_used_, -1};
  front_used_ += count;
  ++num_lookups_;
  found->has_borrowed_ = true;
  return absl::OkStatus();
}

bool GrowingTable::IsAhead(const Vocabulary::RowOfId& created) const {
  const int64_t place = created.row - ahead_.first_row;
  return place >= 0 && place < static_cast<int64_t>(ahead_.ids.size()) &&
         ahead_.ids[place] == created.id;
}

void GrowingTable::ReturnFront() {
  const std::lock_guard<std::mutex> lock(front_mutex_);
  if (--num_lookups_ == 0) front_used_ = 0;
}

Vocabulary::Hold GrowingTable::HoldFor(const std::vector<SharedBatch>& batches,
                                       const std::vector<Rows>& rows) const {
  return [this, &batches, &rows](RowSet* held) {
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
      if (!batch ||
          std::find(batches.begin(), batches.end(), batch) != batches.end()) {
        continue;
      }
      if (known.generation == generation_) {
        for (const Rows& of_source : known.rows) {
          for (const int f : plan_.features) add(of_source[f]);
        }
        continue;
      }
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
  std::vector<Query> queries(1);
  Query& query = queries[0];
  for (const SharedBatch& batch : batches) AddSources(*batch, &query.sources);
  int64_t num_new = 0;  // at most
  {
    const std::lock_guard<std::mutex> front(front_mutex_);
    for (const SharedBatch& batch : batches) {
      const auto known = FindAwaited(batch);
      if (known != awaited_.end() && known->generation == generation_) {
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
  TF_RETURN_IF_ERROR(Run({this}, parallel_for, &queries));
  return WithinMemory([&] {
    Decision decision;
    return InvalidArgument(vocabulary_->Decide(
        query.unknown, HoldFor(batches, query.rows), &decision));
  });
}

absl::Status GrowingTable::Begin(const std::vector<SharedBatch>& batches,
                                 const std::vector<Growth>& growths,
                                 const ParallelFor& parallel_for) {
  std::vector<const GrowingTable*> tables;
  std::vector<Query> queries(growths.size());
  int64_t num_missing = 0;
  for (size_t q = 0; q < growths.size(); ++q) {
    GrowingTable* const table = growths[q].table;
    const std::vector<Var*>& slots = growths[q].slots;
    Update* const update = growths[q].update;
    update->table_ = table;
    update->lock_ = std::unique_lock<SharedMutex>(table->mutex_);
    update->batches_ = batches;
    const int64_t num_rows = table->vocabulary_->num_rows();
    const std::string& name = table->plan_.name;
    TF_RETURN_IF_ERROR(
        CheckLength("slots", slots.size(), table->slots_.size()));
    TF_RETURN_IF_ERROR(
        table->parameters_.Adopt(num_rows, name, growths[q].parameters));
    for (size_t k = 0; k < slots.size(); ++k) {
      TF_RETURN_IF_ERROR(table->slots_[k].Adopt(num_rows, name, slots[k]));
    }
    tables.push_back(table);
    TF_RETURN_IF_ERROR(WithinMemory([&] {
      for (const SharedBatch& batch : batches) {
        AddSources(*batch, &queries[q].sources);
      }
      table->TakeKept(batches, &queries[q]);
      return absl::OkStatus();
    }));
  }
  TF_RETURN_IF_ERROR(Run(tables, parallel_for, &queries));
  for (size_t q = 0; q < growths.size(); ++q) {
    num_missing += queries[q].num_missing;
    growths[q].update->query_ = std::move(queries[q]);
  }
  std::vector<absl::Status> statuses(growths.size());
  ForEachItem(parallel_for, growths.size(),
              (1 + num_missing) * kCyclesPerUnknown / (1 + growths.size()),
              [&](int64_t q) {
                statuses[q] =
                    WithinMemory([&] { return tables[q]->Decide(growths[q]); });
              });
  for (const absl::Status& status : statuses) TF_RETURN_IF_ERROR(status);
  return absl::OkStatus();
}

absl::Status GrowingTable::Decide(const Growth& growth) const {
  Update& update = *growth.update;
  TF_RETURN_IF_ERROR(InvalidArgument(vocabulary_->Decide(
      update.query_.unknown, HoldFor(update.batches_, update.query_.rows),
      &update.decision_)));
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
    num_missing += own.update->query_.num_missing;
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
    for (const SharedBatch& batch : update->batches_) {
      table->Forget(batch->looked_up ? batch->looked_up : batch);
    }
    const std::lock_guard<std::mutex> lock(table->front_mutex_);
    table->pending_.clear();
    table->ahead_ = {};
  }
}

void GrowingTable::TakeRows(const Growth& growth) {
  Update& update = *growth.update;
  std::vector<int32_t> taken;
  vocabulary_->Take(update.query_.unknown, update.decision_,
                    HoldFor(update.batches_, update.query_.rows), &taken,
                    &update.created_);
  NoteIds(update.created_);
  update.num_rows_ = vocabulary_->num_rows();
  if (update.query_.num_missing == 0) return;
  // What has no row trains the one that is shared, or nothing.
  const VocabularyOptions& options = vocabulary_->options();
  const int32_t instead =
      options.unknown == Unknown::kShared ? 0 : update.num_rows_;
  if (!options.TrainsAdmitted()) taken.assign(taken.size(), kNoRow);
  std::replace(taken.begin(), taken.end(), kNoRow, instead);
  for (Rows& rows : update.query_.rows) {
    for (const int f : plan_.features) {
      for (int64_t i = 0; i < rows[f].size(); ++i) {
        if (rows[f][i] < 0) rows[f][i] = taken[-2 - rows[f][i]];
      }
    }
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
  const int64_t count = vocabulary_->Evict(HoldFor({}, {}));
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
    ++generation_;
    ahead_ = {};
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
