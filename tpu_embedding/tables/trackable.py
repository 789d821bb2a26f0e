"""Tables and slots in parts that are one variable each in TensorFlow's checkpoints."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import tensorflow as tf
from tensorflow.python.ops import resource_variable_ops
from tensorflow.python.training.saving import saveable_object_util

from tpu_embedding.layout.plan import UPDATES
from tpu_embedding.tables.rows import MutableTableRows
from tpu_embedding.tables.waiting import EngineVariable

VALUE_KEY = "VARIABLE_VALUE"  # The key of a variable in its checkpoint.


class ShardedArray(tf.__internal__.tracking.Trackable):
    """A table, stack or slot whose rows are divided, in order, among variables.

    TensorFlow's classes also save slices through saveables: the newer
    `_serialize_to_tensors` can restore only one slice of a tensor.
    """

    def __init__(
        self,
        shards: Sequence[tf.Variable],
        on_restore: Callable[[], None] = lambda: None,
    ) -> None:
        """Joins variables of the same width; restoring one calls `on_restore`."""
        self.shards = list(shards)
        self._on_restore = on_restore

    def _gather_saveables_for_checkpoint(self) -> dict[str, Any]:
        def savers(name: str) -> list[Any]:
            shards = zip(self._slices(), self.shards, strict=True)
            return [_Saver(shard, s, name, self._on_restore) for s, shard in shards]

        return {VALUE_KEY: savers}

    def _slices(self) -> list[str]:
        """Returns the slice of each shard in the format of SaveV2; "" for all rows."""
        if len(self.shards) == 1:
            return [""]
        shapes: list[Any] = [tuple(shard.shape) for shard in self.shards]
        heights, width = [height for height, _ in shapes], shapes[0][1]
        starts = itertools.accumulate(heights, initial=0)
        return [
            f"{sum(heights)} {width} {start},{height}:0,{width}"
            for start, height in zip(starts, heights, strict=False)
        ]


class _Saver(saveable_object_util.ResourceVariableSaveable):
    """Saves and restores one shard."""

    def __init__(
        self, shard: Any, where: str, name: str, on_restore: Callable[[], None]
    ) -> None:
        super().__init__(shard, where, name)
        self._on_restore = on_restore

    def restore(self, restored_tensors: Any, restored_shapes: Any) -> Any:
        """Assigns the values of a checkpoint."""
        restored = super().restore(restored_tensors, restored_shapes)
        self._on_restore()
        return restored


class LogicalVariable(tf.__internal__.tracking.Trackable):
    """An object that programs read, assign and save like a variable, but not in graphs.

    Replicas cannot use it, either. Its checkpoints are those of a variable.
    """

    def __init__(
        self,
        name: str,
        shape: tuple[int, ...],
        dtype: np.dtype[Any],
        read: Callable[[], np.ndarray],
        write: Callable[[np.ndarray], None],
    ) -> None:
        """Takes the functions that read and replace the whole value."""
        self.name = name
        self.shape = tf.TensorShape(shape)
        self.dtype = tf.as_dtype(dtype)
        self._read = read
        self._write = write

    def numpy(self) -> np.ndarray:
        """Returns the current value."""
        self._refuse_graphs()
        return self._read()

    def read_value(self) -> tf.Tensor:
        """Returns the current value."""
        return tf.constant(self.numpy())

    def assign(self, value: Any) -> None:
        """Replaces the value."""
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
                "tf.Variable: it can be read and assigned only outside of tf.function "
                "and strategy.run. Inside, call the layer."
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
        return {VALUE_KEY: self.read_value()}

    def _restore_from_tensors(self, restored_tensors: Mapping[str, tf.Tensor]) -> None:
        self.assign(restored_tensors[VALUE_KEY])


class RowsVariable(LogicalVariable):
    """A table or slot in parts, which TensorFlow's checkpoints hold as a whole."""

    def __init__(self, name: str, rows: MutableTableRows) -> None:
        """Takes the name in checkpoints, and the rows, which are in parts."""
        write = functools.partial(rows.write, 0)
        super().__init__(name, rows.shape, rows.dtype, rows.numpy, write)
        self._rows = rows

    def _restore_from_tensors(self, restored_tensors: Mapping[str, tf.Tensor]) -> None:
        if tf.executing_eagerly():
            super()._restore_from_tensors(restored_tensors)
        else:  # TensorFlow restores into several devices in a tf.function.
            self._rows.restore(tf.ensure_shape(restored_tensors[VALUE_KEY], self.shape))


class SavesNothing:
    """Mixin for views of saved variables; must precede the variable class."""

    def _write_object_proto(self: Any, proto: Any, options: Any) -> None:
        del options
        proto.user_object.identifier = self._object_identifier
        proto.user_object.version.producer = 1
        proto.user_object.version.min_consumer = 1

    def _serialize_to_tensors(self) -> dict[str, Any]:
        return {}

    def _restore_from_tensors(self, restored_tensors: Any) -> None:
        del restored_tensors  # Always empty.

    def _export_to_saved_model_graph(self, *args: Any, **kwargs: Any) -> list[Any]:
        del args, kwargs
        return []


def unsaved(variable: Any) -> Any:
    """Returns a view of a variable or LogicalVariable that exported models do not save.

    In these, Keras 3.16 tracks the values of weights, and earlier versions the weights.
    """
    if not isinstance(variable, resource_variable_ops.BaseResourceVariable):
        return UnsavedLogical(variable)
    view: Any = _UnsavedVariable(variable)
    if isinstance(variable, EngineVariable):
        object.__setattr__(view, "__class__", _UnsavedTable)
        view.waiting = variable.waiting
    return view


class _UnsavedVariable(SavesNothing, resource_variable_ops.BaseResourceVariable):
    """A variable in the memory of another one: h5 files accept only variables."""

    def __init__(self, variable: Any) -> None:
        super().__init__(
            trainable=False,
            shape=variable.shape,
            dtype=variable.dtype,
            handle=variable.handle,
            handle_name=variable.name.removesuffix(":0"),
            unique_id=variable._unique_id,
        )


class _UnsavedTable(SavesNothing, EngineVariable):
    """An `_UnsavedVariable` that is a view of a table whose rows wait."""


class UnsavedLogical(tf.__internal__.tracking.Trackable):
    """A view of a LogicalVariable that exported models do not save."""

    def __init__(self, variable: LogicalVariable) -> None:
        self._variable = variable

    def __getattr__(self, name: str) -> Any:
        return getattr(self._variable, name)

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray:
        return self._variable.__array__(dtype, copy)

    def __tf_tensor__(self, dtype: Any = None, name: str | None = None) -> tf.Tensor:
        return self._variable.__tf_tensor__(dtype, name)


class CopiedCounter(LogicalVariable):
    """Copies of the number of updates, assigned together; the first one is read."""

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
        return {VALUE_KEY: self._copies[0].read_value()}

    def _restore_from_tensors(self, restored_tensors: Mapping[str, tf.Tensor]) -> None:
        self._write(restored_tensors[VALUE_KEY])
