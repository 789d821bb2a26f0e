// Writers are alone, and readers are together.

#include "core/shared_mutex.h"

#include <cstdint>
#include <mutex>
#include <shared_mutex>
#include <thread>
#include <vector>

#include "check.h"

namespace tpu_embedding {
namespace {

void TestReadersSeeWholeWrites() {
  SharedMutex mutex;
  int64_t first = 0;
  int64_t second = 0;
  std::vector<std::thread> threads;
  for (int t = 0; t < 2; ++t) {
    threads.emplace_back([&] {
      for (int i = 0; i < 500; ++i) {
        const std::lock_guard<SharedMutex> lock(mutex);
        ++first;
        ++second;
      }
    });
    threads.emplace_back([&] {
      for (int i = 0; i < 500; ++i) {
        const std::shared_lock<SharedMutex> lock(mutex);
        CHECK_EQ(first, second);
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
  CHECK_EQ(first, 1000);
}

void TestReadersShare() {
  SharedMutex mutex;
  const std::shared_lock<SharedMutex> lock(mutex);
  std::thread other([&] { const std::shared_lock<SharedMutex> own(mutex); });
  other.join();
}

}  // namespace
}  // namespace tpu_embedding

int main() {
  tpu_embedding::TestReadersSeeWholeWrites();
  tpu_embedding::TestReadersShare();
}
