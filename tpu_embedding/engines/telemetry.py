"""What engines count of the updates that they apply."""

from __future__ import annotations

import dataclasses
import threading
from collections.abc import Mapping, Sequence

import numpy as np

from tpu_embedding.layout.plan import Plan


@dataclasses.dataclass(frozen=True)
class TableCounts:
    """Sums over the counted updates of one table, and the last of them.

    Attributes:
      ids: Ids that were looked up.
      invalid_ids: Ids that were dropped or taken modulo V; None: not known.
      samples: Samples of all features; None: not known.
      samples_without_ids: Those that no id is looked up for; None: not known.
      distinct_ids: Rows that an update touched, summed over updates.
      rows_touched: Rows that any counted update touched.
      hot_rows: int64 [n, 2], the rows named most often, and by how many ids.
      rows: int [k], those of the last counted update, each once.
      row_ids: int [k], by how many ids it named each.
      gradient_norms: float32 [k], of the summed gradients, not clipped.
      update_norms: float32 [k], of the changes of the rows; [V] where the optimizer
        updates all rows.
    """

    ids: int = 0
    invalid_ids: int | None = 0
    samples: int | None = 0
    samples_without_ids: int | None = 0
    distinct_ids: int = 0
    rows_touched: int = 0
    hot_rows: np.ndarray = dataclasses.field(default_factory=lambda: _empty([0, 2]))
    rows: np.ndarray = dataclasses.field(default_factory=lambda: _empty([0]))
    row_ids: np.ndarray = dataclasses.field(default_factory=lambda: _empty([0]))
    gradient_norms: np.ndarray = dataclasses.field(
        default_factory=lambda: np.zeros([0], np.float32)
    )
    update_norms: np.ndarray = dataclasses.field(
        default_factory=lambda: np.zeros([0], np.float32)
    )


@dataclasses.dataclass(frozen=True)
class Counts:
    """What an engine has counted since it was told to.

    Attributes:
      steps: Updates that were applied.
      counted_steps: Those that were counted.
      queue_depth: Batches of a replica that wait in the queue now.
      pending_updates: Complete updates that are not applied yet.
      tables: By name.
      bytes_sent: By phase of a step what this process has sent to others, or None.
    """

    steps: int
    counted_steps: int
    queue_depth: int
    pending_updates: int
    tables: Mapping[str, TableCounts]
    bytes_sent: Mapping[str, int] | None = None


class Recorder:
    """Counts updates in NumPy, for engines that are made of TensorFlow's ops."""

    def __init__(self, plan: Plan) -> None:
        """Counts nothing until `start`."""
        self._plan = plan
        self._lock = threading.Lock()
        self.start(0)

    @property
    def is_on(self) -> bool:
        """Whether it counts. Functions that were traced while it did ask again."""
        return self._every > 0

    def start(self, every: int) -> None:
        """Forgets counts, then counts the next update and every n-th; 0: none."""
        with self._lock:
            self._every = every
            self._steps = self._uncountable = self._counted = 0
            self._tables = [TableCounts() for _ in self._plan.tables]
            sizes = [spec.config.vocabulary_size for spec in self._plan.tables]
            self._row_ids = [np.zeros(size, np.int64) for size in sizes if every]

    def next(self, countable: np.bool_) -> np.bool_:
        """Notes that an update is about to be applied; whether to count it.

        Args:
          countable: False if its gradients were summed before `start`, without counts.
        """
        with self._lock:
            if not self.is_on:
                return np.bool_(False)
            number = self._steps - self._uncountable
            self._steps += 1
            self._uncountable += not countable
            return np.bool_(countable and number % self._every == 0)

    def add(self, totals: np.ndarray, *arrays: np.ndarray) -> None:
        """Counts an update.

        Args:
          totals: int64 [tables, 3], invalid ids, samples and samples without ids.
          *arrays: For each table its rows [k], each once, the number of ids for each,
            its summed gradients [k, D], and its changes [k, D] or [V, D].
        """
        with self._lock:
            if self._counted == self._steps:
                return  # Started anew or stopped since `next`.
            self._counted += 1
            for t in range(len(self._tables)):
                self._add_table(t, totals[t], arrays[4 * t : 4 * t + 4])

    def _add_table(
        self, table: int, totals: np.ndarray, arrays: Sequence[np.ndarray]
    ) -> None:
        rows, ids, gradients, changes = arrays
        order = np.argsort(rows)
        changed = _norms(changes)
        before = self._tables[table]
        assert before.invalid_ids is not None
        assert before.samples is not None
        assert before.samples_without_ids is not None
        self._row_ids[table][rows] += ids
        invalid, samples, without = (int(total) for total in totals)
        self._tables[table] = TableCounts(
            ids=before.ids + int(ids.sum()),
            invalid_ids=before.invalid_ids + invalid,
            samples=before.samples + samples,
            samples_without_ids=before.samples_without_ids + without,
            distinct_ids=before.distinct_ids + len(rows),
            rows=rows[order],
            row_ids=ids[order],
            gradient_norms=_norms(gradients)[order],
            update_norms=changed[order] if len(changed) == len(rows) else changed,
        )

    def read(self, num_hot_rows: int) -> tuple[int, int, dict[str, TableCounts]]:
        """Updates that were applied, those that were counted, and counts by table."""
        with self._lock:
            tables = {
                spec.name: dataclasses.replace(
                    self._tables[spec.index],
                    rows_touched=int(np.count_nonzero(self._row_ids[spec.index])),
                    hot_rows=_hottest(self._row_ids[spec.index], num_hot_rows),
                )
                for spec in self._plan.tables
            }
            return self._steps, self._counted, tables


def _norms(rows: np.ndarray) -> np.ndarray:
    squares = np.square(rows.astype(np.float64)).sum(-1)
    return np.sqrt(squares).astype(np.float32)


def _hottest(ids: np.ndarray, count: int) -> np.ndarray:
    """The rows named most often, and of equal ones the lower first."""
    rows = np.flatnonzero(ids)
    order = np.lexsort((rows, -ids[rows]))[:count]
    return np.stack([rows[order], ids[rows[order]]], -1).astype(np.int64)


def _empty(shape: list[int]) -> np.ndarray:
    return np.zeros(shape, np.int64)
