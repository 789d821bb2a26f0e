"""A queue of batches made of TensorFlow's ops, for engines that have no kernels."""

from __future__ import annotations

import copy
import uuid
import weakref
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import tensorflow as tf

from tpu_embedding.engines.calls import QUEUE_CAPACITY
from tpu_embedding.lookup.graph_checks import refuse

FULL = (
    f"enqueue: the queue is full ({QUEUE_CAPACITY} batches). Call dequeue once for "
    "each enqueue."
)
EMPTY = (
    "dequeue: no batch is enqueued. Call enqueue before dequeue, once for each dequeue."
)
OWES = (
    "dequeue: the training batch dequeued before still owes its gradients. Call "
    "apply_gradients first, or enqueue with training=False; after a step that failed "
    "call flush and reset."
)
NO_TRAINING = (
    "apply_gradients: the batch was enqueued with training=False. Enqueue with "
    "training=True to train on it."
)
NOT_DEQUEUED = (
    "apply_gradients: the enqueued batch was not dequeued. Call dequeue first."
)
NOTHING_OWED = (
    "apply_gradients: no dequeued batch owes gradients; they can be applied once per "
    "dequeue."
)
_COUNTS, _OWED = -1, -2  # Keys; the key of a waiting batch is its number.


def pack(tensors: Sequence[Any]) -> tf.Tensor:
    """Packs tensors of any dtypes and shapes into one scalar variant."""
    return tf.raw_ops.CompositeTensorVariantFromComponents(
        components=list(tensors), metadata=""
    )


def unpack(variant: tf.Tensor, specs: Sequence[tf.TensorSpec]) -> list[tf.Tensor]:
    """Unpacks a variant of `pack` into tensors of the given dtypes and shapes."""
    tensors = tf.raw_ops.CompositeTensorVariantToComponents(
        encoded=variant, metadata="", Tcomponents=[spec.dtype for spec in specs]
    )
    for tensor, spec in zip(tensors, specs, strict=True):
        tensor.set_shape(spec.shape)
    return tensors


class _Counts(NamedTuple):
    """The counts of a ring, int64 scalars.

    Attributes:
      put: How many batches were put so far.
      taken: How many of them were taken or discarded.
      owing: 1 if a taken batch owes its gradients, else 0.
      evaluated: 1 if the batch taken last was not for training, else 0.
    """

    put: tf.Tensor
    taken: tf.Tensor
    owing: tf.Tensor
    evaluated: tf.Tensor


# The results of a call, and control inputs that wait for its changes.
_Change = tuple[list[tf.Tensor], list[Any]]


class BatchRing:
    """The batches of one replica, as variants, and the one that owes its gradients.

    Unlike a tf.queue.FIFOQueue it never blocks, and a refused call changes nothing.
    Each call holds a mutex, so that calls from several threads, eager or in graphs, run
    one after the other.

    A hash table stores the batches. Variables would not work: TensorFlow reads all of
    a TPU program's variables before it starts and writes them at its end, even those
    that only the host uses, so a call would not see what the previous call has written.

    Attributes:
      handles: The handles of the resources that make up the ring.
    """

    def __init__(self, *, in_order: bool = False) -> None:
        """Makes an empty ring on the current device.

        With `in_order` the calls of one graph wait for each other. Without it, a call
        that waits for the mutex while another call fails would hide that error.
        """
        # For each graph, the name of the op that ended the previous call.
        self._ended: weakref.WeakKeyDictionary[Any, str] | None = (
            weakref.WeakKeyDictionary() if in_order else None
        )
        name = f"tpu_embedding_{uuid.uuid4()}"  # Unnamed mutexes are shared.
        self.handles = [
            tf.raw_ops.AnonymousMutableHashTable(
                key_dtype=tf.int64, value_dtype=tf.variant
            ),
            tf.raw_ops.MutexV2(shared_name=name),
        ]

    def with_handles(self, handles: Sequence[tf.Tensor]) -> BatchRing:
        """Returns a copy of the ring whose resources have these handles."""
        other = copy.copy(self)
        other.handles = list(handles)
        return other

    def check_room(self) -> list[Any]:
        """Makes control inputs for ops that must not run if `put` would be refused."""
        return self._call(lambda counts: ([], _check_room(counts)))

    def put(self, batch: tf.Tensor, *, training: bool) -> list[Any]:
        """Adds a batch at the end, unless the ring is full; returns control inputs."""

        def change(counts: _Counts) -> _Change:
            with tf.control_dependencies(_check_room(counts)):
                stored = self._store(counts.put, [tf.constant(training), batch])
            with tf.control_dependencies([stored]):
                return [], [self._count(counts._replace(put=counts.put + 1))]

        # The checks come first: a call that waits for the mutex would hide their error.
        with tf.control_dependencies([batch]):
            return self._call(change)

    def check_batch(self) -> list[Any]:
        """Makes control inputs for ops that must not run if `take` would be refused."""
        return self._call(
            lambda counts: ([], _check_batch(counts, self._batch(counts.taken)[0]))
        )

    def take(
        self, check: Callable[[tf.Tensor], list[Any]] = lambda batch: []
    ) -> list[tf.Tensor]:
        """Takes the oldest batch; a training batch then owes its gradients.

        `check` makes control inputs that fail if the batch must stay. The result is
        whether the batch is for training, and the batch.
        """

        def change(counts: _Counts) -> _Change:
            training, batch = self._batch(counts.taken)
            with tf.control_dependencies(_check_batch(counts, training)):
                checks = check(tf.identity(batch))
                owed = tf.where(training, tf.constant(_OWED, tf.int64), counts.taken)
                with tf.control_dependencies(checks):
                    stored = self._store(owed, [training, batch])
            owing = tf.cast(training, tf.int64)
            after = _Counts(
                put=counts.put,
                taken=counts.taken + 1,
                owing=tf.maximum(counts.owing, owing),
                evaluated=1 - owing,
            )
            with tf.control_dependencies([stored]):
                counted = self._count(after)
            with tf.control_dependencies([counted]):
                return [training, batch], [self._remove([counts.taken])]

        return self._call(change)

    def owed(self) -> tf.Tensor:
        """Returns the batch that owes its gradients, or fails if there is none."""

        def change(counts: _Counts) -> _Change:
            code = tf.where(self._batch(counts.taken)[0], 2, 3)
            code = tf.where(counts.evaluated > 0, 1, code)
            code = tf.where(counts.owing > 0, 0, code)
            messages = ["", NO_TRAINING, NOT_DEQUEUED, NOTHING_OWED]
            with tf.control_dependencies(refuse(code, messages)):
                return [self._batch(tf.constant(_OWED, tf.int64))[1]], []

        return self._call(change)[0]

    def settle(self) -> list[Any]:
        """Records that no gradients are owed any longer; returns control inputs."""

        def change(counts: _Counts) -> _Change:
            none = tf.zeros([], tf.int64)
            with tf.control_dependencies([self._count(counts._replace(owing=none))]):
                return [], [self._remove([_OWED])]

        return self._call(change)

    def reset(self) -> list[Any]:
        """Discards all batches; returns control inputs."""

        def change(counts: _Counts) -> _Change:
            none = tf.zeros([], tf.int64)
            after = _Counts(counts.put, counts.put, owing=none, evaluated=none)
            with tf.control_dependencies([self._count(after)]):
                waiting = tf.range(counts.taken, counts.put)
                return [], [self._remove([_OWED]), self._remove(waiting)]

        return self._call(change)

    def _call(self, change: Callable[[_Counts], _Change]) -> list[Any]:
        """Calls `change` with the mutex held; returns results or a control input."""
        # The list is cleared, so that the frames of an error do not hold the mutex.
        with tf.control_dependencies(self._call_before()):
            locks = [tf.raw_ops.MutexLock(mutex=self.handles[1])]
        try:
            with tf.control_dependencies(locks):
                found = unpack(
                    self._find(_COUNTS, [tf.zeros([4], tf.int64)]),
                    [tf.TensorSpec([4], tf.int64)],
                )
                results, done = change(_Counts(*tf.unstack(found[0])))
            with tf.control_dependencies([*results, *done]):
                unlocked = tf.raw_ops.ConsumeMutexLock(mutex_lock=locks[0])
        finally:
            locks.clear()
        if self._ended is not None and not tf.executing_eagerly():
            self._ended[unlocked.graph] = unlocked.name
        with tf.control_dependencies([unlocked]):
            return [tf.identity(result) for result in results] or [tf.constant(True)]

    def _call_before(self) -> list[Any]:
        if self._ended is None or tf.executing_eagerly():
            return []
        graph = tf.compat.v1.get_default_graph()
        name = self._ended.get(graph)
        return [] if name is None else [graph.get_operation_by_name(name)]

    def _find(self, key: Any, default: Sequence[tf.Tensor]) -> tf.Tensor:
        found = tf.raw_ops.LookupTableFindV2(
            table_handle=self.handles[0],
            keys=tf.reshape(tf.cast(key, tf.int64), [1]),
            default_value=pack(default),
        )
        return tf.reshape(found, [])

    def _batch(self, key: tf.Tensor) -> list[tf.Tensor]:
        """Returns whether the key has a training batch, and the batch."""
        found = self._find(key, [tf.constant(False), pack([tf.zeros([])])])
        specs = [tf.TensorSpec([], tf.bool), tf.TensorSpec([], tf.variant)]
        return unpack(found, specs)

    def _store(self, key: Any, tensors: Sequence[tf.Tensor]) -> Any:
        return tf.raw_ops.LookupTableInsertV2(
            table_handle=self.handles[0],
            keys=tf.reshape(tf.cast(key, tf.int64), [1]),
            values=tf.reshape(pack(tensors), [1]),
        )

    def _count(self, counts: _Counts) -> Any:
        return self._store(_COUNTS, [tf.stack(counts)])

    def _remove(self, keys: Any) -> Any:
        return tf.raw_ops.LookupTableRemoveV2(
            table_handle=self.handles[0], keys=tf.cast(keys, tf.int64)
        )


def _check_room(counts: _Counts) -> list[Any]:
    is_full = counts.put - counts.taken >= QUEUE_CAPACITY
    return refuse(tf.cast(is_full, tf.int32), ["", FULL])


def _check_batch(counts: _Counts, training: tf.Tensor) -> list[Any]:
    code = tf.where(training & (counts.owing > 0), 2, 0)
    code = tf.where(counts.put > counts.taken, code, 1)
    return refuse(code, ["", EMPTY, OWES])
