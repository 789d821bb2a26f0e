"""Sizes and errors of exported tables."""

from __future__ import annotations

import dataclasses

from tpu_embedding.text import aligned


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
