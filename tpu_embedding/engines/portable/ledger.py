"""Which batch each replica is at: the state of a step queue as a pure value.

  a training batch:    queued -> dequeued -> deposited -> applied (removed)
  an evaluation batch: queued -> dequeued (removed)

A step holds one batch per replica. Its update is ready once every replica has
deposited its gradients; nobody ever waits for that. These are the rules of
ops/cc/core/step_queue.h, each as a function from ledger to ledger, without
branches, so that it is the same eagerly and in a graph.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import tensorflow as tf

from tpu_embedding.engines.portable.refusals import (
    MOST_UPDATES,
    Outcome,
    Refusal,
    first,
)

# States of a replica's part of a step.
_AWAITED, _QUEUED, _DEQUEUED, _DEPOSITED, _DONE = range(5)

NEVER = tf.int64.max  # The number of no step.
_HEADER = 4  # Rows of the matrix before those of the steps.


@dataclasses.dataclass(frozen=True)
class Ledger:
    """The state, for R replicas and the k steps that are under way.

    Attributes:
      failed: int64 scalar, the number of a step given up, or NEVER.
      next_enqueue: int64 [R], the number of each replica's next step.
      next_dequeue: int64 [R].
      last_was_training: bool [R], of the batch dequeued last.
      arrived: bool [R], who has been at the step given up.
      numbers: int64 [k], ascending.
      training: bool [k].
      states: int64 [k, R], the state of each replica's part.
    """

    failed: tf.Tensor
    next_enqueue: tf.Tensor
    next_dequeue: tf.Tensor
    last_was_training: tf.Tensor
    arrived: tf.Tensor
    numbers: tf.Tensor
    training: tf.Tensor
    states: tf.Tensor

    @staticmethod
    def empty(num_replicas: int) -> Ledger:
        """No step under way."""
        zeros = tf.zeros([num_replicas], tf.int64)
        return Ledger(
            failed=tf.constant(NEVER, tf.int64),
            next_enqueue=zeros,
            next_dequeue=zeros,
            last_was_training=tf.ones([num_replicas], tf.bool),
            arrived=tf.zeros([num_replicas], tf.bool),
            numbers=tf.zeros([0], tf.int64),
            training=tf.zeros([0], tf.bool),
            states=tf.zeros([0, num_replicas], tf.int64),
        )

    @staticmethod
    def from_matrix(matrix: tf.Tensor) -> Ledger:
        """Undoes `to_matrix`."""
        head, steps = matrix[:_HEADER], matrix[_HEADER:]
        return Ledger(
            failed=head[0, 0],
            next_enqueue=head[0, 2:],
            next_dequeue=head[1, 2:],
            last_was_training=tf.not_equal(head[2, 2:], 0),
            arrived=tf.not_equal(head[3, 2:], 0),
            numbers=steps[:, 0],
            training=tf.not_equal(steps[:, 1], 0),
            states=steps[:, 2:],
        )

    def to_matrix(self) -> tf.Tensor:
        """int64 [4 + k, 2 + R]: all of it, to be kept in one variable."""
        head = tf.stack(
            [
                self.next_enqueue,
                self.next_dequeue,
                tf.cast(self.last_was_training, tf.int64),
                tf.cast(self.arrived, tf.int64),
            ]
        )
        margin = tf.fill([_HEADER, 2], self.failed)
        steps = tf.stack([self.numbers, tf.cast(self.training, tf.int64)], axis=1)
        return tf.concat(
            [
                tf.concat([margin, head], axis=1),
                tf.concat([steps, self.states], axis=1),
            ],
            axis=0,
        )

    def enqueue(
        self, replicas: Sequence[int], training: bool, capacity: int
    ) -> Outcome:
        """Queues a batch for `replicas`: for one of several, or for all.

        The ledger of the outcome holds for a refusal too. Its numbers are [n].
        """
        alone = len(replicas) < self._num_replicas
        if alone:
            given_up = _exists(self.failed) & ~self.arrived[replicas[0]]
        else:
            given_up = tf.constant(False)
        ledger = self._discard_failed(given_up, replicas)
        refusals = [(given_up, Refusal.GIVEN_UP_ENQUEUE)]
        for replica in replicas:
            number = ledger.next_enqueue[replica]
            full = number - ledger.next_dequeue[replica] >= capacity
            differs = ledger._find(number) & tf.not_equal(ledger.training, training)
            refusals.append((full, Refusal.QUEUE_FULL))
            refusals.append((tf.reduce_any(differs), Refusal.TRAINING_DIFFERS))
        refusal = first(refusals)
        numbers = tf.stack([ledger.next_enqueue[replica] for replica in replicas])
        for replica in replicas:
            taken = tf.equal(refusal, Refusal.NONE)
            ledger = ledger._put(replica, taken, training=training)
        return ledger._outcome(refusal, number=numbers)

    def fail_enqueue(self, replica: int) -> Outcome:
        """The input of `replica` for its next step failed its checks.

        The batches that other replicas queue for that step are to be discarded.
        """
        failed = tf.where(_exists(self.failed), self.failed, self.next_enqueue[replica])
        arrived = tf.where(
            _exists(self.failed), self.arrived, self.next_enqueue > failed
        )
        ledger = dataclasses.replace(
            self, failed=failed, arrived=arrived | self._is(replica)
        )
        return ledger._outcome()

    def dequeue(self, replica: int) -> Outcome:
        """Hands out the next batch of `replica`; answers whether it is training."""
        number = self.next_dequeue[replica]
        step = self._find(number)
        training = tf.reduce_any(step & self.training)
        debts = self.training & (self.numbers < number)
        queued = tf.reduce_any(step & self._in(replica, _QUEUED))
        owes = training & tf.reduce_any(debts & self._in(replica, _DEQUEUED))
        waits = self._in(replica, _DEPOSITED) & ~self._all_in(_DEPOSITED)
        refusal = first(
            [
                (number >= self.failed, Refusal.GIVEN_UP_DEQUEUE),
                (~queued, Refusal.NOTHING_QUEUED),
                (owes, Refusal.OWES_GRADIENTS),
                (tf.reduce_any(debts & waits), Refusal.OTHER_REPLICA_OWES),
            ]
        )
        state = tf.where(training, tf.constant(_DEQUEUED, tf.int64), _DONE)
        ledger = dataclasses.replace(
            self._set_state(step, replica, state),
            last_was_training=tf.where(
                self._is(replica), training, self.last_was_training
            ),
            next_dequeue=self.next_dequeue + tf.cast(self._is(replica), tf.int64),
        )
        ledger = ledger._keep(~ledger._all_in(_DONE))
        return ledger._outcome(refusal, number=number, answer=training)

    def owed(self, replica: int) -> Outcome:
        """Finds the step whose gradients `replica` owes."""
        number = self._owed_number(replica)
        upcoming = self._find(self.next_dequeue[replica]) & self.training
        is_queued = upcoming & self._in(replica, _QUEUED)
        owes = _exists(number)
        refusal = first(
            [
                (owes, Refusal.NONE),
                (~self.last_was_training[replica], Refusal.WAS_EVALUATION),
                (tf.reduce_any(is_queued), Refusal.NOT_DEQUEUED),
                (~owes, Refusal.NOTHING_OWED),
            ]
        )
        return self._outcome(refusal, number=number)

    def deposit(self, replica: int) -> Outcome:
        """Takes the gradients that `replica` owes; answers whether all are there."""
        number = self._owed_number(replica)
        step = self._find(number)
        ledger = self._set_state(step, replica, tf.constant(_DEPOSITED, tf.int64))
        is_complete = tf.reduce_any(step & ledger._all_in(_DEPOSITED))
        return ledger._outcome(number=number, answer=is_complete)

    def completes(self, replica: int, submitting: bool) -> Outcome:
        """The answer: whether the next gradients are the last of their step."""
        own = self.next_enqueue[replica] if submitting else self._owed_number(replica)
        there = tf.reduce_sum(tf.cast(self._of_state(_DEPOSITED), tf.int32), axis=1)
        is_last = tf.equal(there, self._num_replicas - 1)
        answer = tf.reduce_any(self._find(own) & is_last)
        return self._outcome(number=own, answer=answer)

    def fail_deposit(self, replica: int) -> Outcome:
        """The gradients of `replica` failed their checks.

        Among several replicas the step is lost; a single one may try again.
        """
        if self._num_replicas == 1:
            return self._outcome()
        number = self._owed_number(replica)
        is_enqueued = self.next_enqueue > number
        # Where a replica has not come to the step yet, it is given up as if an
        # input had failed: else the replicas would be at different steps for ever.
        complete = tf.reduce_all(is_enqueued)
        failed = tf.where(complete, self.failed, tf.minimum(self.failed, number))
        following = tf.where(complete, number + 1, 0)
        ledger = dataclasses.replace(
            self,
            failed=failed,
            arrived=tf.where(complete, self.arrived, is_enqueued),
            next_dequeue=tf.maximum(self.next_dequeue, following),
        )
        return ledger._keep(~ledger._find(number))._outcome()

    def begin_lookup(self, replica: int) -> Outcome:
        """A lookup outside of the queue, whose gradients may come by `submit`.

        Updates that only some replicas submitted are given up: their step is over.
        The ledger of the outcome holds for a refusal too.
        """
        is_partial = tf.reduce_any(
            self._in(replica, _DEPOSITED) & ~self._all_in(_DEPOSITED)
        )
        ledger = self._clear_if(is_partial)
        return ledger._outcome(first([(is_partial, Refusal.SUBMITTED_BY_SOME)]))

    def reset(self) -> Outcome:
        """Forgets all batches and gradients: what is queued, owed or pending."""
        return self._clear_if(tf.constant(True))._outcome()

    def submit(self, replica: int, pipelined: bool) -> Outcome:
        """Takes a batch together with its gradients.

        The n-th ones of all replicas make up one update. Answers whether an update
        is to be applied now; if `pipelined`, the newest one is left pending.
        """
        number = self.next_enqueue[replica]
        waits = tf.reduce_sum(tf.cast(self._in(replica, _DEPOSITED), tf.int64))
        refusal = first([(waits >= MOST_UPDATES, Refusal.TOO_MANY_UPDATES)])
        ledger = self._put(replica, tf.constant(True), training=True)
        ledger = ledger._set_state(
            ledger._find(number), replica, tf.constant(_DEPOSITED, tf.int64)
        )
        ledger = dataclasses.replace(
            ledger,
            next_dequeue=self.next_dequeue + tf.cast(self._is(replica), tf.int64),
        )
        ready = tf.reduce_sum(tf.cast(ledger._all_in(_DEPOSITED), tf.int32))
        return ledger._outcome(refusal, number=number, answer=ready > int(pipelined))

    def take_ready(self) -> Outcome:
        """Takes out the first step whose update is ready; answers whether one is."""
        number = self._ready()
        ledger = self._keep(~self._find(number))
        return ledger._outcome(number=number, answer=_exists(number))

    def lookups_are_done(self) -> Outcome:
        """Answers whether a ready update has seen the lookups of the step after it."""
        number = self._ready()
        are_done = tf.reduce_all(self.next_dequeue - 1 > number)
        return self._outcome(number=number, answer=_exists(number) & are_done)

    def is_ready_before_evaluation(self, replica: int) -> Outcome:
        """Answers whether one is ready and `replica` is to look up an evaluation."""
        number = self._ready()
        step = self._find(self.next_dequeue[replica])
        is_evaluation = tf.reduce_any(step & ~self.training)
        return self._outcome(number=number, answer=_exists(number) & is_evaluation)

    def _outcome(
        self,
        refusal: tf.Tensor | int = Refusal.NONE,
        *,
        number: tf.Tensor | int = NEVER,
        answer: tf.Tensor | bool = False,
    ) -> Outcome:
        return Outcome(
            refusal=tf.convert_to_tensor(refusal, tf.int32),
            matrix=self.to_matrix(),
            number=tf.convert_to_tensor(number, tf.int64),
            answer=tf.convert_to_tensor(answer, tf.bool),
        )

    @property
    def _num_replicas(self) -> int:
        return int(self.states.shape[1] or 0)

    def _is(self, replica: int) -> tf.Tensor:
        """Bool [R], true for the one."""
        return tf.equal(tf.range(self._num_replicas), replica)

    def _find(self, number: tf.Tensor) -> tf.Tensor:
        """Bool [k], true for the step of that number."""
        return tf.equal(self.numbers, number)

    def _of_state(self, state: int) -> tf.Tensor:
        # Not `==`: in a graph of TensorFlow 1 that compares the Python objects.
        return tf.equal(self.states, state)

    def _in(self, replica: int, state: int) -> tf.Tensor:
        """Bool [k], true where that replica is in that state."""
        return self._of_state(state)[:, replica]

    def _all_in(self, state: int) -> tf.Tensor:
        """Bool [k], true where all replicas are in that state."""
        return tf.reduce_all(self._of_state(state), axis=1)

    def _smallest(self, steps: tf.Tensor) -> tf.Tensor:
        # Of no steps the minimum is NEVER, the largest int64.
        return tf.reduce_min(tf.boolean_mask(self.numbers, steps))

    def _ready(self) -> tf.Tensor:
        """The number of the first step whose update is ready, or NEVER."""
        return self._smallest(self.training & self._all_in(_DEPOSITED))

    def _owed_number(self, replica: int) -> tf.Tensor:
        return self._smallest(self.training & self._in(replica, _DEQUEUED))

    def _set_state(self, step: tf.Tensor, replica: int, state: tf.Tensor) -> Ledger:
        at = step[:, tf.newaxis] & self._is(replica)
        return dataclasses.replace(self, states=tf.where(at, state, self.states))

    def _keep(self, steps: tf.Tensor) -> Ledger:
        return dataclasses.replace(
            self,
            numbers=tf.boolean_mask(self.numbers, steps),
            training=tf.boolean_mask(self.training, steps),
            states=tf.boolean_mask(self.states, steps),
        )

    def _clear_if(self, condition: tf.Tensor) -> Ledger:
        latest = tf.reduce_max(self.next_enqueue)
        ledger = dataclasses.replace(
            self,
            failed=tf.where(condition, NEVER, self.failed),
            arrived=self.arrived & ~condition,
            next_enqueue=tf.where(condition, latest, self.next_enqueue),
            next_dequeue=tf.where(condition, latest, self.next_dequeue),
        )
        return ledger._keep(tf.fill(tf.shape(self.numbers), ~condition))

    def _put(self, replica: int, allowed: tf.Tensor, *, training: bool) -> Ledger:
        """Queues a batch of `replica`, where that is allowed."""
        number = self.next_enqueue[replica]
        is_new = allowed & ~tf.reduce_any(self._find(number))
        count = tf.cast(is_new, tf.int32)
        awaited = tf.zeros([count, self._num_replicas], tf.int64)
        ledger = dataclasses.replace(
            self,
            next_enqueue=self.next_enqueue
            + tf.cast(self._is(replica) & allowed, tf.int64),
            numbers=tf.concat([self.numbers, tf.fill([count], number)], 0),
            training=tf.concat([self.training, tf.fill([count], training)], 0),
            states=tf.concat([self.states, awaited], 0),
        )
        return ledger._set_state(
            ledger._find(number) & allowed, replica, tf.constant(_QUEUED, tf.int64)
        )

    def _discard_failed(self, given_up: tf.Tensor, replicas: Sequence[int]) -> Ledger:
        """Forgets the step given up and every step after it.

        But where `given_up`, notes that the first of `replicas` has been at it.
        """
        end = tf.where(given_up, NEVER, self.failed)
        ledger = dataclasses.replace(
            self,
            failed=tf.where(given_up, self.failed, NEVER),
            arrived=given_up & (self.arrived | self._is(replicas[0])),
            next_enqueue=tf.minimum(self.next_enqueue, end),
            next_dequeue=tf.minimum(self.next_dequeue, end),
        )
        return ledger._keep(self.numbers < end)


def _exists(number: tf.Tensor) -> tf.Tensor:
    return tf.not_equal(number, NEVER)
