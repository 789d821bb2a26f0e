"""Converts tables to the form in which they are served; reports sizes and errors."""

from __future__ import annotations

import abc
import dataclasses
from collections.abc import Iterator, Mapping
from typing import Any, ClassVar

import numpy as np
import tensorflow as tf

from tpu_embedding.checkpoint.writing import Piece, slice_spec
from tpu_embedding.tables.readers import TableReader
from tpu_embedding.tables.rows import ArrayRows, ProcessGroup, TableRows
from tpu_embedding.text import aligned

CONVERTED_BYTES = 1 << 18  # of float32 values that are converted at once


class GatheredRows(TableRows):
    """A variable or tensor [V, D] of the user, on any device."""

    def __init__(self, values: Any) -> None:
        super().__init__(values.shape, np.dtype(values.dtype.as_numpy_dtype))
        self._values = values

    @property
    def variable(self) -> Any:
        return self._values if isinstance(self._values, tf.Variable) else None

    def read(self, start: int, stop: int) -> np.ndarray:
        # gather reads these rows of a variable, and [start:stop] all of it.
        return tf.gather(self._values, tf.range(start, stop)).numpy()


def rows_of(table: Any) -> TableRows:
    """Returns the rows of a variable, a tensor or a NumPy array."""
    return ArrayRows(table) if isinstance(table, np.ndarray) else GatheredRows(table)


class SomeRows(TableRows):
    """The rows [begin, end) of a table."""

    def __init__(self, rows: TableRows, begin: int, end: int) -> None:
        super().__init__((end - begin, rows.shape[1]), rows.dtype)
        self._rows, self._begin = rows, begin
        self.coded = {n: SomeRows(part, begin, end) for n, part in rows.coded.items()}

    @property
    def group(self) -> ProcessGroup | None:
        return self._rows.group

    def read(self, start: int, stop: int) -> np.ndarray:
        return self._rows.read(self._begin + start, self._begin + stop)


@dataclasses.dataclass(frozen=True)
class Source:
    """A table to be exported.

    Attributes:
      name: Name of the table, for messages.
      rows: Values of the table.
      ids: The id of each row of a growing table, int64 [V - 1], in the process that
        writes; other ids look up the last row. None for a static table.
    """

    name: str
    rows: TableRows
    ids: np.ndarray | None = None

    @property
    def shape(self) -> tuple[int, int]:
        """(V, D)."""
        return self.rows.shape

    @property
    def known(self) -> Source:
        """The rows that belong to ids: all rows, except a growing table's last one."""
        return self if self.ids is None else self._some(0, self.shape[0] - 1)

    @property
    def last(self) -> Source:
        """The last row."""
        return self._some(self.shape[0] - 1, self.shape[0])

    def _some(self, begin: int, end: int) -> Source:
        return dataclasses.replace(self, rows=SomeRows(self.rows, begin, end))

    @property
    def variable(self) -> Any:
        """The one float32 variable that is the table, or None."""
        return self.rows.variable if self.rows.dtype == np.float32 else None

    def slices(self, start: int, stop: int) -> Iterator[tuple[int, np.ndarray]]:
        """Yields (first row, float32 rows) for the rows [start, stop)."""
        step = max(1, CONVERTED_BYTES // (4 * self.shape[1]))
        for first in range(start, stop, self.rows.slice_rows):
            rows = self.rows.read(first, min(first + self.rows.slice_rows, stop))
            for begin in range(0, len(rows), step):
                values = rows[begin : begin + step]
                yield first + begin, values.astype(np.float32, copy=False)


@dataclasses.dataclass(frozen=True, eq=False)
class Converted:
    """Some rows as they are stored.

    Attributes:
      parts: One array [n, C] for each part of the table.
      values: The values that are read back, [n, D].
      bounds: The largest error of a value of each row, [n, 1].
    """

    parts: list[np.ndarray]
    values: np.ndarray
    bounds: np.ndarray


class ConvertedTable(TableReader, tf.Module):
    """A table in another form; its variables get their values slice by slice, later."""

    storage: ClassVar[str]
    # Whether the parts are the same as in an int8 table that is trained.
    keeps_codes: ClassVar[bool] = False
    # The largest magnitude that can be stored; None if any value can, even NaN.
    largest: ClassVar[float | None] = float(np.finfo(np.float32).max)

    @classmethod
    @abc.abstractmethod
    def row_bytes(cls, dim: int) -> int:
        """Returns the size of a row."""

    @property
    @abc.abstractmethod
    def parts(self) -> dict[str, tf.Variable]:
        """The variables [V, C] of the table by the name of their attribute."""

    @abc.abstractmethod
    def convert(self, values: np.ndarray) -> Converted:
        """Converts rows [n, D] to what is stored, in the order of `parts`."""

    def require_storable(self, name: str, ids: Any, values: np.ndarray) -> None:
        """Refuses values that cannot be stored.

        Args:
          name: Name of the table.
          ids: The ids of the rows, [n].
          values: The rows, [n, D].

        Raises:
          tf.errors.InvalidArgumentError: If there is such a value.
        """
        if self.largest is None:
            return
        bad = ~(np.abs(values) <= self.largest)
        if bad.any():
            row, column = np.argwhere(bad)[0]
            value = float(values[row, column])
            raise tf.errors.InvalidArgumentError(
                None,
                None,
                f"Table {name}: row {int(ids[row])} holds {value}, which "
                f"{self.storage} cannot store. Fix the table, or export it with "
                'storage "float32".',
            )


class Conversion:
    """Converts one table, and measures the errors of its values."""

    def __init__(self, source: Source, table: ConvertedTable) -> None:
        self._source, self._table = source, table
        self._parts: dict[str, Any] = table.parts  # pyright's stubs allow None axes.
        self._largest, self._squares, self._bound = 0.0, 0.0, 0.0

    @property
    def nbytes(self) -> int:
        """Size of the converted table with its spare rows."""
        rows = next(iter(self._parts.values())).shape[0]
        return rows * self._table.row_bytes(self._source.shape[1])

    def pieces(self, keys: Mapping[str, str], size: int) -> Iterator[Piece]:
        """Yields the converted table in pieces of about `size` bytes, under `keys`."""
        rows, dim = self._source.shape
        step = max(1, size // self._table.row_bytes(dim))
        step -= step % min(step, self._source.rows.slice_rows)  # They are read whole.
        for begin in range(0, rows, step):
            arrays = self._convert(begin, min(begin + step, rows))
            for name, array in arrays.items():
                yield self._piece(keys[name], name, begin, array)
        for name, part in self._parts.items():  # The spare rows follow, as zeros.
            for begin in range(rows, part.shape[0], step):
                count = min(step, part.shape[0] - begin)
                dtype = part.dtype.as_numpy_dtype
                zeros = np.zeros([count, part.shape[1]], dtype)
                yield self._piece(keys[name], name, begin, zeros)

    def _piece(self, key: str, part: str, begin: int, array: np.ndarray) -> Piece:
        shape = tuple(self._parts[part].shape)
        return Piece(key, slice_spec(shape, begin, begin + len(array)), array)

    def report(self) -> TableReport:
        """Returns the report of the table, with the errors of all pieces."""
        rows, dim = self._source.shape
        return TableReport(
            name=self._source.name,
            rows=rows,
            dim=dim,
            storage=self._table.storage,
            bytes_before=4 * rows * dim,
            bytes_after=self.nbytes,
            max_error=self._largest,
            rms_error=(self._squares / max(1, rows * dim)) ** 0.5,
            bound=self._bound,
        )

    def _convert(self, begin: int, end: int) -> dict[str, np.ndarray]:
        arrays = {
            name: np.empty([end - begin, part.shape[1]], part.dtype.as_numpy_dtype)
            for name, part in self._parts.items()
        }
        for start, values in self._source.slices(begin, end):
            ids = range(start, start + len(values))
            self._table.require_storable(self._source.name, ids, values)
            coded = self._source.rows.coded.values() if self._table.keeps_codes else ()
            parts = [part.read(start, start + len(values)) for part in coded]
            converted = (
                Converted(parts, values, np.zeros([len(values), 1]))
                if parts
                else self._table.convert(values)
            )
            here = slice(start - begin, start - begin + len(values))
            for array, part in zip(arrays.values(), converted.parts, strict=True):
                array[here] = part
            self._count(values, converted)
        return arrays

    def _count(self, values: np.ndarray, converted: Converted) -> None:
        if converted.values is values:
            return  # Exact, even for NaN.
        difference = np.abs(values.astype(np.float64) - converted.values)
        self._largest = max(self._largest, float(difference.max()))
        self._squares += float(np.square(difference).sum())
        self._bound = max(self._bound, float(converted.bounds.max()))


@dataclasses.dataclass(frozen=True)
class TableReport:
    """Holds the size and errors of one exported table.

    Attributes:
      name: Name of the table.
      rows: Number of rows.
      dim: Number of columns.
      storage: The form in which the table is stored.
      bytes_before: Size as float32.
      bytes_after: Size as stored.
      max_error: The largest difference between a stored value and the table's.
      rms_error: The root of the mean squared difference.
      bound: The upper bound of all differences, except for rounding in float32: half
        of the largest step of a row.
    """

    name: str
    rows: int
    dim: int
    storage: str
    bytes_before: int
    bytes_after: int
    max_error: float
    rms_error: float
    bound: float


def unchanged(name: str, shape: tuple[int, int]) -> TableReport:
    """Returns the report of a table that is kept as it is, in float32."""
    size = 4 * shape[0] * shape[1]
    return TableReport(name, *shape, "float32", size, size, 0.0, 0.0, 0.0)


@dataclasses.dataclass(frozen=True)
class Report:
    """Holds the sizes and errors of all exported tables.

    >>> films = TableReport("films", 1000, 16, "int8", 64000, 20000, 2e-3, 1e-3, 2e-3)
    >>> print(Report((films,)))
    table  shape      storage   bytes   size  max error  rms error
    films  1000 x 16     int8  20,000  31.2%   2.00e-03   1.00e-03
    all                        20,000  31.2%   2.00e-03

    Attributes:
      tables: The reports of the tables in the order of the plan.
    """

    tables: tuple[TableReport, ...]

    @property
    def bytes_before(self) -> int:
        """The size of all tables as float32."""
        return sum(table.bytes_before for table in self.tables)

    @property
    def bytes_after(self) -> int:
        """The size of all tables as they are stored."""
        return sum(table.bytes_after for table in self.tables)

    def __str__(self) -> str:
        head = ("table", "shape", "storage", "bytes", "size", "max error", "rms error")
        share = self.bytes_after / self.bytes_before
        worst = max(table.max_error for table in self.tables)
        foot = ("all", "", "", f"{self.bytes_after:,}", f"{share:.1%}", f"{worst:.2e}")
        lines = [head, *(_cells(table) for table in self.tables), (*foot, "")]
        return aligned(lines, left=(0, 1))


def _cells(table: TableReport) -> tuple[str, ...]:
    """Returns a table as a line of `Report`."""
    return (
        table.name,
        f"{table.rows} x {table.dim}",
        table.storage,
        f"{table.bytes_after:,}",
        f"{table.bytes_after / table.bytes_before:.1%}",
        f"{table.max_error:.2e}",
        f"{table.rms_error:.2e}",
    )
