"""Divides the rows of tables among parts."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import Any, NamedTuple


class Run(NamedTuple):
    """Rows of a range that are adjacent in one part.

    Attributes:
      part: The number of the part.
      first: The number that the first of these rows has in the part.
      within: The places of the rows in the range; its `start` and `stop` are set.
    """

    part: int
    first: int
    within: slice

    @property
    def count(self) -> int:
        """The number of rows."""
        return len(range(*self.within.indices(self.within.stop)))


@dataclasses.dataclass(frozen=True)
class Division:
    """Divides the rows of a table over processes, servers or SparseCores, its *parts*.

    Row r is row `offset + r // parts` of part `(r + rotation) mod parts`. The methods
    that take a row also take an integer array or tensor, and return the same type.

    >>> division = Division(2)
    >>> division.owner(5), division.local(5)
    (1, 2)
    >>> division.row(1, 2), division.rows(1, count=6)
    (5, range(1, 6, 2))
    >>> Division(8, rotation=5).stacked(12, height=10)
    11

    `ops/cc/core/routing.h` has the same rule.

    Attributes:
      parts: The number of parts.
      rotation: The part of row 0.
      offset: The number of rows of other tables before those of this one in each part.
    """

    parts: int
    rotation: int = 0
    offset: int = 0

    def owner(self, row: Any) -> Any:
        """Returns the part that has a row."""
        return (row + self.rotation) % self.parts

    def local(self, row: Any) -> Any:
        """Returns the number of a row in its part."""
        return self.offset + row // self.parts

    def row(self, part: int, local: Any) -> Any:
        """Returns the row that has the number `local` in a part."""
        return (local - self.offset) * self.parts + (part - self.rotation) % self.parts

    def stacked(self, row: Any, height: int) -> Any:
        """Returns a row's number in the matrix of all parts, each of that height."""
        return self.owner(row) * height + self.local(row)

    def rows(self, part: int, count: int) -> range:
        """Returns the rows that a part has of a table of `count` rows."""
        return range((part - self.rotation) % self.parts, count, self.parts)

    def within(self, part: int, start: int, stop: int) -> Run:
        """Returns the rows that a part has among the rows [start, stop)."""
        first = (part - self.rotation - start) % self.parts
        return Run(
            part, self.local(start + first), slice(first, stop - start, self.parts)
        )

    def runs(self, start: int, stop: int) -> Iterator[Run]:
        """Yields the rows [start, stop) by part; parts without one are left out."""
        for part in range(self.parts):
            run = self.within(part, start, stop)
            if run.count:
                yield run


@dataclasses.dataclass(frozen=True)
class TableLayout:
    """Describes the place of one table, as TensorFlow's SparseCoreTableLayout does.

    Attributes:
      table_name: The name of the table.
      stacked_table_name: The name of its stack.
      num_sparse_cores: SparseCores of all devices, which is the number of shards.
      num_partitions: The number of devices.
      total_rows_per_sparse_core_shard: Rows of the whole stack in one shard.
      unsharded_shape: (V, D).
      unsharded_padded_shape: (V, D) with padding.
      sparse_core_shard_row_offset: Rows of other tables before it in each shard.
      sparse_core_shard_rotation: The shard of id 0.
      per_sparse_core_batch_size: Samples of the table on one SparseCore.
      num_features: Features that look the table up.
    """

    table_name: str
    stacked_table_name: str
    num_sparse_cores: int
    num_partitions: int
    total_rows_per_sparse_core_shard: int
    unsharded_shape: tuple[int, ...]
    unsharded_padded_shape: tuple[int, ...]
    sparse_core_shard_row_offset: int
    sparse_core_shard_rotation: int
    per_sparse_core_batch_size: int = 0
    num_features: int = 0

    @property
    def division(self) -> Division:
        # This divides the rows among the shards.
        return Division(
            self.num_sparse_cores,
            rotation=self.sparse_core_shard_rotation,
            offset=self.sparse_core_shard_row_offset,
        )

    @property
    def end(self) -> int:
        # This is the first row of each shard after the rows of the table.
        rows = self.unsharded_padded_shape[0] // self.num_sparse_cores
        return self.sparse_core_shard_row_offset + rows
