// Rows of a file: those that were asked for, also of a file that changed.

#include "core/file_rows.h"

#include <unistd.h>

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <fstream>
#include <memory>
#include <random>
#include <string>
#include <thread>
#include <vector>

#include "check.h"

namespace tpu_embedding {
namespace {

// A file that is gone afterwards. Each row begins with its number.
struct File {
  File(int64_t num_rows, int64_t row_bytes) : rows(num_rows), bytes(row_bytes) {
    std::ofstream stream(path, std::ios::binary);
    for (int64_t row = 0; row < rows; ++row) stream << Row(row);
  }
  ~File() { std::remove(path.c_str()); }

  std::string Row(int64_t row) const {
    std::string content(bytes, static_cast<char>(row % 251));
    std::memcpy(content.data(), &row,
                std::min<size_t>(sizeof row, content.size()));
    return content;
  }

  std::shared_ptr<FileRows> Open() const {
    std::shared_ptr<FileRows> opened;
    CHECK_TRUE(!FileRows::Open(path, rows, bytes, &opened));
    return opened;
  }

  const int64_t rows, bytes;
  const std::string path =
      std::string(std::getenv("TMPDIR") ? std::getenv("TMPDIR") : "/tmp") +
      "/file_rows_test." + std::to_string(getpid());
};

// On two threads, by halves.
void Halves(int64_t total, int64_t, const Range& body) {
  std::thread first([&] { body(0, total / 2); });
  body(total / 2, total);
  first.join();
}

// Rows within a page and across pages, in the cache or not.
void TestRandomRows() {
  std::mt19937_64 generator(20261126);
  for (const int64_t row_bytes : {7, 512, 4096, 70000}) {
    const File file(2000000 / row_bytes, row_bytes);
    const auto rows = file.Open();
    for (int round = 0; round < 20; ++round) {
      std::vector<int64_t> wanted(generator() % 50);
      for (int64_t& row : wanted) row = generator() % file.rows;
      std::string found(wanted.size() * row_bytes, '\0');
      CHECK_TRUE(
          !rows->Read(wanted.data(), wanted.size(), found.data(), Halves));
      for (size_t i = 0; i < wanted.size(); ++i) {
        CHECK_TRUE(found.substr(i * row_bytes, row_bytes) ==
                   file.Row(wanted[i]));
      }
    }
  }
}

void TestFilesThatDoNotFit() {
  const File file(10, 8);
  std::shared_ptr<FileRows> rows;
  CHECK_EQ(*FileRows::Open(file.path, 11, 8, &rows),
           file.path + " has 80 bytes, but its table has 11 rows of 8.");
  CHECK_EQ(*FileRows::Open(file.path + "x", 10, 8, &rows),
           file.path + "x cannot be opened.");
  CHECK_TRUE(!rows);
}

void TestAFileThatBecomesShorter() {
  const File file(10, 8);
  const auto rows = file.Open();
  CHECK_EQ(truncate(file.path.c_str(), 60), 0);
  const std::vector<int64_t> wanted = {1, 7, 9};
  std::string found(24, '\0');
  CHECK_EQ(*rows->Read(wanted.data(), 3, found.data(), Halves),
           file.path + " can no longer be read, or became shorter.");
  CHECK_TRUE(!rows->Read(wanted.data(), 1, found.data(), Halves));
  CHECK_TRUE(found.substr(0, 8) == file.Row(1));
}

}  // namespace
}  // namespace tpu_embedding

int main() {
  tpu_embedding::TestRandomRows();
  tpu_embedding::TestFilesThatDoNotFit();
  tpu_embedding::TestAFileThatBecomesShorter();
}
