"""Tables as one variable each, whatever the form in which an engine stores them."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from tpu_embedding.engines.base import Engine
from tpu_embedding.layout.plan import UPDATES
from tpu_embedding.layout.table_arrays import MutableRows, by_checkpoint_name
from tpu_embedding.lookup.combine import StoredReader

_KEY = "VARIABLE_VALUE"  # As in the checkpoint of a variable.


class LogicalVariable(tf.__internal__.tracking.Trackable):
    """Read, assigned and saved like a variable, outside of graphs and replicas.

    Its checkpoints are those of a variable with the same value.
    """

    def __init__(
        self,
        name: str,
        shape: tuple[int, ...],
        dtype: np.dtype[Any],
        read: Callable[[], np.ndarray],
        write: Callable[[np.ndarray], None],
    ) -> None:
        """Takes the functions that read and write the value.

        Args:
          name: Name in checkpoints.
          shape: Shape of the value.
          dtype: Dtype of the value.
          read: Returns the whole value.
          write: Replaces the whole value.
        """
        self.name = name
        self.shape = tf.TensorShape(shape)
        self.dtype = tf.as_dtype(dtype)
        self._read = read
        self._write = write

    def numpy(self) -> np.ndarray:
        """The current value."""
        self._refuse_graphs()
        return self._read()

    def read_value(self) -> tf.Tensor:
        """The current value."""
        return tf.constant(self.numpy())

    def assign(self, value: Any) -> None:
        """Replaces the value.

        Raises:
          ValueError: If the shape differs.
        """
        self._refuse_graphs()
        array = np.asarray(value, self.dtype.as_numpy_dtype)
        if array.shape != tuple(self.shape):
            raise ValueError(
                f"The table or slot {self.name!r} has shape {tuple(self.shape)}. "
                f"Received: shape {array.shape}."
            )
        self._write(array)

    def _refuse_graphs(self) -> None:
        if tf.inside_function():
            raise NotImplementedError(
                f"The table or slot {self.name!r} is stored in parts and is not a "
                "tf.Variable: it can be read and assigned outside of tf.function and "
                "strategy.run only. Inside, call the layer."
            )

    def __repr__(self) -> str:
        shape, dtype = tuple(self.shape), self.dtype.name
        return f"<LogicalVariable {self.name!r} shape={shape} dtype={dtype}>"

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray:
        del copy  # The value is a copy already.
        return np.asarray(self.numpy(), dtype)

    def __tf_tensor__(self, dtype: Any = None, name: str | None = None) -> tf.Tensor:
        return tf.convert_to_tensor(self.numpy(), dtype, name=name)

    def _serialize_to_tensors(self) -> dict[str, tf.Tensor]:
        return {_KEY: self.read_value()}

    def _restore_from_tensors(self, restored_tensors: Mapping[str, tf.Tensor]) -> None:
        self.assign(restored_tensors[_KEY])


def full_variables(engine: Engine) -> dict[str, Any]:
    """Each table and slot, and the number of updates, by their names in checkpoints.

    Returns:
      A tf.Variable [V, ...] where one variable is the array, else a `LogicalVariable`.
    """
    arrays = {name: table.rows for name, table in engine.tables().items()}
    found: dict[str, Any] = {
        name: rows.variable
        if rows.variable is not None
        else _variable(engine, name, rows)
        for name, rows in by_checkpoint_name(arrays).items()
    }
    updates: Any = engine.updates()
    if updates is not None:
        copies = getattr(updates, "values", None)  # One for each replica, all equal.
        found[UPDATES] = updates if copies is None else copied_counter(copies)
    return found


def _variable(engine: Engine, name: str, rows: MutableRows) -> LogicalVariable:
    def read() -> np.ndarray:
        engine.retrieve()
        return rows.numpy()

    def write(value: np.ndarray) -> None:
        engine.retrieve()  # The written array is loaded together with the others.
        rows.write(0, value)
        engine.load()

    return LogicalVariable(name, rows.shape, rows.dtype, read, write)


def copied_counter(copies: Sequence[Any]) -> LogicalVariable:
    """The number of updates, of which there are several copies."""
    return _CopiedCounter(copies)


class _CopiedCounter(LogicalVariable):
    """Variables that are assigned and restored together; the first one is read."""

    def __init__(self, copies: Sequence[Any]) -> None:
        self._copies = copies
        super().__init__(
            UPDATES,
            (),
            np.dtype(np.int64),
            lambda: np.asarray(copies[0].numpy()),
            self._write,
        )

    def _write(self, value: Any) -> None:
        for copy in self._copies:
            copy.assign(value)

    def _serialize_to_tensors(self) -> dict[str, tf.Tensor]:
        return {_KEY: self._copies[0].read_value()}

    def _restore_from_tensors(self, restored_tensors: Mapping[str, tf.Tensor]) -> None:
        self._write(restored_tensors[_KEY])


@dataclasses.dataclass(frozen=True)
class ShardedReader(StoredReader):
    """A table in shards, one below the other, which may be trained at the same time.

    Attributes:
      shards: Variables [rows, width]; if their number does not divide the number of
        all rows, the first shards have one row more.
      row_of: A function from int64 ids to their rows among all rows.
      columns: Number of columns of the table; further columns are padding.
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
