"""Chooses which tables are divided by rows, and where the others live."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Collection, Sequence
from typing import Any

from tpu_embedding.layout.placement import ALL_PROCESSES, BY_ID, Placement
from tpu_embedding.layout.plan import Plan, TableSpec

# No process has more than this multiple of the mean load, if division avoids it.
_MAX_IMBALANCE = 1.25
# A table is divided because of its memory only if it has more bytes than this.
_LARGE_TABLE = 16 << 20


def place_tables(
    plan: Plan, process: int, num_processes: int, placement: str = "auto"
) -> Placement:
    """Chooses which tables to divide by rows, and where the others live.

    For a whole table, the combined samples travel: once for the lookup and once for the
    update. For a divided table, each distinct row travels, and the gradient of a sample
    goes to each process with an entry of it. Whole tables thus need fewer bytes unless
    many samples use a row. They are placed one by one, those with the most samples
    first, each in the process with the least to do. A table is divided if it is more
    than the n-th part of all work or memory, or if the processes would otherwise be
    unequally busy; a growing table only for its memory, as its parts fill one by one.

    Args:
      plan: The tables and features.
      process: Index of this process.
      num_processes: Number of processes, n.
      placement: "auto", "rows" or "whole", for tables whose `placement` is None.
    """
    wanted = [_wanted(spec, placement) for spec in plan.tables]
    loads = [_load(plan, spec) for spec in plan.tables]
    sizes = [_bytes(spec) for spec in plan.tables]
    divided = {t for t, choice in enumerate(wanted) if choice == "rows"}
    free = [t for t, choice in enumerate(wanted) if choice == "auto"]
    divided |= {
        t
        for t in free
        if (
            plan.tables[t].config.vocabulary is None
            and loads[t] * num_processes > sum(loads)
        )
        or (sizes[t] > _LARGE_TABLE and sizes[t] * num_processes > sum(sizes))
    }
    free = [t for t in free if plan.tables[t].config.vocabulary is None]
    while True:
        owners, busy = _place_whole(loads, divided, num_processes)
        if max(busy) * num_processes <= _MAX_IMBALANCE * sum(busy):
            break
        busiest = busy.index(max(busy))
        candidates = [t for t in free if owners[t] == busiest]
        if not candidates:
            break
        divided.add(max(candidates, key=lambda t: (loads[t], sizes[t])))
    return _placed(plan, process, num_processes, owners)


def place_on_servers(plan: Plan, number: int, placement: str = "auto") -> Placement:
    """Chooses which tables to divide by rows over servers, and where the others live.

    Whole tables are placed one by one, the largest load first, each on the server with
    the least. The load of a table is its share of all bytes, which a server must hold,
    plus its share of the activations of a batch, which it must compute and send. The
    rows of divided tables travel, and workers combine them, so only memory decides: a
    large table is divided if it is more than the n-th part of all bytes, or if the
    servers would otherwise be unequally full. A table with fewer rows than there are
    servers is always whole.

    Args:
      plan: The tables and features.
      number: Number of servers, n.
      placement: "auto", "rows" or "whole", for tables whose `placement` is None.

    Returns:
      The placement as server 0 has it.
    """
    wanted = [_wanted(spec, placement) for spec in plan.tables]
    sizes, loads = [_bytes(spec) for spec in plan.tables], _server_loads(plan)
    can_be_divided = {
        t for t, spec in enumerate(plan.tables) if 1 < number <= spec.config.max_rows
    }
    divided = {t for t in can_be_divided if wanted[t] == "rows"}
    free = {
        t for t in can_be_divided if wanted[t] == "auto" and sizes[t] > _LARGE_TABLE
    }
    divided |= {t for t in free if sizes[t] * number > sum(sizes)}
    while True:
        owners, _ = _place_whole(loads, divided, number)
        held = [
            sum(size for size, owner in zip(sizes, owners, strict=True) if owner == k)
            for k in range(number)
        ]
        shared = sum(sizes[t] for t in divided) / number
        fullest = held.index(max(held))
        candidates = [t for t in free - divided if owners[t] == fullest]
        most = _MAX_IMBALANCE * sum(sizes) / number
        if held[fullest] + shared <= most or not candidates:
            return _placed(plan, 0, number, owners)
        divided.add(max(candidates, key=lambda t: (sizes[t], -t)))


def _server_loads(plan: Plan) -> list[float]:
    sizes = [_bytes(spec) for spec in plan.tables]
    widths = [0] * len(plan.tables)
    for feature in plan.features:
        samples = max(1, feature.config.max_sequence_length)
        shape = feature.config.output_shape or ()
        samples *= math.prod(axis for axis in shape[1:] if axis)
        widths[feature.table] += samples * plan.tables[feature.table].config.dim
    return [
        size / sum(sizes) + width / sum(widths)
        for size, width in zip(sizes, widths, strict=True)
    ]


def part_of_plan(plan: Plan, tables: Sequence[int]) -> Plan:
    """Returns the plan of some tables and the features that look them up."""
    numbers = {table: index for index, table in enumerate(tables)}
    features = [feature for feature in plan.features if feature.table in numbers]
    of_feature = {feature.index: index for index, feature in enumerate(features)}
    return Plan(
        tables=tuple(
            dataclasses.replace(
                plan.tables[table],
                index=index,
                features=tuple(of_feature[f] for f in plan.tables[table].features),
            )
            for table, index in numbers.items()
        ),
        features=tuple(
            dataclasses.replace(feature, index=index, table=numbers[feature.table])
            for index, feature in enumerate(features)
        ),
    )


def rows_of_plan(plan: Plan, placement: Placement) -> Plan:
    """Returns the plan with the rows of each table that this process has, at least one.

    Growing tables have no rows yet; a part of one gets its part of the limits.
    """

    def part(spec: TableSpec) -> Any:
        vocabulary = spec.config.vocabulary
        if vocabulary is None:
            return max(1, placement.count(spec.index, spec.config.vocabulary_size))
        return vocabulary.part(placement.part(spec.index)[1])

    tables = [
        dataclasses.replace(
            spec, config=dataclasses.replace(spec.config, vocabulary_size=part(spec))
        )
        for spec in plan.tables
    ]
    return Plan(tuple(tables), plan.features)


def _wanted(spec: TableSpec, placement: str) -> str:
    """Returns the placement of a table.

    Raises:
      NotImplementedError: If it must be divided by rows, and cannot be.
    """
    wanted = spec.config.placement or placement
    if wanted == "whole" or not spec.config.shares_row:
        return wanted
    if wanted == "auto":
        return "whole"
    raise NotImplementedError(
        f'Table {spec.name!r} grows and has a shared row, so placement="rows" cannot '
        'divide it. Set placement="whole" in its TableConfig.'
    )


def _placed(
    plan: Plan, process: int, num_processes: int, owners: Sequence[int]
) -> Placement:
    def is_by_id(table: int) -> bool:
        grows = plan.tables[table].config.vocabulary is not None
        return grows and owners[table] == ALL_PROCESSES

    placed = [BY_ID if is_by_id(t) else owner for t, owner in enumerate(owners)]
    return Placement(process, num_processes, tuple(placed))


def _place_whole(
    loads: Sequence[float], divided: Collection[int], num_processes: int
) -> tuple[list[int], list[float]]:
    """Returns the owner of each table, and the load of each process."""
    owners = [ALL_PROCESSES] * len(loads)
    busy = [sum(loads[t] for t in divided) / num_processes] * num_processes
    for table in sorted(range(len(loads)), key=lambda t: (-loads[t], t)):
        if table not in divided:
            owners[table] = busy.index(min(busy))
            busy[owners[table]] += loads[table]
    return owners, busy


def _load(plan: Plan, spec: TableSpec) -> int:
    """Returns how many numbers the activations of one sample of every feature have."""
    features = [plan.features[f].config for f in spec.features]
    samples = sum(max(1, config.max_sequence_length) for config in features)
    return samples * spec.config.dim


def _bytes(spec: TableSpec) -> int:
    """Returns the bytes of the table and its slots."""
    return sum(array.bytes for array in spec.arrays())
