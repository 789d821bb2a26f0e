"""Statistics of the rows of a checkpoint's tables, which are read once in slices."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator, Sequence

import numpy as np
import tensorflow as tf

from tpu_embedding.checkpoint.checkpoint_view import LogicalCheckpoint, LogicalTable
from tpu_embedding.checkpoint.writing import Progress
from tpu_embedding.optimizers import OPTIMIZERS
from tpu_embedding.optimizers.base import Optimizer
from tpu_embedding.tables.rows import TableRows

_PER_OCTAVE = 8  # Buckets of norms between a power of two and the next one.
_MAX_HASHES = 1 << 20  # The number of hashes of rows that memory may hold.
_NUM_ROWS = 10  # The most rows, and groups of rows, that a report lists.
_BUCKETS = 32  # The most buckets of a histogram.


@dataclasses.dataclass(frozen=True)
class DeadRows:
    """Rows that no gradient has changed, as far as the slots say.

    Attributes:
      count: The number of rows whose slots all have their initial value; None if that
        cannot be decided.
      reason: A sentence that says how it was decided, or why it cannot be.
    """

    count: int | None
    reason: str


@dataclasses.dataclass(frozen=True)
class EqualRows:
    """Rows that have the same values as another row, other than zeros.

    Attributes:
      count: The number of rows that are equal to another one.
      groups: The largest groups, as (number of rows, the first rows); see `largest`.
      sampled: 1 if all rows were compared. If it is n > 1, one of n rows was compared,
        chosen by its values so that equal rows stay together; `count` is an estimate.
    """

    count: int
    groups: list[tuple[int, list[int | None]]]
    sampled: int


@dataclasses.dataclass(frozen=True)
class StoredTableReport:
    """The statistics of one table.

    Attributes:
      name: The name of the table.
      rows: The number of rows V.
      dim: The number of columns D.
      key: What identifies a row: "row", or in a growing table "id".
      dtype: The dtype of the parameters.
      bytes: The sizes in bytes by "parameters" and slot name.
      optimizers: Names of the optimizers that have such slots.
      norms: (lower bound, upper bound, rows) of buckets of equal ratio, ascending.
      zero_rows: The number of rows of zeros.
      not_finite_rows: The number of rows with a NaN or an infinity.
      mean_norm: The mean norm of finite rows; None if there are none.
      largest: (row, norm) of the largest finite norms. A growing table has the id in
        place of the row, and None for the row that ids share.
      dead: Rows that no gradient has changed.
      equal: Rows that are equal to another row.
    """

    name: str
    rows: int
    dim: int
    key: str
    dtype: str
    bytes: dict[str, int]
    optimizers: list[str]
    norms: list[tuple[float, float, int]]
    zero_rows: int
    not_finite_rows: int
    mean_norm: float | None
    largest: list[tuple[int | None, float]]
    dead: DeadRows
    equal: EqualRows


def table_reports(
    checkpoint: LogicalCheckpoint, progress: Progress
) -> list[StoredTableReport]:
    """Reads all of a checkpoint once, a slice of each array of a table at a time."""
    arrays = [a for table in checkpoint.values() for a in table.arrays.values()]
    for rows in arrays:
        rows.verify()
    progress.start("Reading", sum(rows.nbytes for rows in arrays))
    return [_report(table, progress) for table in checkpoint.values()]


def _report(table: LogicalTable, progress: Progress) -> StoredTableReport:
    matching = _optimizers_with(table)
    norms, equal = _Norms(), _Equal(table.parameters.shape[0])
    dead = _Dead(list(table.slots), matching)
    for start, slices in _slices(list(table.arrays.values()), progress):
        values, *slots = slices
        norms.add(start, values)
        equal.add(start, values)
        dead.add(slots)
    ids = table.ids if table.vocabulary else None

    def named(row: int | None) -> int | None:
        if ids is None or row is None:
            return row
        return int(ids[row]) if row < len(ids) else None

    found = equal.result()
    groups = [(count, [named(row) for row in rows]) for count, rows in found.groups]
    return StoredTableReport(
        name=table.name,
        rows=table.parameters.shape[0],
        dim=table.parameters.shape[1],
        key="row" if ids is None else "id",
        dtype=table.parameters.stored_dtype,
        bytes={name: rows.nbytes for name, rows in table.arrays.items()},
        optimizers=[type(optimizer).__name__ for optimizer in matching],
        norms=norms.buckets(),
        zero_rows=norms.zeros,
        not_finite_rows=norms.not_finite,
        mean_norm=norms.mean(),
        largest=[(named(row), norm) for row, norm in norms.largest],
        dead=dead.result(),
        equal=dataclasses.replace(found, groups=groups),
    )


def _slices(
    arrays: Sequence[TableRows], progress: Progress
) -> Iterator[tuple[int, list[np.ndarray]]]:
    """Yields (number of the first row, the same rows of each array), in slices."""
    size = min(rows.slice_rows for rows in arrays)
    total = arrays[0].shape[0]
    for start in range(0, total, size):
        stop = min(start + size, total)
        yield start, [rows.read(start, stop) for rows in arrays]
        progress.advance(sum((stop - start) * rows.row_bytes for rows in arrays))
    for rows in arrays:
        rows.release()


class _Norms:
    """The Euclidean norms of rows."""

    def __init__(self) -> None:
        self.zeros = self.not_finite = 0
        self.largest: list[tuple[int, float]] = []
        self._sum, self._finite = 0.0, 0
        self._buckets: dict[int, int] = {}

    def add(self, start: int, values: np.ndarray) -> None:
        # float64 holds the square of every float32.
        norms = np.sqrt(np.square(values.astype(np.float64)).sum(axis=1))
        finite = np.isfinite(norms)
        self.not_finite += int((~finite).sum())
        self._finite += int(finite.sum())
        self._sum += float(norms[finite].sum())
        positive = norms[finite & (norms > 0)]
        self.zeros += int((norms == 0).sum())
        numbers = np.floor(np.log2(positive) * _PER_OCTAVE).astype(np.int64)
        for number, count in zip(*np.unique(numbers, return_counts=True), strict=True):
            self._buckets[int(number)] = self._buckets.get(int(number), 0) + int(count)
        norms[~finite] = -1.0
        first = np.argsort(-norms, kind="stable")[:_NUM_ROWS]
        found = [(start + int(i), float(norms[i])) for i in first if norms[i] >= 0]
        merged = sorted(self.largest + found, key=lambda pair: (-pair[1], pair[0]))
        self.largest = merged[:_NUM_ROWS]

    def mean(self) -> float | None:
        return self._sum / self._finite if self._finite else None

    def buckets(self) -> list[tuple[float, float, int]]:
        """Returns at most _BUCKETS buckets of equal width on a logarithmic scale."""
        if not self._buckets:
            return []
        first, last = min(self._buckets), max(self._buckets)
        width = math.ceil((last - first + 1) / _BUCKETS)
        counts = [0] * math.ceil((last - first + 1) / width)
        for number, count in self._buckets.items():
            counts[(number - first) // width] += count

        def bound(index: int) -> float:
            return 2.0 ** ((first + index * width) / _PER_OCTAVE)

        return [(bound(i), bound(i + 1), count) for i, count in enumerate(counts)]


class _Equal:
    """Rows with the same bytes, found by their hashes."""

    def __init__(self, num_rows: int) -> None:
        # This is a power of two, because the lower bits of its hash choose a row.
        excess = max(0, math.ceil(math.log2(max(num_rows, 1) / _MAX_HASHES)))
        self._one_of = 1 << excess
        self._hashes = [np.zeros([0], np.uint64)]
        self._rows = [np.zeros([0], np.int64)]

    def add(self, start: int, values: np.ndarray) -> None:
        hashes = row_hashes(values)
        chosen = (hashes % np.uint64(self._one_of) == 0) & (values != 0).any(axis=1)
        self._hashes.append(hashes[chosen])
        self._rows.append(start + np.flatnonzero(chosen))

    def result(self) -> EqualRows:
        hashes, rows = np.concatenate(self._hashes), np.concatenate(self._rows)
        order = np.argsort(hashes, kind="stable")
        hashes, rows = hashes[order], rows[order]
        _, starts, counts = np.unique(hashes, return_index=True, return_counts=True)
        several = counts > 1
        starts, counts = starts[several], counts[several]
        groups: list[tuple[int, list[int | None]]] = []
        for i in np.argsort(-counts, kind="stable")[:_NUM_ROWS]:
            first = rows[starts[i] : starts[i] + min(int(counts[i]), 5)]
            groups.append((int(counts[i]), [int(row) for row in first]))
        return EqualRows(int(counts.sum()) * self._one_of, groups, self._one_of)


def row_hashes(values: np.ndarray) -> np.ndarray:
    """Returns a hash of the bytes of each row, uint64 [n]."""
    data = np.ascontiguousarray(values).view(np.uint8).reshape(len(values), -1)
    hashes = tf.raw_ops.Fingerprint(data=data, method="farmhash64").numpy()
    return hashes.view(np.uint64)[:, 0]


class _Dead:
    """Rows whose slots all have their initial value."""

    def __init__(self, slots: Sequence[str], matching: Sequence[Optimizer]) -> None:
        self._slots, self._matching = slots, matching
        values = [
            {s.initial_value for o in matching for s in o.slots if s.name == name}
            for name in slots
        ]
        self._grows = [own != {0.0} for own in values]
        # Each slot's initial value: for one that only grows, the smallest value so far.
        self._initial = [math.inf if grows else 0.0 for grows in self._grows]
        self._count = 0

    def add(self, slots: Sequence[np.ndarray]) -> None:
        if not self._matching or not slots:
            return
        for i, values in enumerate(slots):
            smallest = float(np.fmin.reduce(values, axis=None, initial=math.inf))
            if self._grows[i] and smallest < self._initial[i]:
                # A smaller value shows that all rows before this slice have grown.
                self._initial[i], self._count = smallest, 0
        at_start = [
            (values == initial).all(axis=1)
            for values, initial in zip(slots, self._initial, strict=True)
        ]
        self._count += int(np.logical_and.reduce(at_start).sum())

    def result(self) -> DeadRows:
        if not self._slots:
            return DeadRows(
                None,
                "Not known: without slots, rows that were never updated cannot be "
                "recognized.",
            )
        if not self._matching:
            return DeadRows(None, "Not known: no optimizer has these slots.")
        for name, initial in zip(self._slots, self._initial, strict=True):
            if math.isinf(initial):
                return DeadRows(None, f"Not known: slot {name} has no finite value.")
        conditions = [
            f"{name} are {initial:g}" + (", the smallest value there," if grows else "")
            for name, initial, grows in zip(
                self._slots, self._initial, self._grows, strict=True
            )
        ]
        estimate = (
            "An estimate: checkpoints do not store the initial value."
            if any(self._grows)
            else "Exact, but rows whose gradients were always 0 count, too."
        )
        rows = f"Rows whose {' and '.join(conditions)} have had no update."
        return DeadRows(self._count, f"{rows} {estimate}")


def _optimizers_with(table: LogicalTable) -> list[Optimizer]:
    """Returns an optimizer of each class that has the slots of a table."""
    found = []
    for kind in OPTIMIZERS.values():
        required = {
            field.name: 0.5
            for field in dataclasses.fields(kind)  # pyright: ignore[reportArgumentType]
            if field.init
            and field.default is dataclasses.MISSING
            and field.default_factory is dataclasses.MISSING
        }
        optimizer = kind(**required)
        shapes = {
            slot.name: 1 if slot.per_row else table.parameters.shape[1]
            for slot in optimizer.slots
        }
        if shapes == {name: rows.shape[1] for name, rows in table.slots.items()}:
            found.append(optimizer)
    return found
