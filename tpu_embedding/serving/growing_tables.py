"""Growing tables as they are served: ids become rows by TensorFlow's ops."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from typing import Any

import numpy as np
import tensorflow as tf

from tpu_embedding.hashing import mixed_bits, unmixed_bits
from tpu_embedding.layout.plan import TableSpec
from tpu_embedding.serving.conversion import Source
from tpu_embedding.serving.quantization import WholeTable
from tpu_embedding.tables.codes import CodedReader
from tpu_embedding.tables.growing import first_values_read
from tpu_embedding.tables.readers import TableReader, VariableReader
from tpu_embedding.tables.variables import TableVariables, create_rows, create_state
from tpu_embedding.tables.vocabularies import StoredVocabulary, served_rows
from tpu_embedding.tables.vocabulary_parts import num_shared
from tpu_embedding.vocabulary import PARTS, STATE_SIZE

# The hash table keeps these two keys for itself; a variable has the rows of their ids.
APART = _EMPTY, _DELETED = -(2**63), -(2**63) + 1
_LARGEST_LOAD = 0.6  # Largest share of a hash table's buckets in use; its limit is 0.8.
_INSERTED = 1 << 20  # The number of ids that are inserted at a time.


class RowOfIds(tf.Module):
    """The row of each id; any int64 is an id.

    A key of the hash table is the mixed bits of an id: the low bits of a key are its
    bucket, and those of many ids may be equal.
    """

    def __init__(self) -> None:
        super().__init__()
        self.table: Any = tf.lookup.experimental.DenseHashTable(
            tf.int64, tf.int32, -1, _EMPTY, _DELETED
        )
        self.apart = create_state("apart", tf.constant([-1, -1]))

    def assign(self, ids: np.ndarray, room: int = 0) -> None:
        """Gives the rows 0 to n - 1 to `ids`, int64 [n], and forgets all other ids.

        It makes room for at least `room` ids, so that inserting them causes no pause.
        """
        rows = np.arange(len(ids), dtype=np.int32)
        most = max(len(ids), room)
        buckets = 1 << max(4, int(most / _LARGEST_LOAD).bit_length())
        tf.raw_ops.LookupTableImportV2(
            table_handle=self.table.resource_handle,
            keys=tf.fill([buckets, 1], tf.constant(_EMPTY, tf.int64)),
            values=tf.zeros([buckets, 1], tf.int32),
        )
        self.apart.assign([-1, -1])
        for begin in range(0, len(rows), _INSERTED):
            part = rows[begin : begin + _INSERTED]
            self.insert(tf.constant(ids[part], tf.int64), tf.constant(part))

    def __call__(self, ids: tf.Tensor) -> tf.Tensor:
        """Returns the row of each id, int32 [n]; ids without one have -1."""
        keys = mixed_bits(ids)
        empty, deleted = tf.equal(keys, _EMPTY), tf.equal(keys, _DELETED)
        rows = tf.raw_ops.LookupTableFindV2(
            table_handle=self.table.resource_handle,
            keys=tf.where(empty | deleted, tf.zeros_like(keys), keys),
            default_value=-1,
        )
        apart = tf.unstack(self.apart.read_value())
        return tf.where(empty, apart[0], tf.where(deleted, apart[1], rows))

    def ids(self) -> tf.Tensor:
        """Returns the ids that have rows, int64 [n] in any order."""
        keys = tf.reshape(self.contents()[0], [-1])
        apart = tf.boolean_mask(
            tf.constant(APART, tf.int64), self.apart.read_value() >= 0
        )
        return unmixed_bits(tf.concat([keys[is_used(keys)], apart], 0))

    def contents(self) -> tuple[tf.Tensor, tf.Tensor]:
        """Returns the keys and rows of all buckets, for LookupTableImportV2."""
        return tf.raw_ops.LookupTableExportV2(
            table_handle=self.table.resource_handle, Tkeys=tf.int64, Tvalues=tf.int32
        )

    def insert(self, ids: tf.Tensor, rows: tf.Tensor) -> list[Any]:
        """Gives rows to ids that have none, and returns the ops that do so."""
        keys = mixed_bits(ids)
        return [self.insert_keys(keys, rows), self._set_apart(keys, rows)]

    def insert_keys(self, keys: tf.Tensor, rows: tf.Tensor) -> Any:
        """Gives rows to the keys that the hash table accepts, and returns the op."""
        own = is_used(keys)
        return tf.raw_ops.LookupTableInsertV2(
            table_handle=self.table.resource_handle, keys=keys[own], values=rows[own]
        )

    def remove(self, ids: tf.Tensor) -> list[Any]:
        """Removes ids that have rows, and returns the ops that do so."""
        keys = mixed_bits(ids)
        removed = tf.raw_ops.LookupTableRemoveV2(
            table_handle=self.table.resource_handle, keys=keys[is_used(keys)]
        )
        return [removed, self._set_apart(keys, tf.fill(tf.shape(keys), -1))]

    def _set_apart(self, keys: tf.Tensor, rows: tf.Tensor) -> Any:
        places = []
        for key, before in zip(
            (_EMPTY, _DELETED), tf.unstack(self.apart.read_value()), strict=True
        ):
            own = tf.equal(keys, key)
            place = tf.reduce_max(tf.where(own, rows, -1))
            places.append(tf.where(tf.reduce_any(own), place, before))
        return self.apart.assign(places, read_value=False)


class ChangingRowOfIds(tf.Module):
    """The row of each id, while ids come and go.

    A removed id leaves a mark in its bucket of the hash table, which later lookups of
    other ids must pass. So after many removals all ids go into a second hash table,
    which lookups read from then on. A lookup that still reads the first one may finish
    during one further `change`, because two changes never remove so many ids.
    """

    def __init__(self, most_ids: int, most_removed: int) -> None:
        """Takes the most ids, and the most that one `change` removes."""
        super().__init__()
        self.tables = [RowOfIds(), RowOfIds()]
        self.active = create_state("active", tf.constant(0))
        self.removed = create_state("removed", tf.constant(0, tf.int64))
        self._before_move = max(most_ids // 4, most_removed + 1)
        self._room = most_ids + self._before_move + most_removed

    def assign(self, ids: np.ndarray) -> None:
        """Gives the rows 0 to n - 1 to `ids`, int64 [n]."""
        self.tables[0].assign(ids, self._room)
        self.tables[1].assign(ids[:0])

    def __call__(self, ids: tf.Tensor) -> tf.Tensor:
        """See `RowOfIds`."""
        rows = tf.switch_case(
            self.active.read_value(), [lambda t=t: t(ids) for t in self.tables]
        )
        return tf.ensure_shape(rows, ids.shape)

    def ids(self) -> tf.Tensor:
        """See `RowOfIds`."""
        return tf.switch_case(
            self.active.read_value(), [table.ids for table in self.tables]
        )

    def change(
        self, ids: tf.Tensor, rows: tf.Tensor, removed: tf.Tensor
    ) -> list[tf.Tensor]:
        """Gives rows to `ids`, which have none, and removes the ids `removed`."""
        active = self.active.read_value()

        def change(table: RowOfIds) -> tf.Tensor:
            with tf.control_dependencies(table.insert(ids, rows)):
                ops = table.remove(removed)
            with tf.control_dependencies(ops):
                return tf.constant(True)

        done = tf.switch_case(active, [lambda t=t: change(t) for t in self.tables])
        with tf.control_dependencies([done]):
            count = self.removed.read_value() + tf.size(removed, tf.int64)
            moved = tf.cond(
                count < self._before_move,
                lambda: tf.constant(False),
                lambda: tf.switch_case(
                    active, [lambda k=k: self._move(1 - k, k) for k in (1, 0)]
                ),
            )
        with tf.control_dependencies([moved]):
            left = tf.where(moved, tf.zeros_like(count), count)
            now = tf.where(moved, 1 - active, active)
            return [
                self.removed.assign(left, read_value=False),
                self.active.assign(now, read_value=False),
            ]

    def _move(self, source: int, target: int) -> tf.Tensor:
        """Copies one hash table into the other one, and returns True as a tensor."""
        old, new = self.tables[source], self.tables[target]
        keys, rows = old.contents()
        clear = tf.raw_ops.LookupTableImportV2(
            table_handle=new.table.resource_handle,
            keys=tf.fill(tf.shape(keys), tf.constant(_EMPTY, tf.int64)),
            values=tf.zeros(tf.shape(rows), tf.int32),
        )
        keys, rows = tf.reshape(keys, [-1]), tf.reshape(rows, [-1])
        with tf.control_dependencies([clear]):
            inserted = new.insert_keys(keys, rows)
        apart = new.apart.assign(old.apart.read_value(), read_value=False)
        with tf.control_dependencies([inserted, apart]):
            return tf.constant(True)


def is_used(keys: Any) -> Any:
    """Returns whether keys are of ids, not the two that the hash table reserves."""
    return (keys != _EMPTY) & (keys != _DELETED)


class ServedGrowingTable(TableReader, tf.Module):
    """A growing table, whose rows are read by ids.

    Attributes:
      stored: The rows of its ids, and then the one that ids without a row look up.
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
        if self._spec.growth.unknown != "initializer":
            return values
        first = first_values_read(self._spec, rows)
        return tf.where(known[:, tf.newaxis], values, first)


def missing_rows(spec: TableSpec) -> Callable[[tf.Tensor], tf.Tensor]:
    """Returns a function from ids without any row to values [n, dim] or [1, dim]."""
    if spec.growth.unknown == "initializer":
        return lambda ids: first_values_read(spec, ids)
    return lambda ids: tf.zeros([1, spec.config.dim])


def exported_table(
    spec: TableSpec, source: Source, stored: TableReader
) -> ServedGrowingTable:
    """Makes a growing table whose rows are exported as `stored`."""
    assert source.ids is not None
    size = tf.constant(source.shape[0] - 1, tf.int64)
    table = ServedGrowingTable(spec, stored, lambda: size)
    table.row_of.assign(source.ids)
    return table


class RestoredGrowingTable(StoredVocabulary):
    """A growing table that is restored from a checkpoint and looked up, not trained.

    Attributes:
      served: The table that lookups read. Its rows are in the order of ids; ids without
        a row look up the last one.
    """

    limited = False

    def __init__(self, spec: TableSpec, variables: TableVariables) -> None:
        """Takes the variables of a table without rows."""
        self._spec, self.arrays = spec, variables.arrays
        self._known = {part: np.zeros(0, np.int64) for part in PARTS}
        self._known["state"] = np.zeros(STATE_SIZE, np.int64)
        parameters = variables.parameters

        def last() -> tf.Tensor:
            return tf.shape(parameters.read_value(), tf.int64)[0] - 1

        reader: TableReader = WholeTable(parameters)
        if variables.scale_offset is not None:
            grids = VariableReader(variables.scale_offset)
            reader = CodedReader(VariableReader(parameters), grids)
        self.served = ServedGrowingTable(spec, reader, last)
        self.write(self.read(self.arrays))

    @classmethod
    def alone(cls, spec: TableSpec) -> RestoredGrowingTable:
        """Makes a table without slots, and with variables of its own."""
        (stored,) = create_rows(spec)
        return cls(spec, stored)

    def read(self, names: Collection[str]) -> dict[str, np.ndarray]:
        size = len(self._known["ids"]) + num_shared(self._spec.growth, self._known)
        arrays = {name: self.arrays[name].numpy()[:size] for name in names}
        return {**self._known, **arrays}

    def places(self, known: Mapping[str, np.ndarray]) -> np.ndarray:
        return np.arange(len(known["ids"]) + num_shared(self._spec.growth, known))

    def write(self, state: Mapping[str, np.ndarray]) -> None:
        rows = {**state, **served_rows(self._spec, state)}
        for name, array in self.arrays.items():
            array.assign(tf.constant(rows[name], array.dtype))
        self._known = {part: state[part] for part in PARTS}
        self.served.row_of.assign(state["ids"])
