// The channel over which the processes of one embedding exchange bytes.

#ifndef TPU_EMBEDDING_OPS_CC_KERNELS_CHANNEL_H_
#define TPU_EMBEDDING_OPS_CC_KERNELS_CHANNEL_H_

#include <array>
#include <atomic>
#include <cstdint>
#include <mutex>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/string_view.h"
#include "tensorflow/core/framework/op_kernel.h"
#include "tensorflow/core/framework/resource_base.h"
#include "tensorflow/core/framework/resource_mgr.h"

namespace tpu_embedding {

// The phases by which exchanges are counted.
constexpr std::array<const char*, 5> kPhases = {
    "construction", "enqueue", "lookup", "update", "checkpoint"};

// The exchanges of a lane have the same order in all processes. A thread that
// enqueues ahead of the steps has a lane of its own.
constexpr std::array<const char*, 2> kLanes = {"step", "enqueue"};

// The role of an exchange in the user's step: none, the first exchange of the
// step, or a later one of a step that has begun.
constexpr std::array<const char*, 3> kRoles = {"", "begins", "continues"};

class Channel : public tensorflow::ResourceBase {
 public:
  Channel(std::string own_key, int own_rank, int own_group_key,
          std::vector<std::string> own_devices, int64_t own_timeout_seconds)
      : key(std::move(own_key)),
        rank(own_rank),
        group_key(own_group_key),
        devices(std::move(own_devices)),
        timeout_seconds(own_timeout_seconds),
        waited_microseconds(devices.size()) {}

  std::string DebugString() const override { return "tpu_embedding::Channel"; }
  int size() const { return devices.size(); }

  const std::string key;  // the same in all processes
  const int rank;
  const int group_key;
  const std::vector<std::string> devices;  // by process, its CPU
  const int64_t timeout_seconds;

  struct Phase {
    std::atomic<int64_t> exchanges{0};
    std::atomic<int64_t> bytes_sent{0};  // without headers
  };
  std::array<Phase, kPhases.size()> phases;
  // The time until the messages of each process had arrived.
  std::vector<std::atomic<int64_t>> waited_microseconds;
  std::array<std::atomic<int64_t>, kLanes.size()> sequences{};  // exchanges
  std::atomic<int64_t> last_run{0};  // of the lane of the steps
};

using ChannelPtr = tensorflow::core::RefCountPtr<Channel>;

// Finds the channel that is the first input.
absl::Status LookUpChannel(tensorflow::OpKernelContext* context,
                           ChannelPtr* channel);

// The keys of the channels that this process has made.
class ChannelKeys {
 public:
  static ChannelKeys& Get() {
    static auto* keys = new ChannelKeys;
    return *keys;
  }
  void Add(const std::string& key) {
    const std::lock_guard<std::mutex> lock(mutex_);
    keys_.insert(key);
  }
  std::set<std::string> All() {
    const std::lock_guard<std::mutex> lock(mutex_);
    return keys_;
  }

 private:
  std::mutex mutex_;
  std::set<std::string> keys_;
};

// Returns the refusal of an op in one process, which is sent to all: "", or a
// code and a text. An exchange fails in every process if any process refuses.
inline std::string Refusal(const absl::Status& status) {
  if (status.ok()) return "";
  return absl::StrCat(static_cast<int>(status.code()), "\n", status.message());
}

// Returns the error that `Refusal` wrote, with `prefix` before its text.
inline absl::Status FromRefusal(absl::string_view refusal,
                                absl::string_view prefix = "") {
  if (refusal.empty()) return absl::OkStatus();
  const size_t end = refusal.find('\n');
  int code = 0;
  if (end == absl::string_view::npos ||
      !absl::SimpleAtoi(refusal.substr(0, end), &code) || code == 0) {
    return absl::InternalError("A refusal without a reason.");
  }
  return absl::Status(static_cast<absl::StatusCode>(code),
                      absl::StrCat(prefix, refusal.substr(end + 1)));
}

}  // namespace tpu_embedding

#endif  // TPU_EMBEDDING_OPS_CC_KERNELS_CHANNEL_H_
