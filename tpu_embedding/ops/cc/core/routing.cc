#include "core/routing.h"

#include <algorithm>
#include <cstring>
#include <numeric>
#include <variant>

#include "core/text.h"
#include "core/wire.h"

namespace tpu_embedding {
namespace {

constexpr int64_t kCyclesPerEntry = 30;
constexpr int64_t kWordsOfId = sizeof(int64_t) / sizeof(int32_t);
constexpr int64_t kHeaderWords = 4;

// How a message says what a feature's entries are multiplied by.
enum GainKind : int32_t { kNone = 0, kBySample = 1, kByEntry = 2 };

// If the vocabulary has more rows than this per entry of a batch, a hash table
// numbers the rows. Otherwise an array of all rows is faster.
constexpr int64_t kMaxRowsPerEntry = 8;

// Numbers rows in the order in which they are first seen.
class RowNumbers {
 public:
  void Reset(int64_t vocabulary_size, int64_t num_entries) {
    distinct_.clear();
    direct_ = vocabulary_size <= num_entries * kMaxRowsPerEntry;
    int64_t size = vocabulary_size;
    if (!direct_) {
      for (bits_ = 4; (int64_t{1} << bits_) < 2 * num_entries; ++bits_) {
      }
      size = int64_t{1} << bits_;
    }
    numbers_.assign(size, kFree);
  }

  int32_t Number(int32_t row) {
    int64_t place = row;
    if (!direct_) {
      const int64_t mask = (int64_t{1} << bits_) - 1;
      place = static_cast<uint32_t>(row) * uint64_t{0x9E3779B97F4A7C15} >>
              (64 - bits_);
      while (numbers_[place] != kFree && distinct_[numbers_[place]] != row) {
        place = (place + 1) & mask;
      }
    }
    if (numbers_[place] == kFree) {
      numbers_[place] = distinct_.size();
      distinct_.push_back(row);
    }
    return numbers_[place];
  }

  const std::vector<int32_t>& distinct() const { return distinct_; }

 private:
  static constexpr int32_t kFree = -1;

  bool direct_ = false;
  int bits_ = 0;
  std::vector<int32_t> numbers_;
  std::vector<int32_t> distinct_;
};

// Numbers ids in the order in which they are first seen.
class IdNumbers {
 public:
  int32_t Number(int64_t id) {
    int32_t number = map_.Find(id);
    if (number >= 0) return number;
    map_.Reserve(1);
    number = distinct_.size();
    map_.Insert(id, number);
    distinct_.push_back(id);
    return number;
  }

  const std::vector<int64_t>& distinct() const { return distinct_; }

 private:
  static uint64_t Salt() {
    static const uint64_t salt = RandomSalt();
    return salt;
  }

  IdMap map_{Salt()};
  std::vector<int64_t> distinct_;
};

template <class T>
void Copy(const Buffer<T>& from, Buffer<T>* to) {
  to->Resize(from.size());
  std::copy_n(from.data(), from.size(), to->data());
}

GainKind KindOf(const FeatureCsr& csr) {
  if (csr.gains.size()) return kByEntry;
  return csr.sample_gains.size() ? kBySample : kNone;
}

// Numbers the distinct rows of a table divided by rows, and divides the entries
// of its features over the rows' owners.
class TableRoute {
 public:
  TableRoute(const PreparedBatch& batch, int table, std::vector<int> features,
             RoutedBatch* routed)
      : batch_(batch),
        table_(table),
        features_(std::move(features)),
        routed_(routed),
        size_(routed->placement.size) {}

  void Run(int64_t vocabulary_size, RowNumbers* numbers) {
    if (routed_->table_grows(table_)) {
      IdNumbers id_numbers;
      for (const int f : features_) {
        NumberAll(batch_.features[f].ids, f, &id_numbers);
      }
      Divide(
          id_numbers.distinct(), &Wanted::ids,
          [this](int64_t id) { return OwnerOf(id, size_); },
          [](int64_t id) { return id; });
    } else {
      int64_t num_entries = 0;
      for (const int f : features_) {
        num_entries += batch_.features[f].rows.size();
      }
      numbers->Reset(vocabulary_size, num_entries);
      for (const int f : features_) {
        NumberAll(batch_.features[f].rows, f, numbers);
      }
      Divide(
          numbers->distinct(), &Wanted::rows,
          [this](uint32_t row) { return row % size_; },
          [this](uint32_t row) { return row / size_; });
    }
    for (const int f : features_) {
      if (routed_->training) DivideEntries(f);
      Buffer<int32_t>& rows = routed_->batch.features[f].rows;
      for (int64_t i = 0; i < rows.size(); ++i) rows[i] = positions_[rows[i]];
    }
  }

 private:
  // Replaces each entry's row or id by its number.
  template <class Row, class Numbers>
  void NumberAll(const Buffer<Row>& from, int f, Numbers* numbers) {
    Buffer<int32_t>& to = routed_->batch.features[f].rows;
    to.Resize(from.size());
    for (int64_t i = 0; i < from.size(); ++i) to[i] = numbers->Number(from[i]);
  }

  // Divides rows over owners; `wanted` gets number_there(row) of each.
  template <class Row, class Owner, class NumberThere>
  void Divide(const std::vector<Row>& distinct, Buffer<Row> Wanted::* wanted,
              const Owner& owner_of, const NumberThere& number_there) {
    const int64_t count = distinct.size();
    owners_.resize(count);
    places_.resize(count);
    positions_.resize(count);
    std::vector<int32_t> sizes(size_, 0);
    for (int64_t n = 0; n < count; ++n) {
      owners_[n] = owner_of(distinct[n]);
      places_[n] = sizes[owners_[n]]++;
    }
    std::vector<int32_t> first(size_, 0);
    for (int o = 0; o < size_; ++o) {
      (routed_->sent[o].wanted[table_].*wanted).Resize(sizes[o]);
      if (o > 0) first[o] = first[o - 1] + sizes[o - 1];
    }
    for (int64_t n = 0; n < count; ++n) {
      const int o = owners_[n];
      (routed_->sent[o].wanted[table_].*wanted)[places_[n]] =
          number_there(distinct[n]);
      positions_[n] = first[o] + places_[n];
    }
  }

  void DivideEntries(int f) {
    const FeatureCsr& csr = batch_.features[f];
    const Buffer<int32_t>& numbers = routed_->batch.features[f].rows;
    const GainKind kind = KindOf(csr);
    std::vector<int64_t> entries(size_, 0);
    for (int64_t i = 0; i < numbers.size(); ++i) ++entries[owners_[numbers[i]]];
    std::vector<SentFeature*> sent(size_);
    std::vector<int64_t> samples(size_, 0);
    for (int o = 0; o < size_; ++o) {
      sent[o] = &routed_->sent[o].features[f];
      const int64_t most = std::min(entries[o], csr.num_samples());
      sent[o]->samples.Resize(most);
      sent[o]->lengths.Resize(most);
      sent[o]->rows.Resize(entries[o]);
      sent[o]->gains.Resize(kind == kNone      ? 0
                            : kind == kByEntry ? entries[o]
                                               : most);
      entries[o] = 0;
    }
    std::vector<int64_t> before(size_, 0);
    for (int64_t s = 0; s < csr.num_samples(); ++s) {
      for (int64_t i = csr.offsets[s]; i < csr.offsets[s + 1]; ++i) {
        const int32_t n = numbers[i];
        const int o = owners_[n];
        if (kind == kByEntry) sent[o]->gains[entries[o]] = csr.gains[i];
        sent[o]->rows[entries[o]++] = places_[n];
      }
      for (int o = 0; o < size_; ++o) {
        const int64_t length = entries[o] - before[o];
        if (length == 0) continue;
        before[o] = entries[o];
        if (kind == kBySample) {
          sent[o]->gains[samples[o]] = csr.sample_gains[s];
        }
        sent[o]->samples[samples[o]] = s;
        sent[o]->lengths[samples[o]++] = length;
      }
    }
    for (int o = 0; o < size_; ++o) {
      sent[o]->samples.Truncate(samples[o]);
      sent[o]->lengths.Truncate(samples[o]);
      if (kind == kBySample) sent[o]->gains.Truncate(samples[o]);
    }
  }

  const PreparedBatch& batch_;
  const int table_;
  const std::vector<int> features_;
  RoutedBatch* const routed_;
  const int size_;
  std::vector<int32_t> owners_;     // of each distinct row
  std::vector<int32_t> places_;     // among the rows of its owner
  std::vector<int32_t> positions_;  // among all that arrive
};

// Sizes or writes a message: both walk through it in the same way.
class Writer {
 public:
  explicit Writer(int32_t* words) : words_(words) {}

  void Word(int64_t value) {
    if (words_) words_[size_] = static_cast<int32_t>(value);
    ++size_;
  }
  template <class T>
  void Words(const T* values, int64_t count) {
    static_assert(sizeof(T) == sizeof(int32_t));
    if (words_ && count) std::memcpy(words_ + size_, values, 4 * count);
    size_ += count;
  }
  int64_t size() const { return size_; }

 private:
  int32_t* const words_;
  int64_t size_ = 0;
};

// Writes lengths: one word if all are alike, else -1 and a word for each.
// Lengths of 0 are always written one by one: a word must back each sample.
template <class LengthOf>
void WriteLengths(int64_t count, const LengthOf& length_of, Writer* writer) {
  const int64_t first = count ? length_of(0) : 0;
  bool alike = first > 0 || count == 0;
  for (int64_t s = 1; s < count && alike; ++s) alike = length_of(s) == first;
  writer->Word(alike ? first : -1);
  if (alike) return;
  for (int64_t s = 0; s < count; ++s) writer->Word(length_of(s));
}

void WriteIds(const Buffer<int64_t>& ids, Writer* writer) {
  writer->Words(reinterpret_cast<const int32_t*>(ids.data()),
                ids.size() * kWordsOfId);
}

void WriteSent(const SentFeature& sent, GainKind kind, Writer* writer) {
  const int64_t count = sent.samples.size();
  writer->Word(count);
  writer->Word(sent.rows.size());
  writer->Word(kind);
  WriteLengths(count, [&](int64_t s) { return sent.lengths[s]; }, writer);
  writer->Words(sent.rows.data(), sent.rows.size());
  writer->Words(sent.gains.data(), sent.gains.size());
}

void WriteWhole(const FeatureCsr& csr, Writer* writer) {
  const int64_t count = csr.num_samples();
  const GainKind kind = KindOf(csr);
  writer->Word(count);
  writer->Word(csr.num_entries());
  writer->Word(kind);
  WriteLengths(
      count, [&](int64_t s) { return csr.offsets[s + 1] - csr.offsets[s]; },
      writer);
  writer->Words(csr.rows.data(), csr.rows.size());
  WriteIds(csr.ids, writer);
  writer->Words(csr.gains.data(), csr.gains.size());
  writer->Words(csr.sample_gains.data(), csr.sample_gains.size());
}

// Returns how many words an id takes, which follows from the tables of `owner`.
int64_t WordsOfId(const RoutedBatch& routed, int owner) {
  for (size_t t = 0; t < routed.growing.size(); ++t) {
    if (routed.growing[t] && routed.placement.Holds(owner, t)) {
      return kWordsOfId;
    }
  }
  return 1;
}

void Write(const RoutedBatch& routed, int receiver, int64_t num_words,
           Writer* writer) {
  const Sent& sent = routed.sent[receiver];
  writer->Word(kMessageVersion);
  writer->Word(WordsOfId(routed, receiver));
  writer->Words(reinterpret_cast<const int32_t*>(&num_words), 2);
  for (size_t t = 0; t < sent.wanted.size(); ++t) {
    if (!routed.placement.by_rows(t)) continue;
    const Wanted& wanted = sent.wanted[t];
    writer->Word(wanted.size());
    writer->Words(wanted.rows.data(), wanted.rows.size());
    WriteIds(wanted.ids, writer);
  }
  for (size_t f = 0; f < sent.features.size(); ++f) {
    const FeatureCsr& csr = routed.batch.features[f];
    if (routed.by_rows(f)) {
      if (routed.training) WriteSent(sent.features[f], KindOf(csr), writer);
    } else if (routed.IsWhole(receiver, f)) {
      WriteWhole(csr, writer);
    }
  }
}

class Reader {
 public:
  explicit Reader(const Message& message)
      : next_(message.words), left_(message.size) {}

  // Returns the next number if it is in [0, end], or -1 if it is malformed.
  int64_t Word(int64_t end) {
    const int32_t* word = Words(1);
    return word && *word >= 0 && *word <= end ? *word : -1;
  }
  // Returns the next `count` words, or null if there are not so many.
  const int32_t* Words(int64_t count) {
    if (count < 0 || count > left_) {
      left_ = -1;
      return nullptr;
    }
    const int32_t* words = next_;
    next_ += count;
    left_ -= count;
    return words;
  }
  int64_t left() const { return left_; }

 private:
  const int32_t* next_;
  int64_t left_;
};

bool ReadRows(int64_t num_rows, Reader* reader, Buffer<int32_t>* rows) {
  const int64_t count = reader->Word(kMaxRows);
  const int32_t* words = reader->Words(count);
  if (!words) return false;
  rows->Resize(count);
  for (int64_t i = 0; i < count; ++i) {
    if (words[i] < 0 || words[i] >= num_rows) return false;
    (*rows)[i] = words[i];
  }
  return true;
}

bool ReadOffsets(int64_t count, int64_t entries, Reader* reader,
                 Buffer<int64_t>* offsets) {
  const int32_t* same = reader->Words(1);
  if (!same) return false;
  const int32_t* lengths = *same < 0 ? reader->Words(count) : nullptr;
  if (*same < 0 && !lengths) return false;
  // The words of the entries follow. Nothing is allocated for entries that the
  // message does not have.
  if (entries > reader->left() || (*same >= 0 && count * *same != entries) ||
      (*same == 0 && count > 0)) {
    return false;
  }
  offsets->Resize(count + 1);
  int64_t next = 0;
  for (int64_t s = 0; s < count; ++s) {
    (*offsets)[s] = next;
    const int32_t length = lengths ? lengths[s] : *same;
    if (length < 0 || next + length > entries) return false;
    next += length;
  }
  (*offsets)[count] = next;
  return next == entries;
}

bool ReadIds(int64_t count, Reader* reader, Buffer<int64_t>* ids) {
  const int32_t* words = reader->Words(count * kWordsOfId);
  if (!words) return false;
  ids->Resize(count);
  if (count) std::memcpy(ids->data(), words, count * sizeof(int64_t));
  return true;
}

// Reads the ids wanted of this owner; refuses those of other owners.
bool ReadWantedIds(const Placement& placement, Reader* reader,
                   Buffer<int64_t>* ids) {
  if (!ReadIds(reader->Word(kMaxRows), reader, ids)) return false;
  return std::all_of(ids->data(), ids->data() + ids->size(), [&](int64_t id) {
    return OwnerOf(id, placement.size) == placement.rank;
  });
}

// Reads entries that are positions among the ids wanted.
bool ReadPositions(const Buffer<int64_t>& wanted, int64_t entries,
                   Reader* reader, Buffer<int32_t>* positions,
                   FeatureCsr* csr) {
  const int32_t* words = reader->Words(entries);
  if (!words) return false;
  csr->rows.Resize(0);
  csr->ids.Resize(entries);
  positions->Resize(entries);
  for (int64_t i = 0; i < entries; ++i) {
    if (words[i] < 0 || words[i] >= wanted.size()) return false;
    (*positions)[i] = words[i];
    csr->ids[i] = wanted[words[i]];
  }
  return true;
}

// Makes one sample of all ids that are wanted, for evaluation.
void LookUpWanted(const Buffer<int64_t>& wanted, Buffer<int32_t>* positions,
                  FeatureCsr* csr) {
  Copy(wanted, &csr->ids);
  positions->Resize(wanted.size());
  std::iota(positions->data(), positions->data() + positions->size(), 0);
  csr->output_shape = {1};
  csr->offsets.Resize(2);
  csr->offsets[0] = 0;
  csr->offsets[1] = wanted.size();
}

// Reads entries: positions in `rows`, or rows if it is null.
bool ReadEntries(int64_t num_rows, const Buffer<int32_t>* rows, int64_t entries,
                 Reader* reader, FeatureCsr* csr) {
  const int32_t* words = reader->Words(entries);
  if (!words) return false;
  csr->ids.Resize(0);
  csr->rows.Resize(entries);
  const int64_t end = rows ? rows->size() : num_rows;
  for (int64_t i = 0; i < entries; ++i) {
    if (words[i] < 0 || words[i] >= end) return false;
    csr->rows[i] = rows ? (*rows)[words[i]] : words[i];
  }
  return true;
}

// Reads a feature. read_entries(their number) reads what follows the lengths.
template <class Read>
bool ReadFeature(Reader* reader, const Read& read_entries, FeatureCsr* csr) {
  const int64_t count = reader->Word(kMaxRows);
  const int64_t entries = reader->Word(kMaxRows);
  const int64_t kind = reader->Word(kByEntry);
  if (count < 0 || entries < 0 || kind < 0) return false;
  if (!ReadOffsets(count, entries, reader, &csr->offsets)) return false;
  if (!read_entries(entries)) return false;
  csr->gains.Resize(0);
  csr->sample_gains.Resize(0);
  csr->output_shape = {count};
  if (kind == kNone) return true;
  Buffer<float>& gains = kind == kByEntry ? csr->gains : csr->sample_gains;
  const int64_t size = kind == kByEntry ? entries : count;
  const int32_t* values = reader->Words(size);
  if (!values) return false;
  gains.Resize(size);
  if (size) std::memcpy(gains.data(), values, sizeof(float) * size);
  return true;
}

// Returns the message without header and padding, or an unreadable message.
Message ContentOf(const Message& message, int64_t words_of_id) {
  const int32_t* words = message.words;
  int64_t size = 0;
  if (message.size < kHeaderWords || words[0] != kMessageVersion ||
      words[1] != words_of_id) {
    return {nullptr, -1};
  }
  std::memcpy(&size, words + 2, sizeof(size));
  if (size < kHeaderWords || size > message.size) return {nullptr, -1};
  return {words + kHeaderWords, size - kHeaderWords};
}

bool ReadMessage(const Message& message, int sender, const TableMap& tables,
                 RoutedBatch* routed) {
  const Placement& placement = routed->placement;
  PeerRequest& request = routed->requests[sender];
  Reader reader(ContentOf(message, WordsOfId(*routed, placement.rank)));
  std::vector<bool> looked_up(request.wanted.size());
  for (size_t t = 0; t < request.wanted.size(); ++t) {
    Wanted& wanted = request.wanted[t];
    wanted.Clear();
    if (!placement.by_rows(t)) continue;
    const bool good =
        routed->table_grows(t)
            ? ReadWantedIds(placement, &reader, &wanted.ids)
            : ReadRows(tables.vocabulary_sizes[t], &reader, &wanted.rows);
    if (!good) return false;
  }
  for (size_t f = 0; f < request.features.size(); ++f) {
    const int t = tables.feature_tables[f];
    FeatureCsr& csr = request.features[f];
    const bool by_rows = placement.by_rows(t);
    const Wanted& wanted = request.wanted[t];
    if (by_rows ? routed->training : placement.Holds(placement.rank, t)) {
      const auto read_entries = [&](int64_t entries) {
        if (!routed->grows(f)) {
          return ReadEntries(tables.vocabulary_sizes[t],
                             by_rows ? &wanted.rows : nullptr, entries, &reader,
                             &csr);
        }
        if (by_rows) {
          return ReadPositions(wanted.ids, entries, &reader,
                               &request.positions[f], &csr);
        }
        csr.rows.Resize(0);
        return ReadIds(entries, &reader, &csr.ids);
      };
      if (!ReadFeature(&reader, read_entries, &csr)) return false;
      continue;
    }
    csr.output_shape = {0};
    csr.offsets.Resize(1);
    csr.offsets[0] = 0;
    csr.rows.Resize(0);
    csr.ids.Resize(0);
    csr.gains.Resize(0);
    csr.sample_gains.Resize(0);
    request.positions[f].Resize(0);
    if (by_rows && routed->table_grows(t) && !looked_up[t]) {
      LookUpWanted(wanted.ids, &request.positions[f], &csr);
      looked_up[t] = true;
    }
  }
  return reader.left() == 0;
}

void GroupAll(const TableMap& tables, const ParallelFor& parallel_for,
              RoutedBatch* routed) {
  const int64_t num_tables = tables.vocabulary_sizes.size();
  routed->batch.tables.resize(num_tables);
  std::vector<TableEntries> entries(num_tables);
  for (int64_t t = 0; t < num_tables; ++t) {
    for (const PeerRequest& request : routed->requests) {
      for (const int f : tables.FeaturesOf(t)) {
        entries[t].features.push_back(request.features[f]);
      }
    }
    entries[t].vocabulary_size = tables.vocabulary_sizes[t];
    entries[t].groups = &routed->batch.tables[t];
  }
  GroupByRow(entries, parallel_for);
}

}  // namespace

int64_t RoutedBatch::NumSent(int process, int feature) const {
  if (by_rows(feature)) return sent[process].features[feature].samples.size();
  return IsWhole(process, feature) ? batch.features[feature].num_samples() : 0;
}

int64_t RoutedBatch::NumArriving(int table) const {
  int64_t count = 0;
  for (const Sent& part : sent) count += part.wanted[table].size();
  return count;
}

void RouteBatch(const PreparedBatch& batch, const TableMap& tables,
                const Placement& placement, bool training,
                const ParallelFor& parallel_for, RoutedBatch* routed) {
  const int64_t num_features = batch.features.size();
  const int64_t num_tables = tables.vocabulary_sizes.size();
  routed->training = training;
  routed->placement = placement;
  routed->feature_tables = tables.feature_tables;
  routed->sent.resize(placement.size);
  for (Sent& sent : routed->sent) {
    sent.features.resize(num_features);
    sent.wanted.resize(num_tables);
    for (Wanted& wanted : sent.wanted) wanted.Clear();
  }
  routed->batch.tables.resize(training ? num_tables : 0);
  routed->batch.features.resize(num_features);
  routed->batch.vocabulary_sizes = batch.vocabulary_sizes;
  int64_t num_entries = 0;
  for (int64_t f = 0; f < num_features; ++f) {
    const FeatureCsr& from = batch.features[f];
    FeatureCsr& to = routed->batch.features[f];
    to.output_shape = from.output_shape;
    Copy(from.offsets, &to.offsets);
    Copy(from.gains, &to.gains);
    Copy(from.sample_gains, &to.sample_gains);
    num_entries += from.num_entries();
    to.ids.Resize(0);
    if (routed->by_rows(f)) continue;
    Copy(from.ids, &to.ids);
    Copy(from.rows, &to.rows);
  }
  ForEachItemWith<RowNumbers>(
      parallel_for, num_tables,
      kCyclesPerEntry * num_entries / std::max<int64_t>(num_tables, 1),
      [&](int64_t t, RowNumbers* numbers) {
        if (!placement.by_rows(t)) return;
        TableRoute(batch, t, tables.FeaturesOf(t), routed)
            .Run(tables.vocabulary_sizes[t], numbers);
      });
}

int64_t MessageWords(const RoutedBatch& routed, int receiver) {
  Writer writer(nullptr);
  Write(routed, receiver, 0, &writer);
  return writer.size();
}

void WriteMessage(const RoutedBatch& routed, int receiver, int32_t* words) {
  Writer writer(words);
  Write(routed, receiver, MessageWords(routed, receiver), &writer);
}

Error ReadMessages(const std::vector<Message>& messages, const TableMap& tables,
                   const ParallelFor& parallel_for, RoutedBatch* routed) {
  const int64_t size = messages.size();
  routed->requests.resize(size);
  for (PeerRequest& request : routed->requests) {
    request.features.resize(tables.feature_tables.size());
    request.wanted.resize(tables.vocabulary_sizes.size());
    request.positions.resize(tables.feature_tables.size());
  }
  std::vector<char> good(size, 0);
  int64_t words = 0;
  for (const Message& message : messages) words += message.size;
  ForEachItem(parallel_for, size, 4 * words / std::max<int64_t>(size, 1),
              [&](int64_t sender) {
                good[sender] =
                    ReadMessage(messages[sender], sender, tables, routed);
              });
  for (int64_t sender = 0; sender < size; ++sender) {
    if (good[sender]) continue;
    return Concat(
        "The IDs that ",
        routed->placement.served ? "a worker" : Concat("process ", sender),
        " sent cannot be read. Run the same release of "
        "tpu_embedding in all processes.");
  }
  if (routed->training) GroupAll(tables, parallel_for, routed);
  return std::nullopt;
}

void GatherRows(const Buffer<int32_t>& rows, const ConstTableData& table,
                int64_t dim, bool narrow, int64_t begin, int64_t end,
                char* out) {
  constexpr int64_t kAhead = 16;
  const auto gather = [&](const auto* data, int64_t width, const auto& copy,
                          int64_t bytes, char* to) {
    for (int64_t i = begin; i < end; ++i) {
      const auto* ahead =
          data + int64_t{rows[std::min(i + kAhead, rows.size() - 1)]} * width;
      __builtin_prefetch(ahead);
      __builtin_prefetch(reinterpret_cast<const char*>(ahead + width) - 1);
      copy(data + int64_t{rows[i]} * width, to + i * bytes);
    }
  };
  const auto copy = [&](const auto* data, int64_t width, char* to) {
    const int64_t bytes = width * static_cast<int64_t>(sizeof(*data));
    gather(
        data, width,
        [bytes](const auto* row, char* at) { std::memcpy(at, row, bytes); },
        bytes, to);
  };
  if (const auto* data = std::get_if<const BFloat16*>(&table)) {
    copy(*data, dim, out);
  } else if (const auto* coded = std::get_if<ConstInt8Table>(&table)) {
    copy(coded->codes, dim, out);
    copy(coded->grids, 2, out + Padded(rows.size() * dim));
  } else if (narrow) {
    gather(
        std::get<const float*>(table), dim,
        [dim](const float* row, char* to) {
          ToBFloat16(row, dim, reinterpret_cast<BFloat16*>(to));
        },
        dim * sizeof(BFloat16), out);
  } else {
    copy(std::get<const float*>(table), dim, out);
  }
}

}  // namespace tpu_embedding
