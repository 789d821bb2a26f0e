"""Calls a function with the gradients of activations, in the backward pass."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from typing import Any

import tensorflow as tf
from tensorflow.python.ops import gradients_util

from tpu_embedding.keras.keras_api import keras_api

_Tape: Any = tf.GradientTape  # Type checkers miss two of its methods.


def call_on_gradient(
    placeholder: Any,
    activations: Sequence[tf.Tensor],
    backward: Callable[[Sequence[tf.Tensor]], list[tf.Tensor]],
) -> list[tf.Tensor]:
    """Returns the activations, with `backward` attached to their gradients.

    Args:
      placeholder: The scalar variable that represents the tables. Its gradient is 0.
      activations: float32.
      backward: Receives the gradient of each activation, once for each gradient with
        respect to `placeholder` that a tape computes. The gradient of `placeholder`
        waits for the tensors that `backward` returns.
    """

    @tf.custom_gradient
    def hook(value: tf.Tensor, *activations: tf.Tensor) -> Any:
        def gradient(*upstream: tf.Tensor) -> Any:
            done = backward(upstream) if _is_source(placeholder) else []
            with tf.control_dependencies(done):
                zero = tf.zeros_like(value)
            return (zero, *([None] * len(upstream)))

        return [tf.identity(a) for a in activations], gradient

    return list(hook(tf.convert_to_tensor(placeholder), *activations))


def refuse_gradient(
    placeholder: Any, activations: Sequence[tf.Tensor], reason: str
) -> list[tf.Tensor]:
    """Returns activations whose gradient raises LookupError, also once exported."""
    value = tf.convert_to_tensor(placeholder)
    trap = tf.raw_ops.PreventGradient(input=value, message=reason)
    return tf.raw_ops.IdentityN(input=[*activations, trap])[:-1]


def is_evaluation() -> bool:
    """Returns whether Keras evaluates or predicts, in a graph that nobody exports."""
    return bool(_running_models("test_step", "predict_step"))


def is_export() -> bool:
    """Returns whether `model.export` of Keras traces or saves a model."""
    return bool(_running_models("export"))


def models_in_training() -> list[Any]:
    """Returns the models whose training step is running, innermost first."""
    return _running_models("train_step")


def _running_models(*methods: str) -> list[Any]:
    # Users may override these methods, so compare names instead of code objects.
    found = []
    frame = sys._getframe(1)
    while frame is not None:
        # AutoGraph renames the methods that it converts.
        name = frame.f_code.co_name.removeprefix("tf__")
        if name in methods and frame.f_code.co_argcount:
            owner = frame.f_locals.get(frame.f_code.co_varnames[0])
            if isinstance(owner, keras_api.Model):
                found.append(owner)
        frame = frame.f_back
    return found


def _is_source(placeholder: Any) -> bool:
    """Returns whether the gradient being computed is with respect to `placeholder`.

    A tape walks back through everything that it recorded: the gradient of a score
    with respect to activations or a dense kernel passes here too, and must not train
    the tables. Only the frame of GradientTape.gradient knows the sources.
    """
    frame = sys._getframe(1)
    while frame is not None:
        if frame.f_code is gradients_util._GradientsHelper.__code__:
            return True  # The gradient of a function is traced for any sources.
        if frame.f_code is tf.GradientTape.gradient.__code__:
            sources = tf.nest.flatten(frame.f_locals["sources"])
            asked = _handle(placeholder) in [_handle(source) for source in sources]
            if asked and _is_within_jacobian(frame):
                raise NotImplementedError(
                    "A Jacobian with respect to the weights of "
                    "tpu_embedding.keras.TPUEmbedding would update its tables once for "
                    "each element of the target. Leave the layer's weights out of the "
                    "sources, or call tape.gradient."
                )
            return asked
        if frame.f_code is call_on_gradient.__code__:
            return False  # A tf.autodiff.ForwardAccumulator calls this.
        frame = frame.f_back
    return True


def _is_within_jacobian(frame: Any) -> bool:
    # These ask for many gradients of one call; the tables would apply only the first.
    codes = [_Tape.jacobian.__code__, _Tape.batch_jacobian.__code__]
    while frame is not None and frame.f_code not in codes:
        frame = frame.f_back
    return frame is not None


def _handle(value: Any) -> int:
    """Identifies a variable, however it is wrapped."""
    return id(getattr(keras_api.value_of(value), "handle", value))
