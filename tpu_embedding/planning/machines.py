"""Plans CPUs: one machine, processes that train together, or parameter servers."""

from __future__ import annotations

import bisect
import dataclasses
import functools
from collections.abc import Callable
from typing import Any

from tpu_embedding.config import STORAGES, DistributedOptions
from tpu_embedding.engines.host.waiting import waiting_bytes
from tpu_embedding.layout import limits
from tpu_embedding.layout.balancing import place_on_servers, place_tables
from tpu_embedding.layout.placement import Placement
from tpu_embedding.layout.plan import Plan, TableSpec, require_options
from tpu_embedding.planning.report import PlannedPlacement, table_arrays
from tpu_embedding.planning.sample import Traffic
from tpu_embedding.tables.growing import check_growth, vocabulary_bytes

# What the host engine needs beside tables: a constant for kernels, threads' stacks and
# a queue, and an eighth of the tables, up to a limit. tools/check_plan.py measures it.
_HOST_BYTES, _HOST_TABLE_BYTES = 8 * 2**20, 32 * 2**20
_FLOAT, _HALF = 4, 2  # Bytes of a value, and of a bfloat16.
_WORD = 4  # Bytes of a position, a length, a weight.
_ENTRY = 32  # Bytes of an id in the host engine, with its share of batch and gradients.
# Bytes to request and serve an id of a table divided over processes, with what sorts
# and sends it; and further bytes of a distinct id if the table grows.
_ROUTED_ENTRY, _GROWING_ID = 120, 180
_SERVED_ENTRY = 24  # Bytes of an id that another process requests of a whole table.
_SPLIT_BYTES = 2**27  # The allocator never leaves so much of a piece unused.
# Arrays of a table's size that an initializer has at a time, as tf.random.normal does:
# the numbers, their product with the deviation, and the sum with the mean.
_INITIALIZER_ARRAYS = 3
# Functions and classes of TensorFlow and Keras, by their names in lower case.
_OF_ONE_ARRAY = {"zeros", "ones", "constant"}


@dataclasses.dataclass(frozen=True)
class Machines:
    """Plans places other than TPUs.

    Attributes:
      plan: The tables.
      traffic: Returns the ids in one process's batch, for a number of processes.
      options: The DistributedOptions of a job.
      memory: The bytes of memory of one machine.
    """

    plan: Plan
    traffic: Callable[[int], Traffic]
    options: DistributedOptions
    memory: int

    def one(self) -> PlannedPlacement:
        """Plans the host engine of one machine."""
        place = Placement(0, 1, (0,) * len(self.plan.tables))
        step = [self._step_bytes(place, self.traffic(1))]
        found = self._place("one machine", "host", [place], step, 0.0)
        return dataclasses.replace(found, unsupported=self._refusal("host"))

    def synchronous(self, count: int) -> PlannedPlacement:
        """Plans `count` processes that train together."""
        first = place_tables(self.plan, 0, count, self.options.placement)
        traffic, wire, everyone = self.traffic(count), 0.0, 0.0
        place, served = Placement(0, 1, (0,) * len(self.plan.tables)), [0.0] * count
        for table in self.plan.tables:
            if first.is_divided(table.index):
                sent = self._divided_bytes(table, traffic, count, count - 1)
                wire += sum(sent.values())
                everyone += self._divided_step_bytes(table, traffic, count)
            else:
                wire += self._whole_bytes(table, traffic) * (count - 1) / count
                everyone += self._table_step_bytes(table, place, traffic)
                owner = first.owners[table.index]
                served[owner] += self._served_bytes(table, traffic, count)
        found = self._place(
            f"{count} processes, synchronous",
            "synchronous",
            [dataclasses.replace(first, process=process) for process in range(count)],
            [int(everyone + own) for own in served],
            wire,
        )
        return dataclasses.replace(found, unsupported=self._refusal("sharded"))

    def servers(self, count: int) -> PlannedPlacement:
        """Plans `count` parameter servers that serve one worker."""
        first = place_on_servers(self.plan, count, self.options.placement)
        places = [dataclasses.replace(first, process=server) for server in range(count)]
        traffic, wire = self.traffic(1), 0.0
        for table in self.plan.tables:
            if first.is_divided(table.index):
                wire += sum(self._divided_bytes(table, traffic, count, count).values())
            else:
                wire += self._whole_bytes(table, traffic)
        found = self._place(
            f"{count} parameter servers",
            "parameter_servers",
            places,
            [self._step_bytes(place, traffic) for place in places],
            wire,
        )
        return dataclasses.replace(found, unsupported=self._refusal("parameter_server"))

    def _place(
        self,
        name: str,
        kind: str,
        places: list[Placement],
        step: list[int],
        wire: float,
    ) -> PlannedPlacement:
        """Returns what each process needs, for a step or while the tables are made."""
        least = 1 if kind == "synchronous" else 0  # The fewest rows of `create_parts`.
        tables = [self._table_bytes(place, least) for place in places]
        held = [sum(own.values()) for own in tables]
        engine = [_HOST_BYTES + min(own // 8, _HOST_TABLE_BYTES) for own in held]
        buffers = [own + size for own, size in zip(engine, step, strict=True)]
        steady = [own + size for own, size in zip(held, buffers, strict=True)]
        used = [
            max(size, own + self._making_bytes(place, kind))
            for size, own, place in zip(steady, engine, places, strict=True)
        ]
        fullest = used.index(max(used))
        by_table = {
            table.name: tables[fullest][table.name]
            for table in self.plan.tables
            if self._owner(places[0], table) in ("all", fullest)
        }
        making = used[fullest] - steady[fullest]
        parts = [
            *by_table.items(),
            ("buffers", buffers[fullest]),
            ("initializers", making),
        ]
        return PlannedPlacement(
            name=name,
            kind=kind,
            num_devices=len(places),
            capacity=self.memory,
            device_bytes=tuple(used),
            table_bytes=tuple(held),
            buffer_bytes=buffers[fullest],
            initializer_bytes=making,
            by_table=by_table,
            location={
                table.name: self._owner(places[0], table) for table in self.plan.tables
            },
            wire_bytes=int(wire),
            excesses=tuple(
                limits.device_excess(
                    tuple(by_table), parts, 1, ("this machine", self.memory)
                )
            ),
        )

    def _owner(self, place: Placement, table: TableSpec) -> Any:
        return "all" if place.is_divided(table.index) else place.owners[table.index]

    def _table_bytes(self, place: Placement, least: int) -> dict[str, int]:
        """Returns, by table, the bytes of its rows and their slots in one process.

        A growing table counts with the most rows that it may have.
        """
        found = {}
        for table in self.plan.tables:
            rows = place.count(table.index, table.config.max_rows)
            found[table.name] = max(rows, least) * self._row_bytes[table.index][1]
            found[table.name] += waiting_bytes(table, rows)
            parts = place.part(table.index)[1]
            found[table.name] += vocabulary_bytes(table, rows, parts)
        return found

    @functools.cached_property
    def _row_bytes(self) -> list[tuple[int, int]]:
        """The bytes of a row of each table, without and with its slots."""
        found = []
        for table in self.plan.tables:
            sizes = [array.bytes // array.shape[0] for array in table_arrays(table)]
            found.append((sizes[0], sum(sizes)))
        return found

    def _making_bytes(self, place: Placement, kind: str) -> int:
        """Returns the most bytes of tables and slots while a process makes them.

        Slots come after all tables. A synchronous process calls each initializer that
        has no `by_rows`, and keeps its part. Of parameter servers only the owner of a
        table, or the first server for a divided table, calls the initializer.
        """
        memory, slots = _Memory(), []
        for table in self.plan.static:  # Growing tables begin without rows.
            config = table.config
            rows = place.count(table.index, config.vocabulary_size)
            of_table, of_all = self._row_bytes[table.index]
            slots.append(rows * (of_all - of_table))
            arrays = 0
            if (
                kind == "synchronous"
                or place.owners[table.index] == place.process
                or (place.is_divided(table.index) and place.process == 0)
            ):
                arrays = _initializer_arrays(config.initializer)
            whole = config.vocabulary_size * config.dim * _FLOAT
            made = [memory.take(whole) for _ in range(arrays)]
            # The rows of a divided table are copied out of the whole one.
            copied = not arrays or place.is_divided(table.index)
            copied |= config.dtype != "float32"
            if copied:
                memory.take(rows * of_table)
            for piece in made[: len(made) - (rows > 0 and not copied)]:
                memory.release(piece)
        for size in slots:
            memory.take(size)
        return memory.touched

    def _step_bytes(self, place: Placement, traffic: Traffic) -> int:
        """Returns the bytes of a process's batch, its activations and gradients."""
        steps = [self._table_step_bytes(t, place, traffic) for t in self.plan.tables]
        return int(sum(steps))

    def _table_step_bytes(
        self, table: TableSpec, place: Placement, traffic: Traffic
    ) -> float:
        most = table.config.max_rows
        samples = sum(traffic.samples[f] for f in table.features)
        entries = sum(traffic.entries[f] for f in table.features)
        size = 3 * _FLOAT * samples * table.config.dim + _ENTRY * entries
        return size * place.count(table.index, most) / most

    def _served_bytes(self, table: TableSpec, traffic: Traffic, count: int) -> float:
        """Returns the owner's bytes for what `count` processes ask of a whole table.

        The activations are no longer in memory when the gradients come.
        """
        samples = sum(traffic.samples[f] for f in table.features)
        entries = sum(traffic.entries[f] for f in table.features)
        size = _FLOAT * samples * table.config.dim + _SERVED_ENTRY * entries
        return count * size + _found_bytes(table, traffic)

    def _divided_step_bytes(
        self, table: TableSpec, traffic: Traffic, count: int
    ) -> float:
        """Returns a process's bytes for a step of a table divided over `count` of them.

        In addition to activations and their gradients, a process holds first the rows
        that it sends, receives and combines, then the gradients sent and received.
        """
        sent = self._divided_bytes(table, traffic, count, count)
        samples = sum(traffic.samples[f] for f in table.features)
        size = 2 * _FLOAT * samples * table.config.dim
        size += max(3 * sent["lookup"], 2 * sent["update"])
        size += _ROUTED_ENTRY * sum(traffic.entries[f] for f in table.features)
        return size + _found_bytes(table, traffic)

    def _wire_row_bytes(self, table: TableSpec) -> int:
        """Returns the bytes of a row that is sent between processes."""
        storage = table.config.storage
        if storage.dtype == "float32":
            storage = STORAGES[self.options.wire_dtype]
        return storage.row_bytes(table.config.dim)

    def _gradient_bytes(self) -> int:
        """Returns the bytes of one number of a gradient or activation on the wire."""
        return _HALF if self.options.wire_dtype == "bfloat16" else _FLOAT

    def _divided_bytes(
        self, table: TableSpec, traffic: Traffic, count: int, others: int
    ) -> dict[str, float]:
        """Returns a step's unweighted bytes, by phase, for a table divided by rows.

        IDs are spread evenly over `count` owners, of which `others` are on other
        machines.
        """
        config, away = table.config, others / count
        rows = traffic.distinct[table.index] * away
        entries = samples = lengths = gains = 0.0
        for f in table.features:
            number = traffic.samples[f]
            per_sample = traffic.entries[f] / number if number else 0.0
            entries += traffic.entries[f] * away
            # The samples, counted once for each other owner that has one of their ids.
            sent = number * others * (1 - (1 - 1 / count) ** per_sample)
            samples += sent
            if per_sample > 1:
                lengths += sent
                gains += sent * (config.combiner != "sum")
        return divided_table_bytes(
            rows=rows,
            rows_served=rows,
            entries=entries,
            samples=samples,
            lengths=lengths,
            gains=gains,
            row_bytes=self._wire_row_bytes(table),
            gradient_bytes=self._gradient_bytes() * config.dim,
            key_bytes=table.key_bytes,
        )

    def _whole_bytes(self, table: TableSpec, traffic: Traffic) -> float:
        """Returns a step's bytes on the wire for a table that another process has."""
        config = table.config
        entries = samples = lengths = gains = 0.0
        for f in table.features:
            number = traffic.samples[f]
            per_sample = traffic.entries[f] / number if number else 0.0
            entries += traffic.entries[f]
            samples += number
            lengths += number * (not per_sample.is_integer())
            gains += number * (config.combiner != "sum" and per_sample > 1)
        found = whole_table_bytes(
            entries=entries,
            samples=samples,
            samples_served=samples,
            lengths=lengths,
            gains=gains,
            activation_bytes=self._gradient_bytes() * config.dim,
            key_bytes=table.key_bytes,
        )
        return sum(found.values())

    def _refusal(self, engine: str) -> str | None:
        """Returns why an engine cannot have the tables, or None if it can."""
        try:
            require_options(self.plan, engine)
            for table in self.plan.growing:
                check_growth(table)
        except NotImplementedError as error:
            return str(error)
        return None


def divided_table_bytes(
    *,
    rows: float,
    rows_served: float,
    entries: float,
    samples: float,
    lengths: float,
    gains: float,
    row_bytes: int,
    gradient_bytes: int,
    key_bytes: int = _WORD,
) -> dict[str, float]:
    """Returns a step's bytes to other processes, for a table that is divided by rows.

    This and `whole_table_bytes` are the formula of docs/distributed.md. The messages
    have a few words more for each feature, and end at multiples of 64 bytes. Numbers
    of several features and receivers are added up.

    >>> divided_table_bytes(
    ...     rows=10, rows_served=12, entries=20, samples=5, lengths=5, gains=0,
    ...     row_bytes=32, gradient_bytes=32,
    ... )
    {'enqueue': 140, 'lookup': 384, 'update': 160}

    Args:
      rows: The number of distinct rows that this process asks others for.
      rows_served: The number of distinct rows that others ask this process for.
      entries: The number of IDs whose rows are among `rows`.
      samples: The number of samples with such an ID.
      lengths: `samples`, or 0 where each sample has one ID.
      gains: The number of weights: one for each entry, or one for each sample if only
        the combiner needs one, or 0.
      row_bytes: Bytes of one row on the wire.
      gradient_bytes: Bytes of the gradient of one sample on the wire.
      key_bytes: Bytes of a row's number, or of an ID of a growing table.
    """
    return {
        "enqueue": key_bytes * rows + _WORD * (entries + lengths + gains),
        "lookup": rows_served * row_bytes,
        "update": samples * gradient_bytes,
    }


def whole_table_bytes(
    *,
    entries: float,
    samples: float,
    samples_served: float,
    lengths: float,
    gains: float,
    activation_bytes: int,
    key_bytes: int = _WORD,
) -> dict[str, float]:
    """Returns a step's bytes to other processes, for a table that one process holds.

    >>> whole_table_bytes(
    ...     entries=20, samples=10, samples_served=0, lengths=0, gains=0,
    ...     activation_bytes=32,
    ... )
    {'enqueue': 80, 'lookup': 0, 'update': 320}

    Args:
      entries: The number of IDs that this process sends to the owner.
      samples: The number of samples that this process sends to the owner.
      samples_served: The number of samples that others send the owner; else 0.
      lengths: `samples`, or 0 where all have the same number of IDs.
      gains: As for `divided_table_bytes`.
      activation_bytes: Bytes of an activation, and of a gradient, on the wire.
      key_bytes: As for `divided_table_bytes`.
    """
    return {
        "enqueue": key_bytes * entries + _WORD * (lengths + gains),
        "lookup": samples_served * activation_bytes,
        "update": samples * activation_bytes,
    }


def _found_bytes(table: TableSpec, traffic: Traffic) -> float:
    """Returns the bytes needed to find the rows of ids if the table grows, else 0."""
    grows = table.config.vocabulary is not None
    return grows * _GROWING_ID * traffic.distinct[table.index]


class _Memory:
    """Simulates TensorFlow's allocator on CPUs (BFC), which returns no memory.

    An array takes the smallest piece that it fits into, or a new region, which is at
    least twice as large as the one before. If the rest of a piece is large, it becomes
    a piece of its own.

    Attributes:
      touched: Bytes that the process uses: the bytes of regions that arrays have taken.
    """

    def __init__(self) -> None:
        self.touched = 0
        # The free pieces, ascending: (size, whether an array has used the piece).
        self._pieces: list[tuple[int, bool]] = []
        self._region = 2**21

    def take(self, size: int) -> int:
        """Returns the size of the piece that an array takes."""
        place = bisect.bisect_left(self._pieces, (size, False))
        if place < len(self._pieces):
            piece, touched = self._pieces.pop(place)
        else:
            grown = self._region < size
            while self._region < size:
                self._region *= 2
            piece, touched = self._region, False
            self._region *= 1 if grown else 2
        if not touched:
            self.touched += size
        rest = piece - size
        if rest < min(size, _SPLIT_BYTES):
            return piece
        bisect.insort(self._pieces, (rest, touched))
        return size

    def release(self, piece: int) -> None:
        """Frees an array."""
        bisect.insort(self._pieces, (piece, True))


def _initializer_arrays(initializer: Any) -> int:
    """Returns how many arrays of a table's size an initializer has at a time.

    The number is 0 if each process makes its own rows.
    """
    if initializer is None or hasattr(initializer, "by_rows"):
        return 0
    name = initializer
    if not isinstance(initializer, str):
        name = getattr(initializer, "__name__", type(initializer).__name__)
    return 1 if name.lower() in _OF_ONE_ARRAY else _INITIALIZER_ARRAYS
