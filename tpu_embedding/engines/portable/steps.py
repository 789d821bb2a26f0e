"""The step queue out of stock resources: batches in order, one update per step.

The ledger says what is where; batches and gradients lie in cells. What is new goes
into cells first, then the ledger is assigned, then cells are cleared: a call that is
broken off in between leaves all as it was. No call waits. Calls must not overlap.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any

import tensorflow as tf

from tpu_embedding.engines.portable.cells import Cells, pack, unpack
from tpu_embedding.engines.portable.ledger import Ledger
from tpu_embedding.engines.portable.refusals import (
    MOST_UPDATES,
    Outcome,
    Refusal,
    messages,
)
from tpu_embedding.engines.variables import create_state
from tpu_embedding.lookup.graph_checks import no_change, refuse


class StepQueue:
    """The steps of one embedding; batches and gradients are scalar variants."""

    def __init__(self, num_replicas: int, capacity: int, *, pipelined: bool) -> None:
        """Makes the state, on the device that is current.

        Args:
          num_replicas: Batches in one step, R.
          capacity: How many batches of one replica may wait.
          pipelined: A ready update is left until the next step's lookups.
        """
        self._num_replicas = num_replicas
        self._capacity = capacity
        self._pipelined = pipelined
        self._messages = messages(capacity)
        self._ledger = create_state(
            "ledger", Ledger.empty(num_replicas).to_matrix(), [None, 2 + num_replicas]
        )
        self._queued = Cells("queued", num_replicas * capacity)
        self._owed = Cells("owed", num_replicas)
        self._deposited = Cells("deposited", num_replicas * MOST_UPDATES)

    def enqueue(
        self, batches: Sequence[tf.Tensor], replicas: Sequence[int], *, training: bool
    ) -> None:
        """Queues the batches of `replicas`, one or all; they all enter or none.

        Raises:
          tf.errors.FailedPreconditionError: If the queue is full, the replicas
            disagree on `training`, or another replica's input had failed.
        """
        outcome = self._call(Ledger.enqueue, replicas, training, self._capacity)
        with self._unless_refused(outcome, changes=True):
            puts = [
                self._queued.put(self._queued_cell(r, outcome.number[i]), batch)
                for i, (r, batch) in enumerate(zip(replicas, batches, strict=True))
            ]
            with tf.control_dependencies(puts):
                self._commit(outcome)

    def fail_enqueue(self, replica: int) -> list[Any]:
        """The input of `replica` failed its checks; returns the ops that note it."""
        return [self._commit(self._call(Ledger.fail_enqueue, replica))]

    def dequeue(self, replica: int) -> tf.Tensor:
        """Hands out the next batch of `replica`.

        Raises:
          tf.errors.FailedPreconditionError: If none is queued, or the batch before
            still owes its gradients.
        """
        outcome = self._call(Ledger.dequeue, replica)
        with self._unless_refused(outcome):
            cell = self._queued_cell(replica, outcome.number)
            batch = self._queued.get(cell)

            def owe() -> tf.Tensor:
                with tf.control_dependencies([self._owed.put(replica, batch)]):
                    return tf.constant(True)

            with _after(
                lambda: tf.cond(outcome.answer, owe, lambda: False),
                lambda: self._commit(outcome),
                lambda: self._queued.clear(cell),
            ):
                return tf.identity(batch)

    def owed(self, replica: int) -> tf.Tensor:
        """The batch whose gradients `replica` owes.

        Raises:
          tf.errors.FailedPreconditionError: If there is none.
        """
        with self._unless_refused(self._call(Ledger.owed, replica)):
            return self._owed.get(replica)

    def deposit(self, replica: int, gradients: tf.Tensor) -> tf.Tensor:
        """Takes the gradients that `replica` owes, after `owed`.

        Returns:
          bool scalar, whether the step's update is to be applied now.
        """
        outcome = self._call(Ledger.deposit, replica)
        cell = self._deposited_cell(replica, outcome.number)
        with _after(
            lambda: self._deposited.put(cell, gradients),
            lambda: self._commit(outcome),
            lambda: self._owed.clear(replica),
        ):
            return tf.identity(not self._pipelined and outcome.answer)

    def fail_deposit(self, replica: int) -> list[Any]:
        """The gradients of `replica` failed their checks; returns the ops."""
        return [self._commit(self._call(Ledger.fail_deposit, replica))]

    def begin_lookup(self, replica: int, batch: tf.Tensor) -> tf.Tensor:
        """Lets a batch pass by the queue.

        Returns:
          A ticket for `submit`.

        Raises:
          tf.errors.FailedPreconditionError: If gradients of the step before came
            from some replicas only.
        """
        outcome = self._call(Ledger.begin_lookup, replica)
        with self._unless_refused(outcome, changes=True):
            ticket = self.new_ticket(batch)
            with _after(lambda: self._commit(outcome)):
                return tf.identity(ticket)

    @staticmethod
    def new_ticket(batch: tf.Tensor) -> tf.Tensor:
        """A ticket for `submit` of a batch that was looked up before."""
        # The table gets an entry once the ticket is used, and goes with it.
        used = tf.raw_ops.AnonymousMutableHashTable(
            key_dtype=tf.int64, value_dtype=tf.int64
        )
        return pack([batch, used])

    def ticket_batch(self, ticket: tf.Tensor) -> tf.Tensor:
        """The batch of a ticket."""
        return _unpack_ticket(ticket)[0]

    def submit(
        self, replica: int, ticket: tf.Tensor, gradients: tf.Tensor
    ) -> tf.Tensor:
        """Takes the gradients of one lookup.

        Returns:
          bool scalar, whether an update is to be applied now.

        Raises:
          tf.errors.FailedPreconditionError: If the ticket was used already.
        """
        _, used = _unpack_ticket(ticket)
        outcome = self._call(Ledger.submit, replica, self._pipelined)
        # After submissions before. Not the matrix itself: TensorFlow inlines the call
        # that made it, and what waited for the call then waits for nothing.
        with tf.control_dependencies([tf.identity(outcome.matrix)]):
            is_used = tf.raw_ops.LookupTableSizeV2(table_handle=used) > 0
        refusal = tf.where(is_used, int(Refusal.ALREADY_SUBMITTED), outcome.refusal)
        cell = self._deposited_cell(replica, outcome.number)
        with (
            self._unless_refused(dataclasses.replace(outcome, refusal=refusal)),
            _after(
                lambda: self._deposited.put(cell, gradients),
                # Before the ledger: it is all that the next submission waits for.
                lambda: tf.raw_ops.LookupTableInsertV2(
                    table_handle=used,
                    keys=tf.zeros([1], tf.int64),
                    values=tf.zeros([1], tf.int64),
                ),
                lambda: self._commit(outcome),
            ),
        ):
            return tf.identity(outcome.answer)

    def completes(self, replica: int, *, submitting: bool) -> tf.Tensor:
        """Whether the next gradients of `replica` are the last of their step."""
        return self._call(Ledger.completes, replica, submitting).answer

    def reset(self) -> None:
        """Forgets all steps; what is left in the cells is written over."""
        self._commit(self._call(Ledger.reset))

    def lookups_are_done(self) -> tf.Tensor:
        """Whether an update is ready and all have looked up the step after it."""
        return self._call(Ledger.lookups_are_done).answer

    def is_ready(self) -> tf.Tensor:
        """Whether an update is ready to be applied."""
        return self._call(Ledger.take_ready).answer

    def is_ready_before_evaluation(self, replica: int) -> tf.Tensor:
        """Whether, besides, the next batch of `replica` is an evaluation."""
        return self._call(Ledger.is_ready_before_evaluation, replica).answer

    def take_ready(self) -> list[tf.Tensor]:
        """The gradients of each replica for the update that is ready."""
        outcome = self._call(Ledger.take_ready)
        replicas = range(self._num_replicas)
        cells = [self._deposited_cell(r, outcome.number) for r in replicas]
        gradients = [self._deposited.get(cell) for cell in cells]
        clear = [functools.partial(self._deposited.clear, cell) for cell in cells]
        with _after(lambda: self._commit(outcome), *clear):
            return [tf.identity(gradient) for gradient in gradients]

    def _call(self, rule: Callable[..., Outcome], *arguments: Any) -> Outcome:
        """What `rule` says of the ledger as it is."""
        matrix = self._ledger.read_value()
        return Outcome(**_compiled(rule, 2 + self._num_replicas, *arguments)(matrix))

    def _commit(self, outcome: Outcome) -> Any:
        return self._ledger.assign(outcome.matrix, read_value=False)

    def _unless_refused(self, outcome: Outcome, *, changes: bool = False) -> Any:
        """A context for what must not happen after a refusal.

        Args:
          outcome: Of the call.
          changes: Whether the refusal itself changes the ledger.
        """
        change = (lambda: [self._commit(outcome)]) if changes else no_change
        return tf.control_dependencies(refuse(outcome.refusal, self._messages, change))

    def _queued_cell(self, replica: int, number: tf.Tensor) -> tf.Tensor:
        return replica * self._capacity + number % self._capacity

    def _deposited_cell(self, replica: int, number: tf.Tensor) -> tf.Tensor:
        return replica * MOST_UPDATES + number % MOST_UPDATES


def _after(*actions: Callable[[], Any]) -> Any:
    """A context for what follows the actions, which are made one after the other."""
    done: list[Any] = []
    for action in actions:
        with tf.control_dependencies(done):
            done = [action()]
    return tf.control_dependencies(done)


def _unpack_ticket(ticket: tf.Tensor) -> list[tf.Tensor]:
    return unpack(
        ticket, [tf.TensorSpec([], tf.variant), tf.TensorSpec([], tf.resource)]
    )


@functools.cache
def _compiled(
    rule: Callable[..., Outcome], width: int, *arguments: Any
) -> Callable[[tf.Tensor], dict[str, tf.Tensor]]:
    """A rule as one graph: eagerly its many small ops would take milliseconds."""

    def call(matrix: tf.Tensor) -> dict[str, tf.Tensor]:
        return vars(rule(Ledger.from_matrix(matrix), *arguments))

    with tf.init_scope():
        return tf.function(call, autograph=False).get_concrete_function(
            tf.TensorSpec([None, width], tf.int64)
        )
