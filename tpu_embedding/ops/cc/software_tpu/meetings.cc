#include "software_tpu/meetings.h"

#include <algorithm>
#include <condition_variable>
#include <mutex>
#include <thread>
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
  const absl::Status status = work(contexts);
  // First, so that no kernel that follows these waits for anybody.
  if (!status.ok()) Fail(status);
  for (const Guest& guest : meeting.guests) {
    if (!status.ok()) guest.context->SetStatus(status);
    guest.done();
  }
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
    if (!status_.ok()) return;
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

namespace {

// One thread for all runs. It never ends: other threads may need it while the
// process goes down.
class Watch {
 public:
  static Watch& Get() {
    static Watch* const watch = new Watch;
    return *watch;
  }

  void Add(std::weak_ptr<Meetings> meetings) {
    std::lock_guard<std::mutex> lock(mutex_);
    watched_.push_back(std::move(meetings));
    added_.notify_one();
  }

 private:
  static constexpr std::chrono::milliseconds kInterval{50};

  Watch() {
    std::thread([this] { Loop(); }).detach();
  }

  void Loop() {
    while (true) {
      std::vector<std::shared_ptr<Meetings>> alive = Wait();
      for (const auto& meetings : alive) meetings->CheckTime(absl::Now());
      alive.clear();
      std::this_thread::sleep_for(kInterval);
    }
  }

  std::vector<std::shared_ptr<Meetings>> Wait() {
    std::unique_lock<std::mutex> lock(mutex_);
    added_.wait(lock, [this] { return !watched_.empty(); });
    std::vector<std::shared_ptr<Meetings>> alive;
    for (const auto& weak : watched_) {
      if (auto meetings = weak.lock()) alive.push_back(std::move(meetings));
    }
    watched_.assign(alive.begin(), alive.end());
    return alive;
  }

  std::mutex mutex_;
  std::condition_variable added_;
  std::vector<std::weak_ptr<Meetings>> watched_;
};

}  // namespace

void WatchTime(const std::shared_ptr<Meetings>& meetings) {
  Watch::Get().Add(meetings);
}

const ReplicaRunner* ReplicaRunner::Of(const OpKernelContext* context) {
  const Runner* const runner = context->runner();
  return runner ? runner->target<ReplicaRunner>() : nullptr;
}

void MeetingOp::ComputeAsync(OpKernelContext* context, DoneCallback done) {
  const ReplicaRunner* const runner = ReplicaRunner::Of(context);
  if (!runner) {
    context->SetStatus(MeetAlone(context));
    done();
    return;
  }
  const auto [frame, iteration] = context->frame_iter();
  runner->meetings().Join(
      absl::StrCat(name(), "@", frame, ":", iteration),
      {runner->replica(), context, std::move(done)},
      [this](const Contexts& contexts) { return Meet(contexts); });
}

}  // namespace tpu_embedding
