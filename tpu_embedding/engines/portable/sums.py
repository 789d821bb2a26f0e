"""Gradients as their sums by row: of one replica, of all replicas, and in queues."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Generic, NamedTuple, TypeVar

import tensorflow as tf

from tpu_embedding.layout.plan import Plan
from tpu_embedding.lookup.combine import sum_segments
from tpu_embedding.lookup.entries import Entries

_Element = TypeVar("_Element")


class TableSums(NamedTuple):
    """What one table is to be updated with.

    Attributes:
      rows: int64 [n], each once.
      gradients: float32 [n, D], the sum of the gradients of each row.
      num_ids: int64 [n], the number of ids that looked each row up; empty if nothing
        is counted.
    """

    rows: Any
    gradients: Any
    num_ids: Any


class Sums(NamedTuple):
    """The gradients of one step, or the specs of their tensors.

    Attributes:
      of_weights: float32 [num_weights], the gradients of the weights of all custom
        combiners.
      sample_counts: int64 [tables, 3], invalid ids, samples and samples without ids;
        [0, 3] if nothing is counted.
      tables: In the order of the plan.
    """

    of_weights: Any
    sample_counts: Any
    tables: Sequence[TableSums]

    @classmethod
    def specs(cls, plan: Plan, num_weights: int) -> Sums:
        """The dtype and the static shape of each tensor.

        Args:
          plan: The tables.
          num_weights: The number of weights of all custom combiners.
        """
        vector = tf.TensorSpec([None], tf.int64)
        return cls(
            of_weights=tf.TensorSpec([num_weights]),
            sample_counts=tf.TensorSpec([None, 3], tf.int64),
            tables=[
                TableSums(vector, tf.TensorSpec([None, table.config.dim]), vector)
                for table in plan.tables
            ],
        )

    @classmethod
    def of_replica(
        cls,
        plan: Plan,
        entries: Sequence[Entries],
        gradients: Sequence[tf.Tensor | None],
        *,
        of_weights: tf.Tensor,
        positions: Sequence[Entries],
        counted: bool,
    ) -> Sums:
        """The sums of one replica's gradients.

        Args:
          plan: The tables and features.
          entries: The batch, one for each feature.
          gradients: For each feature float32 of the shape of its vectors, or None.
          of_weights: See `Sums`.
          positions: The entries with which the vectors were looked up.
          counted: Whether ids and samples are counted.
        """
        tables = []
        for table in plan.tables:
            rows = tf.concat([entries[f].rows for f in table.features], 0)
            values = [
                _entry_gradients(gradients[f], positions[f], table.config.dim)
                for f in table.features
            ]
            ids = tf.ones_like(rows) if counted else tf.zeros([0], tf.int64)
            tables.append(_by_row(rows, tf.concat(values, 0), ids, counted=counted))
        counts = _count_samples(plan, entries, counted=counted)
        return cls(of_weights, counts, tables)

    @classmethod
    def merged(cls, replicas: Sequence[Sums], *, counted: bool) -> Sums:
        """The sums of all replicas, added in the order of the replicas."""
        if len(replicas) == 1:
            return replicas[0]
        tables = [
            _by_row(
                *(tf.concat(parts, 0) for parts in zip(*table, strict=True)),
                counted=counted,
            )
            for table in zip(*(sums.tables for sums in replicas), strict=True)
        ]
        return cls(
            of_weights=tf.add_n([sums.of_weights for sums in replicas]),
            sample_counts=tf.add_n([sums.sample_counts for sums in replicas]),
            tables=tables,
        )


class Update(NamedTuple):
    """One update of all tables, or the specs of its tensors.

    Attributes:
      number: int64 scalar, the number of updates before it.
      rates: What `Rates.evaluate` returned for it.
      sums: The gradients of all replicas.
    """

    number: Any
    rates: Any
    sums: Sums


class NestQueue(Generic[_Element]):
    """A first-in-first-out queue of structures, which change as one."""

    def __init__(self, capacity: int, specs: _Element) -> None:
        """Makes an empty queue on the device that is current.

        Args:
          capacity: The largest number of elements.
          specs: An element with a tf.TensorSpec in place of each tensor.
        """
        self._specs = specs
        dtypes = [spec.dtype for spec in tf.nest.flatten(specs)]
        self._queue = tf.queue.FIFOQueue(capacity, dtypes)

    def size(self) -> tf.Tensor:
        """The number of elements, an int32 scalar."""
        return self._queue.size()

    def enqueue(self, element: _Element) -> None:
        """Adds an element at the end."""
        self._queue.enqueue(tf.nest.flatten(element))

    def dequeue(self) -> _Element:
        """Takes the first element, with its static shapes."""
        tensors = tf.nest.flatten(self._queue.dequeue())
        for tensor, spec in zip(tensors, tf.nest.flatten(self._specs), strict=True):
            tensor.set_shape(spec.shape)
        return tf.nest.pack_sequence_as(self._specs, tensors)

    def discard(self, count: tf.Tensor) -> None:
        """Takes `count` elements out; there must be as many."""

        def discard_one(left: tf.Tensor) -> list[tf.Tensor]:
            with tf.control_dependencies(self._queue.dequeue()):
                return [left - 1]

        tf.while_loop(lambda left: left > 0, discard_one, [count])


def _entry_gradients(
    gradient: tf.Tensor | None, entries: Entries, dim: int
) -> tf.Tensor:
    """The gradient that each entry adds to its row, float32 [n, dim].

    Args:
      gradient: float32 [*entries.shape, dim], of the activation, or None for zeros.
      entries: The entries of the lookup.
      dim: D.
    """
    if gradient is None:
        return tf.zeros([tf.size(entries.rows), dim])
    of_samples = tf.reshape(gradient, [-1, dim])
    of_entries = tf.gather(of_samples, entries.samples)
    return of_entries * entries.gains[:, tf.newaxis]


def _by_row(
    rows: tf.Tensor, gradients: tf.Tensor, num_ids: tf.Tensor, *, counted: bool
) -> TableSums:
    """The sums of gradients [n, D] and, if counted, of `num_ids` [n] of each row."""
    unique = tf.unique(rows, out_idx=tf.int64)
    size = tf.size(unique.y)
    sums = sum_segments(gradients, unique.idx, size)
    if counted:
        num_ids = tf.math.unsorted_segment_sum(num_ids, unique.idx, size)
    return TableSums(unique.y, sums, num_ids)


def _count_samples(
    plan: Plan, entries: Sequence[Entries], *, counted: bool
) -> tf.Tensor:
    """int64 [tables, 3], invalid ids, samples and samples without ids; or [0, 3]."""
    if not counted:
        return tf.zeros([0, 3], tf.int64)

    def of_feature(entry: Entries) -> tf.Tensor:
        found = tf.size(tf.unique(entry.samples).y, tf.int64)
        samples = entry.num_samples
        return tf.stack([entry.num_invalid, samples, samples - found])

    return tf.stack(
        [tf.add_n([of_feature(entries[f]) for f in t.features]) for t in plan.tables]
    )
