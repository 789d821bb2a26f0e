"""The rows of all parts of the tables that changed for a consumer of deltas."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import tensorflow as tf

from tpu_embedding.engines.host.part import TablePart
from tpu_embedding.engines.process_group import Channel
from tpu_embedding.layout.placement import Placement
from tpu_embedding.ops import library
from tpu_embedding.parameter_server import ClusterCoordinator
from tpu_embedding.tables.growing import Changed, GrowingState
from tpu_embedding.tables.readers import StoredReader
from tpu_embedding.tables.rows import ProcessGroup


class Held(NamedTuple):
    """A part of the tables that ops of this process work on.

    Attributes:
      part: The part.
      placement: Which rows of its tables it has.
      tables: The indices of its tables in the plan.
    """

    part: TablePart
    placement: Placement
    tables: Sequence[int]


class ReadTable(NamedTuple):
    """What is read of a table.

    Attributes:
      reader: Of what the parts have of it.
      growing: Its state if it grows.
    """

    reader: StoredReader
    growing: GrowingState | None


class HostChanges:
    """See `RowChanges`: of the rows of all parts, by their numbers in the tables."""

    group: ProcessGroup | None = None

    def __init__(
        self, held: Sequence[Held], tables: Sequence[ReadTable], consumer: str
    ) -> None:
        """Notes nothing before the first mark.

        Args:
          held: The parts.
          tables: By index in the plan.
          consumer: The name of the consumer.
        """
        self._ops = library.load()
        self._held, self._tables, self._consumer = held, tables, consumer

    def mark(self, rows: Sequence[Any]) -> None:
        """See `RowChanges.mark`."""
        for part, placement, tables in self._held:
            own = [
                placement.owned(k, np.asarray(rows[t]))[1] for k, t in enumerate(tables)
            ]
            with tf.device(part.device):
                self._ops.tpu_embedding_mark_rows(
                    queue=part.handle, rows=own, consumer=self._consumer
                )

    def take(self) -> list[Changed]:
        """See `RowChanges.take`."""
        found: list[list[np.ndarray]] = [[] for _ in self._tables]
        for part, placement, tables in self._held:
            with tf.device(part.device):
                taken = self._ops.tpu_embedding_take_rows(
                    queue=part.handle, num_tables=len(tables), consumer=self._consumer
                )
            for k, (table, rows) in enumerate(zip(tables, taken, strict=True)):
                found[table].append(placement.rows_at(k, rows.numpy()))
        return [
            self._of_rows(table, rows)
            if read.growing is None
            else read.growing.take_changed(self._consumer)
            for table, (read, rows) in enumerate(zip(self._tables, found, strict=True))
        ]

    def _of_rows(self, table: int, rows: Sequence[np.ndarray]) -> Changed:
        keys = self._joined(table, np.sort(np.concatenate(rows)))

        def read(start: int, stop: int) -> np.ndarray:
            return self.read(table, keys[start:stop])

        return Changed(keys, read)

    def _joined(self, table: int, rows: np.ndarray) -> np.ndarray:
        """The changed rows of a table in all processes."""
        del table
        return rows

    def read(self, table: int, rows: np.ndarray) -> np.ndarray:
        """See `RowChanges.read`."""
        return self._tables[table].reader.read(tf.constant(rows)).numpy()

    def commit(self, *, end: bool = False) -> None:
        """See `RowChanges.commit`."""
        for part, _, _ in self._held:
            with tf.device(part.device):
                self._ops.tpu_embedding_commit_rows(
                    queue=part.handle, consumer=self._consumer, end=end
                )


class ShardedChanges(HostChanges):
    """See `RowChanges`: of tables in the processes of a job."""

    def __init__(
        self,
        held: Held,
        tables: Sequence[ReadTable],
        consumer: str,
        channel: Channel,
    ) -> None:
        super().__init__([held], tables, consumer)
        self.group: ProcessGroup | None = channel
        self._channel = channel
        self._placements = [
            dataclasses.replace(held.placement, process=process)
            for process in range(channel.size)
        ]

    def _joined(self, table: int, rows: np.ndarray) -> np.ndarray:
        del table
        return np.sort(np.concatenate(self._gather(rows, "changed rows")))

    def read(self, table: int, rows: np.ndarray) -> np.ndarray:
        """See `RowChanges.read`."""
        owned = [placement.owned(table, rows) for placement in self._placements]
        _, local = owned[self._channel.rank]
        own = super().read(table, local)
        values = np.empty([len(rows), own.shape[1]], np.float32)
        parts = self._gather(own.ravel(), f"{len(rows)} rows of table {table}")
        for (has, _), part in zip(owned, parts, strict=True):
            values[has] = part.reshape(-1, own.shape[1])
        return values

    def _gather(self, own: np.ndarray, what: str) -> list[np.ndarray]:
        call = f"the reading of {what} for the DeltaWriter of {self._consumer}"
        everyone = self._channel.all_gather("checkpoint", own.tobytes(), call)
        return [np.frombuffer(part, own.dtype) for part in everyone]


class ServedChanges(HostChanges):
    """See `RowChanges`: an error, not a wait without end, if a server is lost."""

    def __init__(
        self,
        held: Sequence[Held],
        tables: Sequence[ReadTable],
        consumer: str,
        coordinator: ClusterCoordinator,
    ) -> None:
        super().__init__(held, tables, consumer)
        self._wait_for = coordinator.wait_for

    def mark(self, rows: Sequence[Any]) -> None:
        """See `RowChanges.mark`."""
        self._wait_for(functools.partial(super().mark, rows))

    def take(self) -> list[Changed]:
        """See `RowChanges.take`."""
        return self._wait_for(super().take)

    def read(self, table: int, rows: np.ndarray) -> np.ndarray:
        """See `RowChanges.read`."""
        return self._wait_for(functools.partial(super().read, table, rows))

    def commit(self, *, end: bool = False) -> None:
        """See `RowChanges.commit`."""
        self._wait_for(functools.partial(super().commit, end=end))
