// Where the kernels of all replicas of one run meet.
//
// A lookup reads rows that other devices hold, so that no replica can do its
// part alone. The kernel that comes last does the work of all of them; until
// then the others wait without a thread, by keeping their done callbacks. A
// wait ends in one of four ways: the last replica comes, a replica fails, a
// replica ends without having come, or the time is over.

#ifndef TPU_EMBEDDING_OPS_CC_SOFTWARE_TPU_MEETINGS_H_
#define TPU_EMBEDDING_OPS_CC_SOFTWARE_TPU_MEETINGS_H_

#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/time/time.h"
#include "software_tpu/watch.h"
#include "tensorflow/core/framework/op_kernel.h"

namespace tpu_embedding {

// In replica order.
using Contexts = std::vector<tensorflow::OpKernelContext*>;

// One replica at a meeting.
struct Guest {
  int replica = 0;
  tensorflow::OpKernelContext* context = nullptr;
  tensorflow::AsyncOpKernel::DoneCallback done;
};

// Tells that the work of a meeting has ended; called once, by any thread.
using Finish = std::function<void(const absl::Status&)>;

class Meetings : public Timed {
 public:
  using Work = std::function<void(const Contexts&, const Finish&)>;

  // `sparse_cores`: of each device; 0 where the TPU has none that programs
  // reach. `cancel` ends what a failed run still does elsewhere. It is called
  // once, and may be called by any thread.
  Meetings(std::vector<std::string> devices, int sparse_cores,
           absl::Duration patience, std::function<void()> cancel);

  int sparse_cores() const { return sparse_cores_; }

  // Waits for the other replicas at the meeting `place`. The last one to come
  // calls `work`. Calls `done` in any case, with the status in its context.
  void Join(const std::string& place, Guest guest, const Work& work);

  // The function of `replica` has ended.
  void Leave(int replica, const absl::Status& status);

  // Ends all waiting, now and later. The first call counts, but an error says
  // more than a cancellation.
  void Fail(const absl::Status& status);

  // Fails if somebody has waited longer than the patience.
  void CheckTime(absl::Time now) override;

  absl::Status status() const;

 private:
  struct Meeting {
    absl::Time opened;
    std::string what;           // op and place, for messages
    std::vector<Guest> guests;  // by replica; absent ones have no context
    int num_guests = 0;
  };

  using Open = std::map<std::string, std::deque<Meeting>>;

  // The first meeting at `place` that `guest` is not at yet.
  Meeting* Find(const std::string& place, const Guest& guest);
  Meeting Close(const std::string& place, Meeting* meeting);
  // Does the work of a meeting that all came to.
  void Hold(const Meeting& meeting, const Work& work);
  bool SomebodyLeft() const;
  std::string Names(const Meeting& meeting, bool present) const;
  absl::Status NobodyComes(const Meeting& meeting) const;

  const std::vector<std::string> devices_;
  const int sparse_cores_;
  const absl::Duration patience_;
  const std::function<void()> cancel_;
  mutable std::mutex mutex_;
  absl::Status status_;
  std::vector<bool> left_;
  Open open_;
};

// The runner of one replica's function: what starts its kernels, and what they
// find their replica by. TensorFlow hands it on to functions that are called
// and to the bodies of control flow, while these get rendezvous of their own.
class ReplicaRunner {
 public:
  using Closure = std::function<void()>;
  using Runner = std::function<void(Closure)>;

  ReplicaRunner(Runner runner, int replica, std::shared_ptr<Meetings> meetings)
      : runner_(std::move(runner)),
        replica_(replica),
        meetings_(std::move(meetings)) {}

  // The replica that `context` belongs to; null outside of runs.
  static const ReplicaRunner* Of(const tensorflow::OpKernelContext* context);

  int replica() const { return replica_; }
  Meetings& meetings() const { return *meetings_; }

  // Tells, now and later, whether the run has failed; null outside of runs.
  static std::function<bool()> HasFailed(
      const tensorflow::OpKernelContext* context);

  void operator()(Closure closure) const { runner_(std::move(closure)); }

 private:
  Runner runner_;
  int replica_;
  std::shared_ptr<Meetings> meetings_;
};

// A kernel whose replicas meet, and whose work may wait.
class AsyncMeetingOp : public tensorflow::AsyncOpKernel {
 public:
  using AsyncOpKernel::AsyncOpKernel;

  void ComputeAsync(tensorflow::OpKernelContext* context,
                    DoneCallback done) final;

 protected:
  // Does the work of all replicas: reads the inputs and sets the outputs of
  // every context, then calls `finish`. Called once per meeting, by one thread.
  virtual void Begin(const Contexts& contexts, const Finish& finish) = 0;

  // Outside of a run there is one replica.
  virtual absl::Status CheckAlone() const { return absl::OkStatus(); }
};

// The same for work that never waits.
class MeetingOp : public AsyncMeetingOp {
 public:
  using AsyncMeetingOp::AsyncMeetingOp;

 protected:
  virtual absl::Status Meet(const Contexts& contexts) = 0;

 private:
  void Begin(const Contexts& contexts, const Finish& finish) final {
    finish(Meet(contexts));
  }
};

}  // namespace tpu_embedding

#endif  // TPU_EMBEDDING_OPS_CC_SOFTWARE_TPU_MEETINGS_H_
