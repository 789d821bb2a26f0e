"""How gradients leave the tape: through a variable that stands for the tables."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import tensorflow as tf
from tensorflow.python.eager import record

_NO_GRADIENT = (
    "tpu_embedding.keras.TPUEmbedding was traced where no tf.GradientTape was "
    "recording, as for evaluation and export, so no gradient can reach its tables. "
    "Open the tape before the tf.function is first called, or inside of it, or use a "
    "second tf.function for training."
)


def is_recording() -> bool:
    """Whether a gradient may be asked of what is computed now.

    True under a tf.GradientTape, also while a tf.function is traced that is called
    under one, or opens one. There is no public function that says so.
    """
    return record.could_possibly_record()


def let_through(
    virtual: tf.Tensor,
    activations: Sequence[tf.Tensor],
    backward: Callable[[Sequence[tf.Tensor]], None],
) -> list[tf.Tensor]:
    """The activations, with `backward` on their way back.

    Args:
      virtual: float32 scalar, of the variable that stands for the tables; it gets
        a gradient of 0.
      activations: float32.
      backward: Called with the gradient of each activation, once for each gradient
        that a tape computes.
    """

    @tf.custom_gradient
    def gate(virtual: tf.Tensor, *activations: tf.Tensor) -> Any:
        def gradient(*upstream: tf.Tensor) -> Any:
            backward(upstream)
            return (tf.zeros_like(virtual), *([None] * len(upstream)))

        return tuple(tf.identity(a) for a in activations), gradient

    return list(gate(virtual, *activations))


def let_nothing_through(
    virtual: tf.Tensor, activations: Sequence[tf.Tensor]
) -> list[tf.Tensor]:
    """The activations; a gradient of them is a LookupError that says why.

    Made of two stock ops that cost nothing, for it stands in exported graphs.
    """
    trap = tf.raw_ops.PreventGradient(input=virtual, message=_NO_GRADIENT)
    return tf.raw_ops.IdentityN(input=[*activations, trap])[:-1]
