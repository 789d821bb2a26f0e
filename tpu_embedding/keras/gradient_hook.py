"""How gradients leave the tape: through a variable that stands for the tables."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from typing import Any

import keras
import tensorflow as tf
from tensorflow.python.ops import gradients_util

from tpu_embedding.keras import errors

# Why a gradient is refused.
NO_TAPE = (
    "tpu_embedding.keras.TPUEmbedding was traced where no tf.GradientTape was "
    "recording, as for evaluation and export, so no gradient can reach its tables. "
    "Open the tape before the tf.function is first called, or inside of it, or use a "
    "second tf.function for training."
)
FOR_SERVING = (
    "tpu_embedding.keras.TPUEmbedding was called with `serving_config`, which is for "
    "serving: such a call consists of stock ops, and no gradient can reach the tables "
    "by it. Train a model that calls the layer without it, or set "
    "`layer.trainable = False` to train the rest of this one."
)
_Tape: Any = tf.GradientTape  # Type checkers miss two of its methods.
# They ask for many gradients of one call, of which the tables would take the first.
_JACOBIANS = (_Tape.jacobian, _Tape.batch_jacobian)


def let_through(
    virtual: keras.Variable,
    activations: Sequence[tf.Tensor],
    backward: Callable[[Sequence[tf.Tensor]], list[tf.Tensor]],
) -> list[tf.Tensor]:
    """The activations, with `backward` on their way back.

    Args:
      virtual: A scalar that stands for the tables; it gets a gradient of 0.
      activations: float32.
      backward: Called with the gradient of each activation, once for each gradient
        with respect to `virtual` that a tape computes. What it returns must have
        been computed before that gradient is there.
    """

    @tf.custom_gradient
    def gate(virtual_value: tf.Tensor, *activations: tf.Tensor) -> Any:
        def gradient(*upstream: tf.Tensor) -> Any:
            done = backward(upstream) if _is_asked_for(virtual) else []
            with tf.control_dependencies(done):
                nothing = tf.zeros_like(virtual_value)
            return (nothing, *([None] * len(upstream)))

        return tuple(tf.identity(a) for a in activations), gradient

    return list(gate(tf.convert_to_tensor(virtual), *activations))


def let_nothing_through(
    virtual: keras.Variable, activations: Sequence[tf.Tensor], why: str
) -> list[tf.Tensor]:
    """The activations; a gradient of them is a LookupError that says why.

    Made of two stock ops that cost nothing, for it stands in exported graphs.
    """
    value = tf.convert_to_tensor(virtual)
    trap = tf.raw_ops.PreventGradient(input=value, message=why)
    return tf.raw_ops.IdentityN(input=[*activations, trap])[:-1]


def _is_asked_for(variable: keras.Variable) -> bool:
    """Whether the gradient being computed is one with respect to `variable`.

    A tape walks back through all that it recorded, also past the tensors that it was
    asked about: the gradient of a score with respect to activations or to a dense
    kernel comes by here as well, and must not train the tables. Only the frame of
    GradientTape.gradient knows what was asked for.
    """
    frame = sys._getframe(1)
    while frame is not None:
        if frame.f_code is gradients_util._GradientsHelper.__code__:
            return True  # The gradient of a function, to be used for any sources.
        if frame.f_code is tf.GradientTape.gradient.__code__:
            sources = tf.nest.flatten(frame.f_locals["sources"])
            asked = _handle(variable) in [_handle(source) for source in sources]
            if asked and _calls(frame, _JACOBIANS):
                raise errors.jacobian()
            return asked
        if frame.f_code is let_through.__code__:
            return False  # Of a tf.autodiff.ForwardAccumulator, in the forward pass.
        frame = frame.f_back
    return True


def _calls(frame: Any, functions: Sequence[Any]) -> bool:
    """Whether one of some functions is being run around a frame."""
    codes = [function.__code__ for function in functions]
    while frame is not None and frame.f_code not in codes:
        frame = frame.f_back
    return frame is not None


def _handle(value: Any) -> int:
    """What tells variables apart, however they are wrapped."""
    value = value.value if isinstance(value, keras.Variable) else value
    return id(getattr(value, "handle", value))
