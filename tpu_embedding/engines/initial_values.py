"""What the initializers of tables and slots are asked for, and their answers."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import tensorflow as tf
from tensorflow.python.trackable import base

from tpu_embedding.combiners import CustomCombiner
from tpu_embedding.engines import table_errors
from tpu_embedding.initializers import default_initializer
from tpu_embedding.layout.plan import TableSpec
from tpu_embedding.layout.table_arrays import InitialValue
from tpu_embedding.optimizers import Slot

# What an initializer that takes `shard_info` is told of its part of a table.
ShardInfo: Any = vars(base)["ShardInfo"]  # pyright does not see exported names.


def initial_value(
    name: str,
    shape: tuple[int, ...],
    initialize: Callable[[], Any],
    dtype: tf.DType = tf.float32,
) -> tf.Tensor:
    """What a table or slot starts as.

    Args:
      name: For messages.
      shape: What the value must have.
      initialize: The user's initializer, with its arguments.
      dtype: Of the value. For bfloat16 an initializer may give float32 all the same,
        which is rounded to the nearest.

    Raises:
      ValueError: If the value has another shape.
    """
    value = initialize()
    if dtype != tf.float32:
        value = tf.cast(value, dtype)
    value = tf.convert_to_tensor(value, dtype)
    if tuple(value.shape) != shape:
        raise ValueError(
            f"The initializer of {name} must return the shape that it is given, "
            f"{shape}. Received: {tuple(value.shape)}."
        )
    return value


def initializer_of(spec: TableSpec) -> Callable[..., Any]:
    """The initializer of a table, or the default one.

    Raises:
      TypeError: If it cannot be called as initializers are.
    """
    initializer = spec.config.initializer or default_initializer(spec.config.dim)
    try:
        signature = inspect.signature(initializer)
    except ValueError:
        return initializer  # Some built-ins have no signature.
    part = {"shard_info": None} if "shard_info" in signature.parameters else {}
    try:
        signature.bind((1, 1), dtype=tf.as_dtype(spec.config.dtype), **part)
    except TypeError as error:
        raise table_errors.initializer_arguments(
            spec.name, initializer, str(error)
        ) from error
    return initializer


def slot_initializer(slot: Slot) -> Callable[..., tf.Tensor]:
    """The initializer of a slot, a callable of ([V, D] or [V, 1], dtype)."""

    def initialize(shape: tuple[int, int], dtype: tf.DType = tf.float32) -> tf.Tensor:
        start = slot.initial_value
        if not callable(start):
            return tf.fill(shape, tf.cast(start, dtype))
        # To the user a slot with one number for each row is a vector.
        value: Any = start(shape[:1] if slot.per_row else shape, dtype=dtype)
        return tf.reshape(value, shape)

    return initialize


def initial_rows(slot: Slot) -> InitialValue:
    """What rows of a slot start as, as `MutableRows` has it."""
    if not callable(slot.initial_value):
        return slot.initial_value
    return lambda shape: slot_initializer(slot)(shape).numpy()


def combiner_weights(name: str, combiner: CustomCombiner) -> tf.Tensor:
    """What the weights of a custom combiner start as, float32 [num_weights]."""
    shape = (combiner.num_weights,)
    if combiner.initializer is None:
        return tf.zeros(shape)
    initialize = combiner.initializer
    return initial_value(name, shape, lambda: initialize(shape, dtype=tf.float32))


def takes_shard_info(initializer: Callable[..., Any]) -> bool:
    """Whether it is called for each part of a table, as TensorFlow's classes do."""
    try:
        return "shard_info" in inspect.signature(initializer).parameters
    except ValueError:  # Some built-ins have no signature.
        return False
