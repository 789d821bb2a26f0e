// The steps of one embedding: which batch each replica is at, and whether the
// calls come in an order that a TPU would survive. What would deadlock there
// is an error here.
//
//   a training batch:    queued -> dequeued -> deposited -> applied (removed)
//   an evaluation batch: queued -> dequeued (removed)
//
// A step holds one batch per replica. Its update is ready once every replica
// has deposited its gradients; nobody ever waits for that. All methods are
// thread-safe. An error leaves the queue as it was, unless said otherwise.

#ifndef TPU_EMBEDDING_OPS_CC_CORE_STEP_QUEUE_H_
#define TPU_EMBEDDING_OPS_CC_CORE_STEP_QUEUE_H_

#include <algorithm>
#include <cstdint>
#include <deque>
#include <mutex>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "core/feature.h"

namespace tpu_embedding {

// `Batch` and `Gradients` are cheap to copy (shared pointers, tensors).
template <class Batch, class Gradients>
class StepQueue {
 public:
  struct Part {
    enum class State { kAwaited, kQueued, kDequeued, kDeposited, kDone };
    State state = State::kAwaited;
    Batch batch;
    Gradients gradients;
  };
  struct Step {
    int64_t number = 0;
    bool training = false;
    std::vector<Part> replicas;
  };

  // `pipelined`: a ready update is left until the next step's lookups.
  StepQueue(int num_replicas, int64_t capacity, bool pipelined)
      : capacity_(capacity),
        pipelined_(pipelined),
        next_enqueue_(num_replicas, 0),
        next_dequeue_(num_replicas, 0),
        last_was_training_(num_replicas, true) {}

  int num_replicas() const { return next_enqueue_.size(); }

  // Queues one batch for every replica, or for none.
  Error EnqueueAll(std::vector<Batch> batches, bool training) {
    std::lock_guard<std::mutex> lock(mutex_);
    DiscardFailedStep();
    for (int r = 0; r < num_replicas(); ++r) {
      if (Error error = CheckEnqueue(r, training)) return error;
    }
    for (int r = 0; r < num_replicas(); ++r) {
      Put(r, std::move(batches[r]), training);
    }
    return std::nullopt;
  }

  // Queues the batch of one replica.
  Error Enqueue(int replica, Batch batch, bool training) {
    std::lock_guard<std::mutex> lock(mutex_);
    if (failed_) {
      if (!HasArrived(replica)) {
        arrived_.push_back(replica);
        return "enqueue: this step was given up because another replica's "
               "input failed its checks. Mend that input and run the step "
               "again.";
      }
      DiscardFailedStep();
    }
    if (Error error = CheckEnqueue(replica, training)) return error;
    Put(replica, std::move(batch), training);
    return std::nullopt;
  }

  // The input of `replica` for its next step failed its checks: the batches
  // that other replicas queue for that step are discarded.
  void FailEnqueue(int replica) {
    std::lock_guard<std::mutex> lock(mutex_);
    if (!failed_) {
      failed_ = next_enqueue_[replica];
      arrived_.clear();
      for (int r = 0; r < num_replicas(); ++r) {
        if (next_enqueue_[r] > *failed_) arrived_.push_back(r);
      }
    }
    if (!HasArrived(replica)) arrived_.push_back(replica);
  }

  // Hands out the next batch of `replica`.
  Error Dequeue(int replica, Batch* batch) {
    std::lock_guard<std::mutex> lock(mutex_);
    const int64_t number = next_dequeue_[replica];
    Step* step = Find(number);
    if (failed_ && number >= *failed_) {
      return "dequeue: this step was given up because a replica's input "
             "failed its checks. Mend that input and run the step again.";
    }
    if (!step || step->replicas[replica].state != Part::State::kQueued) {
      return "dequeue: no batch is enqueued. Call enqueue before dequeue, "
             "once for each dequeue.";
    }
    if (Error error = CheckDebts(*step, replica)) return error;
    Part& part = step->replicas[replica];
    *batch = part.batch;
    part.state = step->training ? Part::State::kDequeued : Part::State::kDone;
    last_was_training_[replica] = step->training;
    ++next_dequeue_[replica];
    if (!step->training && AllIn(*step, Part::State::kDone)) Remove(number);
    return std::nullopt;
  }

  // The batch whose gradients `replica` owes.
  Error Owed(int replica, Batch* batch) {
    std::lock_guard<std::mutex> lock(mutex_);
    Step* step = OwedStep(replica);
    if (!step) return NothingOwed(replica);
    *batch = step->replicas[replica].batch;
    return std::nullopt;
  }

  // Takes the gradients that `replica` owes. `*apply_now` tells whether the
  // caller has to apply the step's update.
  Error Deposit(int replica, Gradients gradients, bool* apply_now) {
    std::lock_guard<std::mutex> lock(mutex_);
    Step* step = OwedStep(replica);
    if (!step) return NothingOwed(replica);
    step->replicas[replica].state = Part::State::kDeposited;
    step->replicas[replica].gradients = std::move(gradients);
    *apply_now = !pipelined_ && AllIn(*step, Part::State::kDeposited);
    return std::nullopt;
  }

  // The gradients of `replica` failed their checks. Among several replicas
  // the step is lost; a single one still owes and may try again.
  void FailDeposit(int replica) {
    std::lock_guard<std::mutex> lock(mutex_);
    const Step* step = OwedStep(replica);
    if (!step || num_replicas() == 1) return;
    const int64_t number = step->number;
    Remove(number);
    std::vector<int> arrived;
    for (int r = 0; r < num_replicas(); ++r) {
      if (next_enqueue_[r] > number) arrived.push_back(r);
    }
    if (static_cast<int>(arrived.size()) == num_replicas()) {
      for (int64_t& next : next_dequeue_) next = std::max(next, number + 1);
      return;
    }
    // A replica has not come to the step yet: it is given up as if an input
    // had failed, else the replicas would be at different steps for ever.
    failed_ = std::min(failed_.value_or(number), number);
    arrived_ = arrived;
  }

  // Whether the next gradients of `replica` complete their step: those it owes,
  // or with `submitting` those that it submits.
  bool Completes(int replica, bool submitting) {
    std::lock_guard<std::mutex> lock(mutex_);
    if (num_replicas() == 1) return true;
    const Step* step =
        submitting ? Find(next_enqueue_[replica]) : OwedStep(replica);
    if (!step) return false;
    int deposited = 0;
    for (const Part& part : step->replicas) {
      deposited += part.state == State::kDeposited;
    }
    return deposited == num_replicas() - 1;
  }

  // Forgets all batches and gradients: what is queued, owed or pending.
  void Reset() {
    std::lock_guard<std::mutex> lock(mutex_);
    Clear();
  }

  // A lookup outside of the queue, whose gradients may come by Submit. Updates
  // that only some replicas submitted are given up: their step has ended.
  Error BeginLookup(int replica) {
    std::lock_guard<std::mutex> lock(mutex_);
    Step* step = FindIf([=](const Step& candidate) {
      return candidate.replicas[replica].state == State::kDeposited &&
             !AllIn(candidate, State::kDeposited);
    });
    if (!step) return std::nullopt;
    Clear();
    return "lookup: gradients came from some replicas only, and their update "
           "was given up. If a step had failed, run it again. Else take all "
           "lookups of a step before its gradients.";
  }

  // Takes a batch together with its gradients. The n-th ones of all replicas
  // make up one update. If pipelined, the newest update is left pending and
  // the one before it is to be applied.
  void Submit(int replica, Batch batch, Gradients gradients, bool* apply_now) {
    std::lock_guard<std::mutex> lock(mutex_);
    const int64_t number = next_enqueue_[replica];
    Put(replica, std::move(batch), /*training=*/true);
    ++next_dequeue_[replica];
    Step* step = Find(number);
    step->replicas[replica].state = State::kDeposited;
    step->replicas[replica].gradients = std::move(gradients);
    const auto ready =
        std::count_if(steps_.begin(), steps_.end(), [](const Step& candidate) {
          return AllIn(candidate, State::kDeposited);
        });
    *apply_now = ready > (pipelined_ ? 1 : 0);
  }

  // To be asked after each lookup: whether the update that was left pending
  // has now to be applied, all replicas having looked up the step after it.
  bool LookupsAreDone() {
    std::lock_guard<std::mutex> lock(mutex_);
    if (!pipelined_ || !Ready()) return false;
    const int64_t pending = Ready()->number;
    return std::all_of(next_dequeue_.begin(), next_dequeue_.end(),
                       [=](int64_t next) { return next > pending + 1; });
  }

  // Whether an update is ready to be applied.
  bool IsReady() {
    std::lock_guard<std::mutex> lock(mutex_);
    return Ready() != nullptr;
  }

  // Whether the next batch of `replica` is an evaluation.
  bool NextIsEvaluation(int replica) {
    std::lock_guard<std::mutex> lock(mutex_);
    const Step* next = Find(next_dequeue_[replica]);
    return next && !next->training;
  }

  // Takes out the step whose update is ready, if there is one.
  std::optional<Step> TakeReady() {
    std::optional<Step> step;
    TakeReady([](const Step&) { return true; }, &step);
    return step;
  }

  // The same, but leaves the step where `check` of it is false. Returns whether
  // a step was there.
  template <class Check>
  bool TakeReady(const Check& check, std::optional<Step>* step) {
    std::lock_guard<std::mutex> lock(mutex_);
    Step* ready = Ready();
    if (ready && check(*ready)) {
      *step = std::move(*ready);
      Remove((*step)->number);
    }
    return ready != nullptr;
  }

 private:
  using State = typename Part::State;

  template <class Predicate>
  Step* FindIf(Predicate predicate) {
    const auto step = std::find_if(steps_.begin(), steps_.end(), predicate);
    return step == steps_.end() ? nullptr : &*step;
  }

  Step* Find(int64_t number) {
    return FindIf([=](const Step& step) { return step.number == number; });
  }

  void Remove(int64_t number) {
    steps_.erase(
        std::remove_if(steps_.begin(), steps_.end(),
                       [=](const Step& step) { return step.number == number; }),
        steps_.end());
  }

  static bool AllIn(const Step& step, State state) {
    return std::all_of(step.replicas.begin(), step.replicas.end(),
                       [=](const Part& part) { return part.state == state; });
  }

  Step* Ready() {
    return FindIf([](const Step& step) {
      return step.training && AllIn(step, State::kDeposited);
    });
  }

  Step* OwedStep(int replica) {
    return FindIf([=](const Step& step) {
      return step.training && step.replicas[replica].state == State::kDequeued;
    });
  }

  Error CheckEnqueue(int replica, bool training) {
    if (next_enqueue_[replica] - next_dequeue_[replica] >= capacity_) {
      return "enqueue: the queue is full (" + std::to_string(capacity_) +
             " batches). Call dequeue once for each enqueue.";
    }
    Step* step = Find(next_enqueue_[replica]);
    if (step && step->training != training) {
      return "enqueue: the replicas disagree on `training` within one step. "
             "Pass the same value in every replica.";
    }
    return std::nullopt;
  }

  void Put(int replica, Batch batch, bool training) {
    const int64_t number = next_enqueue_[replica]++;
    Step* step = Find(number);
    if (!step) {
      steps_.push_back({number, training, std::vector<Part>(num_replicas())});
      step = &steps_.back();
    }
    step->replicas[replica].batch = std::move(batch);
    step->replicas[replica].state = State::kQueued;
  }

  // Whether updates stand out that forbid looking up `next`.
  Error CheckDebts(const Step& next, int replica) {
    for (const Step& step : steps_) {
      if (!step.training || step.number >= next.number) continue;
      if (next.training && step.replicas[replica].state == State::kDequeued) {
        return "dequeue: the training batch dequeued before still owes its "
               "gradients. Call apply_gradients first, or enqueue with "
               "training=False; after a step that failed call reset.";
      }
      if (step.replicas[replica].state == State::kDeposited &&
          !AllIn(step, State::kDeposited)) {
        return "dequeue: another replica has not applied its gradients of "
               "the step before. Put the loop over steps outside of "
               "strategy.run; after a step that failed call reset.";
      }
    }
    return std::nullopt;
  }

  std::string NothingOwed(int replica) {
    Step* next = Find(next_dequeue_[replica]);
    if (!last_was_training_[replica]) {
      return "apply_gradients: the batch was enqueued with training=False. "
             "Enqueue with training=True to train on it.";
    }
    if (next && next->training &&
        next->replicas[replica].state == State::kQueued) {
      return "apply_gradients: the enqueued batch was not dequeued. Call "
             "dequeue first.";
    }
    return "apply_gradients: no dequeued batch owes gradients; they can be "
           "applied once per dequeue.";
  }

  void Clear() {
    steps_.clear();
    failed_.reset();
    arrived_.clear();
    const int64_t next =
        *std::max_element(next_enqueue_.begin(), next_enqueue_.end());
    std::fill(next_enqueue_.begin(), next_enqueue_.end(), next);
    std::fill(next_dequeue_.begin(), next_dequeue_.end(), next);
  }

  bool HasArrived(int replica) const {
    return std::find(arrived_.begin(), arrived_.end(), replica) !=
           arrived_.end();
  }

  // Forgets the step whose input failed, and every step after it.
  void DiscardFailedStep() {
    if (!failed_) return;
    while (!steps_.empty() && steps_.back().number >= *failed_) {
      steps_.pop_back();
    }
    for (int64_t& next : next_enqueue_) next = std::min(next, *failed_);
    for (int64_t& next : next_dequeue_) next = std::min(next, *failed_);
    failed_.reset();
    arrived_.clear();
  }

  const int64_t capacity_;
  const bool pipelined_;
  std::mutex mutex_;
  std::deque<Step> steps_;             // by ascending number
  std::vector<int64_t> next_enqueue_;  // by replica: the number of a step
  std::vector<int64_t> next_dequeue_;
  std::vector<bool> last_was_training_;  // by replica: of the last dequeue
  std::optional<int64_t> failed_;        // a step given up
  std::vector<int> arrived_;             // replicas that have been at it
};

}  // namespace tpu_embedding

#endif  // TPU_EMBEDDING_OPS_CC_CORE_STEP_QUEUE_H_
