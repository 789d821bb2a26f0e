// A map from ids to numbers: any int64 is an id.
//
// Open addressing with linear probing; an entry says by its state whether it is
// in use, so no id is reserved. A map that grows moves a few entries with each
// insertion from the old array to the new one: no insertion takes long.

#ifndef TPU_EMBEDDING_OPS_CC_CORE_ID_MAP_H_
#define TPU_EMBEDDING_OPS_CC_CORE_ID_MAP_H_

#include <algorithm>
#include <cstdint>
#include <cstdlib>
#include <memory>
#include <new>
#include <random>
#include <utility>

namespace tpu_embedding {

// Mixes the bits of a word. It is a bijection.
inline uint64_t MixBits(uint64_t word) {
  word = (word ^ (word >> 32)) * 0xd6e8feb86659fd93u;
  word = (word ^ (word >> 32)) * 0xd6e8feb86659fd93u;
  return word ^ (word >> 32);
}

// Returns a salt that nobody can predict.
inline uint64_t RandomSalt() {
  std::random_device device;
  return static_cast<uint64_t>(device()) << 32 | device();
}

// Reading is thread-safe while nothing changes the map.
class IdMap {
 public:
  // FindAll prefetches the entry of the id this many places ahead.
  static constexpr int64_t kAhead = 16;

  // Only those who know `salt` can choose ids whose entries collide.
  explicit IdMap(uint64_t salt) : salt_(salt) {}

  int64_t size() const { return size_; }

  // Returns the number of `id`, or -1.
  int32_t Find(int64_t id) const { return Find(id, Hash(id)); }

  // Prefetches the entry of `id`.
  void Prefetch(int64_t id) const { Prefetched(id); }

  // Calls found(i, number or -1) for each of the ids, in order.
  template <class Callback>
  void FindAll(const int64_t* ids, int64_t size, const Callback& found) const {
    uint64_t hashes[kAhead];
    for (int64_t i = 0; i < std::min(kAhead, size); ++i) {
      hashes[i] = Prefetched(ids[i]);
    }
    for (int64_t i = 0; i < size; ++i) {
      const uint64_t hash = hashes[i % kAhead];
      if (i + kAhead < size) hashes[i % kAhead] = Prefetched(ids[i + kAhead]);
      found(i, Find(ids[i], hash));
    }
  }

  // Makes room for `count` more ids. This is the only method that can throw
  // std::bad_alloc, and then nothing has changed.
  void Reserve(int64_t count) {
    if (HasRoom(size_ + count)) return;
    Array larger(CapacityFor(size_ + count));
    while (old_.capacity()) Move();
    old_ = std::exchange(entries_, std::move(larger));
    moved_ = 0;
  }

  // Adds an id that the map lacks, for which there is room. `number` >= 0.
  void Insert(int64_t id, int32_t number) {
    entries_.Insert({id, number, State::kUsed}, Hash(id));
    ++size_;
    if (old_.capacity()) Move();
  }

  // Removes an id that the map has.
  void Erase(int64_t id) {
    --size_;
    if (const Entry* entry = entries_.Find(id, Hash(id), 0)) {
      entries_.Erase(entry, *this);
      return;
    }
    // It is enough that the entry is not found again: its array will be freed.
    old_.Kill(old_.Find(id, Hash(id), moved_));
  }

 private:
  enum class State : uint32_t { kFree, kUsed, kKilled };
  struct Entry {
    int64_t id;
    int32_t number;
    State state;
  };

  // The number of entries that a growing map moves with each insertion. It has
  // moved all long before it is full again.
  static constexpr int64_t kMovedAtOnce = 8;
  static constexpr int64_t kSmallest = 64;

  uint64_t Hash(int64_t id) const {
    return MixBits(static_cast<uint64_t>(id) ^ salt_);
  }

  int32_t Find(int64_t id, uint64_t hash) const {
    if (size_ == 0) return -1;
    if (const Entry* entry = entries_.Find(id, hash, 0)) return entry->number;
    if (old_.capacity() == 0) return -1;
    const Entry* entry = old_.Find(id, hash, moved_);
    return entry ? entry->number : -1;
  }

  // Prefetches the entry of an id and returns the hash of the id.
  uint64_t Prefetched(int64_t id) const {
    const uint64_t hash = Hash(id);
    if (entries_.capacity()) entries_.Prefetch(hash);
    return hash;
  }

  class Array {
   public:
    Array() = default;
    // Allocates zeros, for which the system provides pages as they are used.
    explicit Array(int64_t capacity)
        : entries_(static_cast<Entry*>(std::calloc(capacity, sizeof(Entry)))),
          capacity_(capacity),
          shift_(64 - __builtin_ctzll(capacity)) {
      if (!entries_) throw std::bad_alloc();
    }
    Array(Array&& other) noexcept { *this = std::move(other); }
    Array& operator=(Array&& other) noexcept {
      entries_ = std::move(other.entries_);
      capacity_ = std::exchange(other.capacity_, 0);
      shift_ = other.shift_;
      return *this;
    }

    int64_t capacity() const { return capacity_; }
    const Entry& operator[](int64_t i) const { return entries_.get()[i]; }

    void Prefetch(uint64_t hash) const {
      __builtin_prefetch(entries_.get() + Home(hash));
    }

    // Returns the entry of `id` among those from `first` on, or null.
    const Entry* Find(int64_t id, uint64_t hash, int64_t first) const {
      for (int64_t i = Home(hash);; i = Next(i)) {
        const Entry& entry = entries_.get()[i];
        if (entry.state == State::kFree) return nullptr;
        if (entry.id == id && entry.state == State::kUsed) {
          return i >= first ? &entry : nullptr;
        }
      }
    }

    void Insert(const Entry& entry, uint64_t hash) {
      int64_t i = Home(hash);
      while (entries_.get()[i].state != State::kFree) i = Next(i);
      entries_.get()[i] = entry;
    }

    // Closes the gap: entries after it move back, as far as their home allows.
    void Erase(const Entry* erased, const IdMap& map) {
      Entry* entries = entries_.get();
      int64_t gap = erased - entries;
      for (int64_t i = Next(gap); entries[i].state != State::kFree;
           i = Next(i)) {
        const int64_t home = Home(map.Hash(entries[i].id));
        if (((i - home) & (capacity_ - 1)) >= ((i - gap) & (capacity_ - 1))) {
          entries[gap] = entries[i];
          gap = i;
        }
      }
      entries[gap].state = State::kFree;
    }

    void Kill(const Entry* entry) {
      entries_.get()[entry - entries_.get()].state = State::kKilled;
    }

   private:
    struct Free {
      void operator()(Entry* entries) const { std::free(entries); }
    };

    int64_t Home(uint64_t hash) const { return hash >> shift_; }
    int64_t Next(int64_t i) const { return (i + 1) & (capacity_ - 1); }

    std::unique_ptr<Entry, Free> entries_;
    int64_t capacity_ = 0;
    int shift_ = 0;
  };

  // Returns whether at most 5 of 8 entries are in use: probes stay short.
  static bool Fits(int64_t size, int64_t capacity) {
    return size <= capacity / 8 * 5;
  }
  bool HasRoom(int64_t size) const { return Fits(size, entries_.capacity()); }
  static int64_t CapacityFor(int64_t size) {
    int64_t capacity = kSmallest;
    while (!Fits(size, capacity)) capacity *= 2;
    return capacity;
  }

  // Moves some entries out of the old array, and frees it after the last one.
  void Move() {
    for (int64_t k = 0; k < kMovedAtOnce && moved_ < old_.capacity(); ++k) {
      const Entry& entry = old_[moved_++];
      if (entry.state == State::kUsed) {
        entries_.Insert(entry, Hash(entry.id));
      }
    }
    if (moved_ == old_.capacity()) old_ = Array();
  }

  const uint64_t salt_;
  int64_t size_ = 0;
  Array entries_;
  Array old_;          // of a map that grows, else empty
  int64_t moved_ = 0;  // its entries before this one are in entries_
};

}  // namespace tpu_embedding

#endif  // TPU_EMBEDDING_OPS_CC_CORE_ID_MAP_H_
