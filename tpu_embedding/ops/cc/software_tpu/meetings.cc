#include "software_tpu/meetings.h"

#include <algorithm>
#include <mutex>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"

namespace tpu_embedding {

using tensorflow::OpKernelContext;

Meetings::Meetings(std::vector<std::string> devices, int sparse_cores,
                   absl::Duration patience, std::function<void()> cancel)
    : devices_(std::move(devices)),
      sparse_cores_(sparse_cores),
      patience_(patience),
      cancel_(std::move(cancel)),
      left_(devices_.size(), false) {}

void Meetings::Join(const std::string& place, Guest guest, const Work& work) {
  OpKernelContext* const context = guest.context;
  const auto done = guest.done;
  absl::Status over, lonely;
  Meeting complete;
  {
    std::lock_guard<std::mutex> lock(mutex_);
    over = status_;
    if (over.ok()) {
      Meeting* meeting = Find(place, guest);
      meeting->guests[guest.replica] = std::move(guest);
      if (++meeting->num_guests == static_cast<int>(devices_.size())) {
        complete = Close(place, meeting);
      } else if (SomebodyLeft()) {
        lonely = NobodyComes(*meeting);
      }
    }
  }
  if (!over.ok()) {
    context->SetStatus(over);
    done();
  } else if (!lonely.ok()) {
    Fail(lonely);
  } else if (complete.num_guests > 0) {
    Hold(complete, work);
  }
}

void Meetings::Hold(const Meeting& meeting, const Work& work) {
  Contexts contexts;
  for (const Guest& guest : meeting.guests) contexts.push_back(guest.context);
  // `this` lives until the last guest is done.
  work(contexts, [this, guests = meeting.guests](const absl::Status& status) {
    // First, so that no kernel that follows these waits for anybody.
    if (!status.ok()) Fail(status);
    for (const Guest& guest : guests) {
      if (!status.ok()) guest.context->SetStatus(status);
      guest.done();
    }
  });
}

void Meetings::Leave(int replica, const absl::Status& status) {
  if (!status.ok()) {
    Fail(status);
    return;
  }
  absl::Status failed;
  {
    std::lock_guard<std::mutex> lock(mutex_);
    left_[replica] = true;
    if (!open_.empty()) failed = NobodyComes(open_.begin()->second.front());
  }
  if (!failed.ok()) Fail(failed);
}

void Meetings::Fail(const absl::Status& status) {
  Open released;
  {
    std::lock_guard<std::mutex> lock(mutex_);
    if (!status_.ok()) {
      // A replica that fails cancels its ops, and theirs may be the first word.
      if (absl::IsCancelled(status_) && !status.ok()) status_ = status;
      return;
    }
    status_ = status;
    released.swap(open_);
  }
  cancel_();
  for (auto& [place, meetings] : released) {
    for (Meeting& meeting : meetings) {
      for (Guest& guest : meeting.guests) {
        if (!guest.context) continue;
        guest.context->SetStatus(status);
        guest.done();
      }
    }
  }
}

void Meetings::CheckTime(absl::Time now) {
  absl::Status failed;
  {
    std::lock_guard<std::mutex> lock(mutex_);
    for (const auto& [place, meetings] : open_) {
      const Meeting& meeting = meetings.front();
      if (now - meeting.opened < patience_) continue;
      failed = absl::DeadlineExceededError(absl::StrCat(
          Names(meeting, false), " did not come to ", meeting.what, " within ",
          absl::FormatDuration(patience_), ". ", Names(meeting, true),
          " came. All replicas must run the same ops; ",
          "if one only needs more time, raise the strategy's "
          "`meeting_timeout`."));
      break;
    }
  }
  if (!failed.ok()) Fail(failed);
}

absl::Status Meetings::status() const {
  std::lock_guard<std::mutex> lock(mutex_);
  return status_;
}

Meetings::Meeting* Meetings::Find(const std::string& place,
                                  const Guest& guest) {
  std::deque<Meeting>& meetings = open_[place];
  for (Meeting& meeting : meetings) {
    if (!meeting.guests[guest.replica].context) return &meeting;
  }
  Meeting meeting;
  meeting.opened = absl::Now();
  meeting.what = absl::StrCat(guest.context->op_kernel().type_string(), " \"",
                              guest.context->op_kernel().name(), "\"");
  meeting.guests.resize(devices_.size());
  meetings.push_back(std::move(meeting));
  return &meetings.back();
}

Meetings::Meeting Meetings::Close(const std::string& place, Meeting* meeting) {
  std::deque<Meeting>& meetings = open_[place];
  const auto found =
      std::find_if(meetings.begin(), meetings.end(),
                   [&](const Meeting& other) { return &other == meeting; });
  Meeting closed = std::move(*found);
  meetings.erase(found);
  if (meetings.empty()) open_.erase(place);
  return closed;
}

bool Meetings::SomebodyLeft() const {
  return std::find(left_.begin(), left_.end(), true) != left_.end();
}

std::string Meetings::Names(const Meeting& meeting, bool present) const {
  std::vector<std::string> names;
  for (size_t r = 0; r < devices_.size(); ++r) {
    if ((meeting.guests[r].context != nullptr) == present) {
      names.push_back(absl::StrCat("Replica ", r, " (", devices_[r], ")"));
    }
  }
  return absl::StrJoin(names, ", ");
}

absl::Status Meetings::NobodyComes(const Meeting& meeting) const {
  return absl::FailedPreconditionError(absl::StrCat(
      Names(meeting, true), " came to ", meeting.what,
      ", but a replica has ended and will not come. Missing: ",
      Names(meeting, false), ". All replicas must run the same ops."));
}

const ReplicaRunner* ReplicaRunner::Of(const OpKernelContext* context) {
  const Runner* const runner = context->runner();
  return runner ? runner->target<ReplicaRunner>() : nullptr;
}

std::function<bool()> ReplicaRunner::HasFailed(const OpKernelContext* context) {
  const ReplicaRunner* const runner = Of(context);
  if (!runner) return nullptr;
  return [meetings = runner->meetings_] { return !meetings->status().ok(); };
}

void AsyncMeetingOp::ComputeAsync(OpKernelContext* context, DoneCallback done) {
  const ReplicaRunner* const runner = ReplicaRunner::Of(context);
  if (!runner) {
    OP_REQUIRES_OK_ASYNC(context, CheckAlone(), done);
    Begin({context}, [context, done](const absl::Status& status) {
      context->SetStatus(status);
      done();
    });
    return;
  }
  const auto [frame, iteration] = context->frame_iter();
  runner->meetings().Join(
      absl::StrCat(name(), "@", frame, ":", iteration),
      {runner->replica(), context, std::move(done)},
      [this](const Contexts& contexts, const Finish& finish) {
        Begin(contexts, finish);
      });
}

}  // namespace tpu_embedding
