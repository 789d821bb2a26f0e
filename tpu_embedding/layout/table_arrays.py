"""Tables and slots as matrices that are read and written by ranges of rows.

A subclass of `Rows` stores the matrix in a variable, a file or the shards of a TPU.
Checkpoints use tables and slots only in this form, in slices of bounded size.
"""

from __future__ import annotations

import abc
import dataclasses
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Protocol, TypeVar

import numpy as np

from tpu_embedding.layout.stacking import TableLayout

PARAMETERS = "parameters"  # Name of the table itself, beside its slots.
SLICE_BYTES = 4 << 20  # Bytes of a matrix that are held in memory at a time.

_T = TypeVar("_T")


def checkpoint_name(table: str, array: str) -> str:
    """Returns the name of a table, or of one of its slots, in checkpoints.

    >>> checkpoint_name("films", PARAMETERS), checkpoint_name("films", "accumulators")
    ('films', 'films/accumulators')
    """
    return table if array == PARAMETERS else f"{table}/{array}"


def by_checkpoint_name(tables: Mapping[str, Mapping[str, _T]]) -> dict[str, _T]:
    """Returns all arrays by their names in checkpoints.

    Args:
      tables: For each table name the arrays by "parameters" and slot name.
    """
    return {
        checkpoint_name(table, array): value
        for table, arrays in tables.items()
        for array, value in arrays.items()
    }


class ProcessGroup(Protocol):
    """Processes that share matrices; each makes the same calls in the same order.

    Attributes:
      rank: Index of this process.
      size: Number of processes.
    """

    rank: int
    size: int

    def all_gather(self, phase: str, content: bytes) -> list[bytes]:
        """What each process passed, in their order."""
        ...


class Rows(abc.ABC):
    """A matrix [V, C] that is read by ranges of rows.

    Attributes:
      shape: [V, C]; V is the vocabulary without padding.
      dtype: A floating point dtype.
      row_bytes: Size of a row.
      nbytes: Size of the matrix.
      slice_rows: Number of rows in a slice of about `SLICE_BYTES`.
    """

    def __init__(self, shape: Sequence[int], dtype: np.dtype[Any]) -> None:
        rows, columns = shape
        self.shape: tuple[int, int] = (rows, columns)
        self.dtype = dtype
        self.row_bytes: int = columns * dtype.itemsize
        self.nbytes: int = rows * self.row_bytes
        self.slice_rows = max(1, SLICE_BYTES // max(1, self.row_bytes))

    @abc.abstractmethod
    def read(self, start: int, stop: int) -> np.ndarray:
        """Returns the rows [start, stop)."""

    @property
    def group(self) -> ProcessGroup | None:
        """The processes that share this matrix, or None: it is that of this one."""
        return None

    def read_in(self, process: int, start: int, stop: int) -> np.ndarray:
        """Returns the rows [start, stop) in one process of the group.

        Called by all of them; what the others get is of no meaning.
        """
        del process
        return self.read(start, stop)

    @property
    def variable(self) -> Any:
        """The one variable that is this matrix, or None where there is none."""
        return None

    def verify(self) -> None:
        """Raises tf.errors.DataLossError unless all rows can be read."""
        return  # Matrices in memory are always readable.

    def release(self) -> None:
        """Frees memory that speeds up further reads."""
        return

    def slices(self) -> list[tuple[int, int]]:
        """Ranges of rows, each a slice, that make up the matrix."""
        starts = range(0, self.shape[0], self.slice_rows)
        return list(zip(starts, [*starts[1:], self.shape[0]], strict=False))

    def numpy(self) -> np.ndarray:
        """Returns the whole matrix."""
        return self.read(0, self.shape[0])


InitialValue = float | Callable[[tuple[int, int]], Any] | None


class MutableRows(Rows):
    """A matrix that is also written by ranges of rows: a part of a live embedding.

    Attributes:
      initial_value: Initial value of a slot: a number, or a function of the shape that
        returns the values; None for a table, which has an initializer.
    """

    initial_value: InitialValue = None

    def initial_rows(self, count: int) -> np.ndarray:
        """Returns `count` rows of initial values of a slot."""
        assert self.initial_value is not None
        shape = (count, self.shape[1])
        if callable(self.initial_value):
            return np.asarray(self.initial_value(shape), self.dtype)
        return np.full(shape, self.initial_value, self.dtype)

    @abc.abstractmethod
    def write(self, start: int, values: np.ndarray) -> None:
        """Replaces the rows from `start` on."""


class CopiedRows(MutableRows):
    """A matrix of which there are several equal copies, e.g. one for each replica."""

    def __init__(
        self, copies: Sequence[MutableRows], initial_value: InitialValue = None
    ) -> None:
        super().__init__(copies[0].shape, copies[0].dtype)
        self._copies, self.initial_value = copies, initial_value

    def read(self, start: int, stop: int) -> np.ndarray:
        return self._copies[0].read(start, stop)

    def write(self, start: int, values: np.ndarray) -> None:
        for copy in self._copies:
            copy.write(start, values)


@dataclasses.dataclass(frozen=True)
class _Run:
    """Rows of a table that are adjacent in the stack.

    Attributes:
      first: First row in the table; every `step`-th row follows.
      step: Number of shards.
      place: First row in the stack.
      count: Number of rows.
    """

    first: int
    step: int
    place: int
    count: int


class UnstackedRows(Rows):
    """One table, or one of its slots, read from a stack.

    Attributes:
      stack: The shards one after another, [rows, width], or [rows, 1] for a slot with
        one value per row.
      layout: Place of the table.
    """

    def __init__(self, stack: Rows, layout: TableLayout) -> None:
        rows, columns = layout.unsharded_shape
        super().__init__((rows, min(columns, stack.shape[1])), stack.dtype)
        self.stack, self.layout = stack, layout

    def read(self, start: int, stop: int) -> np.ndarray:
        columns = self.shape[1]
        values = np.empty((stop - start, columns), self.dtype)
        for run in _runs(self.layout, self.stack.shape[0], start, stop):
            stored = self.stack.read(run.place, run.place + run.count)
            values[run.first - start :: run.step] = stored[:, :columns]
        return values

    def verify(self) -> None:
        self.stack.verify()

    def release(self) -> None:
        self.stack.release()


class MutableUnstackedRows(MutableRows):
    """`UnstackedRows` of a live embedding."""

    def __init__(
        self,
        stack: MutableRows,
        layout: TableLayout,
        initial_value: InitialValue = None,
    ) -> None:
        self._rows = UnstackedRows(stack, layout)
        super().__init__(self._rows.shape, stack.dtype)
        self._stack, self._layout = stack, layout
        self.initial_value = initial_value

    def read(self, start: int, stop: int) -> np.ndarray:
        return self._rows.read(start, stop)

    def write(self, start: int, values: np.ndarray) -> None:
        padding = self._stack.shape[1] - values.shape[1]
        padded = np.pad(values, ((0, 0), (0, padding)))
        stop = start + len(values)
        for run in _runs(self._layout, self._stack.shape[0], start, stop):
            self._stack.write(run.place, padded[run.first - start :: run.step])


class StackedRows(Rows):
    """A stack, or one of its slots, assembled from its tables; padding is 0.

    Each of the n shards holds every n-th row of a table, so reading the whole stack
    reads each table n times.
    """

    def __init__(
        self, tables: Mapping[str, Rows], layouts: Sequence[TableLayout]
    ) -> None:
        """Stacks `tables`, by name, at the places in `layouts`."""
        first = layouts[0]
        table = tables[first.table_name]
        per_row = table.shape[1] < first.unsharded_shape[1]
        rows = first.total_rows_per_sparse_core_shard * first.num_sparse_cores
        width = 1 if per_row else first.unsharded_padded_shape[1]
        super().__init__((rows, width), table.dtype)
        self._tables, self._layouts = tables, layouts

    def read(self, start: int, stop: int) -> np.ndarray:
        values = np.zeros((stop - start, self.shape[1]), self.dtype)
        for layout in self._layouts:
            table = self._tables[layout.table_name]
            for run in _runs(layout, self.shape[0], 0, table.shape[0]):
                first = max(start, run.place)
                last = min(stop, run.place + run.count)
                if first < last:
                    begin = run.first + (first - run.place) * run.step
                    rows = _every(table, begin, run.step, last - first)
                    values[first - start : last - start, : rows.shape[1]] = rows
        return values


class _RowsOfParts(MutableRows):
    """A matrix whose rows are those of other matrices."""

    def __init__(
        self, parts: Sequence[MutableRows], initial_value: InitialValue = None
    ) -> None:
        """Joins `parts`, which have one width and dtype."""
        shape = (sum(part.shape[0] for part in parts), parts[0].shape[1])
        super().__init__(shape, parts[0].dtype)
        self._parts, self.initial_value = parts, initial_value


class JoinedRows(_RowsOfParts):
    """Parts of a matrix, one below the other, e.g. the parts of all devices."""

    def read(self, start: int, stop: int) -> np.ndarray:
        return np.concatenate(
            [
                part.read(first - offset, last - offset)
                for part, offset, first, last in self._within(start, stop)
            ]
        )

    def write(self, start: int, values: np.ndarray) -> None:
        stop = start + len(values)
        for part, offset, first, last in self._within(start, stop):
            part.write(first - offset, values[first - start : last - start])

    def _within(
        self, start: int, stop: int
    ) -> Iterator[tuple[MutableRows, int, int, int]]:
        """Yields each part in the range, its first row, and the rows in the range."""
        offset = 0
        for part in self._parts:
            first, last = max(start, offset), min(stop, offset + part.shape[0])
            if first < last:
                yield part, offset, first, last
            offset += part.shape[0]


class InterleavedRows(_RowsOfParts):
    """A matrix in n parts: its row r is row r // n of part r % n."""

    def read(self, start: int, stop: int) -> np.ndarray:
        values = np.empty((stop - start, self.shape[1]), self.dtype)
        for part, first, within in self._within(start, stop):
            count = len(values[within])
            values[within] = part.read(first, first + count)
        return values

    def write(self, start: int, values: np.ndarray) -> None:
        for part, first, within in self._within(start, start + len(values)):
            part.write(first, values[within])

    def _within(
        self, start: int, stop: int
    ) -> Iterator[tuple[MutableRows, int, slice]]:
        """Yields each part in the range, its first row, and its rows in the range."""
        number = len(self._parts)
        for k, part in enumerate(self._parts):
            within = slice((k - start) % number, stop - start, number)
            if within.start < stop - start:
                yield part, len(range(k, start, number)), within


def _runs(
    layout: TableLayout, stack_rows: int, start: int, stop: int
) -> Iterator[_Run]:
    """Yields the places of rows [start, stop) of a table, one run for each shard."""
    sharding = layout.sharding
    rows_per_shard = stack_rows // sharding.num_shards
    for first in range(start, min(stop, start + sharding.num_shards)):
        yield _Run(
            first=first,
            step=sharding.num_shards,
            place=sharding.stack_row(first, rows_per_shard),
            count=len(range(first, stop, sharding.num_shards)),
        )


def _every(rows: Rows, first: int, step: int, count: int) -> np.ndarray:
    """Returns every `step`-th row from `first` on, read in slices."""
    values = np.empty((count, rows.shape[1]), rows.dtype)
    per_slice = max(1, rows.slice_rows // step)
    for done in range(0, count, per_slice):
        number = min(per_slice, count - done)
        begin = first + done * step
        span = rows.read(begin, begin + (number - 1) * step + 1)
        values[done : done + number] = span[::step]
    return values
