#include "core/file_rows.h"

#include <fcntl.h>
#include <sys/uio.h>
#include <unistd.h>

#include <atomic>
#include <cerrno>
#include <vector>

namespace tpu_embedding {
namespace {

// macOS has no posix_fadvise, and cannot read from its cache alone.
#ifdef __linux__
void ExpectNoNeighbours(int descriptor) {
  posix_fadvise(descriptor, 0, 0, POSIX_FADV_RANDOM);
}

void AskDisk(int descriptor, int64_t start, int64_t size) {
  posix_fadvise(descriptor, start, size, POSIX_FADV_WILLNEED);
}

int64_t ReadFromCache(int descriptor, const iovec& whole, int64_t start) {
  return preadv2(descriptor, &whole, 1, start, RWF_NOWAIT);
}
#else
void ExpectNoNeighbours(int) {}
void AskDisk(int, int64_t, int64_t) {}
int64_t ReadFromCache(int, const iovec&, int64_t) { return -1; }
#endif

}  // namespace

Error FileRows::Open(const std::string& path, int64_t num_rows,
                     int64_t row_bytes, std::shared_ptr<FileRows>* opened) {
  const int descriptor = open(path.c_str(), O_RDONLY | O_CLOEXEC);
  if (descriptor < 0) return path + " cannot be opened.";
  opened->reset(new FileRows(path, row_bytes, descriptor));
  const int64_t size = lseek(descriptor, 0, SEEK_END);
  if (size % row_bytes != 0 || size / row_bytes != num_rows) {
    opened->reset();
    return path + " has " + std::to_string(size) +
           " bytes, but its table has " + std::to_string(num_rows) +
           " rows of " + std::to_string(row_bytes) + ".";
  }
  ExpectNoNeighbours(descriptor);
  return std::nullopt;
}

FileRows::~FileRows() { close(descriptor_); }

Error FileRows::Read(const int64_t* rows, int64_t count, char* out,
                     const ParallelFor& parallel_for) const {
  constexpr int64_t kCycles = 1500;  // of a row that is in the cache
  std::atomic<bool> failed{false};
  parallel_for(count, kCycles, [&](int64_t begin, int64_t end) {
    std::vector<int64_t> missing;
    for (int64_t i = begin; i < end; ++i) {
      if (ReadIfCached(rows[i], out + i * row_bytes_)) continue;
      AskDisk(descriptor_, rows[i] * row_bytes_, row_bytes_);
      missing.push_back(i);
    }
    for (const int64_t i : missing) {
      if (!ReadFromDisk(rows[i], out + i * row_bytes_)) failed = true;
    }
  });
  if (failed) return path_ + " can no longer be read, or became shorter.";
  return std::nullopt;
}

bool FileRows::ReadIfCached(int64_t row, char* out) const {
  const iovec whole = {out, static_cast<size_t>(row_bytes_)};
  return ReadFromCache(descriptor_, whole, row * row_bytes_) == row_bytes_;
}

bool FileRows::ReadFromDisk(int64_t row, char* out) const {
  for (int64_t done = 0; done < row_bytes_;) {
    const int64_t read = pread(descriptor_, out + done, row_bytes_ - done,
                               row * row_bytes_ + done);
    if (read > 0) {
      done += read;
    } else if (read == 0 || errno != EINTR) {
      return false;
    }
  }
  return true;
}

}  // namespace tpu_embedding
