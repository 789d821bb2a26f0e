"""Lists of tensors in numbered cells, out of stock ops.

A list of tensors of any dtypes and shapes is packed into one scalar variant; a
variable of variants is a shelf of them. Unlike with a queue nothing ever blocks,
and to read is not to remove: a step that fails half-way leaves all in place.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import tensorflow as tf

from tpu_embedding.engines.variables import create_state


def pack(tensors: Sequence[tf.Tensor]) -> tf.Tensor:
    """The tensors as one scalar variant."""
    return tf.raw_ops.CompositeTensorVariantFromComponents(
        components=list(tensors), metadata=""
    )


def unpack(variant: tf.Tensor, specs: Sequence[tf.TensorSpec]) -> list[tf.Tensor]:
    """The tensors in a variant of `pack`.

    Args:
      variant: The scalar.
      specs: Of each tensor its dtype and what is known of its shape.
    """
    tensors = tf.raw_ops.CompositeTensorVariantToComponents(
        encoded=variant, metadata="", Tcomponents=[spec.dtype for spec in specs]
    )
    for tensor, spec in zip(tensors, specs, strict=True):
        tensor.set_shape(spec.shape)
    return tensors


class Cells:
    """A fixed number of cells, each with a scalar variant."""

    def __init__(self, name: str, size: int) -> None:
        self._empty = pack([tf.zeros([0])])
        self._variable = create_state(name, tf.fill([size], self._empty))

    def get(self, index: tf.Tensor | int) -> tf.Tensor:
        """What is in a cell."""
        return tf.gather(self._variable, index)

    def put(self, index: tf.Tensor | int, variant: tf.Tensor) -> Any:
        """Fills a cell; returns the op."""
        return tf.raw_ops.ResourceScatterUpdate(
            resource=self._variable.handle,
            indices=tf.reshape(index, [1]),
            updates=tf.reshape(variant, [1]),
        )

    def clear(self, index: tf.Tensor | int) -> Any:
        """Frees what is in a cell; returns the op."""
        return self.put(index, pack([tf.zeros([0])]))
