// TpuEmbeddingExchange sends one message from each process to each other one.
// Headers are compared first: calls that differ are refused in all processes.

#include <algorithm>
#include <atomic>
#include <cctype>
#include <cstring>
#include <functional>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "absl/strings/match.h"
#include "core/wire.h"
#include "kernels/channel.h"
#include "kernels/kernel_util.h"
#include "kernels/step_queue_resource.h"
#include "kernels/transport.h"
#include "kernels/watchdog.h"
#include "tensorflow/core/framework/collective.h"
#include "tensorflow/core/framework/op.h"
#include "tensorflow/core/framework/op_kernel.h"
#include "tensorflow/core/framework/shape_inference.h"
#include "tensorflow/core/platform/logging.h"

namespace tpu_embedding {
namespace {

using tensorflow::AsyncOpKernel;
using tensorflow::CollectiveExecutor;
using tensorflow::OpKernelConstruction;
using tensorflow::OpKernelContext;
using tensorflow::Tensor;
using tensorflow::shape_inference::InferenceContext;

REGISTER_OP("TpuEmbeddingExchange")
    .Input("channel: resource")
    .Input("queues: num_queues * resource")
    .Input("runs: int64")
    .Input("messages: num_processes * uint8")
    .Input("refusal: string")
    .Input("call: string")
    .Output("received: num_processes * uint8")
    .Attr("num_queues: int >= 0")
    .Attr("num_processes: int >= 1")
    .Attr("phase: string")
    .Attr("lane: string")
    .Attr("role: string")
    .SetIsStateful()
    .SetShapeFn([](InferenceContext* context) {
      for (int p = 0; p < context->num_outputs(); ++p) {
        context->set_output(p, context->Vector(InferenceContext::kUnknownDim));
      }
      return absl::OkStatus();
    })
    .Doc(R"doc(
Sends each process its message, and returns those to this process. If any
process has a refusal, or not all make the same call, the op fails in every
process, and nothing else travels. If some processes have left a step and begun
the next one, the op fails in those that are still in the step, and the others
wait for them.

queues: none, or the step queue of this process: steps that are refused, or that
  some process has left, are noted there or discarded.
runs: empty in graphs. Eagerly it has the number of this run of strategy.run, or
  0 outside; then, if there is one, that of a run that an exception has ended.
messages: the message to each process, of a multiple of 64 bytes. The message to
  this process itself is returned as it is.
refusal: "", or a code and a text: see kernels/channel.h.
call: what the user called, with the arguments that must be alike everywhere.
received: the message from each process.
phase: which exchange of a step it is.
lane: the exchanges that it is ordered among, "step" or "enqueue". In a graph an
  enqueue in the lane "step" is followed by a dequeue.
role: its role in a step: see kernels/channel.h.
)doc");

// After this time a log line names the processes that are still missing.
constexpr int64_t kReminderSeconds = 10;
// How long an exchange that timed out waits for answers from other calls.
constexpr int64_t kAnswerSeconds = 2;

// The header that comes before a message.
enum Header : int {
  kSequence,
  kCall,
  kCallBytes,
  kBytes,
  kRefusalBytes,
  kPhase,
  kRole,
  kLeft,  // batches that an earlier run has left in the queue
  kName,  // the call's first bytes, then zeros
  kHeaderSize = kName + 8
};
constexpr size_t kNameBytes = (kHeaderSize - kName) * sizeof(int64_t);

// Indices in kPhases.
constexpr int kEnqueuePhase = 1, kLookupPhase = 2, kUpdatePhase = 3;
constexpr int kBegins = 1, kContinues = 2;  // of kRoles
constexpr int kStepLane = 0;                // of kLanes

// One run of the op; it lives until its last callback.
class Exchange : public std::enable_shared_from_this<Exchange> {
 public:
  Exchange(OpKernelContext* context, ChannelPtr channel, int phase, int lane,
           int role, AsyncOpKernel::DoneCallback done)
      : context_(context),
        channel_(std::move(channel)),
        phase_(phase),
        lane_(lane),
        role_(role),
        done_(std::move(done)),
        executor_(context->collective_executor()),
        transport_(std::make_shared<Transport>(
            context, channel_.get(), kLanes[lane], executor_,
            [this](const absl::Status& status, int peer) {
              return Explain(status, peer);
            })) {}

  void Begin() {
    absl::Status status = Read();
    if (status.ok() && (!executor_ || !executor_->remote_access())) {
      status = absl::FailedPreconditionError(
          "The processes of this job are not connected: call the embedding in "
          "the processes of its MultiWorkerMirroredStrategy, eagerly or in a "
          "tf.function.");
    }
    if (!status.ok()) {
      context_->SetStatus(status);
      done_();
      return;
    }
    executor_->Ref();
    group_.group_key = channel_->group_key;
    group_.group_size = size();
    group_.device_type = tensorflow::DeviceType(tensorflow::DEVICE_CPU);
    if (lane_ == kStepLane) {
      const bool is_new = channel_->last_run.exchange(run_) != run_;
      if (role_ == kBegins && !is_new) {
        role_ = run_ == BatchQueue::kOutside ? 0 : kContinues;
      }
    }
    StartTimers();
    const auto self = shared_from_this();
    executor_->CompleteGroupAsync(
        context_->device()->attributes(), &group_,
        context_->cancellation_manager(), [self](absl::Status status) {
          status = status.ok() ? self->transport_->FindMembers(self->group_)
                               : self->Explain(status, -1);
          if (!status.ok()) {
            self->Finish(status);
            return;
          }
          self->executor_->RunClosure([self] { self->SwapHeaders(); });
        });
  }

 private:
  int size() const { return channel_->size(); }
  const char* phase_name() const { return kPhases[phase_]; }
  const char* call_name() const {
    return call_.empty() ? phase_name() : call_.c_str();
  }

  void StartTimers() {
    const auto self = shared_from_this();
    const int64_t timeout = channel_->timeout_seconds;
    watch_ = Watchdog::Get().Start(std::chrono::seconds(timeout),
                                   [self] { self->Expire(); });
    reminder_ = Watchdog::Get().Start(
        std::chrono::seconds(std::min(kReminderSeconds, (timeout + 1) / 2)),
        [self] { self->Remind(); });
  }

  void StopTimers() {
    Watchdog::Get().Stop(watch_);
    Watchdog::Get().Stop(reminder_);
  }

  absl::Status Read() {
    tensorflow::OpInputList messages, queues;
    TF_RETURN_IF_ERROR(context_->input_list("queues", &queues));
    if (queues.size() > 0) {
      TF_RETURN_IF_ERROR(CheckScalar("queues", queues[0]));
      TF_RETURN_IF_ERROR(tensorflow::LookupResource(
          context_, queues[0].scalar<tensorflow::ResourceHandle>()(), &queue_));
    }
    TF_RETURN_IF_ERROR(ReadRun(context_, &run_));
    const Tensor* runs = nullptr;
    TF_RETURN_IF_ERROR(context_->input("runs", &runs));
    if (runs->NumElements() > 1) ended_ = runs->flat<int64_t>()(1);
    is_traced_ = runs->NumElements() == 0;
    TF_RETURN_IF_ERROR(context_->input_list("messages", &messages));
    TF_RETURN_IF_ERROR(CheckLength("messages", messages.size(), size()));
    const Tensor *refusal = nullptr, *call = nullptr;
    TF_RETURN_IF_ERROR(context_->input("refusal", &refusal));
    TF_RETURN_IF_ERROR(CheckScalar("refusal", *refusal));
    refusal_ = refusal->flat<tensorflow::tstring>()(0);
    TF_RETURN_IF_ERROR(context_->input("call", &call));
    TF_RETURN_IF_ERROR(CheckScalar("call", *call));
    call_ = call->flat<tensorflow::tstring>()(0);
    for (const Tensor& message : messages) {
      const int64_t bytes = message.NumElements();
      if (bytes % kWireAlignment) return CheckLength("messages", bytes, 0);
      messages_.push_back(message);
    }
    return absl::OkStatus();
  }

  void SwapHeaders() {
    ++channel_->phases[phase_].exchanges;
    sequence_ = channel_->sequences[lane_]++;
    const int64_t left = queue_ && phase_ == kEnqueuePhase && lane_ == kStepLane
                             ? queue_->queue.Left(run_, ended_)
                             : 0;
    for (int p = 0; p < size(); ++p) {
      Tensor header(tensorflow::DT_INT64, {kHeaderSize});
      auto fields = header.flat<int64_t>();
      fields(kSequence) = sequence_;
      fields(kCall) = CallNumber();
      fields(kCallBytes) = call_.size();
      fields(kBytes) = messages_[p].NumElements();
      fields(kRefusalBytes) = refusal_.size();
      fields(kPhase) = phase_;
      fields(kRole) = role_;
      fields(kLeft) = left;
      std::memset(&fields(kName), 0, kNameBytes);
      std::memcpy(&fields(kName), call_.data(),
                  std::min(call_.size(), kNameBytes));
      sent_headers_.push_back(header);
      headers_.emplace_back(tensorflow::DT_INT64,
                            tensorflow::TensorShape({kHeaderSize}));
    }
    SwapTensors("header", sent_headers_, headers_, [this] { ReadHeaders(); });
  }

  void ReadHeaders() {
    bool refused = !refusal_.empty();
    bool alike = true;
    std::vector<int64_t> bytes(size(), 0);
    headers_[channel_->rank] = sent_headers_[channel_->rank];
    for (int p = 0; p < size(); ++p) {
      if (p == channel_->rank) continue;
      const auto fields = headers_[p].flat<int64_t>();
      if (fields(kSequence) != sequence_) {
        const absl::Status status = absl::FailedPreconditionError(absl::StrCat(
            "Process ", p, " is at call number ", fields(kSequence),
            ", but process ", channel_->rank, " is at call number ", sequence_,
            ": the processes called the embedding in a different order. "
            "Restart the job from the last checkpoint."));
        executor_->StartAbort(status);
        Finish(status);
        return;
      }
      refused |= fields(kRefusalBytes) > 0;
      alike &= fields(kCall) == CallNumber();
      bytes[p] = fields(kBytes);
    }
    if (IsLeft()) {
      SwapTexts("call", call_, kCallBytes, [this] { LeaveStep(); });
      return;
    }
    if (refused || !alike) RefuseStep();
    if (refused) {
      SwapTexts("refusal", refusal_, kRefusalBytes, [this] { Refuse(); });
      return;
    }
    if (!alike) {
      SwapTexts("call", call_, kCallBytes, [this] { NameCalls(); });
      return;
    }
    if (queue_ && phase_ == kEnqueuePhase) BeginRun();
    std::vector<Tensor> received;
    absl::Status status;
    for (int p = 0; p < size(); ++p) {
      if (p == channel_->rank) {
        context_->set_output(p, messages_[p]);
        received.push_back(messages_[p]);
        continue;
      }
      Tensor* output = nullptr;
      status.Update(context_->allocate_output(p, {bytes[p]}, &output));
      received.push_back(status.ok() ? *output : Tensor());
      channel_->phases[phase_].bytes_sent += messages_[p].NumElements();
    }
    if (!status.ok()) {
      executor_->StartAbort(status);  // The others wait for this process.
      Finish(status);
      return;
    }
    SwapTensors("message", messages_, received,
                [this] { Finish(absl::OkStatus()); });
  }

  int64_t Field(int process, Header field) const {
    return headers_[process].flat<int64_t>()(field);
  }

  // Returns the first process whose exchange has that role, or -1.
  int FirstWith(int role) const {
    for (int p = 0; p < size(); ++p) {
      if (Field(p, kRole) == role) return p;
    }
    return -1;
  }

  // Returns whether some processes have left the step that the others are in,
  // and have begun another one.
  bool IsLeft() const {
    const int begins = FirstWith(kBegins), continues = FirstWith(kContinues);
    if (begins < 0 || continues < 0) return false;
    for (int p = 0; p < size(); ++p) {
      const int64_t role = Field(p, kRole);
      if (role == 0) return false;
      const int first = role == kBegins ? begins : continues;
      if (Field(p, kRefusalBytes) > 0 || Field(first, kRefusalBytes) > 0) {
        continue;  // A refusal has no call.
      }
      if (Field(p, kCall) != Field(first, kCall)) return false;
    }
    return true;
  }

  // Returns what the user called in a process. The calls must be swapped.
  std::string CallOf(int process) const {
    const std::string text = TextOf(process);
    return text.empty() ? kPhases[Field(process, kPhase)] : text;
  }

  // Discards the step everywhere. Processes that begin another step wait for
  // the others.
  void LeaveStep() {
    const int begins = FirstWith(kBegins), continues = FirstWith(kContinues);
    if (queue_) {
      const int64_t phase = Field(continues, kPhase);
      if (phase == kLookupPhase) queue_->queue.DiscardNext();
      if (phase == kUpdatePhase) queue_->queue.DiscardOwed();
    }
    if (role_ == kBegins) {
      StopTimers();
      StartTimers();
      sent_headers_.clear();
      headers_.clear();
      texts_.clear();
      SwapHeaders();
      return;
    }
    Finish(absl::FailedPreconditionError(absl::StrCat(
        "The processes called the embedding differently: process ", continues,
        " called ", CallOf(continues), ", but process ", begins, " called ",
        CallOf(begins),
        ", which begins another step. This step is discarded in all processes: "
        "no part of it is applied, and the next step trains.")));
  }

  // Notes in the queue that the step of these calls was refused.
  void RefuseStep() {
    if (!queue_) return;
    for (int p = 0; p < size(); ++p) {
      if (Field(p, kRole) != kContinues) continue;
      const int64_t phase = Field(p, kPhase);
      if (phase == kLookupPhase) queue_->queue.RefuseNext();
      if (phase == kUpdatePhase) queue_->queue.RefuseOwed();
    }
  }

  // Discards in all processes what one process has left in its queue.
  void BeginRun() {
    const bool in_steps = lane_ == kStepLane;
    int64_t left = 0;
    for (int p = 0; p < size(); ++p) left = std::max(left, Field(p, kLeft));
    queue_->queue.BeginRun(in_steps ? run_ : BatchQueue::kOutside,
                           in_steps && is_traced_, left);
  }

  // Numbers calls to tell them apart, by FNV-1a, which is the same everywhere.
  int64_t CallNumber() const {
    uint64_t number = 0xcbf29ce484222325u;
    for (const char c : call_) {
      number = (number ^ static_cast<unsigned char>(c)) * 0x100000001b3u;
    }
    return static_cast<int64_t>(number);
  }

  // Sends the `text` of every process to every other one; its length is a field
  // of its header. Then calls `next`.
  void SwapTexts(const char* what, const std::string& text, Header length,
                 const std::function<void()>& next) {
    Tensor own(tensorflow::DT_UINT8, {static_cast<int64_t>(text.size())});
    if (!text.empty()) std::memcpy(own.data(), text.data(), text.size());
    for (int p = 0; p < size(); ++p) {
      const int64_t bytes =
          p == channel_->rank ? 0 : headers_[p].flat<int64_t>()(length);
      texts_.emplace_back(tensorflow::DT_UINT8,
                          tensorflow::TensorShape({bytes}));
    }
    SwapTensors(what, std::vector<Tensor>(size(), own), texts_,
                [this, own, next] {
                  texts_[channel_->rank] = own;
                  next();
                });
  }

  std::string TextOf(int process) const {
    return std::string(static_cast<const char*>(texts_[process].data()),
                       texts_[process].NumElements());
  }

  // Fails with the same error in every process: it tells what each called.
  void NameCalls() {
    int other = 0;
    while (other + 1 < size() && TextOf(other) == TextOf(0)) ++other;
    Finish(absl::FailedPreconditionError(absl::StrCat(
        "The processes called the embedding differently: process 0 called ",
        TextOf(0), ", but process ", other, " called ", TextOf(other),
        ". Nothing has changed. Make the same calls with the same arguments in "
        "every process. Outside of strategy.run, call reset in all of them "
        "after a step that only some have begun.")));
  }

  void Refuse() {
    if (queue_ && phase_ == kUpdatePhase) {
      queue_->ForgetLookup(queue_->sent.lock());
    }
    for (int p = 0; p < size(); ++p) {
      if (texts_[p].NumElements() == 0) continue;
      Finish(FromRefusal(TextOf(p), absl::StrCat("Process ", p, ": ")));
      return;
    }
    Finish(absl::InternalError("A process refused a step without a reason."));
  }

  // Swaps tensors. Unless that fails, calls `next`, which may use `this`.
  void SwapTensors(const char* what, const std::vector<Tensor>& sent,
                   const std::vector<Tensor>& received,
                   const std::function<void()>& next) {
    const auto self = shared_from_this();
    transport_->Swap(what, sent, received,
                     [self, next](const absl::Status& status) {
                       if (status.ok()) {
                         next();
                       } else {
                         self->Finish(status);
                       }
                     });
  }

  absl::Status Explain(const absl::Status& status, int peer) const {
    if (absl::StrContains(status.message(), "tpu_embedding: ")) {
      return status;  // Another process has explained it.
    }
    tensorflow::CancellationManager* function =
        context_->cancellation_manager();
    if (function && (function->IsCancelling() || function->IsCancelled())) {
      return absl::UnavailableError(absl::StrCat(
          "tpu_embedding: Process ", channel_->rank, " gave up ", phase_name(),
          ": another op of its function failed, or it was interrupted. No part "
          "of this step was applied. Restart all processes from the last "
          "checkpoint."));
    }
    const int lost = Lost(status.message(), peer);
    const std::string who =
        lost < 0 ? "A process" : absl::StrCat("Process ", lost);
    return absl::UnavailableError(
        absl::StrCat("tpu_embedding: ", who, " was lost during ", phase_name(),
                     " in process ", channel_->rank,
                     ". No part of this step was applied. Restart all "
                     "processes from the last checkpoint. TensorFlow says: ",
                     status.message()));
  }

  // Returns which process a failure is about, or -1. Once TensorFlow's
  // coordination service has noticed a lost process, every message fails, even
  // one to another `peer`; the text of the failure names the lost process.
  int Lost(absl::string_view message, int peer) const {
    int lost = peer;
    size_t first = absl::string_view::npos;
    for (int p = 0; p < size(); ++p) {
      if (p == channel_->rank) continue;
      const std::string& device = channel_->devices[p];
      const std::string task = device.substr(0, device.find("/device:"));
      const size_t at = message.find(task);
      const size_t end = at + task.size();
      // npos is the largest size_t.
      if (at < first && !(end < message.size() && isdigit(message[end]))) {
        first = at;
        lost = p;
      }
    }
    // The service itself does not answer: process 0, which runs it, is lost.
    if (first == absl::string_view::npos && channel_->rank != 0 &&
        absl::StrContains(message, "CoordinationService")) {
      return 0;
    }
    return lost;
  }

  void Remind() {
    LOG(WARNING) << "tpu_embedding: process " << channel_->rank << " waits in "
                 << call_name() << " for process " << transport_->Missing()
                 << ", at most " << channel_->timeout_seconds << " s.";
  }

  // Handles the timeout. Before this ends the job, it asks the processes that
  // are missing whether they wait elsewhere: in the other lane, or in another
  // embedding.
  void Expire() {
    const auto self = shared_from_this();
    executor_->Ref();
    const bool asks = transport_->AskElsewhere(
        kHeaderSize,
        [self](int process, const std::string& channel, const Tensor& header) {
          self->EndJob(self->Elsewhere(process, channel, header));
        });
    const auto end = [self] {
      self->EndJob("");
      self->executor_->Unref();
    };
    if (asks) {
      Watchdog::Get().Start(std::chrono::seconds(kAnswerSeconds), end);
    } else {
      end();
    }
  }

  // Returns a sentence about what a process that waits elsewhere calls.
  std::string Elsewhere(int process, const std::string& channel,
                        const Tensor& header) const {
    const auto fields = header.flat<int64_t>();
    const auto* text = reinterpret_cast<const char*>(&fields(kName));
    std::string name(text, strnlen(text, kNameBytes));
    if (name.empty()) name = kPhases[fields(kPhase)];
    std::string found = absl::StrCat("Process ", process, " waits in ", name);
    if (channel != channel_->key) {
      absl::StrAppend(
          &found, " of embedding ", channel, ", process ", channel_->rank,
          " of embedding ", channel_->key,
          " (embeddings are numbered in the order of their creation)");
    }
    return found + ". ";
  }

  void EndJob(const std::string& elsewhere) {
    if (ends_job_.exchange(true)) return;
    const absl::Status status = absl::DeadlineExceededError(absl::StrCat(
        "tpu_embedding: process ", channel_->rank, " waited ",
        channel_->timeout_seconds, " s in ", call_name(), " for process ",
        transport_->Missing(), ", which did not make the same call. ",
        elsewhere.empty() ? "It is stuck, is ending, has stopped after an "
                            "error, or has no more batches. "
                          : elsewhere,
        "No part of this step was applied. Give every process the same number "
        "of steps (an empty batch counts), and restart all processes from the "
        "last checkpoint."));
    transport_->Abort(status);
  }

  void Finish(const absl::Status& status) {
    StopTimers();
    if (!status.ok()) context_->SetStatus(status);
    CollectiveExecutor* executor = executor_;
    const auto done = std::move(done_);
    done();  // It may delete the context.
    executor->Unref();
  }

  OpKernelContext* const context_;
  const ChannelPtr channel_;
  const int phase_, lane_;
  int role_;
  AsyncOpKernel::DoneCallback done_;
  CollectiveExecutor* const executor_;
  const std::shared_ptr<Transport> transport_;
  int64_t watch_ = 0, reminder_ = 0;
  tensorflow::CollGroupParams group_;
  std::vector<Tensor> messages_;  // by process
  std::string refusal_, call_;
  QueuePtr queue_;  // null where there is none
  int64_t run_ = 0, ended_ = 0;
  bool is_traced_ = false;
  int64_t sequence_ = 0;
  std::vector<Tensor> sent_headers_, headers_, texts_;
  std::atomic<bool> ends_job_{false};
};

class ExchangeOp : public AsyncOpKernel {
 public:
  explicit ExchangeOp(OpKernelConstruction* context) : AsyncOpKernel(context) {
    OP_REQUIRES_OK(context, Find(context, "phase", kPhases, &phase_));
    OP_REQUIRES_OK(context, Find(context, "lane", kLanes, &lane_));
    OP_REQUIRES_OK(context, Find(context, "role", kRoles, &role_));
  }

  void ComputeAsync(OpKernelContext* context, DoneCallback done) override {
    ChannelPtr channel;
    OP_REQUIRES_OK_ASYNC(context, LookUpChannel(context, &channel), done);
    std::make_shared<Exchange>(context, std::move(channel), phase_, lane_,
                               role_, std::move(done))
        ->Begin();
  }

 private:
  // Finds the index in `names` of the value of an attribute.
  template <typename Names>
  static absl::Status Find(OpKernelConstruction* context, const char* attribute,
                           const Names& names, int* index) {
    std::string name;
    TF_RETURN_IF_ERROR(context->GetAttr(attribute, &name));
    *index = std::find(names.begin(), names.end(), name) - names.begin();
    return CheckIndices(attribute, {*index}, names.size());
  }

  int phase_ = 0, lane_ = 0, role_ = 0;
};

REGISTER_KERNEL_BUILDER(
    Name("TpuEmbeddingExchange").Device(tensorflow::DEVICE_CPU), ExchangeOp);

}  // namespace
}  // namespace tpu_embedding
