// Remembers lookups of a growing table whose update is to come: what they
// found, and the rows that they hold until then.

#include <algorithm>
#include <utility>

#include "kernels/growing_table.h"

namespace tpu_embedding {
namespace {

// Returns the batch whose lookup found rows for the update of `batch`.
const GrowingTable::SharedBatch& LookupOf(
    const GrowingTable::SharedBatch& batch) {
  return batch->looked_up ? batch->looked_up : batch;
}

bool AreEqual(const Buffer<int64_t>& a, const Buffer<int64_t>& b) {
  return a.size() == b.size() &&
         std::equal(a.data(), a.data() + a.size(), b.data());
}

}  // namespace

absl::Status GrowingTable::Await(const SharedBatch& batch,
                                 const ParallelFor& parallel_for) {
  Expect(batch);
  std::vector<SharedBatch> pending;
  {
    const std::lock_guard<std::mutex> front(front_mutex_);
    for (const auto& known : pending_) {
      if (SharedBatch part = known.lock()) pending.push_back(std::move(part));
    }
    // No update is pending, or a reset has discarded it.
    if (pending.empty() || pending.size() != pending_.size()) {
      return absl::OkStatus();
    }
  }
  const std::lock_guard<SharedMutex> lock(mutex_);
  const absl::Status status =
      CheckRoomLocked(pending, pending_clock_, parallel_for);
  if (status.ok()) return status;
  return absl::InvalidArgumentError(
      absl::StrCat(status.message(),
                   " This is the pending update, which cannot evict the rows "
                   "of the next lookup. Call `flush` before that lookup."));
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

void GrowingTable::ForgetFailed(const SharedBatch& batch) {
  Forget(batch);
  const std::lock_guard<std::mutex> lock(front_mutex_);
  if (ahead_.batch.lock() == batch) ahead_ = {};
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
                                     int64_t clock, bool pends,
                                     const ParallelFor& parallel_for) {
  const std::lock_guard<SharedMutex> lock(mutex_);
  clock = std::max(clock, vocabulary_->clock());
  TF_RETURN_IF_ERROR(CheckRoomLocked(batches, clock, parallel_for));
  if (!pends) return absl::OkStatus();
  const std::lock_guard<std::mutex> front(front_mutex_);
  pending_.assign(batches.begin(), batches.end());
  pending_clock_ = clock;
  return absl::OkStatus();
}

absl::Status GrowingTable::CheckRoomLocked(
    const std::vector<SharedBatch>& batches, int64_t clock,
    const ParallelFor& parallel_for) {
  if (vocabulary_->options().shares_when_full) return absl::OkStatus();
  Query query;
  for (const SharedBatch& batch : batches) AddSources(*batch, &query.sources);
  int64_t num_new = 0;  // an upper bound
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
        query.unknown, IdMap(salt_), HoldFor(batches, add), clock, &decision));
  });
}

}  // namespace tpu_embedding
