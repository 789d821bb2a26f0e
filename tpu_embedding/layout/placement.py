"""Places the rows of tables in processes or on parameter servers."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np

from tpu_embedding.layout.partition import Division, Run
from tpu_embedding.vocabulary import mix_bits

# Owners of divided tables. Static tables are divided by rows, growing ones by a hash
# of each id.
ALL_PROCESSES, BY_ID = -1, -2


@dataclasses.dataclass(frozen=True)
class IdDivision:
    """Divides the ids of a growing table among processes or servers, by a hash of each.

    Each part numbers its own rows, so `local` and `row` return an id unchanged.

    >>> IdDivision(3).owner(np.array([7, -1, 1 << 32])).tolist()
    [1, 0, 1]

    `ops/cc/core/routing.h` has the same rule.

    Attributes:
      parts: The number of parts.
    """

    parts: int

    def owner(self, ids: np.ndarray) -> np.ndarray:
        """Returns the part that has each id, int64."""
        words = np.asarray(ids, np.int64).view(np.uint64)
        high = mix_bits(words) >> np.uint64(32)
        return (high * np.uint64(self.parts) >> np.uint64(32)).astype(np.int64)

    def local(self, ids: Any) -> Any:
        """See `Division.local`."""
        return ids

    def row(self, part: int, local: Any) -> Any:
        """See `Division.row`."""
        del part
        return local


@dataclasses.dataclass(frozen=True)
class Placement:
    """Places the tables of a plan on the processes of a job, or on parameter servers.

    `Division` divides a table by rows, and `IdDivision` a growing one, into a part
    for each process. Any other table lives whole in one process.

    Attributes:
      process: Index of this process.
      num_processes: Number of processes, n.
      owners: The process of each table of the plan, `ALL_PROCESSES` or `BY_ID`.
    """

    process: int
    num_processes: int
    owners: tuple[int, ...]

    def is_divided(self, table: int) -> bool:
        """Returns whether a table is divided by rows."""
        return self.owners[table] < 0

    def division(self, table: int) -> Division | IdDivision:
        """Returns the division of a table whose rows are divided."""
        kind = IdDivision if self.owners[table] == BY_ID else Division
        return kind(self.num_processes)

    def part(self, table: int) -> tuple[int, int]:
        """Returns the index of this process's part of a table, and the number of parts.

        A whole table is one part, whether this process has it or not.
        """
        return (self.process, self.num_processes) if self.is_divided(table) else (0, 1)

    def within(self, table: int, start: int, stop: int) -> Run:
        """Returns the rows of a table that this process has among [start, stop)."""
        if self.owners[table] == ALL_PROCESSES:
            return Division(self.num_processes).within(self.process, start, stop)
        if self.owners[table] in (self.process, BY_ID):
            return Division(1).within(0, start, stop)
        return Run(self.process, 0, slice(0, 0))

    def rows_of(self, table: int, vocabulary_size: int) -> range:
        """Returns the rows of a table that this process has."""
        if self.is_divided(table):
            return Division(self.num_processes).rows(self.process, vocabulary_size)
        return range(vocabulary_size if self.owners[table] == self.process else 0)

    def count(self, table: int, vocabulary_size: int) -> int:
        """Returns how many rows this process has, or may have if the table grows."""
        if self.owners[table] == BY_ID:
            return -(-vocabulary_size // self.num_processes)
        return len(self.rows_of(table, vocabulary_size))

    def owned(self, table: int, rows: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Returns a mask of the rows that this process has, and their numbers here.

        >>> Placement(1, 2, (ALL_PROCESSES,)).owned(0, np.array([1, 4, 7]))
        (array([ True, False,  True]), array([0, 3]))
        """
        if not self.is_divided(table):
            own = np.full(len(rows), self.owners[table] == self.process)
            return own, rows[own]
        division = self.division(table)
        own = division.owner(rows) == self.process
        return own, division.local(rows[own])

    def rows_at(self, table: int, local: np.ndarray) -> np.ndarray:
        """Returns the rows of a table that have these numbers in this process."""
        if not self.is_divided(table):
            return local
        return self.division(table).row(self.process, local)
