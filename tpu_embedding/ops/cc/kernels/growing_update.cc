// Updates growing tables: finds which ids get rows, and which row each gradient
// trains.

#include <algorithm>
#include <cstring>
#include <utility>

#include "kernels/growing_table.h"

namespace tpu_embedding {
namespace {

using tensorflow::Var;

}  // namespace

GrowingTable::Update::~Update() {
  if (!table_) return;
  table_->Return(&rows_);
  for (Query& query : queries_) table_->Return(&query.rows);
  for (const SharedBatch& batch : batches_) table_->ForgetLookup(batch);
}

void GrowingTable::Update::Drop(RowGroups* groups) const {
  const int64_t last = groups->num_rows() - 1;
  if (last < 0 || groups->rows[last] != num_rows_) return;
  groups->rows.Truncate(last);
  groups->starts.Truncate(last + 1);
}

absl::Status GrowingTable::Begin(const std::vector<SharedBatch>& batches,
                                 const std::vector<Growth>& growths,
                                 const ParallelFor& parallel_for) {
  std::vector<const GrowingTable*> tables;
  std::vector<Query*> queries;
  for (const Growth& growth : growths) {
    GrowingTable* const table = growth.table;
    Update* const update = growth.update;
    update->table_ = table;
    update->lock_ = std::unique_lock<SharedMutex>(table->mutex_);
    update->batches_ = batches;
    const int64_t num_rows = table->vocabulary_->num_rows();
    const std::string& name = table->plan_.name;
    const std::vector<Array>& arrays = table->arrays_;
    TF_RETURN_IF_ERROR(
        CheckLength("slots", growth.arrays.size(), arrays.size()));
    for (size_t k = 0; k < arrays.size(); ++k) {
      TF_RETURN_IF_ERROR(arrays[k].Adopt(num_rows, name, growth.arrays[k]));
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
    // If no lookup gave anything for the unknown ids, this decides it now.
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
  TF_RETURN_IF_ERROR(InvalidArgument(
      vocabulary_->Decide(update.unknown_, promised, HoldFor(update),
                          growth.clock, &update.decision_)));
  const int64_t most = vocabulary_->MostRowsAfter(update.decision_);
  for (const Array& array : arrays_) {
    array.memory->Grow(most * array.row_bytes());
  }
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
                  own.table->WriteCreated(own.update->created_[i],
                                          own.update->written_[i]);
                }
              });
  for (const auto& [table, arrays, clock, update] : growths) {
    for (size_t k = 0; k < arrays.size(); ++k) {
      table->arrays_[k].Show(update->num_rows_, arrays[k]);
    }
    const std::lock_guard<std::mutex> lock(table->front_mutex_);
    table->pending_.clear();
    table->ahead_ = {};
  }
}

void GrowingTable::TakeRows(const Growth& growth) {
  Update& update = *growth.update;
  std::vector<int32_t> taken;
  vocabulary_->Take(update.unknown_, update.decision_, HoldFor(update),
                    growth.clock, &taken, &update.created_);
  FindWritten(&update);
  NoteIds(update.created_);
  update.num_rows_ = vocabulary_->num_rows();
  const bool shares = vocabulary_->options().unknown == Unknown::kShared;
  for (size_t b = 0; b < update.queries_.size(); ++b) {
    Query& query = update.queries_[b];
    // The row that the gradients of each unknown id train.
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

void GrowingTable::FindWritten(Update* update) const {
  // Both lists are in the order in which ids are first seen.
  auto id = ahead_.ids.begin();
  const auto end = ahead_.ids.end();
  const int64_t end_row = ahead_.first_row + ahead_.ids.size();
  for (const auto& created : update->created_) {
    id = std::find(id, end, created.id);
    const int64_t place = ahead_.first_row + (id - ahead_.ids.begin());
    const int32_t written = id == end ? kNoRow : place;
    update->written_.push_back(written);
    if (written == created.row) continue;
    // A created row that lies among first values of others overwrites them.
    if (ahead_.first_row <= created.row && created.row < end_row) {
      update->written_.assign(update->created_.size(), kNoRow);
      return;
    }
  }
}

void GrowingTable::WriteCreated(const Vocabulary::RowOfId& created,
                                int32_t written) const {
  if (written == kNoRow) {
    WriteFirst(created.id, created.row);
  } else if (written != created.row) {
    for (size_t k = 0; k < num_stored_; ++k) {
      const Array& array = arrays_[k];
      std::memcpy(array.row(created.row), array.row(written),
                  array.row_bytes());
    }
  }
  for (size_t k = 0; k < plan_.first_slots.size(); ++k) {
    const Array& slot = arrays_[num_stored_ + k];
    float* const values = reinterpret_cast<float*>(slot.row(created.row));
    std::fill_n(values, slot.width, plan_.first_slots[k]);
  }
}

}  // namespace tpu_embedding
