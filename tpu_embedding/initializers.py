"""Initial values of tables."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Sequence
from typing import Any

import tensorflow as tf

_PHILOX = tf.random.Algorithm.PHILOX.value  # The algorithm of tf.random's ops.


def default_initializer(dim: int) -> Callable[..., tf.Tensor]:
    """Returns the initializer of tables that have none of their own.

    Truncated normal (redrawn beyond two standard deviations) with mean 0 and
    standard deviation 1 / sqrt(dim), so that a row has length about 1.

    Args:
      dim: Number of columns of the table.

    Returns:
      A callable of (shape, dtype=tf.float32) that returns a tensor of that shape.
    """

    def truncated_normal(shape: Any, dtype: tf.DType = tf.float32) -> tf.Tensor:
        numbers = _scaled_truncated_normal(
            tf.convert_to_tensor(shape, tf.int32),
            _philox_words(),
            tf.cast(1.0 / math.sqrt(dim), dtype),
        )
        return tf.ensure_shape(numbers, shape)

    return truncated_normal


def _philox_words() -> tf.Tensor:
    """The seeds of the next op of tf.random, uint64 [2]; random if none is set."""
    seeds = tf.compat.v1.get_seed(None)
    if seeds == (None, None):
        return tf.bitcast(
            tf.random.uniform([2], tf.int64.min, tf.int64.max, tf.int64), tf.uint64
        )
    return tf.constant(seeds, tf.uint64)


@tf.function(autograph=False)
def _scaled_truncated_normal(
    shape: tf.Tensor, seeds: tf.Tensor, stddev: tf.Tensor
) -> tf.Tensor:
    """The values of tf.random.truncated_normal for two seeds, in the dtype of `stddev`.

    A function scales the numbers in place. tf.random runs op by op, and each op
    allocates memory of the size of the table, which TensorFlow's allocator keeps.
    """
    numbers = tf.raw_ops.StatelessTruncatedNormalV2(
        shape=shape,
        key=seeds[:1],
        counter=tf.stack([tf.constant(0, tf.uint64), seeds[1]]),
        alg=_PHILOX,
        dtype=stddev.dtype,
    )
    return numbers * stddev


@dataclasses.dataclass(frozen=True)
class RowIdInitializer:
    """Fills row r with the value r + offset, so that tests can tell rows apart.

    Attributes:
      offset: The value of row 0.
    """

    offset: int = 0

    def __call__(
        self, shape: Sequence[int] | tf.TensorShape, dtype: tf.DType = tf.float32
    ) -> tf.Tensor:
        """Returns a tensor of `shape`, [V, D]."""
        # Counted in integers, because bfloat16 is not exact above 256.
        rows = tf.cast(tf.range(shape[0], dtype=tf.int64) + self.offset, dtype)
        return tf.broadcast_to(rows[:, tf.newaxis], shape)
