// Tells consumers of deltas which ids of a growing table changed.

#include <algorithm>
#include <utility>

#include "kernels/growing_table.h"

namespace tpu_embedding {

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

absl::Status GrowingTable::TakeIds(const std::vector<Variable>& stored,
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
  for (const int64_t id : lost.taken) {  // Some have rows again.
    int32_t row;
    vocabulary_->Find(&id, 1, &row);
    if (row == kNoRow) changes->deleted.push_back(id);
  }
  changes->size = {vocabulary_->num_ids()};
  const bool shares = plan_.vocabulary->unknown == Unknown::kShared;
  if (shares && vocabulary_->num_rows()) rows.push_back(0);
  for (const Variable& array : stored) {
    TF_RETURN_IF_ERROR(CopyRows(array, rows, &changes->rows.emplace_back()));
  }
  return absl::OkStatus();
}

void GrowingTable::CommitIds(ConsumerRows* consumer) {
  const std::lock_guard<SharedMutex> lock(mutex_);
  consumer->lost[table_].taken.clear();
}

}  // namespace tpu_embedding
