"""Which process of a job has which rows of which table."""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Sequence

from tpu_embedding.layout.plan import Plan, TableSpec

ALL_PROCESSES = -1  # The owner of a table that is divided by rows.


@dataclasses.dataclass(frozen=True)
class Placement:
    """The tables of a plan over the processes of a job.

    Row r of a table that is divided by rows is row r // n of process r % n, with n
    processes. Any other table lives whole in one process.

    Attributes:
      process: Index of this process.
      num_processes: Number of processes, n.
      owners: For each table of the plan its process, or `ALL_PROCESSES`.
    """

    process: int
    num_processes: int
    owners: tuple[int, ...]

    def is_divided(self, table: int) -> bool:
        """Whether a table is divided by rows."""
        return self.owners[table] == ALL_PROCESSES

    def rows_of(self, table: int) -> slice:
        """The rows of a table that this process has."""
        if self.is_divided(table):
            return slice(self.process, None, self.num_processes)
        return slice(None) if self.owners[table] == self.process else slice(0)

    def count(self, table: int, vocabulary_size: int) -> int:
        """How many rows of a table this process has."""
        return len(range(*self.rows_of(table).indices(vocabulary_size)))


# No process has more than this part of the mean load, if dividing tables avoids it.
_MAX_IMBALANCE = 1.25
# Memory decides only for tables of at least so many bytes.
_LARGE_TABLE = 16 << 20


def place_tables(
    plan: Plan, process: int, num_processes: int, placement: str = "auto"
) -> Placement:
    """Chooses which tables to divide by rows, and where the others live.

    Of a whole table the combined samples travel, once for the lookup and once for the
    update; of a divided one each distinct row and, to each process with an entry of the
    sample, its gradient. Whole tables thus need fewer bytes unless a row is used by
    many samples. They are placed one by one, those with the most samples first, each
    in the process with the least to do. A table is divided if it is more than the
    n-th part of all work or memory, or if the processes would be busy unequally.

    Args:
      plan: The tables and features.
      process: Index of this process.
      num_processes: Number of processes, n.
      placement: For tables whose `placement` is None: "auto", "rows" or "whole".
    """
    wanted = [spec.config.placement or placement for spec in plan.tables]
    loads = [_load(plan, spec) for spec in plan.tables]
    sizes = [_bytes(spec) for spec in plan.tables]
    divided = {t for t, choice in enumerate(wanted) if choice == "rows"}
    free = [t for t, choice in enumerate(wanted) if choice == "auto"]
    divided |= {
        t
        for t in free
        if loads[t] * num_processes > sum(loads)
        or (sizes[t] > _LARGE_TABLE and sizes[t] * num_processes > sum(sizes))
    }
    while True:
        owners, busy = _place_whole(loads, divided, num_processes)
        if max(busy) * num_processes <= _MAX_IMBALANCE * sum(busy):
            break
        busiest = busy.index(max(busy))
        candidates = [t for t in free if owners[t] == busiest]
        if not candidates:
            break
        divided.add(max(candidates, key=lambda t: (loads[t], sizes[t])))
    return Placement(process, num_processes, tuple(owners))


def _place_whole(
    loads: Sequence[int], divided: Collection[int], num_processes: int
) -> tuple[list[int], list[float]]:
    """The owner of each table, and what each process has to do."""
    owners = [ALL_PROCESSES] * len(loads)
    busy = [sum(loads[t] for t in divided) / num_processes] * num_processes
    for table in sorted(range(len(loads)), key=lambda t: (-loads[t], t)):
        if table not in divided:
            owners[table] = busy.index(min(busy))
            busy[owners[table]] += loads[table]
    return owners, busy


def _load(plan: Plan, spec: TableSpec) -> int:
    """Numbers of one sample of each feature of a table."""
    features = [plan.features[f].config for f in spec.features]
    samples = sum(max(1, config.max_sequence_length) for config in features)
    return samples * spec.config.dim


def _bytes(spec: TableSpec) -> int:
    """Of the table and its slots, roughly."""
    slots = spec.optimizer.slots if spec.optimizer else ()
    columns = spec.config.dim + sum(
        1 if slot.per_row else spec.config.dim for slot in slots
    )
    return 4 * spec.config.vocabulary_size * columns
