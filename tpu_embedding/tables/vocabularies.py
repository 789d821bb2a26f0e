"""The ids of growing tables, with their rows and slots: read and written as one."""

from __future__ import annotations

import abc
import dataclasses
import functools
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import Any, ClassVar

import numpy as np
import tensorflow as tf

from tpu_embedding.layout.plan import TableSpec
from tpu_embedding.ops import library
from tpu_embedding.tables.codes import joined_codes, joined_values
from tpu_embedding.tables.growing import first_stored
from tpu_embedding.tables.reach import MergedOrder, MergedRows, Reach
from tpu_embedding.tables.rows import (
    PARAMETERS,
    STORED,
    ArrayRows,
    MutableTableRows,
    ProcessGroup,
    TableRows,
    joined,
)
from tpu_embedding.tables.vocabulary_parts import (
    PLACES,
    Arrays,
    fitted_parts,
    joined_parts,
    num_shared,
    total_state,
    updates_begun,
)
from tpu_embedding.tables.waiting import catch_up, read_rows
from tpu_embedding.vocabulary import (
    COUNTS,
    NUM_ROWS,
    PARTS,
    PARTS_OF_CANDIDATES,
    PARTS_OF_IDS,
    SHARED_ID,
    VocabularyContents,
)


@dataclasses.dataclass(frozen=True)
class Changed:
    """The rows of one table that changed for a consumer of deltas.

    Attributes:
      keys: The changed rows, or ids of a growing table, int64 [n] ascending.
      rows: The values of these rows, [n, D].
      deleted: The ids that lost their rows, int64 [m] ascending.
      size: The number of all ids of a growing table.
      shared: The row that ids without a row share, [1, D]; [0, D] if there is none.
    """

    keys: np.ndarray
    rows: TableRows
    deleted: np.ndarray = dataclasses.field(default_factory=lambda: np.zeros(0, int))
    size: int = 0
    shared: TableRows | None = None


def array_rows(stored: Mapping[str, np.ndarray]) -> TableRows:
    """Returns the rows of a table that arrays store, by name."""
    arrays = {name: ArrayRows(array) for name, array in stored.items()}
    return joined_codes(arrays)[PARAMETERS]


class StoredVocabulary(abc.ABC):
    """The store of the ids and rows of a part of a growing table.

    Attributes:
      part: The number of the part, and the number of all parts.
      arrays: The variables with the rows, by "parameters" and slot name.
      limited: Whether the options of the table limit what it holds.
    """

    part: tuple[int, int] = (0, 1)
    arrays: Mapping[str, tf.Variable]
    limited: bool = True

    @abc.abstractmethod
    def read(self, names: Collection[str]) -> Arrays:
        """Returns the state at one moment, with only the arrays of these names.

        The result has the ids, ascending, and what is known of them. By "parameters"
        and slot name it has the rows of the ids, then the row that ids share, if any.
        """

    @abc.abstractmethod
    def places(self, known: Mapping[str, np.ndarray]) -> np.ndarray:
        """Returns where the arrays hold the rows that `read` returns, in its order.

        `known` is the result of `read`.
        """

    @abc.abstractmethod
    def write(self, state: Mapping[str, np.ndarray]) -> None:
        """Replaces everything by what `read` of all arrays returned."""

    def find(self, ids: tf.Tensor) -> tf.Tensor:
        """Returns what a training lookup reads for ids int64 [n]: float32 [n, D].

        Only engines that differentiate weights implement it.
        """
        raise NotImplementedError(f"This process has no rows of {ids}.")

    def evict(self) -> int:
        """Evicts rows now, after a flush, as `TPUEmbedding.evict`; returns how many."""
        raise NotImplementedError("Only tables that are trained evict rows.")

    def take(self, consumer: str) -> Arrays:
        """Returns changes for a consumer of deltas; see the op TpuEmbeddingTakeIds."""
        raise NotImplementedError("Only tables that are trained have changes.")


class QueueVocabulary(StoredVocabulary):
    """A vocabulary in the step queue of a part of the tables."""

    def __init__(
        self,
        spec: TableSpec,
        queue: tf.Tensor,
        arrays: Mapping[str, tf.Variable],
        device: str,
        part: tuple[int, int],
        *,
        find: Callable[[int, tf.Tensor], tf.Tensor],
    ) -> None:
        """Takes the table from the plan of the part, and its variables.

        `find(index, ids)` returns what lookups of ids read in the table with the index.
        """
        self.part, self._find = part, find
        self._spec, self.arrays = spec, arrays
        self._rows = [arrays[name] for name in STORED if name in arrays]
        self._queue, self._device = queue, device
        self._ops = library.load()

    def find(self, ids: tf.Tensor) -> tf.Tensor:
        return self._find(self._spec.index, ids)

    def evict(self) -> int:
        with tf.device(self._device):
            return int(
                self._ops.tpu_embedding_evict(queue=self._queue, table=self._spec.index)
            )

    def take(self, consumer: str) -> Arrays:
        """See `StoredVocabulary.take`; rows have their values at this moment."""
        catch_up(self._rows[0])
        with tf.device(self._device):
            taken = self._ops.tpu_embedding_take_ids(
                queue=self._queue,
                arrays=[variable.handle for variable in self._rows],
                types=[variable.dtype for variable in self._rows],
                table=self._spec.index,
                consumer=consumer,
            )
        found = {name: getattr(taken, name) for name in ("ids", "deleted", "size")}
        found |= zip(STORED, taken.rows, strict=False)
        return {name: value.numpy() for name, value in found.items()}

    def read(self, names: Collection[str]) -> Arrays:
        variables = [self.arrays[name] for name in names]
        if variables:
            catch_up(variables[0])
        with tf.device(self._device):
            saved = self._ops.tpu_embedding_save_vocabulary(
                queue=self._queue,
                arrays=[v.handle for v in variables],
                types=[v.dtype for v in variables],
                table=self._spec.index,
            )
        values = dict(zip(names, saved.values, strict=True))
        parts = {name: getattr(saved, name) for name in PARTS}
        return {name: value.numpy() for name, value in (parts | values).items()}

    def places(self, known: Mapping[str, np.ndarray]) -> np.ndarray:
        _check_heights(self._spec.name, self.arrays, known["state"][NUM_ROWS])
        shared = num_shared(self._spec.growth, known)
        return np.append(known["rows"], np.arange(shared))

    def write(self, state: Mapping[str, np.ndarray]) -> None:
        with tf.device(self._device):
            self._ops.tpu_embedding_load_vocabulary(
                queue=self._queue,
                arrays=[v.handle for v in self.arrays.values()],
                values=[
                    tf.constant(state[name], variable.dtype)
                    for name, variable in self.arrays.items()
                ],
                table=self._spec.index,
                **{name: state[name] for name in PARTS},
            )


class Vocabulary(tf.__internal__.tracking.Trackable):
    """The ids of a growing table, with their rows and slots.

    TensorFlow's checkpoints have one object for all of them.

    Attributes:
      parts: The names of what `read` returns.
      group: The processes that read and write it together, or None.
    """

    rows: ClassVar[Mapping[str, MutableTableRows]] = {}  # See `Table.rows`.

    def __init__(
        self, spec: TableSpec, stored: Sequence[StoredVocabulary], reach: Reach
    ) -> None:
        """Takes the parts that this process reaches.

        If one process of a job has the whole table, the others have an empty part.
        """
        self._spec, self._stored, self._reach = spec, stored, reach
        self._arrays = tuple(stored[0].arrays)
        self._num_parts = stored[0].part[1]
        self.parts = (*PARTS, *self._arrays)
        self.group: ProcessGroup | None = reach.group

    def values(self) -> dict[str, Any]:
        """See `Table.values`; rows come in the order of their numbers, part by part."""
        if (
            self.group is None
            and self._num_parts == 1
            and not self._spec.config.storage.is_coded
        ):
            return {**self._stored[0].arrays}

        def read(part: StoredVocabulary) -> Arrays:
            return {name: array.numpy() for name, array in part.arrays.items()}

        parts = self._everywhere(read, "the reading of the")
        values = [joined_values(part) for part in parts]
        return {n: tf.concat([v[n] for v in values], 0) for n in values[0]}

    def parameters(self, made: Any) -> Any:
        """See `Identity.parameters`."""
        del made
        return self.values()[PARAMETERS]

    def contents(self) -> VocabularyContents:
        """Returns what the vocabulary holds."""
        state = self._read([], "vocabulary of")
        counts = total_state(self._spec.name, state["state"])[COUNTS].tolist()
        return VocabularyContents(*(state[name] for name in PARTS_OF_IDS), *counts)

    def find(self, ids: tf.Tensor) -> tf.Tensor:
        """See `StoredVocabulary.find`."""
        (part,) = self._stored
        return part.find(ids)

    def evict(self) -> int:
        """See `StoredVocabulary.evict`; all processes must call it."""
        self._reach.agree(f"evict of table {self._spec.name}")

        def evict(part: StoredVocabulary) -> Arrays:
            return {"evicted": np.asarray(part.evict())}

        counts = self._everywhere(evict, "the reading of the evictions of")
        return sum(int(count["evicted"]) for count in counts)

    def known(self) -> Iterator[np.ndarray]:
        """See `Identity.known`."""
        yield self.contents().ids

    def objects(self, made: Any) -> dict[str, Any]:
        """See `Identity.objects`."""
        del made
        return {self._spec.name: self}

    def served(self) -> tuple[TableRows, np.ndarray | None]:
        """See `Identity.served`; the ids are the current ones."""
        if self.group is None:  # Training may go on meanwhile.
            state = self.read()
            return array_rows(served_rows(self._spec, state)), state["ids"]
        arrays, known = self._blocks()
        ids = known["ids"]
        stored = {name: arrays[name] for name in STORED if name in arrays}
        if arrays[PARAMETERS].shape[0] == ids.shape[0]:
            stored = {
                name: joined([stored[name], ArrayRows(row)])
                for name, row in _last_row(self._spec, stored).items()
            }
        return joined_codes(stored)[PARAMETERS], _in_first(ids)

    def saved(self) -> tuple[dict[str, TableRows], dict[str, TableRows]]:
        """See `Identity.saved`; ids are read now, and rows when they are needed."""
        arrays, known = self._blocks()
        return joined_codes(arrays), known

    def _blocks(self) -> tuple[dict[str, TableRows], dict[str, TableRows]]:
        """Returns stored arrays and what is known about ids, for reading in blocks."""
        stored, spec, none = self._stored, self._spec, np.zeros(0, np.int64)

        def read() -> tuple[list[Arrays], list[np.ndarray], Arrays]:
            arrays = stored[0].arrays.items()
            known = [part.read([]) for part in stored]
            places = [p.places(own) for p, own in zip(stored, known, strict=True)]
            none_of = {name: read_rows(array, none) for name, array in arrays}
            return known, places, none_of

        known, numbers, empty = self._reach.call(read)
        call = f"the reading of growing table {spec.name}"
        states = [{"state": own["state"]} for own in known]
        states = self._reach.from_owners(spec.index, states, call)
        starts = np.cumsum([0, *(own["state"][NUM_ROWS] for own in states)])
        if not self._reach.has(spec.index):  # An empty part may have a shared row.
            numbers = [none] * len(stored)
        for part, own in zip(stored, known, strict=True):
            own["rows"] = own["rows"] + starts[part.part[0]]

        def order(keys: Sequence[np.ndarray], *, in_turn: bool = False) -> MergedOrder:
            if in_turn:  # One part after the other.
                keys = [
                    (part.part[0] << 40) + np.arange(len(own))
                    for part, own in zip(stored, keys, strict=True)
                ]
            return MergedOrder(keys, self._reach, call)

        by_id = order([own["ids"] for own in known])
        # Ids share a row, which is the last one, only where there is one part.
        by_row = by_id if self._num_parts > 1 else order(numbers, in_turn=True)
        orders = dict.fromkeys(PARTS_OF_IDS, by_id)
        candidates = order([own["candidates"] for own in known], in_turn=True)
        orders |= dict.fromkeys(PARTS_OF_CANDIDATES, candidates)
        vectors: dict[str, TableRows] = {
            name: MergedRows(order, name, none, lambda k, cut, n=name: known[k][n][cut])
            for name, order in orders.items()
        }
        state = np.concatenate([own["state"] for own in states])
        vectors["state"] = ArrayRows(state, self.group)

        def rows(name: str, part: int, cut: slice) -> np.ndarray:
            return read_rows(stored[part].arrays[name], numbers[part][cut])

        arrays: dict[str, TableRows] = {
            name: MergedRows(by_row, name, like, functools.partial(rows, name))
            for name, like in empty.items()
        }
        return arrays, vectors

    def changed(self, consumer: str, marked: Any) -> Changed:
        """See `Identity.changed`: the step queue has marks of ids."""
        del marked
        taken = self._everywhere(
            lambda part: part.take(consumer), "the reading of the changes of"
        )
        names = [name for name in STORED if name in taken[0]]
        # The shared row, of a whole table, comes last.
        shared = {name: taken[0][name][len(taken[0]["ids"]) :] for name in names}
        ids = np.concatenate([t["ids"] for t in taken])
        order = np.argsort(ids)
        stored = {
            name: np.concatenate([t[name][: len(t["ids"])] for t in taken])[order]
            for name in names
        }
        return Changed(
            ids[order],
            array_rows(stored),
            np.sort(np.concatenate([t["deleted"] for t in taken])),
            sum(int(t["size"][0]) for t in taken),
            array_rows(shared),
        )

    def updates_begun(self) -> int:
        """Returns the number of updates so far; cheaper than `read`."""
        return updates_begun(self._spec.name, self._read([], "updates of")["state"])

    def read(self) -> Arrays:
        """Returns what `StoredVocabulary.read` returns, of all parts.

        Outside of jobs it reads each part at one moment.
        """
        return dict(self.read_in_turn())

    def read_in_turn(self) -> Iterator[tuple[str, np.ndarray]]:
        """Yields what `read` returns; in jobs each array is made when it is yielded."""
        if self.group is None:
            yield from self._read(self._arrays, "growing").items()
            return
        arrays, known = self._blocks()
        for name, rows in (known | arrays).items():
            yield name, rows.numpy().reshape(rows.file_shape)

    def _read(self, names: Collection[str], what: str) -> Arrays:
        return joined_parts(
            self._everywhere(lambda p: p.read(names), f"the reading of the {what}")
        )

    def _everywhere(
        self, read: Callable[[StoredVocabulary], Arrays], call: str
    ) -> list[Arrays]:
        """Returns in all processes what is read of each part; all must call it."""
        local = self._reach.call(lambda: [read(part) for part in self._stored])
        call = f"{call} table {self._spec.name}"
        return self._reach.from_owners(self._spec.index, local, call)

    def fit(self, known: Mapping[str, np.ndarray]) -> list[Arrays]:
        """Returns the future content of each part here, for `load`; changes nothing.

        `known` has `PARTS` as `read` returns them, and `PLACES` of the rows.

        Raises:
          ValueError: As `write` does.
        """
        parts = fitted_parts(  # Each process checks what it has read.
            self._spec, known, self._num_parts, limited=self._stored[0].limited
        )
        if not self._reach.has(self._spec.index):
            return []
        return [parts[part.part[0]] for part in self._stored]

    def write(self, state: Mapping[str, np.ndarray]) -> None:
        """Replaces everything by what `read` of a table of any `max_rows` returned.

        Raises:
          ValueError: If the ids do not fit into the table, and none may be evicted, or
            if only one of the two tables has a shared row.
          tf.errors.InvalidArgumentError: If values have another width or dtype.
        """
        self._reach.call(lambda: self._write(state))

    def _write(self, state: Mapping[str, np.ndarray]) -> None:
        known = {name: state[name] for name in PARTS}
        parts = self.fit(known | {PLACES: np.arange(len(state[PARAMETERS]))})
        self._load(parts, lambda places: {n: state[n][places] for n in self._arrays})

    def load(
        self, parts: Sequence[Arrays], read: Callable[[np.ndarray], Arrays]
    ) -> None:
        """Replaces everything by what `fit` returned.

        `read` returns the rows at some places, by name of the array.
        """
        self._reach.call(lambda: self._load(parts, read))

    def _load(
        self, parts: Sequence[Arrays], read: Callable[[np.ndarray], Arrays]
    ) -> None:
        for part, own in zip(self._stored, parts, strict=False):
            part.write(own | read(own[PLACES]))

    def _serialize_to_tensors(self) -> dict[str, tf.Tensor]:
        return {name: tf.constant(value) for name, value in self.read_in_turn()}

    def _restore_from_tensors(self, restored_tensors: Mapping[str, tf.Tensor]) -> None:
        def write(*values: tf.Tensor) -> None:
            state = zip(restored_tensors, values, strict=True)
            self._write({name: value.numpy() for name, value in state})

        values = list(restored_tensors.values())
        if tf.executing_eagerly():
            write(*values)
            return
        # TensorFlow restores into several devices in a tf.function.
        with tf.device(tf.config.list_logical_devices("CPU")[0].name):
            tf.py_function(write, values, [])


def _check_heights(table: str, arrays: Mapping[str, Any], num_rows: int) -> None:
    for array in arrays.values():
        with tf.device(array.device):
            shape = tf.raw_ops.VariableShape(input=array.handle).numpy().tolist()
        if shape[0] != num_rows:
            raise tf.errors.InvalidArgumentError(
                None,
                None,
                f"Table {table} or a slot of it is {shape}, but its vocabulary has "
                f"{num_rows} rows. Assign values of that shape.",
            )


def served_rows(
    spec: TableSpec, state: Mapping[str, np.ndarray]
) -> dict[str, np.ndarray]:
    """Returns arrays of a served table's n + 1 rows, by name, from `Vocabulary.read`.

    Ids without a row look up the last one, unless each looks up its first values.
    """
    stored = {name: state[name] for name in STORED if name in state}
    if len(stored[PARAMETERS]) > len(state["ids"]):
        return stored
    last = _last_row(spec, stored)
    return {name: np.concatenate([rows, last[name]]) for name, rows in stored.items()}


def _last_row(
    spec: TableSpec, stored: Mapping[str, np.ndarray | TableRows]
) -> dict[str, np.ndarray]:
    """Returns the row after those of the ids, [1, C] by name, as before any update."""
    if spec.growth.unknown == "shared_row":
        return first_stored(spec, tf.constant([SHARED_ID], tf.int64))
    return {name: np.zeros((1, *r.shape[1:]), r.dtype) for name, r in stored.items()}


def _in_first(rows: TableRows) -> np.ndarray:
    """Returns a vector in the first process of its group, and nothing in the others."""
    parts = [rows.read_in(0, *cut).reshape(-1) for cut in rows.slices()]
    return np.concatenate([np.zeros(0, rows.dtype), *parts])
