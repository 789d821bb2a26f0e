"""The element-wise functions of optimizer rules, over TensorFlow tensors."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import tensorflow as tf

from tpu_embedding.optimizers.base import ArrayOps


class _TensorFlowOps:
    """`ArrayOps` of TensorFlow."""

    sqrt = staticmethod(tf.sqrt)
    pow = staticmethod(tf.pow)
    abs = staticmethod(tf.abs)
    sign = staticmethod(tf.sign)
    where = staticmethod(tf.where)
    maximum = staticmethod(tf.maximum)
    minimum = staticmethod(tf.minimum)

    @staticmethod
    def mean_last(x: Any) -> tf.Tensor:
        """The mean over the last axis, which is kept with size 1."""
        return tf.reduce_mean(x, axis=-1, keepdims=True)

    @staticmethod
    def map_rows(function: Callable[..., Any], arrays: Sequence[Any]) -> Sequence[Any]:
        """What `function` returns of the first, second, ... row of all arrays."""
        return tf.vectorized_map(lambda rows: function(*rows), tuple(arrays))


TENSORFLOW_OPS: ArrayOps = _TensorFlowOps()
