// Reads rows of a file, from the system's cache if they are there.

#ifndef TPU_EMBEDDING_OPS_CC_CORE_FILE_ROWS_H_
#define TPU_EMBEDDING_OPS_CC_CORE_FILE_ROWS_H_

#include <cstdint>
#include <memory>
#include <string>

#include "core/feature.h"
#include "core/parallel.h"

namespace tpu_embedding {

// The rows are copied out of the cache that all processes share, and nothing of
// the file stays resident in this process. The file is not mapped: touching a
// row could then make a MiB resident (measured with Linux 6.18), and a file
// that became shorter would end the process.
class FileRows {
 public:
  // Opens a file of `num_rows` rows of `row_bytes` bytes.
  static Error Open(const std::string& path, int64_t num_rows,
                    int64_t row_bytes, std::shared_ptr<FileRows>* opened);
  ~FileRows();
  FileRows(const FileRows&) = delete;
  FileRows& operator=(const FileRows&) = delete;

  // Copies rows, which must exist, to `out`. Requests all that are not in the
  // cache before it waits, so that the disk reads many at a time. Thread-safe.
  Error Read(const int64_t* rows, int64_t count, char* out,
             const ParallelFor& parallel_for) const;

 private:
  FileRows(const std::string& path, int64_t row_bytes, int descriptor)
      : path_(path), row_bytes_(row_bytes), descriptor_(descriptor) {}
  bool ReadIfCached(int64_t row, char* out) const;
  bool ReadFromDisk(int64_t row, char* out) const;

  const std::string path_;
  const int64_t row_bytes_;
  const int descriptor_;
};

}  // namespace tpu_embedding

#endif  // TPU_EMBEDDING_OPS_CC_CORE_FILE_ROWS_H_
