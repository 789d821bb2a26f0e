// A barrier for the kernels of all replicas of one run.
//
// A lookup reads rows of other devices, so no replica can compute it alone. The
// kernel that arrives last computes for all replicas. The other kernels wait
// without a thread: they only keep their done callbacks. If they blocked, as
// many replicas as there are threads would deadlock. A wait ends in one of four
// ways: the last replica arrives, a replica fails, a replica ends without
// arriving, or the timeout expires.

#ifndef TPU_EMBEDDING_TESTING_CC_RUNTIME_REPLICA_BARRIER_H_
#define TPU_EMBEDDING_TESTING_CC_RUNTIME_REPLICA_BARRIER_H_

#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/time/time.h"
#include "runtime/watch.h"
#include "tensorflow/core/framework/op_kernel.h"

namespace tpu_embedding {

// The kernels' contexts in replica order.
using Contexts = std::vector<tensorflow::OpKernelContext*>;

// The kernel of one replica at a barrier.
struct Participant {
  int replica = 0;
  tensorflow::OpKernelContext* context = nullptr;
  tensorflow::AsyncOpKernel::DoneCallback done;
};

// Reports the end of the computation for all replicas. Called once, by any
// thread.
using Finish = std::function<void(const absl::Status&)>;

// The barriers of one run. A place is the name of the op and, in a loop, the
// iteration.
class ReplicaBarrier : public Timed {
 public:
  using Work = std::function<void(const Contexts&, const Finish&)>;

  // `sparse_cores` is the number per device; 0 if programs do not see any.
  // `cancel` cancels the functions of all replicas after a failure. It is
  // called once, by any thread.
  ReplicaBarrier(std::vector<std::string> devices, int sparse_cores,
                 absl::Duration timeout, std::function<void()> cancel);

  int sparse_cores() const { return sparse_cores_; }

  // Waits for the other replicas at `place`. The last replica calls `work`.
  // Calls `done` in any case, with the status in the participant's context.
  void Arrive(const std::string& place, Participant participant,
              const Work& work);

  // Notes that the function of `replica` has ended.
  void Leave(int replica, const absl::Status& status);

  // Ends all waits, now and later. The first status counts, except that an
  // error replaces a cancellation.
  void Fail(const absl::Status& status);

  // Fails if a participant has waited longer than the timeout.
  void CheckTime(absl::Time now) override;

  absl::Status status() const;

 private:
  // The participants of one use of a place.
  struct Round {
    absl::Time opened;
    std::string op;                         // type and name, for messages
    std::vector<Participant> participants;  // by replica; a replica that has
                                            // not arrived has no context
    int num_arrived = 0;
  };

  using OpenRounds = std::map<std::string, std::deque<Round>>;

  // Returns the first round at `place` that the replica has not arrived at.
  // There can be several: a replica may run ahead and execute an op again.
  Round* Find(const std::string& place, const Participant& participant);
  Round Close(const std::string& place, Round* round);
  // Computes for the participants of a complete round.
  void Compute(const Round& round, const Work& work);
  bool AnyReplicaEnded() const;
  // Names the replicas that have, or have not, arrived.
  std::string Names(const Round& round, bool arrived) const;
  absl::Status MissingReplicaError(const Round& round) const;

  const std::vector<std::string> devices_;
  const int sparse_cores_;
  const absl::Duration timeout_;
  const std::function<void()> cancel_;
  mutable std::mutex mutex_;
  absl::Status status_;
  std::vector<bool> ended_;  // by replica
  OpenRounds open_;
};

// Runs one replica's function. It starts the kernels, and the kernels identify
// their replica by it: TensorFlow passes the runner on to called functions and
// to the bodies of control flow, while each of these gets a rendezvous of its
// own.
class ReplicaRunner {
 public:
  using Closure = std::function<void()>;
  using Runner = std::function<void(Closure)>;

  ReplicaRunner(Runner runner, int replica,
                std::shared_ptr<ReplicaBarrier> barrier)
      : runner_(std::move(runner)),
        replica_(replica),
        barrier_(std::move(barrier)) {}

  // Returns the replica that `context` belongs to, or null outside of runs.
  static const ReplicaRunner* Of(const tensorflow::OpKernelContext* context);

  int replica() const { return replica_; }
  ReplicaBarrier& barrier() const { return *barrier_; }

  // Returns a function that tells if the run has failed; null outside of runs.
  // It may outlive the run.
  static std::function<bool()> HasFailed(
      const tensorflow::OpKernelContext* context);

  void operator()(Closure closure) const { runner_(std::move(closure)); }

 private:
  Runner runner_;
  int replica_;
  std::shared_ptr<ReplicaBarrier> barrier_;
};

// A kernel that all replicas compute together and whose computation may wait.
class AsyncBarrierOp : public tensorflow::AsyncOpKernel {
 public:
  using AsyncOpKernel::AsyncOpKernel;

  void ComputeAsync(tensorflow::OpKernelContext* context,
                    DoneCallback done) final;

 protected:
  // Computes for all replicas: reads the inputs and sets the outputs of every
  // context, then calls `finish`. Called once per round, by one thread.
  virtual void Begin(const Contexts& contexts, const Finish& finish) = 0;

  // Checks whether the op may run outside of a run, where there is one replica.
  virtual absl::Status CheckAlone() const { return absl::OkStatus(); }
};

// Is an AsyncBarrierOp whose computation never waits.
class BarrierOp : public AsyncBarrierOp {
 public:
  using AsyncBarrierOp::AsyncBarrierOp;

 protected:
  virtual absl::Status ComputeAll(const Contexts& contexts) = 0;

 private:
  void Begin(const Contexts& contexts, const Finish& finish) final {
    finish(ComputeAll(contexts));
  }
};

}  // namespace tpu_embedding

#endif  // TPU_EMBEDDING_TESTING_CC_RUNTIME_REPLICA_BARRIER_H_
