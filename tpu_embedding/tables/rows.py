"""Tables and slots as matrices that are read and written by ranges of rows.

A subclass of `TableRows` stores the matrix in a variable, a file or the shards of a
TPU. Checkpoints use tables and slots only in this form, in slices of bounded size.
"""

from __future__ import annotations

import abc
import functools
import itertools
import math
import types
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, Protocol, TypeVar

import numpy as np

from tpu_embedding.layout.partition import Division, Run, TableLayout

PARAMETERS = "parameters"  # Name of the table itself, beside its slots.
SCALE_OFFSET = "scale_offset"  # In int8 tables, whose parameters are codes.
STORED = PARAMETERS, SCALE_OFFSET  # The arrays that store an int8 table.
SLICE_BYTES = 4 << 20  # Bytes of a matrix that are held in memory at a time.

_T = TypeVar("_T")


def checkpoint_name(table: str, array: str) -> str:
    """Returns the name of a table, or of one of its slots, in checkpoints.

    >>> checkpoint_name("films", PARAMETERS), checkpoint_name("films", "accumulators")
    ('films', 'films/accumulators')
    """
    return table if array == PARAMETERS else f"{table}/{array}"


def by_checkpoint_name(tables: Mapping[str, Mapping[str, _T]]) -> dict[str, _T]:
    """Returns arrays of each table, parameters and slots, by names in checkpoints."""
    return {
        checkpoint_name(table, array): value
        for table, arrays in tables.items()
        for array, value in arrays.items()
    }


def stored_arrays(arrays: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the arrays that store parameters (two for int8) and slots, by name."""
    parameters = arrays[PARAMETERS]
    return {**arrays, **(parameters.coded or {PARAMETERS: parameters})}


class ProcessGroup(Protocol):
    """Processes that share matrices, and make the same calls in the same order.

    Attributes:
      rank: Index of this process.
      size: Number of processes.
    """

    rank: int
    size: int

    def agree(self, phase: str, call: str = "") -> None:
        """Waits until all processes make a call; fails in all if their calls differ."""
        ...

    def all_gather(self, phase: str, content: bytes, call: str = "") -> list[bytes]:
        """Returns what each process passed, in the order of the processes."""
        ...

    def all_to_all(
        self, phase: str, contents: Sequence[bytes], call: str = ""
    ) -> list[bytes]:
        """Sends contents[p] to process p; returns what each sent to this process."""
        ...


class TableRows(abc.ABC):
    """A matrix [V, C] that is read by ranges of rows.

    Attributes:
      shape: [V, C]; V is the vocabulary without padding.
      dtype: The floating point dtype of the values that are read.
      row_bytes: Size of a row.
      nbytes: Size of the matrix.
      slice_rows: Number of rows in a slice of about `SLICE_BYTES`.
      coded: The matrices that store an int8 table, by name: `PARAMETERS`, the codes,
        and `SCALE_OFFSET`. Empty for other tables.
      file_shape: The shape in files: [V] if they have a vector.
    """

    coded: Mapping[str, TableRows] = types.MappingProxyType({})

    def __init__(self, shape: Sequence[int], dtype: np.dtype[Any]) -> None:
        rows, columns = shape
        self.shape: tuple[int, int] = (rows, columns)
        self.file_shape: tuple[int, ...] = self.shape
        self.dtype = dtype
        self.row_bytes: int = columns * dtype.itemsize
        self.nbytes: int = rows * self.row_bytes
        self.slice_rows = max(1, SLICE_BYTES // max(1, self.row_bytes))

    @property
    def stored_dtype(self) -> str:
        """The name of the dtype in which the matrix is stored, e.g. "int8"."""
        return "int8" if self.coded else self.dtype.name

    @abc.abstractmethod
    def read(self, start: int, stop: int) -> np.ndarray:
        """Returns the rows [start, stop)."""

    @property
    def group(self) -> ProcessGroup | None:
        """The processes that share this matrix, or None if this one has all of it."""
        return None

    def read_in(self, process: int, start: int, stop: int) -> np.ndarray:
        """Reads rows [start, stop) in one process of the group; all must call it."""
        del process
        return self.read(start, stop)

    @property
    def variable(self) -> Any:
        """The one variable that is this matrix, or None if there is none."""
        return None

    def verify(self) -> None:
        """Raises tf.errors.DataLossError unless all rows can be read."""
        return  # Matrices in memory are always readable.

    def release(self) -> None:
        """Frees memory that speeds up further reads."""
        return

    def slices(self) -> list[tuple[int, int]]:
        """Returns ranges of rows, each a slice, that make up the matrix."""
        starts = range(0, self.shape[0], self.slice_rows)
        return list(zip(starts, [*starts[1:], self.shape[0]], strict=False))

    def numpy(self) -> np.ndarray:
        """Returns the whole matrix."""
        return self.read(0, self.shape[0])


class ArrayRows(TableRows):
    """A matrix or vector in memory, which each process of a group has."""

    def __init__(self, values: np.ndarray, group: ProcessGroup | None = None) -> None:
        super().__init__((len(values), math.prod(values.shape[1:])), values.dtype)
        self.file_shape = values.shape
        self._values, self._group = values.reshape(self.shape), group

    @property
    def group(self) -> ProcessGroup | None:
        return self._group

    def read(self, start: int, stop: int) -> np.ndarray:
        return self._values[start:stop]


InitialValue = float | Callable[[tuple[int, int]], Any] | None


class MutableTableRows(TableRows):
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

    def restore(self, values: Any) -> None:
        """Replaces all rows by a tensor, in a graph in which TensorFlow restores."""
        raise NotImplementedError(f"{self} can be written only eagerly.")

    def assign(self, values: Any) -> None:
        """Replaces all rows by those of an array or tensor, slice by slice."""
        for start, stop in self.slices():
            rows = np.asarray(values[start:stop])
            self.write(start, rows.astype(self.dtype, copy=False))


class RowsOfParts(MutableTableRows):
    """A matrix whose rows are in other matrices; it is writable only if these are."""

    def __init__(
        self,
        shape: Sequence[int],
        parts: Sequence[TableRows],
        runs: Callable[[int, int], Iterable[Run]],
        initial_value: InitialValue = None,
    ) -> None:
        """Joins matrices of one dtype; their columns beyond `shape` are padding.

        `runs` returns where the rows of a range are.
        """
        super().__init__(shape, parts[0].dtype)
        self._parts, self._runs, self.initial_value = parts, runs, initial_value

    @property
    def group(self) -> ProcessGroup | None:
        return self._parts[0].group

    def read(self, start: int, stop: int) -> np.ndarray:
        values = np.empty((stop - start, self.shape[1]), self.dtype)
        for run in self._runs(start, stop):
            stored = self._parts[run.part].read(run.first, run.first + run.count)
            values[run.within] = stored[:, : self.shape[1]]
        return values

    def write(self, start: int, values: np.ndarray) -> None:
        padding = self._parts[0].shape[1] - self.shape[1]
        padded = np.pad(values, ((0, 0), (0, padding))) if padding else values
        for run in self._runs(start, start + len(values)):
            part = self._parts[run.part]
            assert isinstance(part, MutableTableRows), part
            part.write(run.first, padded[run.within])

    def restore(self, values: Any) -> None:
        for run in self._runs(0, self.shape[0]):
            part = self._parts[run.part]
            assert isinstance(part, MutableTableRows), part
            part.restore(values[run.within])

    def verify(self) -> None:
        for part in self._parts:
            part.verify()

    def release(self) -> None:
        for part in self._parts:
            part.release()


def joined(
    parts: Sequence[TableRows], initial_value: InitialValue = None
) -> RowsOfParts:
    """Returns the matrix of parts, one below the other, e.g. those of all devices."""
    starts = [0, *itertools.accumulate(part.shape[0] for part in parts)]

    def runs(start: int, stop: int) -> Iterator[Run]:
        for k, (begin, end) in enumerate(itertools.pairwise(starts)):
            first, last = max(start, begin), min(stop, end)
            if first < last:
                yield Run(k, first - begin, slice(first - start, last - start))

    return RowsOfParts((starts[-1], parts[0].shape[1]), parts, runs, initial_value)


def interleaved(parts: Sequence[MutableTableRows]) -> MutableTableRows:
    """Returns the matrix of the parts of `Division(len(parts))`."""
    if len(parts) == 1:
        return parts[0]
    shape = (sum(part.shape[0] for part in parts), parts[0].shape[1])
    runs = Division(len(parts)).runs
    return RowsOfParts(shape, parts, runs, parts[0].initial_value)


def unstacked(
    stack: TableRows, layout: TableLayout, initial_value: InitialValue = None
) -> RowsOfParts:
    """Returns a table, or a slot, in a stack whose shards follow one another."""
    rows, columns = layout.unsharded_shape
    return RowsOfParts(
        (rows, min(columns, stack.shape[1])),
        [stack],
        functools.partial(_runs_in_stack, layout, stack.shape[0]),
        initial_value,
    )


def _runs_in_stack(
    layout: TableLayout, stack_rows: int, start: int, stop: int
) -> Iterator[Run]:
    """Yields where rows of a table are in its stack (part 0), a run for each shard."""
    height = stack_rows // layout.division.parts
    for shard, first, within in layout.division.runs(start, stop):
        yield Run(0, shard * height + first, within)


class StackedRows(TableRows):
    """A stack, or one of its slots, assembled from its tables and padded with zeros.

    Each of the n shards holds every n-th row of a table, so reading the whole stack
    reads each table n times.
    """

    def __init__(
        self, tables: Mapping[str, TableRows], layouts: Sequence[TableLayout]
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
            for run in _runs_in_stack(layout, self.shape[0], 0, table.shape[0]):
                first = max(start, run.first)
                last = min(stop, run.first + run.count)
                if first < last:
                    step = run.within.step
                    begin = run.within.start + (first - run.first) * step
                    rows = _every(table, begin, step, last - first)
                    values[first - start : last - start, : rows.shape[1]] = rows
        return values


def _every(rows: TableRows, first: int, step: int, count: int) -> np.ndarray:
    """Returns every `step`-th row from `first` on, read in slices."""
    values = np.empty((count, rows.shape[1]), rows.dtype)
    per_slice = max(1, rows.slice_rows // step)
    for done in range(0, count, per_slice):
        number = min(per_slice, count - done)
        begin = first + done * step
        span = rows.read(begin, begin + (number - 1) * step + 1)
        values[done : done + number] = span[::step]
    return values
