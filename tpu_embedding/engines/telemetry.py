"""The counts of the updates that engines apply."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence

import numpy as np


@dataclasses.dataclass(frozen=True)
class TableCounts:
    """Sums over the counted updates of one table, and the last of them.

    Attributes:
      ids: Ids that were looked up. None, as distinct_ids, rows_touched and hot_rows
        are, if gradients do not name the rows of a batch.
      invalid_ids: Ids that were dropped or taken modulo V; None if not known.
      samples: Samples of all features; None if not known.
      samples_without_ids: Samples that no id is looked up for; None if not known.
      distinct_ids: Rows that an update touched, summed over updates.
      rows_touched: Rows that any counted update touched.
      hot_rows: int64 [n, 2], the rows with the most ids, and how many ids each had.
      rows: int [k], the rows of the last counted update, each once.
      row_ids: int [k], the number of ids of each of these rows.
      gradient_norms: float32 [k], norms of the summed gradients, before clipping.
      update_norms: float32 [k], norms of the changes of the rows; [V] if the optimizer
        updates all rows.
      vocabulary: Counts over all updates of a growing table, also those before
        telemetry: ids without a row, how many of these were admitted and refused, and
        rows that were evicted. Empty for other tables.
      counted_steps: The table's counted updates; None: as in `Counts.counted_steps`.
    """

    ids: int | None = 0
    invalid_ids: int | None = 0
    samples: int | None = 0
    samples_without_ids: int | None = 0
    distinct_ids: int | None = 0
    rows_touched: int | None = 0
    hot_rows: np.ndarray | None = dataclasses.field(
        default_factory=lambda: _empty([0, 2])
    )
    rows: np.ndarray = dataclasses.field(default_factory=lambda: _empty([0]))
    row_ids: np.ndarray = dataclasses.field(default_factory=lambda: _empty([0]))
    gradient_norms: np.ndarray = dataclasses.field(
        default_factory=lambda: np.zeros([0], np.float32)
    )
    update_norms: np.ndarray = dataclasses.field(
        default_factory=lambda: np.zeros([0], np.float32)
    )
    vocabulary: tuple[int, ...] = ()
    counted_steps: int | None = None


@dataclasses.dataclass(frozen=True)
class Counts:
    """The counts of an engine since counting began.

    Attributes:
      steps: Updates that were applied.
      counted_steps: Updates that were counted.
      queue_depth: Batches of a replica that wait in the queue now.
      pending_updates: Complete updates that are not applied yet.
      tables: The counts of each table by name.
      samples: Samples of the updates that were applied; None on servers.
      bytes_sent: Bytes that this process has sent by phase of a step, or None.
      waited_seconds: How long this process waited for each process, or None.
    """

    steps: int
    counted_steps: int
    queue_depth: int
    pending_updates: int
    tables: Mapping[str, TableCounts]
    samples: int | None = None
    bytes_sent: Mapping[str, int] | None = None
    waited_seconds: Sequence[float] | None = None


def joined(parts: Sequence[Counts], num_hot_rows: int | None) -> Counts:
    """Joins the counts of the parts of the tables."""
    if len(parts) == 1:
        return parts[0]
    tables: dict[str, list[TableCounts]] = {}
    for part in parts:
        for name, counts in part.tables.items():
            tables.setdefault(name, []).append(counts)
    return Counts(
        # A push under way has reached only some of the servers.
        max(part.steps for part in parts),
        max(part.counted_steps for part in parts),
        max(part.queue_depth for part in parts),
        max(part.pending_updates for part in parts),
        {name: _joined_table(own, num_hot_rows) for name, own in tables.items()},
    )


def _joined_table(
    parts: Sequence[TableCounts], num_hot_rows: int | None
) -> TableCounts:
    if len(parts) == 1:
        return parts[0]

    def every(name: str) -> np.ndarray:
        return np.concatenate([getattr(part, name) for part in parts])

    hot_rows, order = every("hot_rows"), np.argsort(every("rows"))
    hottest = np.lexsort((hot_rows[:, 0], -hot_rows[:, 1]))[:num_hot_rows]
    return dataclasses.replace(
        parts[0],
        **{
            name: sum(getattr(part, name) for part in parts)
            for name in ("ids", "distinct_ids", "rows_touched")
        },
        hot_rows=hot_rows[hottest],
        **{n: every(n)[order] for n in ("rows", "row_ids", "gradient_norms")},
        update_norms=every("update_norms"),
        vocabulary=tuple(np.sum([part.vocabulary for part in parts], 0).tolist()),
    )


def _empty(shape: list[int]) -> np.ndarray:
    return np.zeros(shape, np.int64)
