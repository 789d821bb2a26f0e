"""Reports of plans: objects, a text, JSON and a picture."""

from __future__ import annotations

import dataclasses
import html
import json
import math
from collections.abc import Iterable, Sequence
from typing import Any

from tpu_embedding.layout.limits import Excess
from tpu_embedding.layout.plan import TableSpec
from tpu_embedding.text import aligned, size_text

_SHOWN_TABLES = 8
_COLORS = (
    *("#4e79a7", "#f28e2b", "#59a14f", "#e15759"),
    *("#76b7b2", "#edc948", "#b07aa1", "#9c755f", "#bab0ac"),
)


@dataclasses.dataclass(frozen=True)
class ArrayBytes:
    """Holds the size of one table or slot.

    Attributes:
      table: Name of the table.
      array: "parameters" or the name of the slot.
      shape: [V, D], or [V, 1] for a slot of one number for each row; for a growing
        table V is its `max_rows`.
      dtype: "float32", "bfloat16" or "int8".
      bytes: Bytes of the whole array without padding; for int8 with scales and offsets.
    """

    table: str
    array: str
    shape: tuple[int, int]
    dtype: str
    bytes: int


def table_arrays(table: TableSpec) -> list[ArrayBytes]:
    """Returns the arrays of a table and its slots."""
    return [
        ArrayBytes(table.name, a.name, (a.rows, a.columns), a.dtype, a.bytes)
        for a in table.arrays()
    ]


@dataclasses.dataclass(frozen=True)
class TableStatistics:
    """Counts the ids of one table in the sample.

    Attributes:
      table: Name of the table.
      ids_per_step: Mean number of ids of a batch.
      distinct_ids_per_step: Mean number of distinct ids of a batch.
      ids_per_sample: Mean number of ids of a sample that has any.
      distinct_ids: Distinct ids of the whole sample.
      out_of_range_ids: Ids below 0 or not below V, which count nowhere else.
    """

    table: str
    ids_per_step: float
    distinct_ids_per_step: float
    ids_per_sample: float
    distinct_ids: int
    out_of_range_ids: int


@dataclasses.dataclass(frozen=True)
class StackLimits:
    """Says which limits the sample needs for one stack of SparseCores.

    Attributes:
      stack: Name of the stack.
      max_ids: Largest number of ids of a partition, in any step.
      max_unique_ids: Largest number of distinct ids of a partition.
      required_ids: Largest id buffer of a device, in ids.
      suggested_max_ids: A value for max_ids_per_table: a quarter more, a multiple of 8.
      suggested_max_unique_ids: A value for max_unique_ids_per_table, chosen in the same
        way, but not larger than what compiles for the TPU.
      beyond_default: Share of ids beyond the limits of a partition, which are defaults
        unless the configuration sets them. Steps with such ids fail, or are split with
        minibatching=True.
      beyond_suggested: Share of ids beyond the suggested limits.
      dropped: Share of ids that would be dropped with allow_id_dropping=True at the
        max_ids_per_chip_per_sample of the configuration.
      shard_balance: Ids of the busiest SparseCore over the mean of all; 1 is even.
    """

    stack: str
    max_ids: int
    max_unique_ids: int
    required_ids: int
    suggested_max_ids: int
    suggested_max_unique_ids: int
    beyond_default: float
    beyond_suggested: float
    dropped: float
    shard_balance: float


@dataclasses.dataclass(frozen=True)
class PlannedPlacement:
    """Describes one way to place all tables.

    Attributes:
      name: A name such as "one machine", "4 processes, synchronous" or "v6e:2x2".
      kind: "host", "synchronous", "parameter_servers" or "tpu".
      num_devices: The number of machines, processes, servers or TPU devices.
      capacity: Bytes of memory of each device.
      device_bytes: Bytes that each device needs for tables, slots and a step, or while
        initializers make tables if that is more.
      buffer_bytes: The part of these bytes for a step's buffers on the fullest device.
      by_table: By table, the bytes of the table and its slots on the fullest device.
      location: By table, "all" if its rows are divided, else the index of the device.
      wire_bytes: Bytes that leave one process in a training step, or None for TPUs,
        which use a network of their own.
      limits: The limits that the sample needs, by stack.
      max_ids_per_chip_per_sample: Suggested id buffer, if there is a sample.
      excesses: Limits that the placement exceeds.
      unsupported: Why the placement is impossible whatever the memory, or None.
      program_bytes: The part of `device_bytes` that the compiled step of SparseCores
        needs beside its arguments, which are tables, slots and buffers.
      padding_bytes: The part of `program_bytes` that some programs need for activations
        and others do not: activations may be padded to a multiple of 128 columns.
      initializer_bytes: The part of `device_bytes` that initializers of whole tables
        need on the fullest device, beyond tables, slots and a step.
      not_counted: What the plan leaves out, or "".
      table_bytes: The part of `device_bytes` for tables and slots.
      note: What to set so that the first step does not fail, or "".
    """

    name: str
    kind: str
    num_devices: int
    capacity: int
    device_bytes: tuple[int, ...]
    buffer_bytes: int
    by_table: dict[str, int]
    location: dict[str, Any]
    wire_bytes: int | None = None
    limits: tuple[StackLimits, ...] = ()
    max_ids_per_chip_per_sample: int | None = None
    excesses: tuple[Excess, ...] = ()
    unsupported: str | None = None
    program_bytes: int = 0
    padding_bytes: int = 0
    initializer_bytes: int = 0
    not_counted: str = ""
    table_bytes: tuple[int, ...] = ()
    note: str = ""

    @property
    def fits(self) -> bool:
        """Whether the placement is possible, however activations are stored."""
        return not self.excesses and self.unsupported is None

    @property
    def close(self) -> bool:
        """Whether it fits only if the compiler does not pad activations."""
        return (
            not self.fits
            and self.unsupported is None
            and all(e.kind == "device bytes" for e in self.excesses)
            and self.peak_bytes - self.padding_bytes <= self.capacity
        )

    @property
    def peak_bytes(self) -> int:
        """Bytes that the fullest device needs."""
        return max(self.device_bytes, default=0)

    @property
    def balance(self) -> float:
        """Bytes of the fullest device over the mean of all; 1 is even."""
        total = sum(self.device_bytes)
        return self.peak_bytes * len(self.device_bytes) / total if total else 1.0

    @property
    def problem(self) -> str:
        """Why the placement does not or may not fit, in one line; "" if it fits."""
        if self.unsupported is not None:
            return self.unsupported
        if self.close:
            return (
                f"Close to the limit: {size_text(self.peak_bytes)} are needed of "
                f"{size_text(self.capacity)}, and {size_text(self.padding_bytes)} of "
                "them are padding of activations, which only some programs store. "
                "Compile the step to know (`python -m tpu_embedding compile`), or use "
                "more devices or a smaller batch."
            )
        return self.excesses[0].message if self.excesses else ""


@dataclasses.dataclass(frozen=True)
class PlanReport:
    """Holds the result of `plan`.

    Attributes:
      arrays: All tables and slots.
      statistics: The statistics of each table, if there is a sample.
      placements: The placements by rank: those that fit first, then close ones; then
        by fewer devices, machines before TPUs, fewer bytes on the wire, and a lower
        share of a device's memory.
    """

    arrays: tuple[ArrayBytes, ...]
    statistics: tuple[TableStatistics, ...]
    placements: tuple[PlannedPlacement, ...]

    @property
    def best(self) -> PlannedPlacement | None:
        """The first placement that fits, or None."""
        return next((p for p in self.placements if p.fits), None)

    @property
    def total_bytes(self) -> int:
        """Bytes of all tables and slots, without padding."""
        return sum(array.bytes for array in self.arrays)

    def to_json(self) -> str:
        """Returns everything as JSON."""
        facts = {
            "total_bytes": self.total_bytes,
            "arrays": [dataclasses.asdict(array) for array in self.arrays],
            "statistics": [dataclasses.asdict(table) for table in self.statistics],
            "placements": [
                {
                    **dataclasses.asdict(placement),
                    "fits": placement.fits,
                    "close": placement.close,
                    "peak_bytes": placement.peak_bytes,
                    "balance": placement.balance,
                }
                for placement in self.placements
            ],
        }
        return json.dumps(facts, indent=2)

    def __str__(self) -> str:
        tables = len({array.table for array in self.arrays})
        slots = len(self.arrays) - tables
        parts = [
            f"{_count(tables, 'table')}, {_count(slots, 'slot')}: "
            f"{size_text(self.total_bytes)}",
            aligned(_placement_rows(self.placements)),
        ]
        problems: dict[str, list[str]] = {}
        for own in self.placements:
            if not own.fits:
                problems.setdefault(own.problem, []).append(own.name)
        for own in self.placements:
            if own.note:
                problems.setdefault(own.note, []).append(own.name)
            if own.not_counted:
                text = f"not counted is {own.not_counted}"
                problems.setdefault(text, []).append(own.name)
        parts += [f"{', '.join(names)}: {text}" for text, names in problems.items()]
        best = self.best or next((p for p in self.placements if p.by_table), None)
        if best is not None:
            parts.append(
                f"{best.name}: the largest tables of the fullest device\n"
                + aligned(_table_rows(best))
            )
        if self.statistics:
            parts.append(aligned(_statistics_rows(self.statistics)))
        parts += [aligned(_limit_rows(p)) for p in self.placements if p.limits]
        return "\n\n".join(parts)

    def to_svg(self) -> str:
        """Returns a picture: the fullest device of each placement, by table."""
        return _svg(self.placements)


def _count(number: int, what: str) -> str:
    return f"{number} {what}" + ("" if number == 1 else "s")


def _placement_rows(placements: Sequence[PlannedPlacement]) -> Iterable[list[str]]:
    yield ["placement", "fits", "devices", "fullest", "of", "balance", "wire a step"]
    for p in placements:
        wire = "-" if p.wire_bytes is None else size_text(p.wire_bytes)
        yield [
            p.name,
            "yes" if p.fits else "close" if p.close else "NO",
            str(p.num_devices),
            size_text(p.peak_bytes),
            size_text(p.capacity),
            f"{p.balance:.2f}",
            wire,
        ]


def _table_rows(placement: PlannedPlacement) -> Iterable[list[str]]:
    yield ["table", "bytes", "where"]
    largest = sorted(placement.by_table.items(), key=lambda item: -item[1])
    for name, size in largest[:_SHOWN_TABLES]:
        yield [name, size_text(size), str(placement.location.get(name, ""))]
    rest = largest[_SHOWN_TABLES:]
    if rest:
        yield [f"{len(rest)} more", size_text(sum(size for _, size in rest)), ""]
    yield ["buffers of a step", size_text(placement.buffer_bytes), ""]
    if placement.program_bytes:
        yield ["program of a step", size_text(placement.program_bytes), ""]
    if placement.initializer_bytes:
        yield ["initializers", size_text(placement.initializer_bytes), ""]


def _statistics_rows(statistics: Sequence[TableStatistics]) -> Iterable[list[str]]:
    yield ["table", "ids a step", "distinct", "ids a sample", "out of range"]
    for own in statistics:
        yield [
            own.table,
            f"{own.ids_per_step:.0f}",
            f"{own.distinct_ids_per_step:.0f}",
            f"{own.ids_per_sample:.2f}",
            str(own.out_of_range_ids),
        ]


def _limit_rows(placement: PlannedPlacement) -> Iterable[list[str]]:
    yield [
        f"stack ({placement.name})",
        "ids",
        "distinct",
        "set max_ids to",
        "max_unique to",
        "beyond now",
        "beyond these",
        "dropped",
        "balance",
    ]
    for own in placement.limits:
        yield [
            own.stack,
            str(own.max_ids),
            str(own.max_unique_ids),
            str(own.suggested_max_ids),
            str(own.suggested_max_unique_ids),
            f"{own.beyond_default:.2%}",
            f"{own.beyond_suggested:.2%}",
            f"{own.dropped:.2%}",
            f"{own.shard_balance:.2f}",
        ]


_TITLE = (
    "Memory of the fullest device by table (square-root scale); a line is its capacity"
)
_LETTER, _LINE, _BARS = 7, 26, 400  # Pixels: of a letter at most, a row, all bars.


def _svg(placements: Sequence[PlannedPlacement]) -> str:
    """Draws a bar for each placement, of stacked tables, and a line where memory ends.

    A legend is below. Columns of names are as wide as the names need.
    """
    top = max([max(p.peak_bytes, p.capacity) for p in placements], default=1)
    # Square roots: a chip of 16 GiB and a machine of 512 GiB are both seen.
    scale = _BARS / math.sqrt(top or 1)
    totals: dict[str, int] = {}
    for p in placements:
        for name, size in p.by_table.items():
            totals[name] = max(totals.get(name, 0), size)
    shown = sorted(totals, key=lambda name: -totals[name])[:_SHOWN_TABLES]
    legend = [*shown, "a step, and other tables"]
    sizes = [
        size_text(p.peak_bytes) + ("" if p.fits else " - close" if p.close else " - no")
        for p in placements
    ]
    left = 8 + _text_width([p.name for p in placements])
    right = left + _BARS + 12
    lines = [_text(4, 16, _TITLE)]
    for row, (p, label) in enumerate(zip(placements, sizes, strict=True)):
        y, x, done = 28 + row * _LINE, float(left), 0
        own = [p.by_table.get(name, 0) for name in shown]
        own.append(max(p.peak_bytes - sum(own), 0))
        lines += [_text(4, y + 13, p.name), _text(right, y + 13, label)]
        for color, name, size in zip(_COLORS, legend, own, strict=False):
            done += size
            end = left + scale * math.sqrt(done)
            title = f"{html.escape(name)}: {size_text(size)}"
            lines.append(_bar(x, y, end - x, color, f"<title>{title}</title>"))
            x = end
        limit = left + scale * math.sqrt(p.capacity)
        lines.append(
            f'<line x1="{limit:.1f}" x2="{limit:.1f}" y1="{y - 3}" y2="{y + 19}" '
            'stroke="black" stroke-width="2"/>'
        )
    below = 28 + len(placements) * _LINE
    for row, (color, name) in enumerate(zip(_COLORS, legend, strict=False)):
        y = below + row * 20
        lines += [_bar(4, y, 16, color), _text(26, y + 13, name)]
    width = max(
        right + _text_width(sizes), _text_width([_TITLE]), 30 + _text_width(legend)
    )
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" '
        f'height="{below + len(legend) * 20 + 4}" font-family="sans-serif" '
        f'font-size="11">{"".join(lines)}</svg>\n'
    )


def _text_width(texts: Sequence[str]) -> int:
    return _LETTER * max(map(len, texts), default=0)


def _text(x: int, y: int, text: str) -> str:
    return f'<text x="{x}" y="{y}">{html.escape(text)}</text>'


def _bar(x: float, y: int, width: float, color: str, inside: str = "") -> str:
    return (
        f'<rect x="{x:.1f}" y="{y}" width="{width:.1f}" height="16" fill="{color}">'
        f"{inside}</rect>"
    )
