// The steps of one embedding: the batch that each replica is at, and the order
// of calls. A call that would deadlock a TPU is an error here.
//
//   a training batch:     queued -> dequeued -> gradients -> an update
//   an evaluation batch:  queued -> dequeued
//   a lookup past the queue:            gradients -> an update
//
// A step holds one part per replica. Once every replica has submitted its
// gradients, the step is an update: complete, with its own rates and number. An
// update is due at once, or with pipelining once it is one step old. No call
// waits.
//
// A step that failed in one replica is discarded in all. The queue learns of
// the failure from the failing op (Fail...), or when a replica starts another
// run (of strategy.run or of a tf.function) while it, or a replica after it,
// has its part in a step that others lack: replicas act in ascending order.
// Complete updates are never discarded, except by Reset.
//
// In a job of several processes each has a queue of one replica, and all queues
// are at the same step. There the exchanges between the processes decide what
// all of them discard (Left, BeginRun, BeginDequeue, Discard..., Refuse...).
//
// All methods are thread-safe. An error leaves the queue as it was, unless said
// otherwise.

#ifndef TPU_EMBEDDING_OPS_CC_CORE_STEP_QUEUE_H_
#define TPU_EMBEDDING_OPS_CC_CORE_STEP_QUEUE_H_

#include <algorithm>
#include <cstdint>
#include <deque>
#include <functional>
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
    Batch batch;
    Gradients gradients;
  };
  struct Update {
    int64_t number = 0;  // of updates before it, for stochastic rounding
    std::vector<Part> replicas;
  };
  // Counts an update that is complete; returns the number of updates before.
  using Count = std::function<int64_t()>;
  // Tells whether a batch can be looked up. It must not call the queue.
  using Accept = std::function<bool(const Batch&)>;
  // The `run` of calls outside of strategy.run, each with one replica's batch.
  static constexpr int64_t kOutside = 0;

  // Is told of batches past the queue whose gradients are discarded. It must
  // not call the queue.
  using GivenUp = std::function<void(const Batch&)>;

  // If `pipelined`, an update is left pending until it is one step old.
  StepQueue(
      int num_replicas, int64_t capacity, bool pipelined,
      GivenUp given_up = [](const Batch&) {})
      : capacity_(capacity),
        pipelined_(pipelined),
        given_up_(std::move(given_up)),
        next_enqueue_(num_replicas, 0),
        next_dequeue_(num_replicas, 0),
        next_submit_(num_replicas, 0),
        last_was_training_(num_replicas, true),
        enqueue_runs_(num_replicas),
        dequeue_runs_(num_replicas),
        lookup_runs_(num_replicas) {}

  int num_replicas() const { return next_enqueue_.size(); }

  // Queues one batch for every replica, or for none. `*apply_now` tells whether
  // updates are due, as they are before an evaluation.
  Error EnqueueAll(std::vector<Batch> batches, bool training, bool* apply_now) {
    std::lock_guard<std::mutex> lock(mutex_);
    DiscardFailedStep();
    // A step that only some replicas queued has failed in the others.
    if (!AllEqual(next_enqueue_)) DiscardFrom(Smallest(next_enqueue_));
    for (int r = 0; r < num_replicas(); ++r) {
      if (Error error = CheckEnqueue(r, training)) return error;
    }
    for (int r = 0; r < num_replicas(); ++r) {
      Put(r, std::move(batches[r]), training);
    }
    *apply_now = !training && SetDue(updates_.size());
    return std::nullopt;
  }

  // Queues the batch of one replica. `run` identifies the strategy.run that the
  // call is part of; it is kOutside for calls outside of any.
  Error Enqueue(int replica, Batch batch, bool training, int64_t run,
                bool* apply_now) {
    std::lock_guard<std::mutex> lock(mutex_);
    if (run == kOutside) {
      EndRun();
    } else if (failed_) {
      if (!HasArrived(replica)) {
        arrived_.push_back(replica);
        return "enqueue: this step was discarded because another replica's "
               "input failed its checks. Fix that input and run the step "
               "again.";
      }
      DiscardFailedStep();
    }
    if (IsNewRun(&enqueue_runs_, replica, run)) DiscardQueued(replica);
    if (Error error = CheckEnqueue(replica, training)) return error;
    Put(replica, std::move(batch), training);
    *apply_now = !training && SetDue(updates_.size());
    return std::nullopt;
  }

  // Notes that the input of `replica` for its next step failed its checks: the
  // batches that other replicas queue for that step are discarded. Outside of
  // runs each call is alone, and nothing is discarded.
  void FailEnqueue(int replica, int64_t run) {
    std::lock_guard<std::mutex> lock(mutex_);
    if (num_replicas() == 1 || run == kOutside) return;
    if (!failed_) {
      failed_ = next_enqueue_[replica];
      arrived_.clear();
      for (int r = 0; r < num_replicas(); ++r) {
        if (next_enqueue_[r] > *failed_) arrived_.push_back(r);
      }
    }
    if (!HasArrived(replica)) arrived_.push_back(replica);
  }

  // Hands out the next batch of `replica`, unless `accept` refuses it: then it
  // stays in the queue.
  Error Dequeue(int replica, int64_t run, const Accept& accept, Batch* batch) {
    std::lock_guard<std::mutex> lock(mutex_);
    if (IsNewRun(&dequeue_runs_, replica, run)) DiscardDequeued(replica);
    const Step* owed = OwedStep(replica);
    if (owed && owed->refused) Remove(owed->number);
    const int64_t number = next_dequeue_[replica];
    Step* step = Find(number);
    if (failed_ && number >= *failed_) {
      return "dequeue: this step was discarded because a replica's input "
             "failed its checks. Fix that input and run the step again.";
    }
    if (!step || step->replicas[replica].state != State::kQueued) {
      return "dequeue: no batch is enqueued. Call enqueue before dequeue, "
             "once for each dequeue.";
    }
    if (Error error = CheckOwedGradients(*step, replica)) return error;
    StepPart& part = step->replicas[replica];
    if (!accept(part.part.batch)) return std::nullopt;
    *batch = part.part.batch;
    part.state = step->training ? State::kDequeued : State::kDone;
    last_was_training_[replica] = step->training;
    ++next_dequeue_[replica];
    refused_ = false;
    if (dequeue_run_ == enqueue_run_) --excess_;
    if (!step->training && AllIn(*step, State::kDone)) Remove(number);
    return std::nullopt;
  }

  // Returns whether updates are due. Must be called after each dequeue and its
  // lookup. With pipelining the pending update is due once every replica has
  // looked up the training step after it.
  bool LookupsAreDone() {
    std::lock_guard<std::mutex> lock(mutex_);
    const bool looked_up =
        std::any_of(steps_.begin(), steps_.end(), [this](const Step& step) {
          return step.training &&
                 std::all_of(step.replicas.begin(), step.replicas.end(),
                             [](const StepPart& part) {
                               return part.state == State::kDequeued ||
                                      part.state == State::kSubmitted;
                             });
        });
    return looked_up && SetDue(updates_.size());
  }

  // Gets the batch whose gradients `replica` owes.
  Error Owed(int replica, Batch* batch) {
    std::lock_guard<std::mutex> lock(mutex_);
    Step* step = OwedStep(replica);
    if (!step) return NothingOwed(replica);
    *batch = step->replicas[replica].part.batch;
    return std::nullopt;
  }

  // Returns the batches, by replica, of the update that these gradients of
  // `replica` would complete; none if other replicas must come first.
  std::vector<Batch> CompletedByOwed(int replica) {
    std::lock_guard<std::mutex> lock(mutex_);
    const Step* step = OwedStep(replica);
    std::vector<Batch> batches;
    for (int r = 0; step && r < num_replicas(); ++r) {
      const StepPart& part = step->replicas[r];
      if (r != replica && part.state != State::kSubmitted) return {};
      batches.push_back(part.part.batch);
    }
    return batches;
  }

  // Does the same as CompletedByOwed for gradients of `batch` past the queue.
  std::vector<Batch> CompletedBy(int replica, const Batch& batch) {
    std::lock_guard<std::mutex> lock(mutex_);
    const size_t index = next_submit_[replica];
    std::vector<Batch> batches;
    for (int r = 0; r < num_replicas(); ++r) {
      const bool own = r == replica;
      if (!own && (index >= partial_.size() || !partial_[index][r])) return {};
      batches.push_back(own ? batch : partial_[index][r]->batch);
    }
    return batches;
  }

  // Takes the gradients that `replica` owes. `*apply_now` tells whether
  // updates are due.
  Error SubmitOwed(int replica, Gradients gradients, const Count& count,
                   bool* apply_now) {
    std::lock_guard<std::mutex> lock(mutex_);
    Step* step = OwedStep(replica);
    if (!step) return NothingOwed(replica);
    step->replicas[replica].state = State::kSubmitted;
    step->replicas[replica].part.gradients = std::move(gradients);
    *apply_now = false;
    if (!AllIn(*step, State::kSubmitted)) return std::nullopt;
    const int64_t number = step->number;
    std::vector<Part> parts;
    for (StepPart& part : step->replicas) parts.push_back(std::move(part.part));
    Remove(number);
    updates_.push_back({count(), std::move(parts)});
    // An evaluation batch that is queued already must see the update.
    const Step* next = Find(number + 1);
    const bool at_once = !pipelined_ || (next && !next->training);
    *apply_now = at_once && SetDue(updates_.size());
    return std::nullopt;
  }

  // Notes that the gradients of `replica` failed their checks. With several
  // replicas the step is lost; a single one still owes gradients and may retry.
  void FailOwed(int replica) {
    std::lock_guard<std::mutex> lock(mutex_);
    const Step* step = OwedStep(replica);
    if (!step || num_replicas() == 1) return;
    const int64_t number = step->number;
    std::vector<int> arrived;
    for (int r = 0; r < num_replicas(); ++r) {
      if (next_enqueue_[r] > number) arrived.push_back(r);
    }
    if (static_cast<int>(arrived.size()) == num_replicas()) {
      Discard(number);
      return;
    }
    // A replica has not reached the step yet: the step is discarded as if an
    // input had failed. Otherwise the replicas would be at different steps.
    Remove(number);
    failed_ = std::min(failed_.value_or(number), number);
    arrived_ = arrived;
  }

  // Returns, before a job queues a batch of `run`, how many of the newest
  // batches an earlier run abandoned in the queue: its lookup was refused, it
  // is `ended`, or it dequeues what it enqueues but has not yet done so.
  int64_t Left(int64_t run, int64_t ended) {
    std::lock_guard<std::mutex> lock(mutex_);
    if (enqueue_run_ == kOutside || enqueue_run_ == run) return 0;
    if (!dequeues_ && !refused_ && ended != enqueue_run_) return 0;
    const int64_t queued = next_enqueue_[0] - next_dequeue_[0];
    return std::clamp<int64_t>(excess_, 0, queued);
  }

  // Discards, before a job queues a batch of `run`, the newest `left` batches.
  // `dequeues` says if the run is known to dequeue what it enqueues.
  void BeginRun(int64_t run, bool dequeues, int64_t left) {
    std::lock_guard<std::mutex> lock(mutex_);
    if (left > 0) DiscardFrom(next_enqueue_[0] - left);
    dequeues_ = dequeues;
    if (run == enqueue_run_) return;
    enqueue_run_ = run;
    excess_ = 0;
    refused_ = false;
  }

  // Discards, before a job looks up a training batch, gradients that an earlier
  // run owes.
  void BeginDequeue(int64_t run) {
    std::lock_guard<std::mutex> lock(mutex_);
    const bool is_new = run != dequeue_run_ && run != kOutside;
    const Step* owed = OwedStep(0);
    const Step* next = Find(next_dequeue_[0]);
    if (is_new && dequeue_run_ != kOutside && owed && next && next->training) {
      Remove(owed->number);
    }
    dequeue_run_ = run;
  }

  // Discards the next step: another process of the job has left it.
  void DiscardNext() {
    std::lock_guard<std::mutex> lock(mutex_);
    if (!Find(next_dequeue_[0])) return;
    Discard(next_dequeue_[0]);
    --excess_;
  }

  // Discards the step that owes its gradients: another process has left it.
  void DiscardOwed() {
    std::lock_guard<std::mutex> lock(mutex_);
    if (const Step* step = OwedStep(0)) Remove(step->number);
  }

  // Notes that a process of the job refused the next lookup. The lookup may be
  // repeated, unless the next run begins with another batch.
  void RefuseNext() {
    std::lock_guard<std::mutex> lock(mutex_);
    refused_ = Find(next_dequeue_[0]) != nullptr;
  }

  // Notes that a process of the job refused the gradients that are owed. Others
  // may be submitted instead; dequeuing the next step discards the refused one.
  void RefuseOwed() {
    std::lock_guard<std::mutex> lock(mutex_);
    if (Step* step = OwedStep(0)) step->refused = true;
  }

  // Begins a lookup past the queue, whose gradients may come by Submit. With
  // `*epoch` Submit recognizes late gradients of a discarded step.
  Error BeginLookup(int replica, int64_t run, int64_t* epoch) {
    std::lock_guard<std::mutex> lock(mutex_);
    const bool new_run = IsNewRun(&lookup_runs_, replica, run);
    *epoch = epoch_;
    for (const Submissions& step : partial_) {
      for (int r = replica; r < num_replicas(); ++r) {
        if (!step[r]) continue;
        DiscardSubmissions();
        *epoch = epoch_;
        if (new_run) return std::nullopt;
        return "Only some replicas applied gradients of the previous step, so "
               "it was discarded. Put the loop over steps outside of "
               "strategy.run, and in each step look up all batches before "
               "gradients are applied.";
      }
    }
    return std::nullopt;
  }

  // Notes that a lookup or gradients past the queue failed their checks: the
  // step is discarded in every replica.
  void FailLookup() {
    std::lock_guard<std::mutex> lock(mutex_);
    if (num_replicas() > 1) DiscardSubmissions();
  }

  // Takes a batch with its gradients. The n-th submissions of all replicas make
  // up one update. With pipelining the newest update stays pending and earlier
  // ones are due. `epoch` is from BeginLookup, or empty if unknown.
  Error Submit(int replica, Batch batch, Gradients gradients,
               std::optional<int64_t> epoch, const Count& count,
               bool* apply_now) {
    std::lock_guard<std::mutex> lock(mutex_);
    *apply_now = false;
    if (epoch && *epoch != epoch_) {
      return "The gradients belong to a step that was discarded: it failed in "
             "some replica, or reset was called after its lookup. Run the step "
             "again.";
    }
    const size_t index = next_submit_[replica];
    if (index == partial_.size()) {
      if (replica > 0) {
        DiscardSubmissions();
        return "The gradients belong to a step for which the previous replica "
               "has applied none. Put the loop over steps outside of "
               "strategy.run.";
      }
      partial_.emplace_back(num_replicas());
    }
    Submissions& step = partial_[index];
    step[replica] = Part{std::move(batch), std::move(gradients)};
    ++next_submit_[replica];
    if (!std::all_of(step.begin(), step.end(),
                     [](const std::optional<Part>& part) { return !!part; })) {
      return std::nullopt;
    }
    std::vector<Part> parts;
    for (std::optional<Part>& part : step) parts.push_back(std::move(*part));
    partial_.pop_front();  // Each replica submits in order: it is the first.
    for (size_t& next : next_submit_) --next;
    updates_.push_back({count(), std::move(parts)});
    *apply_now = SetDue(updates_.size() - (pipelined_ ? 1 : 0));
    return std::nullopt;
  }

  // Makes every complete update due. Returns whether there is one.
  bool Flush() {
    std::lock_guard<std::mutex> lock(mutex_);
    return SetDue(updates_.size());
  }

  // Discards all batches and gradients: those that are queued, owed or pending,
  // and lookups whose gradients have not come. Returns the number of complete
  // updates among them.
  int64_t Reset() {
    std::lock_guard<std::mutex> lock(mutex_);
    steps_.clear();
    failed_.reset();
    arrived_.clear();
    const int64_t next =
        *std::max_element(next_enqueue_.begin(), next_enqueue_.end());
    std::fill(next_enqueue_.begin(), next_enqueue_.end(), next);
    std::fill(next_dequeue_.begin(), next_dequeue_.end(), next);
    std::fill(last_was_training_.begin(), last_was_training_.end(), true);
    DiscardSubmissions();
    enqueue_run_ = dequeue_run_ = kOutside;
    excess_ = 0;
    refused_ = false;
    const int64_t discarded = updates_.size();
    updates_.clear();
    due_ = 0;
    return discarded;
  }

  // Returns how many steps some replica has enqueued and not dequeued yet.
  int64_t Depth() {
    std::lock_guard<std::mutex> lock(mutex_);
    return std::count_if(steps_.begin(), steps_.end(), [](const Step& step) {
      return std::any_of(
          step.replicas.begin(), step.replicas.end(),
          [](const StepPart& part) { return part.state == State::kQueued; });
    });
  }

  // Returns how many complete updates are not applied yet.
  int64_t Pending() {
    std::lock_guard<std::mutex> lock(mutex_);
    return updates_.size();
  }

  // Takes out the oldest update that is due, if there is one.
  std::optional<Update> TakeDue() {
    std::lock_guard<std::mutex> lock(mutex_);
    if (due_ == 0) return std::nullopt;
    std::optional<Update> update = std::move(updates_.front());
    updates_.pop_front();
    --due_;
    return update;
  }

 private:
  enum class State { kAwaited, kQueued, kDequeued, kSubmitted, kDone };
  struct StepPart {
    State state = State::kAwaited;
    Part part;
  };
  // A step of the queue, until it is an update.
  struct Step {
    int64_t number = 0;
    bool training = false;
    std::vector<StepPart> replicas;
    bool refused = false;  // some process refused its gradients
  };
  // A step past the queue, until it is an update: what each replica submitted.
  using Submissions = std::vector<std::optional<Part>>;
  using Runs = std::vector<std::optional<int64_t>>;

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
    return std::all_of(
        step.replicas.begin(), step.replicas.end(),
        [=](const StepPart& part) { return part.state == state; });
  }

  static bool AllEqual(const std::vector<int64_t>& numbers) {
    return std::all_of(numbers.begin(), numbers.end(),
                       [&](int64_t n) { return n == numbers[0]; });
  }

  static int64_t Smallest(const std::vector<int64_t>& numbers) {
    return *std::min_element(numbers.begin(), numbers.end());
  }

  // Makes the oldest `count` updates due. Returns whether any is.
  bool SetDue(size_t count) {
    due_ = std::max(due_, count);
    return due_ > 0;
  }

  // Discards what a failed run left, before a batch outside of runs is queued.
  void EndRun() {
    const auto in_run = [](const std::optional<int64_t>& run) {
      return run.value_or(kOutside) != kOutside;
    };
    DiscardFailedStep();
    if (std::none_of(enqueue_runs_.begin(), enqueue_runs_.end(), in_run)) {
      return;
    }
    if (!AllEqual(next_enqueue_)) DiscardFrom(Smallest(next_enqueue_));
    std::fill(enqueue_runs_.begin(), enqueue_runs_.end(), kOutside);
  }

  // Records `run`. Returns whether the last call of `replica` was in another.
  bool IsNewRun(Runs* runs, int replica, int64_t run) const {
    std::optional<int64_t>& last = (*runs)[replica];
    const bool is_new = num_replicas() > 1 && last && *last != run;
    last = run;
    return is_new;
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
      steps_.push_back(
          {number, training, std::vector<StepPart>(num_replicas())});
      step = &steps_.back();
    }
    step->replicas[replica].part.batch = std::move(batch);
    step->replicas[replica].state = State::kQueued;
    ++excess_;
  }

  // Fails if gradients of an earlier step must come before `next` is looked up.
  Error CheckOwedGradients(const Step& next, int replica) {
    for (const Step& step : steps_) {
      if (!step.training || step.number >= next.number) continue;
      const State state = step.replicas[replica].state;
      if (next.training && state == State::kDequeued) {
        return "dequeue: the training batch dequeued before still owes its "
               "gradients. Call apply_gradients first, or enqueue with "
               "training=False; after a step that failed call flush and reset.";
      }
      if (state == State::kSubmitted) {
        return "dequeue: another replica has not applied its gradients of the "
               "previous step. Put the loop over steps outside of "
               "strategy.run; after a step that failed call flush and reset.";
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

  bool HasArrived(int replica) const {
    return std::find(arrived_.begin(), arrived_.end(), replica) !=
           arrived_.end();
  }

  // Discards the step whose input failed, and every step after it.
  void DiscardFailedStep() {
    if (failed_) DiscardFrom(*failed_);
    failed_.reset();
    arrived_.clear();
  }

  void DiscardFrom(int64_t number) {
    while (!steps_.empty() && steps_.back().number >= number) {
      steps_.pop_back();
    }
    for (int64_t& next : next_enqueue_) next = std::min(next, number);
    for (int64_t& next : next_dequeue_) next = std::min(next, number);
  }

  // Discards the steps that `replica`, or one after it, has queued in an
  // earlier run and that another replica has not.
  void DiscardQueued(int replica) {
    for (const Step& step : steps_) {
      bool queued = false;
      bool awaited = false;
      for (int r = 0; r < num_replicas(); ++r) {
        const bool here = step.replicas[r].state != State::kAwaited;
        queued |= here && r >= replica;
        awaited |= !here;
      }
      if (queued && awaited) {
        DiscardFrom(step.number);
        return;
      }
    }
  }

  // Discards the steps that `replica`, or one after it, has dequeued in an
  // earlier run and that are not at the same state in all replicas.
  void DiscardDequeued(int replica) {
    std::vector<int64_t> numbers;
    for (const Step& step : steps_) {
      bool begun = false;
      for (int r = replica; r < num_replicas(); ++r) {
        begun |= step.replicas[r].state > State::kQueued;
      }
      if (begun && !AllIn(step, step.replicas[0].state)) {
        numbers.push_back(step.number);
      }
    }
    for (const int64_t number : numbers) Discard(number);
  }

  // Discards a step that every replica has queued. Replicas that have not yet
  // dequeued it skip it.
  void Discard(int64_t number) {
    Remove(number);
    for (int64_t& next : next_dequeue_) next = std::max(next, number + 1);
    for (int64_t& next : next_enqueue_) next = std::max(next, number + 1);
  }

  void DiscardSubmissions() {
    for (const Submissions& step : partial_) {
      for (const std::optional<Part>& part : step) {
        if (part) given_up_(part->batch);
      }
    }
    partial_.clear();
    std::fill(next_submit_.begin(), next_submit_.end(), 0);
    ++epoch_;
  }

  const int64_t capacity_;
  const bool pipelined_;
  const GivenUp given_up_;
  std::mutex mutex_;
  std::deque<Step> steps_;             // by ascending number
  std::vector<int64_t> next_enqueue_;  // by replica: the number of a step
  std::vector<int64_t> next_dequeue_;
  std::deque<Submissions> partial_;
  std::vector<size_t> next_submit_;      // by replica: an index into partial_
  std::deque<Update> updates_;           // complete, the oldest first
  size_t due_ = 0;                       // how many of them are to be applied
  int64_t epoch_ = 0;                    // how often submissions were discarded
  std::vector<bool> last_was_training_;  // by replica: of the last dequeue
  // The run of the last enqueue, dequeue and lookup of each replica.
  Runs enqueue_runs_, dequeue_runs_, lookup_runs_;
  std::optional<int64_t> failed_;  // a discarded step
  std::vector<int> arrived_;       // replicas that have begun it
  // For a job: the run that enqueued last, how many more batches it has
  // enqueued than dequeued, whether it dequeues them, and whether its lookup
  // was refused.
  int64_t enqueue_run_ = kOutside;
  int64_t excess_ = 0;
  bool dequeues_ = false;
  bool refused_ = false;
  int64_t dequeue_run_ = kOutside;  // the run that dequeued last
};

}  // namespace tpu_embedding

#endif  // TPU_EMBEDDING_OPS_CC_CORE_STEP_QUEUE_H_
