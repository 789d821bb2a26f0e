// Every transition of the step queue, and every refusal by its first words.

#include "core/step_queue.h"

#include <string>
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

int Dequeue(Queue* queue, int replica) {
  int batch = -1;
  CheckOk(queue->Dequeue(replica, &batch));
  return batch;
}

bool Deposit(Queue* queue, int replica, int gradients) {
  bool apply_now = false;
  CheckOk(queue->Deposit(replica, gradients, &apply_now));
  return apply_now;
}

void TestTrainingStep() {
  Queue queue(1, kCapacity, /*pipelined=*/false);
  int batch = 0;
  bool apply_now = false;
  CheckRefused(queue.Dequeue(0, &batch), "dequeue: no batch is enqueued");
  CheckOk(queue.EnqueueAll({7}, true));
  CheckRefused(queue.Deposit(0, 1, &apply_now),
               "apply_gradients: the enqueued batch was not dequeued");
  CHECK_EQ(Dequeue(&queue, 0), 7);
  CheckOk(queue.Owed(0, &batch));
  CHECK_EQ(batch, 7);
  CHECK_TRUE(!queue.IsReady());
  CHECK_TRUE(Deposit(&queue, 0, 5));
  CheckRefused(queue.Deposit(0, 1, &apply_now),
               "apply_gradients: no dequeued batch owes gradients");
  // A step that its taker refuses stays.
  std::optional<Queue::Step> refused;
  CHECK_TRUE(
      queue.TakeReady([](const Queue::Step&) { return false; }, &refused));
  CHECK_TRUE(!refused);
  CHECK_TRUE(queue.IsReady());
  const auto step = queue.TakeReady();
  CHECK_TRUE(step);
  CHECK_EQ(step->replicas[0].batch, 7);
  CHECK_EQ(step->replicas[0].gradients, 5);
  CHECK_TRUE(!queue.TakeReady());
}

void TestOrderAndDebts() {
  Queue queue(1, kCapacity, /*pipelined=*/false);
  CheckOk(queue.EnqueueAll({1}, true));
  CheckOk(queue.EnqueueAll({2}, false));
  CheckOk(queue.EnqueueAll({3}, true));
  CHECK_EQ(Dequeue(&queue, 0), 1);
  CHECK_TRUE(queue.NextIsEvaluation(0));
  CHECK_EQ(Dequeue(&queue, 0), 2);  // an evaluation may come between
  int batch = 0;
  CheckRefused(queue.Dequeue(0, &batch),
               "dequeue: the training batch dequeued before still owes");
  CHECK_TRUE(Deposit(&queue, 0, 1));
  queue.TakeReady();
  CHECK_EQ(Dequeue(&queue, 0), 3);
  CHECK_TRUE(Deposit(&queue, 0, 1));
  queue.TakeReady();
  CheckOk(queue.EnqueueAll({4}, false));
  CHECK_EQ(Dequeue(&queue, 0), 4);
  bool apply_now = false;
  CheckRefused(queue.Deposit(0, 1, &apply_now),
               "apply_gradients: the batch was enqueued with training=False");
}

void TestCapacity() {
  Queue queue(2, kCapacity, /*pipelined=*/false);
  for (int i = 0; i < kCapacity; ++i) {
    CheckOk(queue.EnqueueAll({i, i}, false));
  }
  CheckRefused(queue.EnqueueAll({9, 9}, false),
               "enqueue: the queue is full (4");
  CheckRefused(queue.Enqueue(1, 9, false), "enqueue: the queue is full (4");
  CHECK_EQ(Dequeue(&queue, 0), 0);
  // Replica 1 has no room: nothing enters for replica 0 either.
  CheckRefused(queue.EnqueueAll({9, 9}, false),
               "enqueue: the queue is full (4");
  CHECK_EQ(Dequeue(&queue, 1), 0);
  CheckOk(queue.EnqueueAll({9, 9}, false));
}

void TestReplicas() {
  Queue queue(3, kCapacity, /*pipelined=*/false);
  CheckOk(queue.EnqueueAll({0, 1, 2}, true));
  CheckOk(queue.EnqueueAll({3, 4, 5}, true));
  for (int r : {2, 0, 1}) CHECK_EQ(Dequeue(&queue, r), r);
  CHECK_TRUE(!Deposit(&queue, 1, 11));
  CHECK_TRUE(!Deposit(&queue, 0, 10));
  int batch = 0;
  CheckRefused(queue.Dequeue(0, &batch),
               "dequeue: another replica has not applied its gradients");
  CHECK_TRUE(Deposit(&queue, 2, 12));
  const auto step = queue.TakeReady();
  for (int r = 0; r < 3; ++r) {
    CHECK_EQ(step->replicas[r].batch, r);
    CHECK_EQ(step->replicas[r].gradients, 10 + r);
  }
  CHECK_EQ(Dequeue(&queue, 0), 3);
  CheckOk(queue.Enqueue(0, 6, true));
  CheckRefused(queue.Enqueue(1, 7, false), "enqueue: the replicas disagree");
}

void TestPipelining() {
  Queue queue(2, kCapacity, /*pipelined=*/true);
  for (int step = 0; step < 3; ++step) {
    CheckOk(queue.EnqueueAll({step, step}, true));
    CHECK_EQ(Dequeue(&queue, 0), step);
    CHECK_TRUE(!queue.LookupsAreDone());  // replica 1 has not looked up yet
    CHECK_EQ(Dequeue(&queue, 1), step);
    CHECK_EQ(queue.LookupsAreDone(), step > 0);
    if (step > 0) {
      CHECK_EQ(queue.TakeReady()->number, step - 1);
    }
    CHECK_TRUE(!Deposit(&queue, 0, 0));
    CHECK_TRUE(!Deposit(&queue, 1, 0));
    CHECK_TRUE(queue.IsReady());
  }
}

void TestFailedInput() {
  Queue queue(3, kCapacity, /*pipelined=*/false);
  CheckOk(queue.Enqueue(0, 1, true));
  queue.FailEnqueue(1);
  int batch = 0;
  CheckRefused(queue.Dequeue(0, &batch), "dequeue: this step was given up");
  // The last replica of the same step learns of it, and leaves nothing behind.
  CheckRefused(queue.Enqueue(2, 1, true), "enqueue: this step was given up");
  for (int r = 0; r < 3; ++r) CheckOk(queue.Enqueue(r, 10 + r, true));
  for (int r = 0; r < 3; ++r) CHECK_EQ(Dequeue(&queue, r), 10 + r);
  // A step before the failed one is kept; the failed one is discarded by a
  // call for all replicas too.
  queue.FailEnqueue(0);
  CheckOk(queue.EnqueueAll({20, 21, 22}, true));
  for (int r = 0; r < 3; ++r) Deposit(&queue, r, r);
  CHECK_EQ(queue.TakeReady()->replicas[2].batch, 12);
  for (int r = 0; r < 3; ++r) CHECK_EQ(Dequeue(&queue, r), 20 + r);
}

void TestFailedGradients() {
  Queue one(1, kCapacity, /*pipelined=*/false);
  CheckOk(one.EnqueueAll({1}, true));
  Dequeue(&one, 0);
  one.FailDeposit(0);
  CHECK_TRUE(Deposit(&one, 0, 1));  // a single replica may try again

  Queue two(2, kCapacity, /*pipelined=*/false);
  CheckOk(two.EnqueueAll({1, 1}, true));
  Dequeue(&two, 0);
  Dequeue(&two, 1);
  Deposit(&two, 0, 1);
  two.FailDeposit(1);  // among several the step is lost
  CHECK_TRUE(!two.IsReady());
  CheckOk(two.EnqueueAll({2, 3}, true));
  CHECK_EQ(Dequeue(&two, 0), 2);
  two.FailDeposit(0);  // replica 1 has not dequeued its batch: it is lost too
  CheckOk(two.EnqueueAll({4, 5}, true));
  CHECK_EQ(Dequeue(&two, 0), 4);
  CHECK_EQ(Dequeue(&two, 1), 5);
  Deposit(&two, 0, 1);
  CHECK_TRUE(Deposit(&two, 1, 1));
  two.TakeReady();
  CheckOk(two.Enqueue(0, 6, true));
  CHECK_EQ(Dequeue(&two, 0), 6);
  two.FailDeposit(0);  // replica 1 has not even enqueued
  CheckRefused(two.Enqueue(1, 7, true), "enqueue: this step was given up");
  CheckOk(two.EnqueueAll({8, 9}, true));
  CHECK_EQ(Dequeue(&two, 0), 8);
  CHECK_EQ(Dequeue(&two, 1), 9);
}

void TestSubmissions() {
  Queue queue(2, kCapacity, /*pipelined=*/false);
  bool apply_now = false;
  for (int call : {0, 1}) {  // two lookups of replica 0, then of replica 1
    CheckOk(queue.BeginLookup(0));
    queue.Submit(0, call, 10 + call, &apply_now);
    CHECK_TRUE(!apply_now);
    if (call == 0) {
      CheckRefused(queue.BeginLookup(0), "lookup: gradients came");
    }
  }
  // The refusal gave up the first submission: the next ones make up a step.
  queue.Submit(1, 5, 15, &apply_now);
  CHECK_TRUE(apply_now);
  const auto step = queue.TakeReady();
  CHECK_EQ(step->replicas[0].batch, 1);
  CHECK_EQ(step->replicas[1].batch, 5);

  Queue pipelined(1, kCapacity, /*pipelined=*/true);
  pipelined.Submit(0, 1, 1, &apply_now);
  CHECK_TRUE(!apply_now);
  pipelined.Submit(0, 2, 2, &apply_now);
  CHECK_TRUE(apply_now);
  CHECK_EQ(pipelined.TakeReady()->replicas[0].batch, 1);
  CHECK_TRUE(pipelined.IsReady());
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
  tpu_embedding::TestSubmissions();
}
