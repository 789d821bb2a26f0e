"""Batches in order, in variables or a hash table: a queue made of TensorFlow's ops.

Each replica has a ring of batches, which are variants; an int64 matrix counts what is
where. Unlike a tf.queue.FIFOQueue a ring never blocks, can be read without
taking, and discards the batches of a refused step by a change of counts alone. A batch
is first written into its ring and then counted, so a call that is interrupted in
between changes nothing. Calls must not overlap.
"""

from __future__ import annotations

import copy
import functools
import weakref
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, Protocol

import tensorflow as tf

from tpu_embedding.distribution import Topology
from tpu_embedding.lookup.graph_checks import refuse
from tpu_embedding.tables.variables import create_state

_OTHERS_OWE = (
    "dequeue: another replica has not applied its gradients of the step before. Put "
    "the loop over steps outside of strategy.run."
)
_DISAGREE = (
    "enqueue: the replicas disagree on `training` within one step. Pass the same value "
    "in every replica."
)
_EMPTY = (
    "dequeue: no batch is enqueued. Call enqueue before dequeue, once for each dequeue."
)
_OWES = (
    "dequeue: the training batch dequeued before still owes its gradients. Call "
    "apply_gradients first, or enqueue with training=False; after a step that failed "
    "call flush and reset."
)
_REFUSED_DEQUEUE = ("", _OTHERS_OWE, _EMPTY, _OWES)  # By code.
_NO_TRAINING = (
    "apply_gradients: the batch was enqueued with training=False. Enqueue with "
    "training=True to train on it."
)
_NOT_DEQUEUED = (
    "apply_gradients: the enqueued batch was not dequeued. Call dequeue first."
)
_NOTHING_OWED = (
    "apply_gradients: no dequeued batch owes gradients; they can be applied once per "
    "dequeue."
)


def pack(tensors: Sequence[tf.Tensor]) -> tf.Tensor:
    """Tensors of any dtypes and shapes as one scalar variant."""
    return tf.raw_ops.CompositeTensorVariantFromComponents(
        components=list(tensors), metadata=""
    )


def unpack(variant: tf.Tensor, specs: Sequence[tf.TensorSpec]) -> list[tf.Tensor]:
    """The tensors in a variant of `pack`, with the dtypes and static shapes given."""
    tensors = tf.raw_ops.CompositeTensorVariantToComponents(
        encoded=variant, metadata="", Tcomponents=[spec.dtype for spec in specs]
    )
    for tensor, spec in zip(tensors, specs, strict=True):
        tensor.set_shape(spec.shape)
    return tensors


class Store(Protocol):
    """Where a queue keeps its batches and its counts; cells are numbered from 0."""

    handles: list[tf.Tensor]

    def with_handles(self, handles: Sequence[tf.Tensor]) -> Store:
        """The store of the same kind whose resources have these handles."""
        ...

    def counts(self) -> tf.Tensor:
        """Reads the matrix of counts, int64."""
        ...

    def write_counts(self, matrix: tf.Tensor) -> Any:
        """Replaces it; returns a control input."""
        ...

    def get(self, cell: tf.Tensor | int) -> tf.Tensor:
        """Reads a variant."""
        ...

    def put(self, cell: tf.Tensor | int, variant: tf.Tensor) -> Any:
        """Replaces a variant; returns a control input."""
        ...


class VariableStore:
    """A variable of counts and a variable of variants."""

    def __init__(self, cells: int, counts: tf.Tensor) -> None:
        """Creates them, on the device that is current."""
        self._variables = [
            create_state("counts", counts),
            create_state("cells", tf.fill([cells], pack([tf.zeros([0])]))),
        ]
        self.handles = [variable.handle for variable in self._variables]

    def with_handles(self, handles: Sequence[tf.Tensor]) -> VariableStore:
        other = copy.copy(self)
        other.handles = list(handles)
        return other

    def counts(self) -> tf.Tensor:
        return tf.raw_ops.ReadVariableOp(resource=self.handles[0], dtype=tf.int64)

    def write_counts(self, matrix: tf.Tensor) -> Any:
        return tf.raw_ops.AssignVariableOp(resource=self.handles[0], value=matrix)

    def get(self, cell: tf.Tensor | int) -> tf.Tensor:
        return tf.raw_ops.ResourceGather(
            resource=self.handles[1], indices=cell, dtype=tf.variant
        )

    def put(self, cell: tf.Tensor | int, variant: tf.Tensor) -> Any:
        return tf.raw_ops.ResourceScatterUpdate(
            resource=self.handles[1],
            indices=tf.reshape(cell, [1]),
            updates=tf.reshape(variant, [1]),
        )


class HashTableStore:
    """A hash table of variants, for what runs on the host of a TPU's program.

    TensorFlow reads all variables of such a program before it starts and writes them
    at its end, also those that only the host uses, so that a call would not see what
    the call before it has written.
    """

    _COUNTS = -1

    def __init__(self, counts: tf.Tensor) -> None:
        """Creates it, on the device that is current."""
        self.handles = [
            tf.raw_ops.AnonymousMutableHashTable(
                key_dtype=tf.int64, value_dtype=tf.variant
            )
        ]
        self.write_counts(counts)

    def with_handles(self, handles: Sequence[tf.Tensor]) -> HashTableStore:
        other = copy.copy(self)
        other.handles = list(handles)
        return other

    def counts(self) -> tf.Tensor:
        spec = tf.TensorSpec([None, None], tf.int64)
        return unpack(self.get(self._COUNTS), [spec])[0]

    def write_counts(self, matrix: tf.Tensor) -> Any:
        return self.put(self._COUNTS, pack([matrix]))

    def get(self, cell: tf.Tensor | int) -> tf.Tensor:
        found = tf.raw_ops.LookupTableFindV2(
            table_handle=self.handles[0],
            keys=tf.reshape(tf.cast(cell, tf.int64), [1]),
            default_value=pack([tf.zeros([0])]),
        )
        return tf.reshape(found, [])

    def put(self, cell: tf.Tensor | int, variant: tf.Tensor) -> Any:
        return tf.raw_ops.LookupTableInsertV2(
            table_handle=self.handles[0],
            keys=tf.reshape(tf.cast(cell, tf.int64), [1]),
            values=tf.reshape(variant, [1]),
        )


_HEAD = 4  # Rows of counts before those of `training`.


class CallsOfRun:
    """What each replica has called so far, in each strategy.run."""

    def __init__(self, topology: Topology) -> None:
        self._topology = topology
        # By the context of a replica, one for each strategy.run.
        self._calls: Any = weakref.WeakKeyDictionary()

    def made(self, *calls: str) -> bool:
        """Whether the replica has made one of these calls in this strategy.run.

        True outside of strategy.run, where no call begins a step.
        """
        context = self._topology.run_context()
        if context is None:
            return True
        return any(call in self._calls.get(context, ()) for call in calls)

    def note(self, call: str) -> None:
        """Notes a call of the calling replica in this strategy.run."""
        context = self._topology.run_context()
        if context is not None:
            self._calls.setdefault(context, set()).add(call)


class _Counts(NamedTuple):
    """How many batches there are.

    Attributes:
      enqueued: int64 [R], the batches that each replica has enqueued so far.
      dequeued: int64 [R], those that it has dequeued.
      owes: int64 [R], 1 if a batch that it has dequeued owes its gradients.
      outside: int64 [R], 1 everywhere if the call that enqueued last was one for a
        single replica outside of strategy.run, else 0.
      training: int64 [capacity, R], 1 for training batches, by place in the ring.
    """

    enqueued: tf.Tensor
    dequeued: tf.Tensor
    owes: tf.Tensor
    outside: tf.Tensor
    training: tf.Tensor

    @staticmethod
    def of_matrix(matrix: tf.Tensor) -> _Counts:
        return _Counts(matrix[0], matrix[1], matrix[2], matrix[3], matrix[_HEAD:])

    def to_matrix(self) -> tf.Tensor:
        head = tf.stack([self.enqueued, self.dequeued, self.owes, self.outside])
        return tf.concat([head, self.training], 0)

    def next_is_training(self, replica: int) -> tf.Tensor:
        place = self.dequeued[replica] % self.training.shape[0]
        return self.has_batch(replica) & (self.training[place, replica] > 0)

    def last_was_training(self, replica: int) -> tf.Tensor:
        number = self.dequeued[replica] - 1
        place = number % self.training.shape[0]
        return (number < 0) | (self.training[place, replica] > 0)

    def has_batch(self, replica: int) -> tf.Tensor:
        return self.enqueued[replica] > self.dequeued[replica]


class BatchQueue:
    """The batches of R replicas, packed as scalar variants, in the order of steps.

    The n-th batches of all replicas make up one step. A step in which only some
    replicas went on was refused in another one; a replica that begins the next step
    gives it up for all that have not begun it.
    """

    def __init__(
        self, num_replicas: int, capacity: int, *, in_hash_table: bool = False
    ) -> None:
        """Makes the store, on the device that is current."""
        self._num_replicas, self._capacity = num_replicas, capacity
        zeros = tf.zeros([_HEAD + capacity, num_replicas], tf.int64)
        # The rings of all replicas, then for each the batch that owes gradients.
        cells = num_replicas * (capacity + 1)
        self._store: Store = (
            HashTableStore(zeros) if in_hash_table else VariableStore(cells, zeros)
        )

    @property
    def handles(self) -> list[tf.Tensor]:
        """Of the resources that are the queue."""
        return self._store.handles

    def with_handles(self, handles: Sequence[tf.Tensor]) -> BatchQueue:
        """The queue of the same size whose resources have these handles."""
        other = copy.copy(self)
        other._store = self._store.with_handles(handles)
        return other

    def _read(self) -> tf.Tensor:
        counts = self._store.counts()
        counts.set_shape([_HEAD + self._capacity, self._num_replicas])
        return counts

    def _write(self, counts: tf.Tensor) -> Any:
        return self._store.write_counts(counts)

    def _clear(self, cell: tf.Tensor | int) -> Any:
        return self._store.put(cell, pack([tf.zeros([0])]))

    def _owed(self, replica: int) -> int:
        return self._num_replicas * self._capacity + replica

    def depth(self) -> int:
        """Steps that some replica has enqueued and not dequeued yet; eagerly."""
        counts = _Counts.of_matrix(self._read())
        return int(tf.reduce_max(counts.enqueued) - tf.reduce_min(counts.dequeued))

    def check_room(self) -> list[Any]:
        """Control inputs for ops that must not run if a replica's ring is full.

        Raises:
          tf.errors.FailedPreconditionError: If it is.
        """
        counts = _Counts.of_matrix(self._read())
        full = tf.reduce_any(counts.enqueued - counts.dequeued >= self._capacity)
        return refuse(tf.cast(full, tf.int32), ["", self._full()])

    def check_batch(self, replica: int) -> list[Any]:
        """Control inputs for ops that must not run if `dequeue` would be refused.

        Raises:
          tf.errors.FailedPreconditionError: If it would be.
        """
        rule = self._rule(_dequeue, replica, False)
        code, *_ = rule(self._read(), tf.constant(False))
        return refuse(code, _REFUSED_DEQUEUE)

    def enqueue(
        self,
        batches: Sequence[tf.Tensor],
        replica: int | None,
        *,
        training: bool,
        begins: bool,
        outside: bool,
    ) -> tf.Tensor:
        """Queues the batches of all replicas, or of one; all enter or none.

        Args:
          batches: For each replica, or for `replica` alone.
          replica: The calling replica, or None for all.
          training: Whether the batches will owe gradients.
          begins: Whether this call may begin a step: `replica` has not enqueued
            before in this strategy.run, or all replicas enqueue.
          outside: Whether it enqueues for `replica` outside of strategy.run, where
            replicas may come in any order.

        Returns:
          Bool scalar, whether a refused step was given up.

        Raises:
          tf.errors.FailedPreconditionError: If the queue is full, or the replicas
            disagree on `training`.
        """
        rule = self._rule(_enqueue, self._capacity, replica, training, begins, outside)
        code, matrix, gave_up = rule(self._read(), tf.constant(False))
        replicas = range(self._num_replicas) if replica is None else [replica]
        with tf.control_dependencies(refuse(code, ["", self._full(), _DISAGREE])):
            puts = [
                self._store.put(self._cell(r, matrix[0, r] - 1), batch)
                for r, batch in zip(replicas, batches, strict=True)
            ]
        with tf.control_dependencies(puts):
            done = self._write(matrix)
        with tf.control_dependencies([done]):
            return tf.identity(gave_up)

    def dequeue(
        self,
        replica: int,
        *,
        partial: tf.Tensor,
        begins: bool,
        check: Callable[[tf.Tensor], list[Any]],
    ) -> tuple[tf.Tensor, tf.Tensor, tf.Tensor]:
        """Takes the next batch of `replica`; a training batch then owes its gradients.

        Args:
          replica: The calling replica.
          partial: Bool scalar, whether gradients of `replica` wait for other replicas.
          begins: Whether `replica` may begin a step, and so give the one before up: it
            is one of several, and has not dequeued or handed in gradients before in
            this strategy.run.
          check: Returns control inputs that fail if a batch cannot be looked up, and
            so leave it in the queue.

        Returns:
          (The batch; bool scalars, whether it is for training and whether a refused
          step was given up).

        Raises:
          tf.errors.FailedPreconditionError: If none is queued, or the step before
            still owes gradients.
        """
        rule = self._rule(_dequeue, replica, begins)
        code, matrix, gave_up, training = rule(self._read(), partial)
        with tf.control_dependencies(refuse(code, _REFUSED_DEQUEUE)):
            cell = self._cell(replica, matrix[1, replica] - 1)
            batch = self._store.get(cell)
            checked = check(batch)

        def owe() -> tf.Tensor:
            with tf.control_dependencies([self._store.put(self._owed(replica), batch)]):
                return tf.constant(True)

        with tf.control_dependencies(checked):
            owed = tf.cond(training, owe, lambda: False)
        with tf.control_dependencies([owed]):
            done = self._write(matrix)
        with tf.control_dependencies([done]):
            cleared = self._clear(cell)
        with tf.control_dependencies([cleared]):
            return batch, training, tf.identity(gave_up)

    def owed(self, replica: int) -> tf.Tensor:
        """The batch whose gradients `replica` owes.

        Raises:
          tf.errors.FailedPreconditionError: If there is none.
        """
        counts = _Counts.of_matrix(self._read())
        code = tf.where(counts.next_is_training(replica), 2, 3)
        code = tf.where(counts.last_was_training(replica), code, 1)
        code = tf.where(counts.owes[replica] > 0, 0, code)
        messages = ["", _NO_TRAINING, _NOT_DEQUEUED, _NOTHING_OWED]
        with tf.control_dependencies(refuse(code, messages)):
            return self._store.get(self._owed(replica))

    def settle(self, replica: int) -> None:
        """Notes that `replica` has handed in the gradients that it owed."""
        counts = _Counts.of_matrix(self._read())
        owes = counts.owes * (
            1 - tf.one_hot(replica, self._num_replicas, dtype=tf.int64)
        )
        self._write(counts._replace(owes=owes).to_matrix())
        self._clear(self._owed(replica))

    def reset(self) -> None:
        """Discards all batches; the cells are overwritten later."""
        self._write(tf.zeros([_HEAD + self._capacity, self._num_replicas], tf.int64))

    def _full(self) -> str:
        return (
            f"enqueue: the queue is full ({self._capacity} batches). Call dequeue once "
            "for each enqueue."
        )

    def _cell(self, replica: int, number: tf.Tensor) -> tf.Tensor:
        return replica * self._capacity + number % self._capacity

    def _rule(self, rule: Callable[..., Any], *arguments: Any) -> Callable[..., Any]:
        return _compiled(rule, _HEAD + self._capacity, self._num_replicas, *arguments)


def _enqueue(
    matrix: tf.Tensor,
    partial: tf.Tensor,
    capacity: int,
    replica: int | None,
    training: bool,
    begins: bool,
    outside: bool,
) -> tuple[tf.Tensor, ...]:
    """(Number of a message or 0, counts afterwards, whether a step was given up)."""
    del partial
    counts = _Counts.of_matrix(matrix)
    enqueued, dequeued, owes, was_outside, flags = counts
    # Without a refusal all replicas have enqueued as often when a step begins.
    complete = tf.reduce_min(enqueued)
    gave_up = tf.constant(False)
    if begins or outside:
        # Replicas act in ascending order: those before have begun the step already.
        own = tf.reduce_max(enqueued if outside else enqueued[replica or 0 :])
        gave_up = own > complete
        if outside:  # Only what a run left that failed.
            gave_up &= tf.equal(was_outside[0], 0)
        owes = tf.where(gave_up & (dequeued > complete), tf.zeros_like(owes), owes)
        dequeued = tf.where(gave_up, tf.minimum(dequeued, complete), dequeued)
        enqueued = tf.where(gave_up, complete, enqueued)
    num_replicas = int(enqueued.shape[0] or 0)
    chosen = range(num_replicas) if replica is None else [replica]
    is_full = tf.reduce_any(tf.gather(enqueued - dequeued, chosen) >= capacity)
    disagrees = tf.constant(False)
    for r in chosen:
        place = enqueued[r] % capacity
        others = tf.cast(enqueued > enqueued[r], tf.int64)  # Who is further on.
        disagrees |= tf.reduce_any(others * tf.abs(flags[place] - int(training)) > 0)
        flags = tf.tensor_scatter_nd_update(flags, [[place, r]], [int(training)])
    mask = tf.reduce_sum(tf.one_hot(chosen, num_replicas, dtype=tf.int64), 0)
    is_outside = tf.fill([num_replicas], tf.constant(int(outside), tf.int64))
    after = _Counts(enqueued + mask, dequeued, owes, is_outside, flags)
    code = tf.where(is_full, 1, tf.where(disagrees, 2, 0))
    return code, after.to_matrix(), gave_up


def _dequeue(
    matrix: tf.Tensor, partial: tf.Tensor, replica: int, begins: bool
) -> tuple[tf.Tensor, ...]:
    """As `_enqueue`, and whether the batch is for training."""
    counts = _Counts.of_matrix(matrix)
    debt = counts.next_is_training(replica) & (counts.owes[replica] > 0)
    gave_up = tf.constant(False)
    if begins:
        # A step that is at the same state in all replicas was not refused: a call of
        # apply_gradients was forgotten.
        alike = _equal(counts.owes) & _equal(counts.dequeued)
        gave_up = partial | (debt & ~alike)
        # Replicas act in ascending order: those before have begun this step already.
        latest = tf.reduce_max(counts.dequeued[replica:])
        given_up = gave_up & (tf.range(counts.owes.shape[0]) >= replica)
        counts = counts._replace(
            dequeued=tf.where(given_up, latest, counts.dequeued),
            owes=tf.where(given_up, tf.zeros_like(counts.owes), counts.owes),
        )
        partial, debt = tf.constant(False), debt & ~gave_up
    is_empty = ~counts.has_batch(replica)
    code = tf.where(partial, 1, tf.where(is_empty, 2, tf.where(debt, 3, 0)))
    training = counts.next_is_training(replica)
    one = tf.one_hot(replica, counts.owes.shape[0], dtype=tf.int64)
    after = counts._replace(
        dequeued=counts.dequeued + one,
        owes=tf.maximum(counts.owes, one * tf.cast(training, tf.int64)),
    )
    return code, after.to_matrix(), gave_up, training


def _equal(values: tf.Tensor) -> tf.Tensor:
    return tf.reduce_all(tf.equal(values, values[0]))


@functools.cache
def _compiled(
    rule: Callable[..., Any], rows: int, num_replicas: int, *arguments: Any
) -> Callable[..., Any]:
    """A rule as one graph: eagerly its many small ops would take milliseconds."""

    def call(matrix: tf.Tensor, partial: tf.Tensor) -> Any:
        return rule(matrix, partial, *arguments)

    with tf.init_scope():
        return tf.function(call, autograph=False).get_concrete_function(
            tf.TensorSpec([rows, num_replicas], tf.int64), tf.TensorSpec([], tf.bool)
        )
