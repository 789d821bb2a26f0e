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
