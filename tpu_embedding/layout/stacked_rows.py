"""Tables of a stack as rows, and stacks of tables as rows, in slices."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from tpu_embedding.layout.stacking import TableLayout
from tpu_embedding.layout.table_arrays import InitialValue, MutableRows, Rows


@dataclasses.dataclass(frozen=True)
class _Run:
    """Rows that lie side by side in the stack.

    Attributes:
      first: The first of them in the table; then each `step`-th.
      step: The number of shards.
      place: The first row in the stack.
      count: How many.
    """

    first: int
    step: int
    place: int
    count: int


@dataclasses.dataclass(frozen=True, eq=False)
class UnstackedRows(Rows):
    """One table, or one slot of it, out of a stack.

    Attributes:
      stack: One shard after another, [rows, width] or, a slot per row, [rows, 1].
      layout: Where the table is.
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


@dataclasses.dataclass(frozen=True, eq=False)
class MutableUnstackedRows(MutableRows):
    """As `UnstackedRows`, of a stack in use.

    Attributes:
      stack: The stack.
      layout: Where the table is.
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
    """A stack, or one slot of it, made of its tables; padding is 0.

    Each shard has every n-th row of a table, so that the whole of each table is read
    once for each of the n shards.

    Attributes:
      tables: By table name.
      layouts: Where each table is.
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
    """Parts of a stack, one below the other, e.g. those of its devices.

    Attributes:
      parts: All of one width.
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
        """Each part that the range touches, where it begins, and the range in it."""
        offset = 0
        for part in self.parts:
            first, last = max(start, offset), min(stop, offset + part.shape[0])
            if first < last:
                yield part, offset, first, last
            offset += part.shape[0]


def _runs(
    layout: TableLayout, stack_rows: int, start: int, stop: int
) -> Iterator[_Run]:
    """Where the rows [start, stop) of a table are, one run for each shard."""
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
    """Each `step`-th row from `first` on, read in slices."""
    values = np.empty((count, rows.shape[1]), rows.dtype)
    per_slice = max(1, rows.slice_rows // step)
    for done in range(0, count, per_slice):
        number = min(per_slice, count - done)
        begin = first + done * step
        span = rows.read(begin, begin + (number - 1) * step + 1)
        values[done : done + number] = span[::step]
    return values
