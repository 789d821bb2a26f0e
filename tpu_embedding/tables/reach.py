"""Reaches tables in this process, in the processes of a job, or on servers.

All reads and writes of tables outside of steps pass through a `Reach`, whether of rows,
of changes or of the ids of growing tables.
"""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

import numpy as np
import tensorflow as tf

from tpu_embedding.layout.partition import Division, Run
from tpu_embedding.layout.placement import ALL_PROCESSES, BY_ID, Placement
from tpu_embedding.parameter_server import ClusterCoordinator
from tpu_embedding.tables.readers import StoredReader
from tpu_embedding.tables.rows import MutableTableRows, ProcessGroup, TableRows

_T = TypeVar("_T")
_PHASE = "checkpoint"  # The phase of all exchanges here.


class Reach:
    """How a process reaches the tables; in this base class it has all of them.

    Attributes:
      group: The processes that share the tables and make the same calls, or None.
      rank: The index of this process.
    """

    group: ProcessGroup | None = None
    rank = 0

    def call(self, function: Callable[[], _T]) -> _T:
        """Calls a function that reads or writes tables by ops; returns its result."""
        return function()

    def agree(self, call: str) -> None:
        """Fails in all processes if their calls differ, before anything changes."""
        del call

    def reader(self, stored: StoredReader) -> StoredReader:
        """Returns a reader of the whole table in any graph; `stored` reads a part."""
        return stored

    def variables(self, stored: StoredReader) -> Sequence[Any]:
        """Returns the variables of a whole table, or raises NotImplementedError."""
        return stored.variables

    def has(self, table: int) -> bool:
        """Returns whether this process has a part of a table."""
        del table
        return True

    def within(self, table: int, process: int, start: int, stop: int) -> Run:
        """Returns the rows that a process reaches among the rows [start, stop)."""
        del table, process
        return Division(1).within(0, start, stop)

    def owned(
        self, table: int, rows: np.ndarray
    ) -> list[tuple[np.ndarray, np.ndarray]]:
        """Returns for each process which rows it reaches, and their numbers there."""
        del table
        return [(np.full(len(rows), True), rows)]

    def gather(
        self, array: np.ndarray, call: str, receiver: int | None = None
    ) -> list[np.ndarray]:
        """Returns the arrays of all processes, which differ in the first axis only.

        Args:
          array: The array of this process.
          call: The call, with the arguments that must be alike everywhere.
          receiver: The only process that gets the rows; others get arrays without
            rows. None gives all processes the rows.
        """
        del call, receiver
        return [array]

    def from_owners(
        self, table: int, parts: Sequence[Mapping[str, np.ndarray]], call: str
    ) -> list[dict[str, np.ndarray]]:
        """Returns the arrays of all parts of a table, given those reached here."""
        del table, call
        return [{**arrays} for arrays in parts]


ALONE = Reach()


class InJob(Reach):
    """How a process reaches the tables in the processes of a synchronous job."""

    def __init__(self, placement: Placement, group: ProcessGroup) -> None:
        """Takes the placement as this process has it."""
        self.group: ProcessGroup | None = group
        self.rank = group.rank
        self._group = group
        self._placements = [
            dataclasses.replace(placement, process=process)
            for process in range(group.size)
        ]

    def agree(self, call: str) -> None:
        self._group.agree(_PHASE, call)

    def reader(self, stored: StoredReader) -> StoredReader:
        del stored
        return _NoReader()

    def variables(self, stored: StoredReader) -> Sequence[Any]:
        del stored
        raise NotImplementedError(
            "Under MultiWorkerMirroredStrategy no process has a whole stacked table. "
            "Use `embedding_tables`, which gathers the tables, or a checkpoint."
        )

    def has(self, table: int) -> bool:
        return self._placements[0].owners[table] in (self.rank, ALL_PROCESSES, BY_ID)

    def within(self, table: int, process: int, start: int, stop: int) -> Run:
        return self._placements[process].within(table, start, stop)

    def owned(
        self, table: int, rows: np.ndarray
    ) -> list[tuple[np.ndarray, np.ndarray]]:
        return [placement.owned(table, rows) for placement in self._placements]

    def gather(
        self, array: np.ndarray, call: str, receiver: int | None = None
    ) -> list[np.ndarray]:
        content = array.tobytes()
        sent = [
            content if receiver in (None, process) else b""
            for process in range(self._group.size)
        ]
        received = self._group.all_to_all(_PHASE, sent, call)
        return [
            np.frombuffer(part, array.dtype).reshape(-1, *array.shape[1:])
            for part in received
        ]

    def from_owners(
        self, table: int, parts: Sequence[Mapping[str, np.ndarray]], call: str
    ) -> list[dict[str, np.ndarray]]:
        (arrays,) = parts
        head = [(name, v.dtype.name, v.shape) for name, v in arrays.items()]
        content = b"".join(v.tobytes() for v in arrays.values())
        sent = json.dumps(head).encode() + b"\n" + content if self.has(table) else b""
        everyone = self._group.all_gather(_PHASE, sent, call)
        return [_read_arrays(sent) for sent in everyone if sent]


def _read_arrays(sent: bytes) -> dict[str, np.ndarray]:
    """Reads what a process sent in `InJob.from_owners`."""
    line, _, content = sent.partition(b"\n")
    result, start = {}, 0
    for name, dtype, shape in json.loads(line):
        kind: Any = tf.as_dtype(dtype).as_numpy_dtype
        flat = np.frombuffer(content, kind, math.prod(shape), start)
        result[name] = flat.reshape(shape)
        start += flat.nbytes
    return result


class _NoReader(StoredReader):
    """Refuses to read rows in a graph, as each process has only a part of them."""

    @property
    def variables(self) -> Sequence[Any]:
        raise _not_whole()

    def read(self, rows: tf.Tensor) -> tf.Tensor:
        raise _not_whole()


def _not_whole() -> NotImplementedError:
    return NotImplementedError(
        "Under MultiWorkerMirroredStrategy no process has a whole table, so none can "
        "look up rows alone. In a tf.function without a tf.GradientTape, call the "
        "layer in `strategy.run`. To export or serve a model with a layer, restore a "
        "checkpoint of it in one process; te.serving.export accepts a TPUEmbedding of "
        "several processes."
    )


class OnServers(Reach):
    """How the coordinator reaches tables on servers; calls raise if one is lost."""

    def __init__(self, coordinator: ClusterCoordinator) -> None:
        self._coordinator = coordinator

    def call(self, function: Callable[[], _T]) -> _T:
        return self._coordinator.wait_for(function)


class ReachedRows(MutableTableRows):
    """A matrix of which this process reaches some rows, and other processes the rest.

    In a job all processes must call `read` with the same range, and each gets all of
    the rows. `write` keeps the rows of this process and ignores the others.
    """

    def __init__(
        self, name: str, height: int, local: MutableTableRows, table: int, reach: Reach
    ) -> None:
        """Takes the rows that this process reaches of the table with index `table`."""
        super().__init__((height, local.shape[1]), local.dtype)
        self.initial_value = local.initial_value
        self._name, self._local = name, local
        self._table, self._reach = table, reach

    @property
    def group(self) -> ProcessGroup | None:
        return self._reach.group

    @property
    def variable(self) -> Any:
        return self._local.variable if self.group is None else None

    def read(self, start: int, stop: int) -> np.ndarray:
        return self.read_in(None, start, stop)

    def read_in(self, process: int | None, start: int, stop: int) -> np.ndarray:
        run = self._run(self._reach.rank, start, stop)
        local = self._reach.call(
            lambda: self._local.read(run.first, run.first + run.count)
        )
        call = f"the reading of rows {start} to {stop} of {self._name}"
        parts = self._reach.gather(local, call, process)
        if len(parts) == 1:
            return parts[0]
        values = np.empty((stop - start, self.shape[1]), self.dtype)
        if process in (None, self._reach.rank):
            for sender, part in enumerate(parts):
                values[self._run(sender, start, stop).within] = part
        return values

    def write(self, start: int, values: np.ndarray) -> None:
        run = self._run(self._reach.rank, start, start + len(values))
        if run.count:
            self._reach.call(lambda: self._local.write(run.first, values[run.within]))

    def restore(self, values: Any) -> None:
        run = self._run(self._reach.rank, 0, self.shape[0])
        self._local.restore(values[run.within])

    def _run(self, process: int, start: int, stop: int) -> Run:
        return self._reach.within(self._table, process, start, stop)


class MergedOrder:
    """Orders the entries of all parts of a growing table for files, by their keys.

    A hash spreads the ids over the parts, so a block of a file has entries of all.

    Attributes:
      keys: The keys of each part that this process reaches.
      reach: Where the parts are.
      call: A text that says what is read.
      length: The number of entries.
    """

    def __init__(self, keys: Sequence[np.ndarray], reach: Reach, call: str) -> None:
        """Takes int64 keys, ascending and distinct; all processes must call it."""
        self.keys, self.reach, self.call = keys, reach, call
        ends = [len(own) for own in keys]
        self.length = int(self._everywhere([sum(ends)])[0])
        self._cuts = {self.length: ends, 0: [0] * len(ends)}

    def _everywhere(self, counts: Any) -> np.ndarray:
        """Returns the sums of the counts of all processes."""
        own = np.array(counts, np.int64)
        return np.sum(self.reach.gather(own, f"{self.call}, counted"), axis=0)

    def cuts(self, places: Sequence[int], step: int) -> list[list[int]]:
        """Returns, by place, how many entries of each part come before it.

        All processes must call it, unless all places are known. It also finds every
        `step`-th place from the first one on, but at most a few thousand.
        """
        if not self._cuts.keys() >= {*places}:
            step = max(1, step, self.length >> 12)
            wanted = {*places, *range(places[0], self.length, step)}
            self._find(np.array(sorted(wanted - self._cuts.keys())))
        return [self._cuts[place] for place in places]

    def _find(self, places: np.ndarray) -> None:
        """Finds the keys at places by bisection, and with them the cuts."""
        least, most = (np.full_like(places, end) for end in (-(2**63), 2**63 - 1))
        while (least < most).any():
            middle = (least & most) + ((least ^ most) >> 1)
            counts = [np.searchsorted(own, middle, "right") for own in self.keys]
            reached = self._everywhere(np.sum(counts, axis=0)) > places
            least = np.where(reached, least, middle + 1)
            most = np.where(reached, middle, most)
        cuts = np.transpose([np.searchsorted(own, least) for own in self.keys])
        self._cuts |= zip(places.tolist(), cuts.tolist(), strict=True)


class MergedRows(TableRows):
    """A matrix of the entries of all parts; in files it may be a vector.

    All processes must call a read with the same range.
    """

    def __init__(
        self,
        order: MergedOrder,
        name: str,
        like: np.ndarray,
        read: Callable[[int, slice], np.ndarray],
    ) -> None:
        """Takes the order of the entries.

        Args:
          order: The order of the rows.
          name: The name of the matrix in the table.
          like: An array without rows, of the columns and dtype of a part.
          read: Returns a slice of a part's rows, given the number of the part here.
        """
        super().__init__((order.length, math.prod(like.shape[1:])), like.dtype)
        self.file_shape = (order.length, *like.shape[1:])
        self._order, self._name, self._read_part = order, name, read

    @property
    def group(self) -> ProcessGroup | None:
        return self._order.reach.group

    def read(self, start: int, stop: int) -> np.ndarray:
        return self.read_in(None, start, stop)

    def numpy(self) -> np.ndarray:
        values = np.empty(self.shape, self.dtype)
        for start, stop in self.slices():
            values[start:stop] = self.read(start, stop)
        return values

    def read_in(self, process: int | None, start: int, stop: int) -> np.ndarray:
        order = self._order
        call = f"{order.call}, {self._name}, rows {start} to {stop}"
        cuts = [
            slice(*cut)
            for cut in zip(*order.cuts((start, stop), stop - start), strict=True)
        ]
        keys = [k[cut] for k, cut in zip(order.keys, cuts, strict=True)]
        values = order.reach.call(
            lambda: [self._read_part(k, cut) for k, cut in enumerate(cuts)]
        )
        keys, values = (
            np.concatenate(order.reach.gather(np.concatenate(local), call, process))
            for local in (keys, values)
        )
        return values[np.argsort(keys)].reshape(-1, self.shape[1])
