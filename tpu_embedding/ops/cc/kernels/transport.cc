#include "kernels/transport.h"

#include <algorithm>
#include <utility>

#include "absl/strings/str_cat.h"
#include "tensorflow/core/framework/device.h"
#include "tensorflow/core/platform/env_time.h"

namespace tpu_embedding {
namespace {

using tensorflow::OpKernelContext;
using tensorflow::Tensor;

// Tensors travel in pieces of this size, kWindow at a time from each process:
// whole tensors of 16 MiB took twice as long.
constexpr int64_t kPieceBytes = int64_t{256} << 10;
constexpr int kWindow = 8;

std::vector<Tensor> Cut(const Tensor& tensor) {
  std::vector<Tensor> pieces;
  if (tensor.TotalBytes() == 0) return pieces;
  const int64_t count = tensor.dim_size(0);
  const int64_t step =
      std::max<int64_t>(1, kPieceBytes * count / tensor.TotalBytes());
  for (int64_t i = 0; i < count; i += step) {
    pieces.push_back(tensor.Slice(i, std::min(count, i + step)));
  }
  return pieces;
}

std::string KeyOf(const std::string& channel, const char* lane,
                  const char* what, int from, int to, size_t piece) {
  return absl::StrCat("tpu_embedding:", channel, ":", lane, ":", what, ":",
                      from, ">", to, ":", piece);
}

tensorflow::Device* DeviceOf(OpKernelContext* context) {
  return static_cast<tensorflow::Device*>(context->device());
}

}  // namespace

struct Transport::Part {
  std::vector<Tensor> sent, received;
  std::atomic<size_t> next{0};
};

Transport::Transport(OpKernelContext* context, Channel* channel,
                     const char* lane, tensorflow::CollectiveExecutor* executor,
                     Explain explain)
    : context_(context),
      channel_(channel),
      lane_(lane),
      executor_(executor),
      explain_(std::move(explain)),
      arrived_(new std::atomic<bool>[size()]),
      taken_(new std::atomic<bool>[size()]) {
  for (int p = 0; p < size(); ++p) arrived_[p] = taken_[p] = false;
}

absl::Status Transport::FindMembers(const tensorflow::CollGroupParams& group) {
  for (const std::string& device : channel_->devices) {
    const auto found = std::find_if(
        group.members.begin(), group.members.end(),
        [&](const auto& member) { return member.device.name() == device; });
    if (found == group.members.end()) {
      return absl::InternalError(absl::StrCat(
          "The devices of this job are not those of the strategy: ",
          group.ToString()));
    }
    members_.push_back(&*found);
  }
  return absl::OkStatus();
}

void Transport::Swap(const char* what, const std::vector<Tensor>& sent,
                     const std::vector<Tensor>& received, Next next) {
  const auto parts = std::make_shared<std::vector<Part>>(size());
  int64_t number = 0;
  for (int p = 0; p < size(); ++p) {
    if (p == channel_->rank) continue;
    Part& part = (*parts)[p];
    part.sent = Cut(sent[p]);
    part.received = Cut(received[p]);
    number += part.sent.size() + part.received.size();
  }
  for (int p = 0; p < size(); ++p) {
    arrived_[p] = (*parts)[p].received.empty();
    taken_[p] = (*parts)[p].sent.empty();
  }
  if (number == 0) {
    next(absl::OkStatus());
    return;
  }
  next_ = std::move(next);
  waiting_ = number;
  began_ = tensorflow::EnvTime::NowMicros();
  const auto self = shared_from_this();
  // Each piece calls this; the last one goes on.
  const Done done = [self](int peer, const absl::Status& status) {
    if (!status.ok()) self->Abort(self->explain_(status, peer));
    self->Arrive();
  };
  for (int p = 0; p < size(); ++p) Send(what, parts, p, done);
  for (int p = 0; p < size(); ++p) {
    if (p == channel_->rank) continue;
    for (int w = 0; w < kWindow; ++w) RequestPiece(what, parts, p, done);
  }
}

// Offers process `p` all pieces for it.
void Transport::Send(const char* what, const Parts& parts, int p,
                     const Done& done) {
  const Part& part = (*parts)[p];
  if (part.sent.empty()) return;  // The swap may be over.
  const auto self = shared_from_this();
  tensorflow::Device* const device = DeviceOf(context_);
  for (size_t k = 0; k < part.sent.size(); ++k) {
    executor_->remote_access()->PostToPeer(
        members_[p]->device.name(), members_[p]->task,
        Key(what, channel_->rank, p, k), device, nullptr,
        tensorflow::AllocatorAttributes(), &part.sent[k],
        device->attributes().locality(), context_->cancellation_manager(),
        [self, done, parts, p](const absl::Status& status) {
          if (status.ok()) self->taken_[p] = true;
          done(p, status);
        });
  }
}

// Asks process `p` for the next piece that has not been requested yet.
void Transport::RequestPiece(const char* what, const Parts& parts, int p,
                             const Done& done) {
  Part& part = (*parts)[p];
  const size_t k = part.next++;
  if (k >= part.received.size()) return;
  const auto self = shared_from_this();
  Receive(p, Key(what, p, channel_->rank, k), &part.received[k],
          [=](const absl::Status& status) {
            if (status.ok()) {
              self->arrived_[p] = true;
              if (k + 1 == (*parts)[p].received.size()) {
                self->channel_->waited_microseconds[p] +=
                    tensorflow::EnvTime::NowMicros() - self->began_;
              }
              self->RequestPiece(what, parts, p, done);
            } else {
              self->SkipRest(parts, p, done);
            }
            done(p, status);
          });
}

// Skips the pieces after one that failed: nobody asks for them.
void Transport::SkipRest(const Parts& parts, int p, const Done& done) {
  Part& part = (*parts)[p];
  while (part.next++ < part.received.size()) {
    done(p, absl::CancelledError("an earlier piece failed"));
  }
}

void Transport::Receive(int process, const std::string& key, Tensor* tensor,
                        const tensorflow::StatusCallback& done) {
  const tensorflow::CollGroupMember& member = *members_[process];
  tensorflow::Device* const device = DeviceOf(context_);
  executor_->remote_access()->RecvFromPeer(
      member.device.name(), member.task, member.is_local, key, device, nullptr,
      tensorflow::AllocatorAttributes(), tensor,
      device->attributes().locality(), 0, context_->cancellation_manager(),
      done);
}

// Counts one arrival. After the last one, goes on with `next_`.
void Transport::Arrive() {
  if (--waiting_ > 0) return;
  const Next next = std::move(next_);  // It may hold this.
  const absl::Status status = failure();
  if (!status.ok()) return next(status);
  executor_->RunClosure([next] { next(absl::OkStatus()); });
}

void Transport::Abort(const absl::Status& status) {
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    if (!failure_.ok()) return;
    failure_ = status;
  }
  executor_->StartAbort(status);
}

absl::Status Transport::failure() {
  const std::lock_guard<std::mutex> lock(mutex_);
  return failure_;
}

bool Transport::AskElsewhere(int64_t size_of_header, const Answer& answer) {
  struct Question {
    int process;
    std::string channel;
    const char* lane;
    Tensor header;
  };
  const auto questions = std::make_shared<std::vector<Question>>();
  for (const std::string& channel : ChannelKeys::Get().All()) {
    for (const char* lane : kLanes) {
      const bool own = channel == channel_->key && lane == lane_;
      for (int p = 0; p < size() && !own; ++p) {
        if (p == channel_->rank || arrived_[p]) continue;
        questions->push_back(
            {p, channel, lane, Tensor(tensorflow::DT_INT64, {size_of_header})});
      }
    }
  }
  int64_t waiting = waiting_;
  const int64_t number = questions->size();
  while (waiting > 0 && number > 0 &&
         !waiting_.compare_exchange_weak(waiting, waiting + number)) {
  }
  if (waiting == 0 || number == 0) return false;
  const auto self = shared_from_this();
  for (Question& question : *questions) {
    const int p = question.process;
    Receive(
        p,
        KeyOf(question.channel, question.lane, "header", p, channel_->rank, 0),
        &question.header,
        [self, questions, &question, answer](const absl::Status& status) {
          if (status.ok()) {
            answer(question.process, question.channel, question.header);
          }
          self->Arrive();
        });
  }
  return true;
}

std::string Transport::Key(const char* what, int from, int to,
                           size_t piece) const {
  return KeyOf(channel_->key, lane_, what, from, to, piece);
}

std::string Transport::Missing() const {
  const std::string missing = Missing(arrived_.get());
  return missing.empty() ? Missing(taken_.get()) : missing;
}

// Names the other processes for which `done` is false.
std::string Transport::Missing(const std::atomic<bool>* done) const {
  std::string missing;
  for (int p = 0; p < size(); ++p) {
    if (p == channel_->rank || done[p]) continue;
    absl::StrAppend(&missing, missing.empty() ? "" : ", ", p);
  }
  return missing;
}

}  // namespace tpu_embedding
