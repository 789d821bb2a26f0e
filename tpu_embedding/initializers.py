"""What tables start as."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Sequence
from typing import Any

import tensorflow as tf


def default_initializer(dim: int) -> Callable[..., tf.Tensor]:
    """Returns what fills a table that has no initializer of its own.

    Truncated normal (redrawn beyond two standard deviations) with mean 0 and
    standard deviation 1 / sqrt(dim), so that a row has length about 1.

    Args:
      dim: Number of columns of the table.

    Returns:
      A callable of (shape, dtype=tf.float32) that returns a tensor of that shape.
    """

    def truncated_normal(shape: Any, dtype: tf.DType = tf.float32) -> tf.Tensor:
        return tf.random.truncated_normal(
            shape, mean=0.0, stddev=1.0 / math.sqrt(dim), dtype=dtype
        )

    return truncated_normal


@dataclasses.dataclass(frozen=True)
class RowIdInitializer:
    """Fills row r with the value r + offset: a wrong row shows itself.

    Attributes:
      offset: The value of row 0.
    """

    offset: int = 0

    def __call__(
        self, shape: Sequence[int] | tf.TensorShape, dtype: tf.DType = tf.float32
    ) -> tf.Tensor:
        """Returns a tensor of `shape`, [V, D]."""
        # Counted in integers: bfloat16 would leave the range at 256.
        rows = tf.cast(tf.range(shape[0], dtype=tf.int64) + self.offset, dtype)
        return tf.broadcast_to(rows[:, tf.newaxis], shape)
