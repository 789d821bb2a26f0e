// Moves tensors between the processes of a job, over the transport of
// TensorFlow's collectives.

#ifndef TPU_EMBEDDING_OPS_CC_KERNELS_TRANSPORT_H_
#define TPU_EMBEDDING_OPS_CC_KERNELS_TRANSPORT_H_

#include <atomic>
#include <cstdint>
#include <functional>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "kernels/channel.h"
#include "tensorflow/core/framework/collective.h"
#include "tensorflow/core/framework/op_kernel.h"

namespace tpu_embedding {

// Sends and receives for one exchange. It lives until its last callback.
class Transport : public std::enable_shared_from_this<Transport> {
 public:
  using Next = std::function<void(const absl::Status&)>;
  // Makes the error that a user reads about a failure. `peer` is the other
  // process, or -1 if it is not known.
  using Explain =
      std::function<absl::Status(const absl::Status& status, int peer)>;
  // Gets a header that a process sends over another channel or lane.
  using Answer = std::function<void(int process, const std::string& channel,
                                    const tensorflow::Tensor& header)>;

  // The context, the channel, the executor of its collectives and what
  // `explain` uses live until `next` of the last swap is called, but not
  // longer.
  Transport(tensorflow::OpKernelContext* context, Channel* channel,
            const char* lane, tensorflow::CollectiveExecutor* executor,
            Explain explain);

  // Finds the processes of the channel among the members of its group.
  absl::Status FindMembers(const tensorflow::CollGroupParams& group);

  // Sends and receives what is not empty, in pieces; then calls `next` with the
  // first failure or OK. A failure ends all collectives of the job.
  void Swap(const char* what, const std::vector<tensorflow::Tensor>& sent,
            const std::vector<tensorflow::Tensor>& received, Next next);

  // Fails the swap and ends all collectives of the job, unless it has failed.
  void Abort(const absl::Status& status);

  // Asks the processes from which nothing has come for headers of `size`
  // numbers in the other lanes and in this process's other channels. Returns
  // false if it asked none: no piece is missing, or there is nowhere to ask.
  bool AskElsewhere(int64_t size, const Answer& answer);

  // Names the processes that sent nothing, or else those that took nothing.
  std::string Missing() const;

 private:
  struct Part;  // to and from one other process
  using Parts = std::shared_ptr<std::vector<Part>>;
  using Done = std::function<void(int peer, const absl::Status&)>;

  int size() const { return channel_->size(); }
  std::string Missing(const std::atomic<bool>* done) const;
  void Send(const char* what, const Parts& parts, int p, const Done& done);
  void RequestPiece(const char* what, const Parts& parts, int p,
                    const Done& done);
  void SkipRest(const Parts& parts, int p, const Done& done);
  void Receive(int process, const std::string& key, tensorflow::Tensor* tensor,
               const tensorflow::StatusCallback& done);
  void Arrive();
  std::string Key(const char* what, int from, int to, size_t piece) const;
  absl::Status failure();

  tensorflow::OpKernelContext* const context_;
  Channel* const channel_;
  const char* const lane_;
  tensorflow::CollectiveExecutor* const executor_;
  const Explain explain_;
  std::vector<const tensorflow::CollGroupMember*> members_;  // by process
  // Whether a piece came from each process, and whether it took one.
  std::unique_ptr<std::atomic<bool>[]> arrived_, taken_;
  Next next_;                        // after the swap
  std::atomic<int64_t> waiting_{0};  // pieces still under way
  std::atomic<int64_t> began_{0};    // in microseconds
  std::mutex mutex_;
  absl::Status failure_;
};

}  // namespace tpu_embedding

#endif  // TPU_EMBEDDING_OPS_CC_KERNELS_TRANSPORT_H_
