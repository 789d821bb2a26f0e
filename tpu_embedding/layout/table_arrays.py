"""Tables and slots as matrices that are read and written by ranges of rows.

A subclass of `Rows` stores the matrix in a variable, a file or the shards of a TPU.
Checkpoints use tables and slots only in this form, in slices of bounded size.
"""

from __future__ import annotations

import abc
import dataclasses
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, TypeVar

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


class Rows(abc.ABC):
    """A matrix [V, C] that is read by ranges of rows."""

    @property
    @abc.abstractmethod
    def shape(self) -> tuple[int, int]:
        """[V, C]; V is the vocabulary without padding."""

    @property
    @abc.abstractmethod
    def dtype(self) -> np.dtype[Any]:
        """A floating point dtype."""

    @abc.abstractmethod
    def read(self, start: int, stop: int) -> np.ndarray:
        """Returns the rows [start, stop)."""

    @property
    def variable(self) -> Any:
        """The variable that stores exactly this matrix, or None."""
        return None

    def verify(self) -> None:
        """Raises tf.errors.DataLossError unless all rows can be read."""
        return  # Matrices in memory are always readable.

    def release(self) -> None:
        """Frees memory that speeds up further reads."""
        return

    @property
    def row_bytes(self) -> int:
        """Bytes of a row."""
        return self.shape[1] * self.dtype.itemsize

    @property
    def nbytes(self) -> int:
        """Bytes of the matrix."""
        return self.shape[0] * self.row_bytes

    @property
    def slice_rows(self) -> int:
        """Number of rows in a slice of about `SLICE_BYTES`."""
        return max(1, SLICE_BYTES // max(1, self.row_bytes))

    def slices(self) -> Iterator[tuple[int, int]]:
        """Yields the range of each slice, in order."""
        for start in range(0, self.shape[0], self.slice_rows):
            yield start, min(self.shape[0], start + self.slice_rows)

    def numpy(self) -> np.ndarray:
        """Returns the whole matrix."""
        return self.read(0, self.shape[0])


@dataclasses.dataclass(frozen=True, eq=False)
class ArrayRows(Rows):
    """A matrix whose shape and dtype are known before it is read.

    Attributes:
      array_shape: Shape, of rank 2.
      array_dtype: Dtype of the values.
    """

    array_shape: tuple[int, ...]
    array_dtype: np.dtype[Any]

    @property
    def shape(self) -> tuple[int, int]:
        rows, columns = self.array_shape
        return rows, columns

    @property
    def dtype(self) -> np.dtype[Any]:
        return self.array_dtype


InitialValue = float | Callable[[tuple[int, int]], Any] | None


class MutableRows(Rows):
    """A matrix of a live embedding, which is also written by ranges of rows.

    Attributes:
      initial_value: Initial value of a slot: a number, or a function of the shape.
        None for a table, which has an initializer.
    """

    initial_value: InitialValue

    def initial_rows(self, count: int) -> np.ndarray:
        """Returns `count` rows of a slot with their initial value."""
        assert self.initial_value is not None
        shape = (count, self.shape[1])
        if callable(self.initial_value):
            return np.asarray(self.initial_value(shape), self.dtype)
        return np.full(shape, self.initial_value, self.dtype)

    @abc.abstractmethod
    def write(self, start: int, values: np.ndarray) -> None:
        """Replaces the rows from `start` on."""


@dataclasses.dataclass(frozen=True, eq=False)
class CopiedRows(MutableRows):
    """A matrix of which there are several equal copies, e.g. one for each replica.

    Attributes:
      copies: Matrices of one shape and dtype.
      initial_value: See `MutableRows`.
    """

    copies: Sequence[MutableRows]
    initial_value: InitialValue = None

    @property
    def shape(self) -> tuple[int, int]:
        return self.copies[0].shape

    @property
    def dtype(self) -> np.dtype[Any]:
        return self.copies[0].dtype

    def read(self, start: int, stop: int) -> np.ndarray:
        return self.copies[0].read(start, stop)

    def write(self, start: int, values: np.ndarray) -> None:
        for copy in self.copies:
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


@dataclasses.dataclass(frozen=True, eq=False)
class UnstackedRows(Rows):
    """One table, or one of its slots, read from a stack.

    Attributes:
      stack: The shards one after another, [rows, width], or [rows, 1] for a slot with
        one value per row.
      layout: Place of the table.
    """

    stack: Rows
    layout: TableLayout

    @property
    def shape(self) -> tuple[int, int]:
        rows, columns = self.layout.unsharded_shape
        return rows, min(columns, self.stack.shape[1])

    @property
    def dtype(self) -> np.dtype[Any]:
        return self.stack.dtype

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


@dataclasses.dataclass(frozen=True, eq=False)
class MutableUnstackedRows(MutableRows):
    """`UnstackedRows` of a live embedding.

    Attributes:
      stack: As in `UnstackedRows`.
      layout: As in `UnstackedRows`.
      initial_value: See `MutableRows`.
    """

    stack: MutableRows
    layout: TableLayout
    initial_value: InitialValue = None

    @property
    def shape(self) -> tuple[int, int]:
        return UnstackedRows(self.stack, self.layout).shape

    @property
    def dtype(self) -> np.dtype[Any]:
        return self.stack.dtype

    def read(self, start: int, stop: int) -> np.ndarray:
        return UnstackedRows(self.stack, self.layout).read(start, stop)

    def write(self, start: int, values: np.ndarray) -> None:
        padding = self.stack.shape[1] - values.shape[1]
        padded = np.pad(values, ((0, 0), (0, padding)))
        stop = start + len(values)
        for run in _runs(self.layout, self.stack.shape[0], start, stop):
            self.stack.write(run.place, padded[run.first - start :: run.step])


@dataclasses.dataclass(frozen=True, eq=False)
class StackedRows(Rows):
    """A stack, or one of its slots, assembled from its tables; padding is 0.

    Each of the n shards holds every n-th row of a table, so reading the whole stack
    reads each table n times.

    Attributes:
      tables: By table name.
      layouts: Place of each table.
    """

    tables: Mapping[str, Rows]
    layouts: Sequence[TableLayout]

    @property
    def shape(self) -> tuple[int, int]:
        first = self.layouts[0]
        rows = first.total_rows_per_sparse_core_shard * first.num_sparse_cores
        per_row = self.tables[first.table_name].shape[1] < first.unsharded_shape[1]
        return rows, 1 if per_row else first.unsharded_padded_shape[1]

    @property
    def dtype(self) -> np.dtype[Any]:
        return self.tables[self.layouts[0].table_name].dtype

    def read(self, start: int, stop: int) -> np.ndarray:
        values = np.zeros((stop - start, self.shape[1]), self.dtype)
        for layout in self.layouts:
            table = self.tables[layout.table_name]
            for run in _runs(layout, self.shape[0], 0, table.shape[0]):
                first = max(start, run.place)
                last = min(stop, run.place + run.count)
                if first < last:
                    begin = run.first + (first - run.place) * run.step
                    rows = _every(table, begin, run.step, last - first)
                    values[first - start : last - start, : rows.shape[1]] = rows
        return values


@dataclasses.dataclass(frozen=True, eq=False)
class JoinedRows(MutableRows):
    """Parts of a matrix, one below the other, e.g. the parts of all devices.

    Attributes:
      parts: Matrices of the same width.
      initial_value: See `MutableRows`.
    """

    parts: Sequence[MutableRows]
    initial_value: InitialValue = None

    @property
    def shape(self) -> tuple[int, int]:
        return sum(part.shape[0] for part in self.parts), self.parts[0].shape[1]

    @property
    def dtype(self) -> np.dtype[Any]:
        return self.parts[0].dtype

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
        for part in self.parts:
            first, last = max(start, offset), min(stop, offset + part.shape[0])
            if first < last:
                yield part, offset, first, last
            offset += part.shape[0]


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
