#include "core/vocabulary.h"

#include <algorithm>
#include <limits>
#include <utility>

#include "core/text.h"

namespace tpu_embedding {
namespace {

// An update examines kRowsPerSlice rows and evicts up to kEvictionsPerSlice,
// unless it needs more: this takes about a millisecond.
constexpr int64_t kRowsPerSlice = 65536;
constexpr int64_t kEvictionsPerSlice = 8192;

// A sweep decides by this many rows, which are a sample if the table is larger.
constexpr int64_t kRowsPerSample = 65536;

bool AreAll(const std::vector<int64_t>& numbers, int64_t least, int64_t most) {
  return std::all_of(numbers.begin(), numbers.end(), [=](int64_t number) {
    return least <= number && number <= most;
  });
}

}  // namespace

Vocabulary::Vocabulary(VocabularyOptions options, uint64_t salt)
    : options_(std::move(options)),
      map_(salt),
      ids_(options_.max_rows * sizeof(int64_t)),
      uses_(Evicts() ? options_.max_rows * sizeof(Use) : 1),
      times_(options_.has_clock ? options_.max_rows * sizeof(int64_t) : 1),
      places_(salt) {}

int64_t Vocabulary::Find(const int64_t* ids, int64_t size,
                         int32_t* rows) const {
  int64_t missing = 0;
  map_.FindAll(ids, size, [&missing, rows](int64_t i, int32_t row) {
    rows[i] = row;
    missing += row == kNoRow;
  });
  return missing;
}

std::vector<Unknown> Vocabulary::Give(const UnknownIds& unknown, bool training,
                                      const IdMap& promised) const {
  const bool admits = training && options_.min_count == 1;
  std::vector<Unknown> given(unknown.ids.size(),
                             admits ? Unknown::kInitializer : options_.unknown);
  if (!admits || !options_.Promises()) return given;
  int64_t free = room() - promised.size();
  for (size_t i = 0; i < given.size(); ++i) {
    if (promised.Find(unknown.ids[i]) >= 0) continue;
    if (--free < 0) given[i] = options_.unknown;
  }
  return given;
}

Error Vocabulary::Decide(const UnknownIds& unknown, const IdMap& promised,
                         const Hold& hold, int64_t clock, Decision* decision) {
  const int64_t size = unknown.ids.size();
  const auto is_promised = [&](int64_t i) {
    return promised.Find(unknown.ids[i]) >= 0;
  };
  decision->admitted.assign(size, false);
  decision->hits_before.resize(size);
  decision->num_admitted = 0;
  decision->num_promised = promised.size();
  for (int64_t i = 0; i < size; ++i) {
    decision->num_promised -= is_promised(i);
    const int64_t before = HitsOfCandidate(unknown.ids[i]);
    decision->hits_before[i] = before;
    if (before + unknown.hits[i] < options_.min_count) continue;
    decision->admitted[i] = true;
    ++decision->num_admitted;
  }
  int64_t most = room() - decision->num_promised;
  if (decision->num_admitted > most && Evicts()) {
    const int64_t now = options_.has_clock ? clock : step_ + 1;
    most += CountEvictable(decision->num_admitted - most, now, hold);
  }
  if (decision->num_admitted > most) {
    if (!options_.shares_when_full) {
      const std::string freed =
          Evicts() ? Concat(" can be freed: evictions keep min_rows=",
                            options_.min_rows,
                            " ids, and rows with outstanding updates. Nothing "
                            "has changed. Lower min_rows, raise max_rows")
                   : " is free. Nothing has changed. Set `eviction`, raise "
                     "max_rows";
      return Concat("Table ", options_.table, " is full: ", map_.size(),
                    " of max_rows=", options_.max_rows,
                    " rows are in use, the update needs ",
                    decision->num_admitted, " more, and ", most, freed,
                    ", or set when_full=\"shared_row\".");
    }
    for (const bool keeps_promises : {true, false}) {
      for (int64_t i = size - 1; decision->num_admitted > most && i >= 0; --i) {
        if (!decision->admitted[i]) continue;
        if (keeps_promises && is_promised(i)) continue;
        decision->admitted[i] = false;
        --decision->num_admitted;
      }
    }
  }
  map_.Reserve(decision->num_admitted);
  const int64_t rows = MostRowsAfter(*decision);
  ids_.Grow(rows * sizeof(int64_t));
  if (Evicts()) uses_.Grow(rows * sizeof(Use));
  if (options_.has_clock) times_.Grow(rows * sizeof(int64_t));
  if (options_.min_count > 1) {
    places_.Reserve(std::min(size, options_.max_candidates));
  }
  return std::nullopt;
}

int64_t Vocabulary::MostRowsAfter(const Decision& decision) const {
  const int64_t first = num_rows_ ? num_rows_ : num_shared();
  return std::min(first + decision.num_admitted, options_.max_rows);
}

void Vocabulary::Take(const UnknownIds& unknown, const Decision& decision,
                      const Hold& hold, int64_t clock,
                      std::vector<int32_t>* rows,
                      std::vector<RowOfId>* created) {
  ++step_;
  clock_ = clock;
  if (num_rows_ == 0 && num_shared()) {
    created->push_back({static_cast<int32_t>(num_rows_++), kSharedId});
    id_of(0) = kSharedId;
  }
  MakeRoom(decision.num_admitted, decision.num_promised, hold);
  const int64_t size = unknown.ids.size();
  rows->assign(size, kNoRow);
  for (int64_t i = 0; i < size; ++i) {
    const int64_t id = unknown.ids[i];
    if (i + IdMap::kAhead < size) map_.Prefetch(unknown.ids[i + IdMap::kAhead]);
    if (!decision.admitted[i]) {
      AddCandidate(id, unknown.hits[i]);
      continue;
    }
    const int32_t row = NewRow(id, decision.hits_before[i]);
    ForgetCandidate(id);
    (*rows)[i] = row;
    created->push_back({row, id});
  }
  counts_.unknown += size;
  counts_.admitted += decision.num_admitted;
  counts_.refused += size - decision.num_admitted;
}

void Vocabulary::CountHits(const RowGroups& groups, int64_t begin,
                           int64_t end) {
  for (int64_t g = begin; g < end; ++g) {
    CountHits(groups.rows[g], groups.starts[g + 1] - groups.starts[g]);
  }
}

void Vocabulary::CountHits(int32_t row, int64_t hits) {
  if (!Evicts()) return;
  Use& use = use_of(row);
  if (use.last == 0) return;  // the shared row
  use.hits =
      std::min<int64_t>(use.hits + hits, std::numeric_limits<uint32_t>::max());
  SetLast(row);
}

void Vocabulary::SetLast(int32_t row) {
  use_of(row).last = step_;
  if (options_.has_clock) time_of(row) = clock_;
}

VocabularySnapshot Vocabulary::Save() const {
  VocabularySnapshot saved;
  for (int64_t row = num_shared(); row < num_rows_; ++row) {
    if (HasId(row)) saved.rows.push_back(row);
  }
  std::sort(saved.rows.begin(), saved.rows.end(),
            [this](int64_t a, int64_t b) { return id_of(a) < id_of(b); });
  for (const int64_t row : saved.rows) {
    const Use use = Evicts() ? use_of(row) : Use{0, 0};
    saved.ids.push_back(id_of(row));
    saved.hits.push_back(use.hits);
    saved.last_updates.push_back(Evicts() ? LastOf(row) : 0);
  }
  for (const Candidate& candidate : candidates_) {
    saved.candidates.push_back(candidate.id);
    saved.candidate_hits.push_back(candidate.hits);
  }
  std::vector<int64_t>& state = saved.state;
  state.resize(VocabularyState::kSize);
  state[VocabularyState::kNumRows] = num_rows_;
  state[VocabularyState::kUpdatesBegun] = step_;
  state[VocabularyState::kUnknown] = counts_.unknown;
  state[VocabularyState::kAdmitted] = counts_.admitted;
  state[VocabularyState::kRefused] = counts_.refused;
  state[VocabularyState::kEvicted] = counts_.evicted;
  state[VocabularyState::kNextCandidate] = next_candidate_;
  state[VocabularyState::kCursor] = cursor_;
  state[VocabularyState::kSweeping] = sweeping_;
  state[VocabularyState::kThreshold] = threshold_;
  state[VocabularyState::kTies] = ties_;
  state[VocabularyState::kClock] = options_.has_clock ? clock_ + 1 : 0;
  return saved;
}

Error Vocabulary::Load(const VocabularySnapshot& saved) {
  constexpr int64_t kMost = std::numeric_limits<uint32_t>::max();
  constexpr int64_t kMostCount = std::numeric_limits<int64_t>::max();
  const int64_t size = saved.ids.size();
  const std::vector<int64_t>& state = saved.state;
  const int64_t num_candidates = saved.candidates.size();
  const auto sizes_are = [](int64_t wanted, const auto&... lists) {
    return ((static_cast<int64_t>(lists.size()) == wanted) && ...);
  };
  if (!sizes_are(size, saved.rows, saved.hits, saved.last_updates) ||
      !sizes_are(num_candidates, saved.candidate_hits) ||
      !sizes_are(VocabularyState::kSize, state) ||
      !AreAll(state, 0, kMostCount) ||
      (Evicts() && state[VocabularyState::kUpdatesBegun] > kMost) ||
      state[VocabularyState::kThreshold] > kMost ||
      state[VocabularyState::kNumRows] > options_.max_rows ||
      state[VocabularyState::kCursor] > state[VocabularyState::kNumRows] ||
      num_candidates > options_.max_candidates ||
      state[VocabularyState::kNextCandidate] > options_.max_candidates ||
      !AreAll(saved.rows, num_shared(), state[VocabularyState::kNumRows] - 1) ||
      !AreAll(saved.hits, 0, kMost) ||
      options_.has_clock != (state[VocabularyState::kClock] > 0) ||
      !AreAll(saved.last_updates, 0,
              options_.has_clock ? state[VocabularyState::kClock] - 1
                                 : state[VocabularyState::kUpdatesBegun]) ||
      !AreAll(saved.candidate_hits, 0, kMostCount) ||
      (!Evicts() && state[VocabularyState::kNumRows] &&
       size + num_shared() != state[VocabularyState::kNumRows])) {
    return Concat(
        "The vocabulary of table ", options_.table,
        " in the file is damaged or belongs to another configuration.");
  }
  num_rows_ = state[VocabularyState::kNumRows];
  step_ = state[VocabularyState::kUpdatesBegun];
  counts_ = {
      state[VocabularyState::kUnknown], state[VocabularyState::kAdmitted],
      state[VocabularyState::kRefused], state[VocabularyState::kEvicted]};
  next_candidate_ = state[VocabularyState::kNextCandidate];
  cursor_ = state[VocabularyState::kCursor];
  sweeping_ = state[VocabularyState::kSweeping];
  threshold_ = state[VocabularyState::kThreshold];
  ties_ = state[VocabularyState::kTies];
  clock_ = std::max<int64_t>(state[VocabularyState::kClock] - 1, 0);
  map_.Reserve(size);
  ids_.Grow(num_rows_ * sizeof(int64_t));
  if (Evicts()) uses_.Grow(num_rows_ * sizeof(Use));
  if (options_.has_clock) times_.Grow(num_rows_ * sizeof(int64_t));
  if (num_rows_ && num_shared()) id_of(0) = kSharedId;
  RowSet used(num_rows_);
  for (int64_t i = 0; i < size; ++i) {
    const int32_t row = saved.rows[i];
    const bool is_new = map_.Find(saved.ids[i]) < 0 && !used.Has(row);
    if (!is_new) {
      return Concat("The vocabulary of table ", options_.table,
                    " in the file has an id or a row twice.");
    }
    used.Add(row);
    map_.Insert(saved.ids[i], row);
    id_of(row) = saved.ids[i];
    if (!Evicts()) continue;
    // If no updates were counted, all rows are as old as can be.
    const int64_t last = options_.has_clock ? 0 : saved.last_updates[i];
    use_of(row) = {static_cast<uint32_t>(saved.hits[i]),
                   static_cast<uint32_t>(std::max<int64_t>(last, 1))};
    if (options_.has_clock) time_of(row) = saved.last_updates[i];
  }
  for (int64_t row = num_shared(); row < num_rows_; ++row) {
    if (!used.Has(row)) free_.push_back(row);  // Ascending, which is a heap.
  }
  places_.Reserve(num_candidates);
  for (int64_t i = 0; i < num_candidates; ++i) {
    candidates_.push_back({saved.candidates[i], saved.candidate_hits[i]});
    if (saved.candidate_hits[i]) places_.Insert(saved.candidates[i], i);
  }
  return std::nullopt;
}

uint32_t Vocabulary::KeyOf(int32_t row) const {
  return options_.eviction == Eviction::kLeastFrequent ? use_of(row).hits
                                                       : use_of(row).last;
}

bool Vocabulary::IsEvictable(int32_t row, const RowSet& held,
                             int64_t now) const {
  if (use_of(row).last == 0 || held.Has(row)) return false;
  return options_.eviction != Eviction::kAge ||
         now - LastOf(row) > options_.max_age;
}

int64_t Vocabulary::LastOf(int32_t row) const {
  return options_.has_clock ? time_of(row) : int64_t{use_of(row).last};
}

int64_t Vocabulary::CountEvictable(int64_t most, int64_t now,
                                   const Hold& hold) const {
  most = std::min(most, map_.size() - options_.min_rows);
  RowSet held(num_rows_);
  hold(&held);
  int64_t count = 0;
  for (int64_t row = 0; row < num_rows_ && count < most; ++row)
    count += IsEvictable(row, held, now);
  return count;
}

void Vocabulary::MakeRoom(int64_t needed, int64_t num_promised,
                          const Hold& hold) {
  const bool by_age = options_.eviction == Eviction::kAge;
  // A sweep begins early, so that it has made room before it is needed.
  const int64_t reserve =
      std::max((capacity() - options_.min_rows) / 2, num_promised);
  const bool begins = by_age || (!sweeping_ && room() < needed + reserve);
  if (!Evicts() || !(begins || sweeping_)) return;
  RowSet held(num_rows_);
  hold(&held);
  const auto begin = [&](int64_t stride) {
    BeginSweep(map_.size() - options_.min_rows, held, stride);
  };
  const int64_t stride = num_rows_ / kRowsPerSample + 1;
  if (begins) begin(stride);
  if (sweeping_) SweepSlice(held);
  needed += num_promised;
  // All rows that the sweep has yet to look at may have been used meanwhile.
  for (const int64_t each : {stride, int64_t{1}}) {
    if (room() >= needed) return;
    begin(each);
    while (room() < needed && sweeping_) SweepSlice(held);
  }
}

int64_t Vocabulary::Evict(const Hold& hold) {
  const int64_t surplus = map_.size() - options_.min_rows;
  if (!Evicts() || surplus <= 0) return 0;
  const int64_t before = counts_.evicted;
  RowSet held(num_rows_);
  hold(&held);
  cursor_ = 0;
  BeginSweep(surplus, held, 1);
  while (sweeping_) SweepSlice(held);
  return counts_.evicted - before;
}

void Vocabulary::BeginSweep(int64_t wanted, const RowSet& held,
                            int64_t stride) {
  if (options_.eviction == Eviction::kAge) {
    // The sweep goes round and round: each row is looked at in its turn.
    sweeping_ = wanted > 0;
    if (!sweeping_) return;
    threshold_ = std::numeric_limits<uint32_t>::max();
    ties_ = 0;
    return;
  }
  std::vector<uint32_t> keys;
  keys.reserve(num_rows_ / stride + 1);
  for (int64_t first = 0; first < num_rows_; first += stride) {
    // The sample takes an arbitrary row per stride: rows may vary periodically.
    const int64_t row =
        first + (uint64_t(first) * 0x9E3779B97F4A7C15 >> 32) % stride;
    if (row < num_rows_ && IsEvictable(row, held, Now())) {
      keys.push_back(KeyOf(row));
    }
  }
  wanted = (wanted + stride - 1) / stride;  // of the sample
  wanted = std::min<int64_t>(wanted, keys.size());
  sweeping_ = wanted > 0;
  if (!sweeping_) return;
  const auto last = keys.begin() + wanted - 1;
  std::nth_element(keys.begin(), last, keys.end());
  threshold_ = *last;
  const auto is_below = [this](uint32_t key) { return key < threshold_; };
  const int64_t below = std::count_if(keys.begin(), last, is_below);
  ties_ = (wanted - below) * stride;
  cursor_ = 0;
}

void Vocabulary::SweepSlice(const RowSet& held) {
  const int64_t end = std::min(cursor_ + kRowsPerSlice, num_rows_);
  const int64_t most =
      std::min(map_.size() - options_.min_rows, kEvictionsPerSlice);
  std::vector<int32_t> rows;
  for (; cursor_ < end; ++cursor_) {
    const int32_t row = cursor_;
    if (!IsEvictable(row, held, Now())) continue;
    const uint32_t key = KeyOf(row);
    if (key > threshold_ || (key == threshold_ && ties_ == 0)) continue;
    if (static_cast<int64_t>(rows.size()) >= most) break;
    if (key == threshold_) --ties_;
    rows.push_back(row);
  }
  EvictRows(rows);
  if (cursor_ < num_rows_ && map_.size() > options_.min_rows) return;
  sweeping_ = false;
  if (cursor_ >= num_rows_) cursor_ = 0;
}

void Vocabulary::EvictRows(const std::vector<int32_t>& rows) {
  const int64_t size = rows.size();
  for (int64_t i = 0; i < size; ++i) {
    if (i + IdMap::kAhead < size) map_.Prefetch(id_of(rows[i + IdMap::kAhead]));
    const int32_t row = rows[i];
    map_.Erase(id_of(row));
    evicted_.push_back({row, id_of(row)});
    use_of(row) = {0, 0};
    free_.push_back(row);
    std::push_heap(free_.begin(), free_.end(), std::greater<>());
  }
  counts_.evicted += size;
}

int32_t Vocabulary::NewRow(int64_t id, int64_t hits) {
  int32_t row;
  if (free_.empty()) {
    row = num_rows_++;
  } else {
    std::pop_heap(free_.begin(), free_.end(), std::greater<>());
    row = free_.back();
    free_.pop_back();
  }
  map_.Insert(id, row);
  id_of(row) = id;
  if (Evicts()) {
    use_of(row) = {0, 0};
    SetLast(row);
    CountHits(row, hits);
  }
  return row;
}

int64_t Vocabulary::HitsOfCandidate(int64_t id) const {
  const int32_t place = places_.Find(id);
  return place < 0 ? 0 : candidates_[place].hits;
}

void Vocabulary::AddCandidate(int64_t id, int64_t hits) {
  if (options_.min_count == 1) return;  // Refused, as the table is full.
  const int32_t place = places_.Find(id);
  if (place >= 0) {
    candidates_[place].hits += hits;
    return;
  }
  if (static_cast<int64_t>(candidates_.size()) < options_.max_candidates) {
    places_.Insert(id, candidates_.size());
    candidates_.push_back({id, hits});
    return;
  }
  Candidate& oldest = candidates_[next_candidate_];
  if (oldest.hits) places_.Erase(oldest.id);
  places_.Insert(id, next_candidate_);
  oldest = {id, hits};
  next_candidate_ = (next_candidate_ + 1) % options_.max_candidates;
}

void Vocabulary::ForgetCandidate(int64_t id) {
  const int32_t place = places_.Find(id);
  if (place < 0) return;
  places_.Erase(id);
  candidates_[place].hits = 0;
}

}  // namespace tpu_embedding
