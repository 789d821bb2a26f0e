"""Served tables that can follow their trainer: rows are changed while others are read.

A table has more rows than its vocabulary. An index says in which of them the row of
each id is, and the others are spare. A delta is written into spare rows, block by
block; its last block then points the index at them. The rows that this frees are
written again by the next delta but one at the earliest, because a delta may change at
most half of the spare rows, which form a ring. So a lookup during which fewer than two
deltas are committed has read whole rows; any other lookup reads its rows again.

The ids of a growing table are numbered: a hash table has the number of each id, and
the index has the row of each number. Numbers are reused as spare rows are. In a static
table the number of an id is the id. A delta that changes id 70 and adds id 90:

    id      number      row before -> after
    70  ->  0       ->  0          -> 5     the delta was written into rows 5 and 6
    80  ->  1       ->  1          -> 1
    90  ->  2       ->  2          -> 6     number 2 was free, and no lookup read row 2
                 spare  5 6 7 8    -> 7 8 0 2
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import tensorflow as tf
from tensorflow.python.trackable.trackable_utils import escape_local_name

from tpu_embedding.serving.conversion import ConvertedTable
from tpu_embedding.serving.delta_files import BaseTable
from tpu_embedding.serving.growing_tables import ChangingRowOfIds
from tpu_embedding.tables.readers import TableReader
from tpu_embedding.tables.variables import create_state
from tpu_embedding.tables.waiting import scatter

SMALL_TABLE = 4096  # One delta may change all rows of a table of at most this size.


def most_changed(rows: int, share: float) -> int:
    """Returns the number of rows of a table that one delta may change.

    >>> most_changed(1000, 0.125), most_changed(1_000_000, 0.125)
    (1000, 125000)
    """
    return min(rows, max(SMALL_TABLE, math.ceil(rows * share)))


def most_ids(ids: int, max_rows: int) -> int:
    """Returns the most ids that a table may have while it takes deltas."""
    return min(max_rows, 2 * ids + SMALL_TABLE)


def stored_place(spec: BaseTable) -> str:
    """Returns where the parts of a table are in the objects of an export."""
    shared = "ids/shared/" if spec.shared else ""
    return f"tables/{escape_local_name(spec.name)}/{shared}stored"


class GrowingBase(NamedTuple):
    """A growing table as it is exported.

    Attributes:
      ids: The ids of its first rows, int64 [n].
      missing: Returns what ids without a row look up, unless they share a row.
    """

    ids: np.ndarray
    missing: Callable[[tf.Tensor], tf.Tensor]


class FollowingTable(TableReader, tf.Module):
    """A table with spare rows, and the index of the rows that are served."""

    def __init__(
        self,
        stored: ConvertedTable,
        spec: BaseTable,
        sequence: Any,
        ids: FollowingIds | None = None,
    ) -> None:
        """Takes the table with its spare rows; the first of its rows are served."""
        super().__init__()
        self.stored, self.ids = stored, ids
        self.index = create_state("index", tf.range(spec.height))
        self.ring = create_state(
            "ring", tf.range(spec.height, spec.height + 2 * spec.most_changed)
        )
        self.staged_keys = create_state(
            "staged_keys", tf.zeros([spec.most_changed], tf.int64)
        )
        self._dim, self._sequence = spec.dim, sequence

    def read(self, rows: tf.Tensor) -> tf.Tensor:
        """See `TableReader.read`; of a growing table `rows` are ids."""

        def look(values: tf.Tensor, commits: tf.Tensor) -> list[tf.Tensor]:
            del values, commits
            before = self._sequence.read_value()
            with tf.control_dependencies([before]):
                values = self._look(rows)
            with tf.control_dependencies([values]):
                return [values, self._sequence.read_value() - before]

        values, _ = tf.while_loop(
            lambda _, commits: commits > 1,
            look,
            [tf.zeros([0, self._dim]), tf.constant(2, tf.int64)],
            [tf.TensorShape([None, self._dim]), tf.TensorShape([])],
            parallel_iterations=1,
        )
        return tf.ensure_shape(values, [rows.shape[0], self._dim])

    def _look(self, rows: tf.Tensor) -> tf.Tensor:
        if self.ids is None:
            return self.stored.read(tf.gather(self.index, rows))
        numbers = self.ids.number_of(rows)
        known = numbers >= 0
        values = self.stored.read(tf.gather(self.index, tf.maximum(numbers, 0)))
        return tf.where(known[:, tf.newaxis], values, self.ids.missing(rows))

    def numbered(self, keys: tf.Tensor, deleted: tf.Tensor) -> Numbered:
        """Returns the numbers of a delta's ids, and how it changes the numbering."""
        if self.ids is not None:
            return self.ids.numbered(keys, deleted)
        return Numbered(keys, tf.constant(True), list)


class Numbered(NamedTuple):
    """The numbers of the ids of a delta.

    Attributes:
      numbers: The number of each changed id, int [n].
      fits: Whether the delta can be applied.
      change: Makes the ops that assign and free numbers, once the index was changed.
    """

    numbers: tf.Tensor
    fits: tf.Tensor
    change: Callable[[], list[Any]]


class FollowingIds(tf.Module):
    """The ids of a growing table that follows its trainer.

    Attributes:
      number_of: The number of each id.
      shared: The table of the trained row that ids without a row share, or None.
    """

    def __init__(
        self,
        spec: BaseTable,
        ids: np.ndarray,
        missing: Callable[[tf.Tensor], tf.Tensor],
        shared: FollowingTable | None,
    ) -> None:
        """Takes ids, int64 [n], and what ids without any row look up (`missing`)."""
        super().__init__()
        self.number_of = ChangingRowOfIds(spec.rows, spec.most_changed)
        self.number_of.assign(ids)
        numbers = tf.range(spec.height)
        self.free = create_state("free", tf.roll(numbers, -len(ids), 0))
        # How many ids there are, and the place of the number that is free longest.
        self.counts = create_state("counts", tf.constant([len(ids), 0], tf.int64))
        self.staged_keys = create_state(
            "staged_keys", tf.zeros([spec.most_changed], tf.int64)
        )
        self.shared, self._missing = shared, missing
        self._most, self._height = spec.rows, spec.height

    def missing(self, ids: tf.Tensor) -> tf.Tensor:
        """Returns what ids without a row look up, [n, D] or [1, D]."""
        if self.shared is not None:
            return self.shared.read(tf.zeros([1], tf.int64))
        return self._missing(ids)

    def numbered(self, keys: tf.Tensor, deleted: tf.Tensor) -> Numbered:
        """See `FollowingTable.numbered`."""
        old, lost = self.number_of(keys), self.number_of(deleted)
        is_new = old < 0
        size, head = tf.unstack(self.counts.read_value())
        order = tf.cumsum(tf.cast(is_new, tf.int64), exclusive=True)
        free = tf.gather(self.free, (head + order) % self._height)
        numbers = tf.where(is_new, free, old)
        freed, removed = lost[lost >= 0], deleted[lost >= 0]
        created = tf.reduce_sum(tf.cast(is_new, tf.int64))
        after = size + created - tf.size(freed, tf.int64)
        both = tf.concat([keys, deleted], 0)
        once = tf.equal(tf.size(tf.unique(both).y), tf.size(both))

        def change() -> list[Any]:
            tail = head + self._height - size + tf.range(tf.size(freed, tf.int64))
            return [
                *self.number_of.change(keys[is_new], numbers[is_new], removed),
                scatter(self.free, tail % self._height, freed),
                self.counts.assign(
                    [after, (head + created) % self._height], read_value=False
                ),
            ]

        return Numbered(numbers, once & (after <= self._most), change)
