"""The ids of growing tables, with their rows and slots: read and written as one."""

from __future__ import annotations

import abc
import dataclasses
from collections.abc import Callable, Collection, Iterator, Mapping
from typing import Any, ClassVar

import numpy as np
import tensorflow as tf
from absl import logging

from tpu_embedding.layout.plan import TableSpec
from tpu_embedding.ops import library
from tpu_embedding.tables.growing import first_rows
from tpu_embedding.tables.reach import Reach
from tpu_embedding.tables.rows import (
    PARAMETERS,
    ArrayRows,
    MutableTableRows,
    ProcessGroup,
    TableRows,
)
from tpu_embedding.vocabulary import (
    COUNTS,
    NUM_ROWS,
    PARTS,
    PARTS_OF_CANDIDATES,
    PARTS_OF_IDS,
    SHARED_ID,
    SWEEP,
    UPDATES_BEGUN,
    GrowingVocabulary,
    VocabularyContents,
)

# Places in the `state` of a VocabularySnapshot (core/vocabulary.h).
_EVICTED, _NEXT_CANDIDATE = 5, 6

_Arrays = dict[str, Any]  # NumPy arrays


@dataclasses.dataclass(frozen=True)
class Changed:
    """The rows of one table that changed for a consumer of deltas.

    Attributes:
      keys: Rows, or ids of a growing table, int64 [n] ascending.
      read: Reads the values of the keys [start, stop), float32 [stop - start, D].
      deleted: Ids that lost their rows, int64 [m] ascending.
      size: Of a growing table the number of all its ids.
      shared: The row that ids without one share, float32 [1, D], or [0, D].
    """

    keys: np.ndarray
    read: Callable[[int, int], np.ndarray]
    deleted: np.ndarray = dataclasses.field(default_factory=lambda: np.zeros(0, int))
    size: int = 0
    shared: np.ndarray | None = None


class StoredVocabulary(abc.ABC):
    """Where the ids and rows of a growing table are, for the process that has them.

    Attributes:
      arrays: By "parameters" and slot name the variables with the rows.
      limited: Whether the options of the table limit what it holds.
    """

    arrays: Mapping[str, tf.Variable]
    limited: bool = True

    @abc.abstractmethod
    def read(self, names: Collection[str]) -> _Arrays:
        """Everything at one moment; of the arrays those with these names.

        By "parameters" and slot name the rows of the ids in ascending order, and then
        the row that ids share, if it is there; the ids and what is known of them.
        """

    @abc.abstractmethod
    def write(self, state: Mapping[str, np.ndarray]) -> None:
        """Replaces everything by what `fit` returned."""

    def find(self, ids: tf.Tensor) -> tf.Tensor:
        """What a lookup for an update reads of int64 [n]: float32 [n, D].

        Only where the engine differentiates weights.
        """
        raise NotImplementedError(f"No rows of {ids} are here.")

    def evict(self) -> int:
        """Evicts rows now, after a flush; how many. See `TPUEmbedding.evict`."""
        raise NotImplementedError("Only tables that are trained evict rows.")

    def take(self, consumer: str) -> _Arrays:
        """What changed for a consumer of deltas, as TpuEmbeddingTakeIds has it."""
        raise NotImplementedError("Only tables that are trained have changes.")


class QueueVocabulary(StoredVocabulary):
    """A vocabulary in the step queue of a part of the tables."""

    def __init__(
        self,
        spec: TableSpec,
        queue: tf.Tensor,
        arrays: Mapping[str, tf.Variable],
        device: str,
    ) -> None:
        """Takes the table as the plan of the part has it, and its variables."""
        self._spec, self.arrays, self._parameters = spec, arrays, arrays[PARAMETERS]
        self._queue, self._device = queue, device
        self._ops = library.load()

    def find(self, ids: tf.Tensor) -> tf.Tensor:
        """See `StoredVocabulary.find`."""
        with tf.device(self._device):
            rows = self._ops.tpu_embedding_read_ids(
                queue=self._queue,
                parameters=self._parameters.handle,
                ids=ids,
                table=self._spec.index,
            )
        return tf.ensure_shape(rows, [None, self._spec.config.dim])

    def evict(self) -> int:
        """See `StoredVocabulary.evict`."""
        with tf.device(self._device):
            return int(
                self._ops.tpu_embedding_evict(queue=self._queue, table=self._spec.index)
            )

    def take(self, consumer: str) -> _Arrays:
        """See `StoredVocabulary.take`: as it is at this moment."""
        with tf.device(self._device):
            taken = self._ops.tpu_embedding_take_ids(
                queue=self._queue,
                parameters=self._parameters.handle,
                dtype=self._parameters.dtype,
                table=self._spec.index,
                consumer=consumer,
            )
        arrays = {name: value.numpy() for name, value in taken._asdict().items()}
        return arrays | {"rows": arrays["rows"].astype(np.float32)}

    def read(self, names: Collection[str]) -> _Arrays:
        """See `StoredVocabulary.read`."""
        variables = [self.arrays[name] for name in names]
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

    def write(self, state: Mapping[str, np.ndarray]) -> None:
        """See `StoredVocabulary.write`."""
        with tf.device(self._device):
            self._ops.tpu_embedding_load_vocabulary(
                queue=self._queue,
                snapshot=[state[name] for name in PARTS],
                arrays=[v.handle for v in self.arrays.values()],
                values=[
                    tf.constant(state[name], variable.dtype)
                    for name, variable in self.arrays.items()
                ],
                table=self._spec.index,
            )


class Vocabulary(tf.__internal__.tracking.Trackable):
    """The ids of a growing table, with their rows and slots.

    TensorFlow's checkpoints have one object for all of them.

    Attributes:
      parts: The names of what `read` returns.
      group: The processes that read and write it together, or None.
    """

    rows: ClassVar[Mapping[str, MutableTableRows]] = {}  # See `Table.rows`.

    def __init__(self, spec: TableSpec, stored: StoredVocabulary, reach: Reach) -> None:
        """Takes what this process reaches; in a job it is empty but in one process."""
        self._spec, self._stored, self._reach = spec, stored, reach
        self.parts = (*PARTS, *stored.arrays)
        self.group: ProcessGroup | None = reach.group

    def values(self) -> dict[str, Any]:
        """See `Table.values`: the rows as they are stored."""
        if self.group is None:
            return {**self._stored.arrays}
        local = {name: array.numpy() for name, array in self._stored.arrays.items()}
        values = self._from_owner(local, "the reading of the")
        return {name: tf.constant(value) for name, value in values.items()}

    def contents(self) -> VocabularyContents:
        """What the vocabulary holds."""
        state = self._read([], "vocabulary of")
        counts = state["state"][COUNTS].tolist()
        return VocabularyContents(*(state[name] for name in PARTS_OF_IDS), *counts)

    def find(self, ids: tf.Tensor) -> tf.Tensor:
        """See `StoredVocabulary.find`."""
        return self._stored.find(ids)

    def evict(self) -> int:
        """See `StoredVocabulary.evict`; a call of all processes."""
        self._reach.agree(f"evict of table {self._spec.name}")
        count = {"evicted": np.asarray(self._reach.call(self._stored.evict))}
        count = self._from_owner(count, "the reading of the evictions of")
        return int(count["evicted"])

    def known(self) -> Iterator[np.ndarray]:
        """See `Identity.known`."""
        yield self.contents().ids

    def objects(self, made: Any) -> dict[str, Any]:
        """See `Identity.objects`."""
        del made
        return {self._spec.name: self}

    def served(self) -> tuple[TableRows, np.ndarray | None]:
        """See `Identity.served`: as it is now."""
        state = self.read()
        return ArrayRows(served_rows(self._spec, state), self.group), state["ids"]

    def saved(self) -> tuple[dict[str, TableRows], dict[str, np.ndarray]]:
        """See `Identity.saved`: everything at one moment."""
        state = self.read()
        known = {name: state.pop(name) for name in PARTS}
        return {n: ArrayRows(v, self.group) for n, v in state.items()}, known

    def changed(self, consumer: str, marked: Any) -> Changed:
        """See `Identity.changed`: the step queue has marks of ids."""
        del marked
        local = self._reach.call(lambda: self._stored.take(consumer))
        taken = self._from_owner(local, "the reading of the changes of")
        rows, shared = np.split(taken["rows"], [len(taken["ids"])])
        return Changed(
            taken["ids"],
            lambda start, stop: rows[start:stop],
            taken["deleted"],
            int(taken["size"][0]),
            shared,
        )

    def updates_begun(self) -> int:
        """The number of updates so far; cheaper than `read`."""
        return int(self._read([], "updates of")["state"][UPDATES_BEGUN])

    def read(self) -> _Arrays:
        """Everything at one moment, see `StoredVocabulary.read`."""
        return self._read(self._stored.arrays, "growing")

    def _read(self, names: Collection[str], what: str) -> _Arrays:
        local = self._reach.call(lambda: self._stored.read(names))
        return self._from_owner(local, f"the reading of the {what}")

    def _from_owner(self, local: Mapping[str, np.ndarray], call: str) -> _Arrays:
        name, index = self._spec.name, self._spec.index
        return self._reach.from_owner(index, local, f"{call} table {name}")

    def fit(self, state: Mapping[str, np.ndarray]) -> _Arrays:
        """What `write` makes of a state, without a change of the table.

        Raises:
          ValueError: As `write`.
        """
        fitting = {name: np.asarray(value) for name, value in state.items()}
        vocabulary = self._spec.config.vocabulary
        assert vocabulary is not None
        shared = num_shared(vocabulary, fitting)
        if len(fitting[PARAMETERS]) != len(fitting["ids"]) + shared:
            raise ValueError(
                f"Table {self._spec.name!r} has unknown={vocabulary.unknown!r}, but "
                "only one of it and the table that was saved shares a row. Use the "
                "same `unknown`."
            )
        if self._stored.limited:
            fitting["state"] = fitting["state"].copy()
            _keep_ids(fitting, self._spec.name, vocabulary, shared)
            _keep_candidates(fitting, vocabulary)
        return fitting

    def write(self, state: Mapping[str, np.ndarray]) -> None:
        """Replaces everything by what `read` of a table of any budget returned.

        Raises:
          ValueError: If the ids do not fit into the table, and none may be evicted, or
            one of both tables shares a row.
          tf.errors.InvalidArgumentError: If values have another width or dtype.
        """
        self._reach.call(lambda: self._write(state))

    def _write(self, state: Mapping[str, np.ndarray]) -> None:
        fitting = self.fit(state)  # Each process checks what it has read.
        if self._reach.has(self._spec.index):
            self._stored.write(fitting)

    def _serialize_to_tensors(self) -> dict[str, tf.Tensor]:
        return {name: tf.constant(value) for name, value in self.read().items()}

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


def served_rows(spec: TableSpec, state: Mapping[str, np.ndarray]) -> np.ndarray:
    """The rows of a served table, from `Vocabulary.read`: [n + 1, dim].

    The last one is what ids without a row look up, unless each has its first values.
    """
    values = state[PARAMETERS]
    if len(values) > len(state["ids"]):
        return values
    assert spec.config.vocabulary is not None
    last = np.zeros_like(values, shape=(1, spec.config.dim))
    if spec.config.vocabulary.unknown == "shared_row":  # No update has made it yet.
        last = first_rows(spec, tf.constant([SHARED_ID], tf.int64)).numpy()
    return np.concatenate([values, last])


def num_shared(vocabulary: GrowingVocabulary, state: Mapping[str, np.ndarray]) -> int:
    """How many rows of a state ids share: 1 once an update has made it."""
    return int(vocabulary.unknown == "shared_row" and state["state"][NUM_ROWS] > 0)


def _keep_ids(
    fitting: _Arrays, table: str, vocabulary: GrowingVocabulary, shared: int
) -> None:
    """Leaves out the ids that evictions would, and rows without an id.

    Raises:
      ValueError: If no id may be left out.
    """
    size, numbers = len(fitting["ids"]), fitting["state"]
    room = vocabulary.max_rows - (vocabulary.unknown == "shared_row")
    if size > room:
        if vocabulary.eviction is None:
            raise ValueError(
                f"Table {table!r} has max_rows={vocabulary.max_rows}, but the table "
                f"that was saved has {size} ids. Raise max_rows, or set `eviction`."
            )
        key = "hits" if vocabulary.eviction == "lfu" else "last_updates"
        by_age = np.lexsort((fitting["rows"], fitting[key]))
        kept = np.sort(by_age[size - room :])
        for name in PARTS_OF_IDS:
            fitting[name] = fitting[name][kept]
        kept = np.append(kept, [size] * shared).astype(np.int64)
        for name in fitting.keys() - {*PARTS}:
            fitting[name] = fitting[name][kept]
        numbers[_EVICTED] += size - room
        logging.warning("Table %s: %d ids were evicted.", table, size - room)
    full = len(fitting["ids"]) + shared
    if numbers[NUM_ROWS] > (full if vocabulary.eviction is None else room + shared):
        # Evicted rows are left out.
        rank = np.argsort(np.argsort(fitting["rows"]))
        fitting["rows"] = rank + shared
        numbers[NUM_ROWS], numbers[SWEEP] = full, 0


def _keep_candidates(fitting: _Arrays, vocabulary: GrowingVocabulary) -> None:
    """Leaves out the oldest ids without a row that would not be remembered."""
    numbers = fitting["state"]
    most = vocabulary.max_candidates or vocabulary.max_rows
    for name in PARTS_OF_CANDIDATES:
        ordered = np.roll(fitting[name], -numbers[_NEXT_CANDIDATE])
        kept = ordered[-most:] if vocabulary.min_count > 1 else ordered[:0]
        fitting[name] = kept
    numbers[_NEXT_CANDIDATE] = 0
