// Every transition of the step queue, and every refusal by its first words.

#include "core/step_queue.h"

#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "check.h"

namespace tpu_embedding {
namespace {

using Queue = StepQueue<int, int>;  // batches and gradients are numbers here

constexpr int64_t kCapacity = 4;

void CheckOk(const Error& error) { CHECK_EQ(error.value_or(""), ""); }

void CheckRefused(const Error& error, const std::string& words) {
  CHECK_TRUE(error);
  CHECK_EQ(error->substr(0, words.size()), words);
}

// Each call below is of the same run unless it says otherwise.
constexpr int64_t kRun = 1;

int64_t NoCount() { return 0; }

bool Accept(int) { return true; }

int Dequeue(Queue* queue, int replica, int64_t run = kRun) {
  int batch = -1;
  CheckOk(queue->Dequeue(replica, run, Accept, &batch));
  return batch;
}

Error Enqueue(Queue* queue, int replica, int batch, bool training = true,
              int64_t run = kRun) {
  bool apply_now = false;
  return queue->Enqueue(replica, batch, training, run, &apply_now);
}

Error EnqueueAll(Queue* queue, std::vector<int> batches, bool training) {
  bool apply_now = false;
  return queue->EnqueueAll(std::move(batches), training, &apply_now);
}

bool SubmitOwed(Queue* queue, int replica, int gradients) {
  bool apply_now = false;
  CheckOk(queue->SubmitOwed(replica, gradients, NoCount, &apply_now));
  return apply_now;
}

void CheckSubmitOwedRefused(Queue* queue, int replica,
                            const std::string& words) {
  bool apply_now = false;
  CheckRefused(queue->SubmitOwed(replica, 1, NoCount, &apply_now), words);
}

int64_t Begin(Queue* queue, int replica, int64_t run = kRun) {
  int64_t epoch = -1;
  CheckOk(queue->BeginLookup(replica, run, &epoch));
  return epoch;
}

bool Submit(Queue* queue, int replica, int batch,
            std::optional<int64_t> epoch = std::nullopt) {
  bool apply_now = false;
  CheckOk(queue->Submit(replica, batch, batch, epoch, NoCount, &apply_now));
  return apply_now;
}

void TestTrainingStep() {
  Queue queue(1, kCapacity, /*pipelined=*/false);
  int batch = 0;
  CheckRefused(queue.Dequeue(0, kRun, Accept, &batch),
               "dequeue: no batch is enqueued");
  CheckOk(EnqueueAll(&queue, {7}, true));
  CheckSubmitOwedRefused(
      &queue, 0, "apply_gradients: the enqueued batch was not dequeued");
  CHECK_EQ(Dequeue(&queue, 0), 7);
  CheckOk(queue.Owed(0, &batch));
  CHECK_EQ(batch, 7);
  CHECK_TRUE(!queue.Flush());
  CHECK_TRUE(SubmitOwed(&queue, 0, 5));
  CheckSubmitOwedRefused(&queue, 0,
                         "apply_gradients: no dequeued batch owes gradients");
  const auto update = queue.TakeDue();
  CHECK_TRUE(update);
  CHECK_EQ(update->replicas[0].batch, 7);
  CHECK_EQ(update->replicas[0].gradients, 5);
  CHECK_TRUE(!queue.TakeDue());
}

void TestOrderAndDebts() {
  Queue queue(1, kCapacity, /*pipelined=*/false);
  CheckOk(EnqueueAll(&queue, {1}, true));
  CheckOk(EnqueueAll(&queue, {2}, false));
  CheckOk(EnqueueAll(&queue, {3}, true));
  CHECK_EQ(Dequeue(&queue, 0), 1);
  CHECK_EQ(Dequeue(&queue, 0), 2);  // an evaluation may come between
  int batch = 0;
  // For one replica another run does not give a step up.
  CheckRefused(queue.Dequeue(0, kRun + 1, Accept, &batch),
               "dequeue: the training batch dequeued before still owes");
  CHECK_TRUE(SubmitOwed(&queue, 0, 1));
  queue.TakeDue();
  CHECK_EQ(Dequeue(&queue, 0), 3);
  CHECK_TRUE(SubmitOwed(&queue, 0, 1));
  queue.TakeDue();
  CheckOk(EnqueueAll(&queue, {4}, false));
  CHECK_EQ(Dequeue(&queue, 0), 4);
  CheckSubmitOwedRefused(
      &queue, 0, "apply_gradients: the batch was enqueued with training=False");
}

void TestCapacity() {
  Queue queue(2, kCapacity, /*pipelined=*/false);
  for (int i = 0; i < kCapacity; ++i) {
    CheckOk(EnqueueAll(&queue, {i, i}, false));
  }
  CheckRefused(EnqueueAll(&queue, {9, 9}, false),
               "enqueue: the queue is full (4");
  CheckRefused(Enqueue(&queue, 1, 9, false), "enqueue: the queue is full (4");
  CHECK_EQ(Dequeue(&queue, 0), 0);
  // Replica 1 has no room: nothing enters for replica 0 either.
  CheckRefused(EnqueueAll(&queue, {9, 9}, false),
               "enqueue: the queue is full (4");
  CHECK_EQ(Dequeue(&queue, 1), 0);
  CheckOk(EnqueueAll(&queue, {9, 9}, false));
}

void TestReplicas() {
  Queue queue(3, kCapacity, /*pipelined=*/false);
  CheckOk(EnqueueAll(&queue, {0, 1, 2}, true));
  CheckOk(EnqueueAll(&queue, {3, 4, 5}, true));
  for (int r : {2, 0, 1}) CHECK_EQ(Dequeue(&queue, r), r);
  CHECK_TRUE(!SubmitOwed(&queue, 1, 11));
  CHECK_TRUE(!SubmitOwed(&queue, 0, 10));
  int batch = 0;
  CheckRefused(queue.Dequeue(0, kRun, Accept, &batch),
               "dequeue: another replica has not applied its gradients");
  CHECK_TRUE(SubmitOwed(&queue, 2, 12));
  const auto update = queue.TakeDue();
  for (int r = 0; r < 3; ++r) {
    CHECK_EQ(update->replicas[r].batch, r);
    CHECK_EQ(update->replicas[r].gradients, 10 + r);
  }
  CHECK_EQ(Dequeue(&queue, 0), 3);
  CheckOk(Enqueue(&queue, 0, 6));
  CheckRefused(Enqueue(&queue, 1, 7, false), "enqueue: the replicas disagree");
}

void TestPipelining() {
  Queue queue(2, kCapacity, /*pipelined=*/true);
  int64_t updates = 0;
  const auto count = [&] { return updates++; };
  bool apply_now = false;
  for (int step = 0; step < 3; ++step) {
    CheckOk(EnqueueAll(&queue, {step, step}, true));
    CHECK_EQ(Dequeue(&queue, 0), step);
    CHECK_TRUE(!queue.LookupsAreDone());  // replica 1 has not looked up yet
    CHECK_EQ(Dequeue(&queue, 1), step);
    CHECK_EQ(queue.LookupsAreDone(), step > 0);
    if (step > 0) CHECK_EQ(queue.TakeDue()->number, step - 1);
    for (int r : {0, 1}) {
      CheckOk(queue.SubmitOwed(r, 0, count, &apply_now));
      CHECK_TRUE(!apply_now);
    }
    CHECK_TRUE(!queue.TakeDue());  // pending, not due
  }
  // An evaluation needs the pending update, whether it comes after or before.
  CheckOk(queue.EnqueueAll({9, 9}, false, &apply_now));
  CHECK_TRUE(apply_now);
  CHECK_EQ(queue.TakeDue()->number, 2);
  for (int r : {0, 1}) CHECK_EQ(Dequeue(&queue, r), 9);
  CheckOk(EnqueueAll(&queue, {3, 3}, true));
  CheckOk(queue.EnqueueAll({9, 9}, false, &apply_now));
  CHECK_TRUE(!apply_now);
  for (int r : {0, 1}) Dequeue(&queue, r);
  CheckOk(queue.SubmitOwed(0, 0, count, &apply_now));
  CheckOk(queue.SubmitOwed(1, 0, count, &apply_now));
  CHECK_TRUE(apply_now);
  CHECK_EQ(queue.TakeDue()->number, 3);
  // Discarded updates are counted.
  for (int r : {0, 1}) CHECK_EQ(Dequeue(&queue, r), 9);
  CheckOk(EnqueueAll(&queue, {4, 4}, true));
  for (int r : {0, 1}) Dequeue(&queue, r);
  for (int r : {0, 1}) SubmitOwed(&queue, r, 0);
  CHECK_EQ(queue.Reset(), 1);
  CHECK_EQ(queue.Reset(), 0);
  CHECK_TRUE(!queue.Flush());
}

void TestFailedInput() {
  Queue queue(3, kCapacity, /*pipelined=*/false);
  CheckOk(Enqueue(&queue, 0, 1));
  queue.FailEnqueue(1, kRun);
  int batch = 0;
  CheckRefused(queue.Dequeue(0, kRun, Accept, &batch),
               "dequeue: this step was discarded");
  // The last replica of the same step learns of it, and leaves nothing behind.
  CheckRefused(Enqueue(&queue, 2, 1), "enqueue: this step was discarded");
  for (int r = 0; r < 3; ++r) CheckOk(Enqueue(&queue, r, 10 + r));
  for (int r = 0; r < 3; ++r) CHECK_EQ(Dequeue(&queue, r), 10 + r);
  // A step before the failed one is kept; the failed one is discarded by a
  // call for all replicas too.
  queue.FailEnqueue(0, kRun);
  CheckOk(EnqueueAll(&queue, {20, 21, 22}, true));
  for (int r = 0; r < 3; ++r) SubmitOwed(&queue, r, r);
  CHECK_EQ(queue.TakeDue()->replicas[2].batch, 12);
  for (int r = 0; r < 3; ++r) CHECK_EQ(Dequeue(&queue, r), 20 + r);
}

void TestFailedGradients() {
  Queue one(1, kCapacity, /*pipelined=*/false);
  CheckOk(EnqueueAll(&one, {1}, true));
  Dequeue(&one, 0);
  one.FailOwed(0);
  CHECK_TRUE(SubmitOwed(&one, 0, 1));  // a single replica may try again

  Queue two(2, kCapacity, /*pipelined=*/false);
  CheckOk(EnqueueAll(&two, {1, 1}, true));
  Dequeue(&two, 0);
  Dequeue(&two, 1);
  SubmitOwed(&two, 0, 1);
  two.FailOwed(1);  // among several the step is lost
  CHECK_TRUE(!two.Flush());
  CheckOk(EnqueueAll(&two, {2, 3}, true));
  CHECK_EQ(Dequeue(&two, 0), 2);
  two.FailOwed(0);  // replica 1 has not dequeued its batch: it is lost too
  CheckOk(EnqueueAll(&two, {4, 5}, true));
  CHECK_EQ(Dequeue(&two, 0), 4);
  CHECK_EQ(Dequeue(&two, 1), 5);
  SubmitOwed(&two, 0, 1);
  CHECK_TRUE(SubmitOwed(&two, 1, 1));
  two.TakeDue();
  CheckOk(Enqueue(&two, 0, 6));
  CHECK_EQ(Dequeue(&two, 0), 6);
  two.FailOwed(0);  // replica 1 has not even enqueued
  CheckRefused(Enqueue(&two, 1, 7), "enqueue: this step was discarded");
  CheckOk(EnqueueAll(&two, {8, 9}, true));
  CHECK_EQ(Dequeue(&two, 0), 8);
  CHECK_EQ(Dequeue(&two, 1), 9);
}

// Steps that fail without a word to the queue, in the code of the user.
// Of a job of processes, each with one replica.
void TestRefusedInAnotherProcess() {
  Queue queue(1, kCapacity, false);
  for (int batch = 1; batch < 4; ++batch) {
    CheckOk(Enqueue(&queue, 0, batch));
  }
  CHECK_EQ(Dequeue(&queue, 0), 1);
  queue.RefuseOwed();
  CHECK_TRUE(SubmitOwed(&queue, 0, 1));  // Others, of the same step.
  CHECK_EQ(Dequeue(&queue, 0), 2);
  queue.RefuseOwed();
  CHECK_EQ(Dequeue(&queue, 0), 3);
  CHECK_TRUE(SubmitOwed(&queue, 0, 3));
  CHECK_EQ(queue.Pending(), 2);  // Not the second.
}

// A batch of `run`, as a process of a job queues one.
void EnqueueInJob(Queue* queue, int batch, int64_t run, bool dequeues = true,
                  int64_t ended = Queue::kOutside) {
  queue->BeginRun(run, dequeues, queue->Left(run, ended));
  CheckOk(EnqueueAll(queue, {batch}, true));
}

int DequeueInJob(Queue* queue, int64_t run) {
  queue->BeginDequeue(run);
  return Dequeue(queue, 0, Queue::kOutside);
}

void TestStepsThatAJobLeaves() {
  Queue queue(1, kCapacity, /*pipelined=*/true);
  // A run that does not dequeue enqueues ahead; one that does leaves a batch.
  EnqueueInJob(&queue, 1, 1, /*dequeues=*/false);
  EnqueueInJob(&queue, 2, 2);
  CHECK_EQ(queue.Left(2, Queue::kOutside), 0);
  CHECK_EQ(queue.Left(3, Queue::kOutside), 1);
  EnqueueInJob(&queue, 3, 3);
  CHECK_EQ(DequeueInJob(&queue, 3), 1);
  SubmitOwed(&queue, 0, 1);
  // One batch for each dequeue: nothing is left, also by the run that ended.
  EnqueueInJob(&queue, 4, 4);
  CHECK_EQ(DequeueInJob(&queue, 4), 3);
  // Another run's training batch discards the gradients that are owed.
  EnqueueInJob(&queue, 5, 5);
  CHECK_EQ(DequeueInJob(&queue, 5), 4);
  SubmitOwed(&queue, 0, 4);
  CHECK_EQ(queue.Pending(), 2);
  // Of a run that an exception ended, and of one whose lookup was refused.
  queue.Reset();
  EnqueueInJob(&queue, 6, 6, /*dequeues=*/false);
  EnqueueInJob(&queue, 7, 7, /*dequeues=*/false, /*ended=*/6);
  queue.RefuseNext();
  CHECK_EQ(queue.Left(7, Queue::kOutside), 0);
  EnqueueInJob(&queue, 8, 8, /*dequeues=*/false);
  queue.RefuseNext();
  CHECK_EQ(DequeueInJob(&queue, 9), 8);  // Repeated.
  queue.DiscardOwed();
  // Another process has left the step that is looked up.
  EnqueueInJob(&queue, 9, 9);
  queue.DiscardNext();
  EnqueueInJob(&queue, 10, 10);
  CHECK_EQ(DequeueInJob(&queue, 10), 10);
  // Outside of runs nothing is left.
  EnqueueInJob(&queue, 11, Queue::kOutside);
  EnqueueInJob(&queue, 12, 12);
  queue.DiscardOwed();
  CHECK_EQ(DequeueInJob(&queue, 12), 11);
}

void TestAnotherRun() {
  Queue queue(2, kCapacity, /*pipelined=*/true);
  // Replica 1 did not enqueue in run 1; in one run a replica may queue ahead.
  CheckOk(Enqueue(&queue, 0, 1, true, 1));
  for (int r : {0, 1}) {
    CheckOk(Enqueue(&queue, r, 2, true, 2));
    CheckOk(Enqueue(&queue, r, 3, true, 2));
  }
  // Replica 1 fails before its dequeue, then after it.
  CHECK_EQ(Dequeue(&queue, 0, 2), 2);
  SubmitOwed(&queue, 0, 1);
  CHECK_EQ(Dequeue(&queue, 0, 3), 3);
  CHECK_EQ(Dequeue(&queue, 1, 3), 3);
  SubmitOwed(&queue, 0, 1);
  CheckOk(EnqueueAll(&queue, {4, 5}, true));
  CHECK_EQ(Dequeue(&queue, 0, 4), 4);
  CHECK_EQ(Dequeue(&queue, 1, 4), 5);
  SubmitOwed(&queue, 0, 40);
  CheckSubmitOwedRefused(&queue, 0, "apply_gradients: no dequeued batch");
  SubmitOwed(&queue, 1, 50);
  // The pending update outlives a step that is discarded.
  CheckOk(EnqueueAll(&queue, {6, 7}, true));
  CHECK_EQ(Dequeue(&queue, 0, 5), 6);
  CHECK_TRUE(!queue.LookupsAreDone());
  CheckOk(EnqueueAll(&queue, {8, 9}, true));
  CHECK_EQ(Dequeue(&queue, 0, 6), 8);
  CHECK_TRUE(!queue.LookupsAreDone());
  CHECK_EQ(Dequeue(&queue, 1, 6), 9);
  CHECK_TRUE(queue.LookupsAreDone());
  const auto update = queue.TakeDue();
  CHECK_EQ(update->replicas[0].gradients, 40);
  CHECK_EQ(update->replicas[1].gradients, 50);
  CHECK_TRUE(!queue.TakeDue());
}

// A batch that cannot be looked up stays where it is.
void TestRefusedByTheCaller() {
  Queue queue(1, kCapacity, /*pipelined=*/false);
  for (int batch : {1, 2}) CheckOk(Enqueue(&queue, 0, batch));
  int batch = -1;
  const auto refuse = [](int asked) {
    CHECK_EQ(asked, 1);
    return false;
  };
  for (int i = 0; i < 2; ++i) {
    CheckOk(queue.Dequeue(0, kRun, refuse, &batch));
    CHECK_EQ(batch, -1);
    CheckSubmitOwedRefused(&queue, 0, "apply_gradients: the enqueued batch");
  }
  CHECK_EQ(Dequeue(&queue, 0), 1);
  CHECK_TRUE(SubmitOwed(&queue, 0, 1));
  CHECK_EQ(Dequeue(&queue, 0), 2);
}

// Outside of runs replicas come one by one, in any order.
void TestOutsideOfRuns() {
  Queue queue(2, kCapacity, /*pipelined=*/false);
  const int64_t outside = Queue::kOutside;
  // What a failed run left is discarded, once.
  CheckOk(Enqueue(&queue, 0, 9, true, 1));
  for (int r : {1, 1, 0, 0, 0, 1}) {
    CheckOk(Enqueue(&queue, r, r, true, outside));
    queue.FailEnqueue(1 - r, outside);  // A refused call changes nothing.
  }
  for (int64_t run : {2, 3, 4}) {
    for (int r : {0, 1}) {
      CHECK_EQ(Dequeue(&queue, r, run), r);
      SubmitOwed(&queue, r, 1);
    }
  }
  // Here the failed run said so itself.
  CheckOk(Enqueue(&queue, 0, 9, true, 5));
  queue.FailEnqueue(1, 5);
  for (int r : {1, 0}) CheckOk(Enqueue(&queue, r, r, true, outside));
  for (int r : {0, 1}) CHECK_EQ(Dequeue(&queue, r, 6), r);
}

void TestReset() {
  Queue queue(1, kCapacity, /*pipelined=*/true);
  bool apply_now = false;
  Submit(&queue, 0, 1, Begin(&queue, 0));
  const int64_t late = Begin(&queue, 0);
  CHECK_EQ(queue.Reset(), 1);
  CheckRefused(queue.Submit(0, 2, 2, late, NoCount, &apply_now),
               "The gradients belong to a step that was discarded");
  CHECK_EQ(queue.Reset(), 0);
  Submit(&queue, 0, 3, Begin(&queue, 0));
  CHECK_TRUE(queue.Flush());
  CHECK_EQ(queue.TakeDue()->replicas[0].batch, 3);
}

void TestSubmissions() {
  Queue queue(2, kCapacity, /*pipelined=*/false);
  bool apply_now = false;
  // Two lookups of a step, then their gradients, replica by replica.
  for (int r : {0, 1}) {
    const int64_t first = Begin(&queue, r);
    const int64_t second = Begin(&queue, r);
    CHECK_EQ(Submit(&queue, r, 10 + r, first), r == 1);
    CHECK_EQ(Submit(&queue, r, 20 + r, second), r == 1);
  }
  CHECK_EQ(queue.TakeDue()->replicas[1].batch, 11);
  CHECK_EQ(queue.TakeDue()->replicas[0].batch, 20);
  // A loop inside of strategy.run is refused, and leaves nothing behind.
  int64_t epoch = Begin(&queue, 0);
  Submit(&queue, 0, 1, epoch);
  CheckRefused(queue.BeginLookup(0, kRun, &epoch),
               "Only some replicas applied");
  epoch = Begin(&queue, 0);
  Submit(&queue, 0, 2, epoch);
  CHECK_TRUE(Submit(&queue, 1, 3, Begin(&queue, 1)));
  CHECK_EQ(queue.TakeDue()->replicas[0].batch, 2);
  // So is one whose runs cannot be told apart, at the latest by replica 1.
  for (int64_t run : {10, 11}) {
    Submit(&queue, 0, 4, Begin(&queue, 0, run));
  }
  CHECK_TRUE(Submit(&queue, 1, 4, Begin(&queue, 1, 12)));
  queue.TakeDue();
  epoch = Begin(&queue, 1, 13);
  CheckRefused(queue.Submit(1, 4, 4, epoch, NoCount, &apply_now),
               "The gradients belong to a step for which the previous");
}

void TestFailedSubmissions() {
  Queue queue(2, kCapacity, /*pipelined=*/true);
  bool apply_now = false;
  for (int r : {0, 1}) Submit(&queue, r, 1, Begin(&queue, r, 1));
  // Replica 1 fails and says so: its part and that of replica 0 are discarded.
  Submit(&queue, 0, 2, Begin(&queue, 0, 2));
  int64_t late = Begin(&queue, 1, 2);
  queue.FailLookup();
  CheckRefused(queue.Submit(1, 2, 2, late, NoCount, &apply_now),
               "The gradients belong to a step that was discarded");
  // It fails without a word, and its gradients come too late.
  Submit(&queue, 0, 3, Begin(&queue, 0, 3));
  late = Begin(&queue, 1, 3);
  Submit(&queue, 0, 4, Begin(&queue, 0, 4));
  CheckRefused(queue.Submit(1, 3, 3, late, NoCount, &apply_now),
               "The gradients belong to a step that was discarded");
  // What was complete stays pending, and is due when the next step is.
  CHECK_TRUE(!queue.TakeDue());
  CHECK_TRUE(Submit(&queue, 1, 4, Begin(&queue, 1, 4)));
  CHECK_EQ(queue.TakeDue()->replicas[0].batch, 1);
  CHECK_TRUE(!queue.TakeDue());
  CHECK_TRUE(queue.Flush());
  CHECK_EQ(queue.TakeDue()->replicas[1].batch, 4);
}

}  // namespace
}  // namespace tpu_embedding

int main() {
  tpu_embedding::TestTrainingStep();
  tpu_embedding::TestOrderAndDebts();
  tpu_embedding::TestCapacity();
  tpu_embedding::TestReplicas();
  tpu_embedding::TestPipelining();
  tpu_embedding::TestFailedInput();
  tpu_embedding::TestFailedGradients();
  tpu_embedding::TestRefusedInAnotherProcess();
  tpu_embedding::TestStepsThatAJobLeaves();
  tpu_embedding::TestAnotherRun();
  tpu_embedding::TestRefusedByTheCaller();
  tpu_embedding::TestOutsideOfRuns();
  tpu_embedding::TestReset();
  tpu_embedding::TestSubmissions();
  tpu_embedding::TestFailedSubmissions();
}
