// Ends waits at their timeout.

#ifndef TPU_EMBEDDING_TESTING_CC_RUNTIME_WATCH_H_
#define TPU_EMBEDDING_TESTING_CC_RUNTIME_WATCH_H_

#include <memory>

#include "absl/time/time.h"

namespace tpu_embedding {

// An object whose calls wait until a timeout.
class Timed {
 public:
  virtual ~Timed() = default;

  // Fails if anything has waited for too long.
  virtual void CheckTime(absl::Time now) = 0;
};

// Calls `timed` at intervals as long as it exists.
void WatchTime(const std::shared_ptr<Timed>& timed);

}  // namespace tpu_embedding

#endif  // TPU_EMBEDDING_TESTING_CC_RUNTIME_WATCH_H_
