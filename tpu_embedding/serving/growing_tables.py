"""Growing tables as they are served: ids become rows by TensorFlow's ops."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import tensorflow as tf

from tpu_embedding.engines import GrowingState
from tpu_embedding.layout.plan import TableSpec
from tpu_embedding.serving.conversion import Source
from tpu_embedding.serving.quantization import WholeTable
from tpu_embedding.tables.growing import first_rows
from tpu_embedding.tables.readers import TableReader
from tpu_embedding.tables.rows import PARAMETERS, ArrayRows
from tpu_embedding.tables.variables import TableVariables, create_state, variable_name
from tpu_embedding.vocabulary import (
    COUNTS,
    NUM_ROWS,
    PARTS,
    PARTS_OF_IDS,
    SHARED_ID,
    STATE_SIZE,
    VocabularyContents,
)

# The hash table keeps these two keys for itself. They are ids as others are, whose rows
# are in a variable.
_EMPTY, _DELETED = -(2**63), -(2**63) + 1
_LARGEST_LOAD = 0.6  # Of its buckets; it allows 0.8.
_INSERTED = 1 << 20  # Ids at a time.


class RowOfIds(tf.Module):
    """The row of each id; any int64 is an id."""

    def __init__(self) -> None:
        super().__init__()
        self.table: Any = tf.lookup.experimental.DenseHashTable(
            tf.int64, tf.int32, -1, _EMPTY, _DELETED
        )
        self.apart = create_state("apart", tf.constant([-1, -1]))

    def assign(self, ids: np.ndarray) -> None:
        """Makes `ids`, int64 [n], those of the rows 0 to n - 1, and forgets others."""
        rows = np.arange(len(ids), dtype=np.int32)
        buckets = 1 << max(4, int(len(ids) / _LARGEST_LOAD).bit_length())
        tf.raw_ops.LookupTableImportV2(
            table_handle=self.table.resource_handle,
            keys=tf.fill([buckets, 1], tf.constant(_EMPTY, tf.int64)),
            values=tf.zeros([buckets, 1], tf.int32),
        )
        apart = [rows[ids == key] for key in (_EMPTY, _DELETED)]
        self.apart.assign([own[0] if own.size else -1 for own in apart])
        rows = rows[(ids != _EMPTY) & (ids != _DELETED)]
        for begin in range(0, len(rows), _INSERTED):
            part = rows[begin : begin + _INSERTED]
            self.table.insert(ids[part], part)

    def __call__(self, ids: tf.Tensor) -> tf.Tensor:
        """The row of each of int64 [n], int32; -1 of an id without one."""
        empty, deleted = tf.equal(ids, _EMPTY), tf.equal(ids, _DELETED)
        rows = self.table.lookup(tf.where(empty | deleted, tf.zeros_like(ids), ids))
        apart = tf.unstack(self.apart.read_value())
        return tf.where(empty, apart[0], tf.where(deleted, apart[1], rows))


class ServedGrowingTable(TableReader, tf.Module):
    """A growing table, whose rows are read by ids.

    Attributes:
      stored: Its rows, and then the one that ids without a row look up.
      row_of: The row of each id.
    """

    def __init__(
        self, spec: TableSpec, stored: TableReader, last: Callable[[], tf.Tensor]
    ) -> None:
        """Takes a function that returns the number of the last row."""
        super().__init__()
        self.stored, self.row_of = stored, RowOfIds()
        self._spec, self._last = spec, last

    def read(self, rows: tf.Tensor) -> tf.Tensor:
        """See `TableReader.read`; `rows` are ids."""
        places = tf.cast(self.row_of(rows), tf.int64)
        known = places >= 0
        values = self.stored.read(tf.where(known, places, self._last()))
        assert self._spec.config.vocabulary is not None
        if self._spec.config.vocabulary.unknown != "initializer":
            return values
        first = tf.cast(first_rows(self._spec, rows), tf.float32)
        return tf.where(known[:, tf.newaxis], values, first)


def served_rows(spec: TableSpec, state: Mapping[str, np.ndarray]) -> np.ndarray:
    """The rows of a served table, from `GrowingState.read`: [n + 1, dim].

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


def source_of(spec: TableSpec, growing: GrowingState) -> Source:
    """A growing table to be exported, as it is now."""
    state = growing.read()
    rows = ArrayRows(served_rows(spec, state), growing.group)
    return Source(spec.name, rows, state["ids"])


def exported_table(
    spec: TableSpec, source: Source, stored: TableReader
) -> ServedGrowingTable:
    """A growing table whose rows are exported as `stored`."""
    assert source.ids is not None
    size = tf.constant(len(source.ids), tf.int64)
    table = ServedGrowingTable(spec, stored, lambda: size)
    table.row_of.assign(source.ids)
    return table


class RestoredGrowingTable(GrowingState):
    """A growing table that is looked up as a checkpoint has it, and not trained.

    Attributes:
      served: What lookups read. Its rows are in the order of ids; the last one is what
        ids without a row look up.
    """

    def __init__(self, spec: TableSpec, variables: TableVariables) -> None:
        """Takes the variables of a table without rows."""
        self._spec, self._arrays = spec, variables.arrays
        self.parameters = variables.parameters
        self.parts = (*PARTS, *self._arrays)
        self._known = {part: np.zeros(0, np.int64) for part in PARTS}
        self._known["state"] = np.zeros(STATE_SIZE, np.int64)

        def last() -> tf.Tensor:
            return tf.shape(self.parameters.read_value(), tf.int64)[0] - 1

        self.served = ServedGrowingTable(spec, WholeTable(self.parameters), last)
        self.write(self.read())

    @classmethod
    def alone(cls, spec: TableSpec) -> RestoredGrowingTable:
        """One without slots, and with variables of its own."""
        dim, dtype = spec.config.dim, tf.as_dtype(spec.config.dtype)
        empty = tf.zeros([0, dim], dtype)
        variable = create_state(variable_name(spec.name), empty, (None, dim))
        return cls(spec, TableVariables(variable, {}))

    def contents(self) -> VocabularyContents:
        """See `GrowingState.contents`."""
        ids, rows, hits, last_updates = (self._known[n] for n in PARTS_OF_IDS)
        counts: list[int] = self._known["state"][COUNTS].tolist()
        return VocabularyContents(ids, rows, hits, last_updates, *counts)

    def read(self) -> dict[str, np.ndarray]:
        """See `GrowingState.read`."""
        arrays = {name: array.numpy() for name, array in self._arrays.items()}
        arrays[PARAMETERS] = arrays[PARAMETERS][: self._num_rows]
        return {**self._known, **arrays}

    @property
    def _num_rows(self) -> int:
        return len(self._known["ids"]) + self._shares(self._known)

    def _shares(self, state: Mapping[str, np.ndarray]) -> bool:
        """Whether ids share a row of the table."""
        assert self._spec.config.vocabulary is not None
        shared = self._spec.config.vocabulary.unknown == "shared_row"
        return shared and bool(state["state"][NUM_ROWS])

    def fit(self, state: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
        """See `GrowingState.fit`; a table that is not trained has no budget."""
        if len(state[PARAMETERS]) != len(state["ids"]) + self._shares(state):
            raise ValueError(
                f"Table {self._spec.name!r}: only one of it and the table that was "
                "saved shares a row. Use the same `unknown`."
            )
        return {name: np.asarray(state[name]) for name in self.parts}

    def write(self, state: Mapping[str, np.ndarray]) -> None:
        """See `GrowingState.write`."""
        fitting = self.fit(state)
        rows = fitting | {PARAMETERS: served_rows(self._spec, fitting)}
        for name, array in self._arrays.items():
            array.assign(tf.constant(rows[name], array.dtype))
        self._known = {part: fitting[part] for part in PARTS}
        self.served.row_of.assign(fitting["ids"])
