"""The state of a growing table: read, written and saved as one."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import tensorflow as tf
from absl import logging

from tpu_embedding.layout.plan import TableSpec
from tpu_embedding.ops import library
from tpu_embedding.tables.growing import Changed, GrowingState
from tpu_embedding.tables.variables import TableVariables
from tpu_embedding.vocabulary import (
    COUNTS,
    NUM_ROWS,
    PARTS,
    PARTS_OF_CANDIDATES,
    PARTS_OF_IDS,
    SWEEP,
    UPDATES_BEGUN,
    GrowingVocabulary,
    VocabularyContents,
)

# Places in the `state` of a VocabularySnapshot (core/vocabulary.h).
_EVICTED, _NEXT_CANDIDATE = 5, 6

_Arrays = dict[str, Any]  # NumPy arrays


class GrowingPart(GrowingState):
    """A growing table, whose vocabulary is in the step queue of its part."""

    def __init__(
        self, spec: TableSpec, queue: tf.Tensor, variables: TableVariables, device: str
    ) -> None:
        """Takes the queue that has the vocabulary, and the variables with the rows."""
        assert spec.config.vocabulary is not None
        self._spec, self._vocabulary = spec, spec.config.vocabulary
        self._queue, self._device = queue, device
        self._arrays = variables.arrays
        self.parameters = variables.parameters
        self.parts = (*PARTS, *self._arrays)
        self._ops = library.load()

    def contents(self) -> VocabularyContents:
        found = self._read([])
        counts = found["state"][COUNTS].tolist()
        return VocabularyContents(*(found[name] for name in PARTS_OF_IDS), *counts)

    def read_ids(self, ids: tf.Tensor) -> tf.Tensor:
        """See `GrowingState.read_ids`."""
        with tf.device(self._device):
            rows = self._ops.tpu_embedding_read_ids(
                queue=self._queue,
                parameters=self.parameters.handle,
                ids=ids,
                table=self._spec.index,
            )
        return tf.ensure_shape(rows, [None, self._spec.config.dim])

    def evict(self) -> int:
        """See `GrowingState.evict`."""
        with tf.device(self._device):
            return int(
                self._ops.tpu_embedding_evict(queue=self._queue, table=self._spec.index)
            )

    def read(self) -> _Arrays:
        return self._read(list(self._arrays))

    def take_changed(self, consumer: str) -> Changed:
        """See `GrowingState.take_changed`: as it is at this moment."""
        return changed(self.take_arrays(consumer))

    def take_arrays(self, consumer: str) -> _Arrays:
        """What `changed` takes."""
        with tf.device(self._device):
            taken = self._ops.tpu_embedding_take_ids(
                queue=self._queue,
                parameters=self.parameters.handle,
                dtype=self.parameters.dtype,
                table=self._spec.index,
                consumer=consumer,
            )
        found = {name: value.numpy() for name, value in taken._asdict().items()}
        return found | {"rows": found["rows"].astype(np.float32)}

    def updates_begun(self) -> int:
        """See `GrowingState.updates_begun`."""
        return int(self._read([])["state"][UPDATES_BEGUN])

    def _read(self, names: list[str]) -> _Arrays:
        variables = [self._arrays[name] for name in names]
        with tf.device(self._device):
            found = self._ops.tpu_embedding_save_vocabulary(
                queue=self._queue,
                arrays=[v.handle for v in variables],
                types=[v.dtype for v in variables],
                table=self._spec.index,
            )
        values = dict(zip(names, found.values, strict=True))
        parts = {name: getattr(found, name) for name in PARTS}
        return {name: value.numpy() for name, value in (parts | values).items()}

    def fit(self, state: Mapping[str, np.ndarray]) -> _Arrays:
        """See `GrowingState.fit`."""
        return _fit(state, self._spec.name, self._vocabulary)

    def write(self, state: Mapping[str, np.ndarray]) -> None:
        fitting = self.fit(state)
        with tf.device(self._device):
            self._ops.tpu_embedding_load_vocabulary(
                queue=self._queue,
                snapshot=[fitting[name] for name in PARTS],
                arrays=[v.handle for v in self._arrays.values()],
                values=[
                    tf.constant(fitting[name], variable.dtype)
                    for name, variable in self._arrays.items()
                ],
                table=self._spec.index,
            )


def changed(taken: Mapping[str, np.ndarray]) -> Changed:
    """What TpuEmbeddingTakeIds gave, with the rows as float32."""
    ids, size = taken["ids"], int(taken["size"][0])
    rows, shared = np.split(taken["rows"], [len(ids)])

    def read(start: int, stop: int) -> np.ndarray:
        return rows[start:stop]

    return Changed(ids, read, taken["deleted"], size, shared)


def _fit(
    state: Mapping[str, np.ndarray], table: str, vocabulary: GrowingVocabulary
) -> _Arrays:
    """The same state for a table of other options.

    Raises:
      ValueError: If it cannot be.
    """
    fitting = {name: np.asarray(value) for name, value in state.items()}
    fitting["state"] = fitting["state"].copy()
    size, numbers = len(fitting["ids"]), fitting["state"]
    shared = int(vocabulary.unknown == "shared_row" and numbers[NUM_ROWS] > 0)
    if len(fitting["parameters"]) != size + shared:
        raise ValueError(
            f"Table {table!r} has unknown={vocabulary.unknown!r}, but only one of it "
            "and the table that was saved shares a row. Use the same `unknown`."
        )
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
    most = vocabulary.max_candidates or vocabulary.max_rows
    for name in PARTS_OF_CANDIDATES:
        ordered = np.roll(fitting[name], -numbers[_NEXT_CANDIDATE])
        kept = ordered[-most:] if vocabulary.min_count > 1 else ordered[:0]
        fitting[name] = kept
    numbers[_NEXT_CANDIDATE] = 0
    return fitting
