"""Counts the rows that a RowSparseOptimizer updates, for `te.Telemetry`.

TensorFlow's ops count around a step, in whichever way it updates a table.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np
import tensorflow as tf

from tpu_embedding.engines.calls import Counts, TableCounts
from tpu_embedding.keras.keras_api import keras_api
from tpu_embedding.keras.rows.waiting import (
    is_in_xla,
    make_variable,
    waiting_of,
)
from tpu_embedding.tables.waiting import gather

# The dtypes of rows, row_ids, gradient_norms and update_norms of TableCounts.
_LAST = (np.int64, np.int64, np.float32, np.float32)


class _Totals(NamedTuple):
    """Numbers of one table, in the order of the variable that holds them.

    Attributes:
      every: One of so many updates is counted; 0 while none is.
      updates: The updates.
      counted: The counted updates.
      ids: The ids of counted updates.
      distinct_ids: Their distinct ids, summed over updates.
      dense: The counted updates with a dense gradient, which names no ids.
    """

    every: Any = 0
    updates: Any = 0
    counted: Any = 0
    ids: Any = 0
    distinct_ids: Any = 0
    dense: Any = 0

    def stacked(self) -> tf.Tensor:
        """Returns the numbers as one tensor, int64 [6]."""
        return tf.stack([tf.cast(number, tf.int64) for number in self])


class RowCounter:
    """Counts every n-th update of a table; traced functions keep its ops.

    Attributes:
      owner: The object for which it counts, or None while nobody counts.
      started_with: This counter and those of the other tables of the owner.
    """

    owner: Any = None
    started_with: Sequence[RowCounter] = ()

    def __init__(self, table: Any) -> None:
        self._table = table
        self._size, self._dim = (int(axis) for axis in table.shape)
        self._totals = make_variable(np.zeros([len(_Totals._fields)], np.int64))
        self._ids_by_row = make_variable(np.zeros([0], np.int64), [None])
        self._last = [make_variable(np.zeros([0], kind), [None]) for kind in _LAST]

    def start(self, every: int, owner: Any) -> None:
        """Forgets the counts; then counts for the owner, if `every` is not 0."""
        self.owner = owner if every else None
        self._totals.assign(_Totals().stacked())
        self._ids_by_row.assign(np.zeros([self._size if every else 0], np.int64))
        for last in self._last:
            last.assign(tf.zeros([0], last.dtype))
        self._totals.assign(_Totals(every).stacked())  # Only now steps are counted.

    def read(self, num_hot_rows: int) -> TableCounts:
        """Returns the counts; those of ids and rows are None after a dense gradient."""
        by_row = self._ids_by_row.numpy()
        rows = np.flatnonzero(by_row)
        hottest = rows[np.lexsort((rows, -by_row[rows]))[:num_hot_rows]]
        totals = _Totals(*self._totals.numpy().tolist())
        named, row_ids, gradient_norms, update_norms = (x.numpy() for x in self._last)
        known = not totals.dense
        return TableCounts(
            counted_steps=totals.counted,
            ids=totals.ids if known else None,
            invalid_ids=None,
            samples=None,
            samples_without_ids=None,
            distinct_ids=totals.distinct_ids if known else None,
            rows_touched=len(rows) if known else None,
            hot_rows=np.stack([hottest, by_row[hottest]], 1) if known else None,
            rows=named,
            row_ids=row_ids,
            gradient_norms=gradient_norms,
            update_norms=update_norms,
        )

    def steps(self) -> tuple[int, int]:
        """Returns the number of updates, and of those that were counted."""
        totals = _Totals(*self._totals.numpy().tolist())
        return totals.updates, totals.counted

    def begin(self, gradient: Any, all_rows: bool) -> Callable[[], None]:
        """Reads what an update will change; returns a function that counts it later."""
        if is_in_xla():
            if self.owner is None:
                return lambda: None
            raise NotImplementedError(
                f"te.Telemetry cannot count the updates of {self._table.name}: XLA "
                "compiles this step. Compile the model with jit_compile=False."
            )
        is_sparse = isinstance(gradient, tf.IndexedSlices)
        table = self._table
        totals = _Totals(*tf.unstack(self._totals.read_value()))
        is_counted = tf.equal(totals.updates % tf.maximum(totals.every, 1), 0)
        is_counted &= totals.every > 0

        def rows() -> tf.Tensor:
            return tf.range(self._size) if all_rows else tf.unique(gradient.indices)[0]

        def caught_up() -> tf.Tensor:
            waiting = waiting_of(table)
            return gather(table, rows()) if waiting is None else waiting.read(rows())

        def count() -> tf.Tensor:
            named = ids = tf.zeros([0], tf.int64)
            sums = gradient
            if is_sparse:
                found = tf.unique_with_counts(gradient.indices, tf.int64)
                named, ids = tf.cast(found.y, tf.int64), found.count
                sums = tf.math.unsorted_segment_sum(
                    gradient.values, found.idx, tf.size(ids)
                )
            self._ids_by_row.scatter_add(tf.IndexedSlices(ids, named))
            added = _Totals(
                counted=1,
                ids=tf.reduce_sum(ids),
                distinct_ids=tf.size(ids, tf.int64),
                dense=int(not is_sparse),
            )
            self._totals.assign_add(added.stacked())
            change = gather(table, rows()) - before
            values = (named, ids, _norms(sums), _norms(change))
            for last, value in zip(self._last, values, strict=True):
                last.assign(value)
            return tf.constant(0)

        before = tf.cond(
            is_counted, caught_up, lambda: tf.zeros([0, self._dim], table.dtype)
        )

        def end() -> None:
            now = _Totals(*tf.unstack(self._totals.read_value()))
            goes_on = now.every > 0  # Counting may have stopped.
            tf.cond(is_counted & goes_on, count, lambda: tf.constant(0))
            self._totals.assign_add(_Totals(updates=goes_on).stacked())

        return end


@contextlib.contextmanager
def counted(
    pairs: Sequence[tuple[Any, Any]], by_rows: Callable[[Any, Any], bool]
) -> Iterator[None]:
    """Counts a step of (gradient, variable) pairs, for tables with a counter.

    `by_rows` takes a gradient and a table, and returns whether only rows are updated.
    """
    tables = [(g, keras_api.value_of(variable)) for g, variable in pairs]
    ends = [
        table.counter.begin(
            getattr(gradient, "unclipped", gradient), not by_rows(gradient, table)
        )
        for gradient, table in tables
        if getattr(table, "counter", None) is not None
    ]
    yield
    for end in ends:
        end()


def start_counting(
    tables: dict[str, Any], every: int, owner: Any
) -> Callable[[int | None], Counts]:
    """Counts every n-th update for an owner; returns a function that reads counts."""
    counters = {}
    for name, table in tables.items():
        table.counter = counters[name] = table.counter or RowCounter(table)
        # An earlier owner of the table stops counting, in its other tables, too.
        for counter in table.counter.started_with:
            counter.start(0, None)
    for counter in counters.values():
        counter.started_with = [*counters.values()] if every else ()
        counter.start(every, owner)

    def read(num_hot_rows: int | None) -> Counts:
        steps = [counter.steps() for counter in counters.values()]
        known = {} if num_hot_rows is None else counters
        return Counts(
            *max(steps),
            queue_depth=0,
            pending_updates=0,
            tables={name: c.read(num_hot_rows or 0) for name, c in known.items()},
        )

    return read


def _norms(values: tf.Tensor) -> tf.Tensor:
    return tf.cast(tf.norm(tf.cast(values, tf.float64), axis=-1), tf.float32)
