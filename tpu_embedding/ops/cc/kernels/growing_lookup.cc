// Looks ids up in growing tables: finds which row each entry reads.

#include <algorithm>
#include <numeric>
#include <shared_mutex>
#include <utility>

#include "kernels/growing_table.h"

namespace tpu_embedding {
namespace {

constexpr int64_t kIdsPerChunk = 2048;
constexpr int64_t kCyclesPerId = 40;

}  // namespace

GrowingTable::Found::~Found() {
  if (!table_) return;
  table_->Return(&rows_);
  if (!borrowed_.empty()) table_->ReturnFront(borrowed_);
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

absl::Status GrowingTable::Find(const SharedBatch& batch, Purpose purpose,
                                const std::vector<Search>& searches,
                                const ParallelFor& parallel_for) {
  const absl::Status status =
      FindLocked(batch, purpose, searches, parallel_for);
  if (status.ok() || purpose != Purpose::kTraining) return status;
  for (const Search& search : searches) search.table->ForgetFailed(batch);
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
    if (own.vocabulary_->num_rows() && !own.HoldsRows(searches[q].stored)) {
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
  // The shared row may not exist yet.
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

absl::Status GrowingTable::Borrow(const SharedBatch& batch, Purpose purpose,
                                  const std::vector<int64_t>& ids, Found* found,
                                  std::vector<int32_t>* rows) {
  if (ids.empty()) return absl::OkStatus();
  const int64_t count = ids.size();
  const int64_t num_rows = vocabulary_->num_rows();
  const auto fits = [&](const Array& array) {
    const size_t bytes = (num_rows + count) * array.row_bytes();
    return bytes <= array.memory->capacity();
  };
  const std::lock_guard<std::mutex> lock(front_mutex_);
  if (purpose == Purpose::kTraining && ahead_.batch.expired() &&
      std::all_of(arrays_.begin(), arrays_.begin() + num_stored_, fits)) {
    ahead_ = {batch, num_rows, ids};
    rows->resize(count);
    std::iota(rows->begin(), rows->end(), num_rows);
    return absl::OkStatus();
  }
  const int64_t num_free = free_places_.size();
  const int64_t used = next_place_ - num_free;
  if (used + count >= kMaxBorrowedRows) {
    return absl::ResourceExhaustedError(absl::StrCat(
        "Table ", plan_.name, ": lookups use ", used + count,
        " ids without a row at the same time, but at most ",
        kMaxBorrowedRows - 1, " are allowed. Make the batch smaller."));
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

void GrowingTable::ReturnFront(const std::vector<int32_t>& places) {
  const std::lock_guard<std::mutex> lock(front_mutex_);
  free_places_.insert(free_places_.end(), places.rbegin(), places.rend());
}

}  // namespace tpu_embedding
