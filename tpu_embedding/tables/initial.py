"""The first values of tables and slots, of all rows or any of them."""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Callable
from typing import Any

import tensorflow as tf
from tensorflow.python.trackable import base

from tpu_embedding.combiners import CustomCombiner
from tpu_embedding.initializers import (
    ReadRows,
    constant_of,
    default_initializer,
    named_initializer,
)
from tpu_embedding.layout.plan import TableSpec
from tpu_embedding.optimizers.base import Slot
from tpu_embedding.tables.rows import InitialValue, checkpoint_name

# What an initializer that takes `shard_info` is told of its part of a table.
ShardInfo: Any = vars(base)["ShardInfo"]  # pyright does not see exported names.


@dataclasses.dataclass(frozen=True)
class FirstValues:
    """The first values of a table, a slot or the weights of a combiner.

    Attributes:
      name: The name in checkpoints.
      shape: The shape, [V, D] for a table.
      initializer: A callable of (shape, dtype=dtype), often the user's. It may have a
        method like `RowIdInitializer.by_rows`.
      dtype: The dtype of the values. If it is bfloat16, the initializer may still give
        float32, which is rounded to the nearest.
      grows: Whether rows are added later.
    """

    name: str
    shape: tuple[int, ...]
    initializer: Callable[..., Any]
    dtype: tf.DType = tf.float32
    grows: bool = False

    def whole(self) -> tf.Tensor:
        """Returns all values, by one call of the initializer."""
        return self.part(self.shape)

    def part(
        self,
        shape: tuple[int, ...],
        asked: tuple[int, ...] | None = None,
        **arguments: Any,
    ) -> tf.Tensor:
        """Makes a part; the initializer gets the shape `asked` if it is not None."""
        made = self.initializer(asked or shape, dtype=self.dtype, **arguments)
        return self._checked(made, shape)

    def reader(self, device: str) -> Callable[[range], tf.Tensor]:
        """Returns a function that makes any rows on the device where it is called.

        An initializer without `by_rows` makes the whole table at once, on `device`.
        """
        if hasattr(self.initializer, "by_rows"):
            by_rows: Any = self.initializer
            make = by_rows.by_rows(self.shape, dtype=self.dtype)

            def read_made(rows: range) -> tf.Tensor:
                start, stop = rows.start, rows[-1] + 1
                shape = (stop - start, *self.shape[1:])
                return self._checked(make(start, stop), shape)[:: rows.step]

            return read_made
        with tf.device(device):
            whole = self.whole()

        def read(rows: range) -> tf.Tensor:
            with tf.device(device):
                return whole[rows.start : rows[-1] + 1 : rows.step]

        return read

    @property
    def takes_shard_info(self) -> bool:
        """Whether the initializer wants to be called for each part of a table."""
        signature = _signature(self.initializer)
        return signature is not None and "shard_info" in signature.parameters

    def _checked(self, value: Any, shape: tuple[int, ...]) -> tf.Tensor:
        if self.dtype != tf.float32:
            value = tf.cast(value, self.dtype)
        value = tf.convert_to_tensor(value, self.dtype)
        if tuple(value.shape) != shape:
            raise ValueError(
                f"The initializer of {self.name} must return a tensor of the shape "
                f"that it receives, {shape}. Received: {tuple(value.shape)}."
            )
        return value


def table_values(spec: TableSpec) -> FirstValues:
    """Returns the first values of a table."""
    config = spec.config
    dtype = tf.as_dtype(config.storage.first_dtype)
    if config.vocabulary is not None:
        return _of_growing(spec.name, config.dim, dtype)
    rows = spec.hashing.hashes if spec.hashing else 1  # Rows of each id.
    initializer = config.initializer or default_initializer(config.dim * rows)
    if isinstance(initializer, str):
        initializer = named_initializer(spec.name, initializer)
    signature = _signature(initializer)
    if signature is not None:
        part = {"shard_info": None} if "shard_info" in signature.parameters else {}
        try:
            signature.bind((1, 1), dtype=dtype, **part)
        except TypeError as error:
            raise TypeError(
                f"The initializer of {spec.name} is called as initializer(shape, "
                f"dtype=tf.float32), which {initializer!r} does not accept: {error}. "
                "Write it as `def initializer(shape, dtype)`."
            ) from error
    constant = constant_of(initializer)
    if constant is not None:  # Any of its rows can be made alone.
        initializer = _Constant(constant)
    shape = (config.vocabulary_size, config.dim)
    return FirstValues(spec.name, shape, initializer, dtype)


def slot_values(spec: TableSpec, slot: Slot) -> FirstValues:
    """Returns the first values of a slot of a table."""
    name = checkpoint_name(spec.name, slot.name)
    if spec.config.vocabulary is not None:
        return _of_growing(name, 1 if slot.per_row else spec.config.dim, tf.float32)
    shape = (spec.config.vocabulary_size, 1 if slot.per_row else spec.config.dim)
    return FirstValues(name, shape, _start(slot))


def _of_growing(name: str, width: int, dtype: tf.DType) -> FirstValues:
    """Makes the values of a table or slot that has no rows until ids arrive."""
    return FirstValues(name, (0, width), _Constant(0.0), dtype, grows=True)


def combiner_values(name: str, combiner: CustomCombiner) -> FirstValues:
    """Returns the first values of custom combiner weights, float32 [num_weights]."""
    initializer = combiner.initializer or _Constant(0.0)
    return FirstValues(name, (combiner.num_weights,), initializer)


def initial_rows(slot: Slot) -> InitialValue:
    """Returns the `MutableTableRows.initial_value` for the rows of a slot."""
    if not callable(slot.initial_value):
        return slot.initial_value
    return lambda shape: _start(slot)(shape, dtype=tf.float32).numpy()


@dataclasses.dataclass(frozen=True)
class _Constant:
    """An initializer that gives every element the same value."""

    value: float

    def __call__(self, shape: Any, dtype: tf.DType) -> tf.Tensor:
        return tf.fill(shape, tf.cast(self.value, dtype))

    def by_rows(self, shape: Any, dtype: tf.DType) -> ReadRows:
        return lambda start, stop: self((stop - start, *shape[1:]), dtype)


def _start(slot: Slot) -> Callable[..., tf.Tensor]:
    """Returns the initializer of a slot, a callable of ([V, D] or [V, 1], dtype)."""
    start = slot.initial_value
    if not callable(start):
        return _Constant(start)

    def initialize(shape: tuple[int, int], dtype: tf.DType) -> tf.Tensor:
        # To the user a slot with one number for each row is a vector.
        value: Any = start(shape[:1] if slot.per_row else shape, dtype=dtype)
        return tf.reshape(value, shape)

    return initialize


def _signature(function: Callable[..., Any]) -> inspect.Signature | None:
    try:
        return inspect.signature(function)
    except ValueError:
        return None  # Some built-ins have none.
