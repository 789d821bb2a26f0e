#include "core/changed_rows.h"

#include <new>
#include <utility>

namespace tpu_embedding {

int64_t RowBits::Count() const {
  int64_t count = 0;
  for (const auto& word : words_) {
    count += __builtin_popcountll(word.load(std::memory_order_relaxed));
  }
  return count;
}

void RowBits::ForEach(const std::function<void(int64_t)>& visit) const {
  for (size_t w = 0; w < words_.size(); ++w) {
    uint64_t bits = words_[w].load(std::memory_order_relaxed);
    for (; bits; bits &= bits - 1) visit(w * 64 + __builtin_ctzll(bits));
  }
}

void RowBits::Take(RowBits* other) {
  for (size_t w = 0; w < words_.size(); ++w) {
    const uint64_t bits =
        other->words_[w].exchange(0, std::memory_order_relaxed);
    if (bits) words_[w].fetch_or(bits, std::memory_order_relaxed);
  }
}

void MarkingObserver::Apply(const UpdatePiece& piece,
                            const std::function<void()>& apply) {
  apply();
  // A row is marked only after its new value can be read.
  RowBits& bits = *consumer_->since[piece.table];
  const RowGroups& groups = *piece.gradients.groups;
  for (int64_t unit = piece.begin; unit < piece.end; ++unit) {
    bits.Set(piece.all_rows ? unit : groups.rows[unit]);
  }
}

std::vector<std::shared_ptr<ConsumerRows>> ChangedRows::Consumers() const {
  std::lock_guard<std::mutex> lock(mutex_);
  std::vector<std::shared_ptr<ConsumerRows>> found;
  for (const auto& [name, consumer] : consumers_) found.push_back(consumer);
  return found;
}

std::shared_ptr<ConsumerRows> ChangedRows::Begin(const std::string& name) {
  std::lock_guard<std::mutex> lock(mutex_);
  const auto found = consumers_.find(name);
  if (found != consumers_.end()) return found->second;
  try {
    auto consumer = std::make_shared<ConsumerRows>();
    for (const int64_t rows : num_rows_) {
      consumer->since.push_back(std::make_unique<RowBits>(rows));
      consumer->taken.push_back(std::make_unique<RowBits>(rows));
      consumer->lost.emplace_back();
    }
    return consumers_[name] = std::move(consumer);
  } catch (const std::bad_alloc&) {
    return nullptr;
  }
}

std::shared_ptr<ConsumerRows> ChangedRows::Find(const std::string& name) const {
  std::lock_guard<std::mutex> lock(mutex_);
  const auto found = consumers_.find(name);
  return found == consumers_.end() ? nullptr : found->second;
}

void ChangedRows::End(const std::string& name) {
  std::lock_guard<std::mutex> lock(mutex_);
  consumers_.erase(name);
}

}  // namespace tpu_embedding
