"""Tables as one variable each, for engines that store them in another form."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from tpu_embedding.engines import errors
from tpu_embedding.layout.plan import UPDATES
from tpu_embedding.layout.table_arrays import MutableRows, by_checkpoint_name
from tpu_embedding.lookup.combine import StoredReader

_KEY = "VARIABLE_VALUE"  # As in the checkpoint of a variable.


class LogicalVariable(tf.__internal__.tracking.Trackable):
    """Read, assigned and saved as a variable, outside of graphs and replicas.

    A checkpoint of it is that of a variable of the same value.
    """

    def __init__(
        self,
        name: str,
        value: np.ndarray | MutableRows,
        read: Callable[[], np.ndarray],
        write: Callable[[np.ndarray], None],
    ) -> None:
        """Takes the functions that reach what is stored.

        Args:
          name: In checkpoints.
          value: Has its shape and dtype.
          read: Gives the whole value.
          write: Replaces it.
        """
        self.name = name
        self.shape = tf.TensorShape(value.shape)
        self.dtype = tf.as_dtype(value.dtype)
        self._read = read
        self._write = write

    def numpy(self) -> np.ndarray:
        """What is stored now."""
        if not tf.inside_function():
            return self._read()
        raise errors.logical_in_graph(self.name)

    def read_value(self) -> tf.Tensor:
        """What is stored now."""
        return tf.constant(self.numpy())

    def assign(self, value: Any) -> None:
        """Replaces what is stored.

        Raises:
          ValueError: If the shape differs.
        """
        if tf.inside_function():
            raise errors.logical_in_graph(self.name)
        array = np.asarray(value, self.dtype.as_numpy_dtype)
        if array.shape != tuple(self.shape):
            raise errors.logical_shape(self.name, tuple(self.shape), array.shape)
        self._write(array)

    def __repr__(self) -> str:
        shape, dtype = tuple(self.shape), self.dtype.name
        return f"<LogicalVariable {self.name!r} shape={shape} dtype={dtype}>"

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray:
        del copy  # It is one.
        return np.asarray(self.numpy(), dtype)

    def __tf_tensor__(self, dtype: Any = None, name: str | None = None) -> tf.Tensor:
        return tf.convert_to_tensor(self.numpy(), dtype, name=name)

    def _serialize_to_tensors(self) -> dict[str, tf.Tensor]:
        return {_KEY: self.read_value()}

    def _restore_from_tensors(self, restored_tensors: Mapping[str, tf.Tensor]) -> None:
        self.assign(restored_tensors[_KEY])


def logical_rows(
    tables: Mapping[str, Mapping[str, MutableRows]],
    retrieve: Callable[[], None],
    load: Callable[[], None],
) -> dict[str, LogicalVariable]:
    """Tables and slots by their names in checkpoints.

    Args:
      tables: By name of the table "parameters" and slots.
      retrieve: Called before any of them is read.
      load: Called after any of them was written.
    """

    def variable(name: str, rows: MutableRows) -> LogicalVariable:
        def read() -> np.ndarray:
            retrieve()
            return rows.numpy()

        def write(value: np.ndarray) -> None:
            retrieve()  # What is written is a part of what is loaded.
            rows.write(0, value)
            load()

        return LogicalVariable(name, rows, read, write)

    named = by_checkpoint_name(tables)
    return {name: variable(name, rows) for name, rows in named.items()}


def logical_counter(counter: Any) -> LogicalVariable:
    """A scalar of which each replica has its own, all the same."""

    def write(value: np.ndarray) -> None:
        for copy in counter.values:
            copy.assign(value)

    def read() -> np.ndarray:
        return np.asarray(counter.values[0].numpy())

    return LogicalVariable(UPDATES, read(), read, write)


@dataclasses.dataclass(frozen=True)
class ShardedReader(StoredReader):
    """A table in shards, one below the other, that may be trained meanwhile.

    Attributes:
      shards: Variables [rows, width]; the first ones have one row more where their
        number does not divide that of all rows.
      row_of: By int64 ids where they are among all rows.
      columns: Of the table; the others are padding.
    """

    shards: Sequence[tf.Variable]
    row_of: Callable[[tf.Tensor], tf.Tensor]
    columns: int

    def read(self, rows: tf.Tensor) -> tf.Tensor:
        """See `StoredReader.read`."""
        found = tf.compat.v1.nn.embedding_lookup(
            list(self.shards), self.row_of(rows), partition_strategy="div"
        )
        return tf.cast(found[:, : self.columns], tf.float32)

    @property
    def variables(self) -> Sequence[tf.Variable]:
        """See `StoredReader.variables`."""
        return self.shards
