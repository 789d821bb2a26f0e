"""Calls a function with the gradients of activations, in the backward pass.

Keras unscales gradients of a scaled loss only afterwards, so `unscaled` does it here.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from typing import Any

import tensorflow as tf
from tensorflow.python.ops import gradients_util

from tpu_embedding.errors import type_name
from tpu_embedding.keras.keras_api import keras_api
from tpu_embedding.keras.serialization import encode_object
from tpu_embedding.optimizers.base import check_positive, is_number

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


def check_loss_scale(value: Any) -> None:
    """Checks the argument `loss_scale` of the layer."""
    if is_number(value):
        check_positive("loss_scale", value)
    elif (
        value is not None
        and not isinstance(value, keras_api.Optimizer)
        and not callable(value)
    ):
        raise TypeError(
            "Argument `loss_scale` must be None, a number, a Keras optimizer that "
            "scales the loss, or a callable that returns a number or such an "
            f"optimizer. Received: {value!r} of type {type_name(value)}. For a scale "
            "held in a variable pass `lambda: variable`."
        )


def encode_loss_scale(value: Any) -> Any:
    """Returns `loss_scale` as JSON."""
    if isinstance(value, keras_api.Optimizer):
        raise ValueError(
            "A layer whose `loss_scale` is an optimizer, here "
            f"{type(value).__name__}, cannot be saved or cloned: the copy would follow "
            "the scale of a copied optimizer, not that of its model. Use "
            "`save_weights` or tf.train.Checkpoint, and create the model in code."
        )
    return float(value) if is_number(value) else encode_object("`loss_scale`", value)


def check_scale_is_known(loss_scale: Any) -> None:
    """Checks `loss_scale` against the optimizer of the model whose step is running.

    It cannot check the result of a callable, nor a number other than 1.
    """
    unscaled = loss_scale is None or (is_number(loss_scale) and loss_scale == 1)
    if not unscaled and not isinstance(loss_scale, keras_api.Optimizer):
        return
    for model in models_in_training():
        optimizer = model.optimizer
        factor = getattr(optimizer, "loss_scale_factor", None)
        scales = isinstance(optimizer, keras_api.LossScaleOptimizer) or factor not in (
            None,
            1,
        )
        if scales and optimizer is not loss_scale:
            name = type(optimizer).__name__
            raise loss_scale_missing(f"With the optimizer {name} of the model")


def loss_scale_missing(cause: str) -> ValueError:
    """Makes the error for a scaled loss without `loss_scale`."""
    return ValueError(
        f"{cause} Keras scales the loss and unscales the gradients only after they "
        "have reached the embedding tables. Pass `loss_scale` to the layer: the "
        "number, the optimizer that scales, or a callable that returns either, such as "
        "`lambda: model.optimizer` for an optimizer that `compile` creates. Or avoid "
        'scaling: use the policy "mixed_bfloat16", or an optimizer without '
        "`loss_scale_factor` in `compile(auto_scale_loss=False)`, and under float16 "
        "pass `loss_scale=1`."
    )


def unscaled(
    gradients: Sequence[tf.Tensor], loss_scale: Any, *, check_numerics: bool
) -> list[tf.Tensor]:
    """Returns the gradients of one call divided by the scale of the loss.

    With `check_numerics` it keeps those that are not finite, so that the engine refuses
    them. Without it, if one is not finite, all gradients of the call become 0.
    """
    if loss_scale is None:
        return list(gradients)
    scale = _current(loss_scale)
    divided = [gradient / scale for gradient in gradients]
    if check_numerics:
        return divided
    # A dynamic scale grows until a gradient overflows; Keras skips such steps.
    finite = tf.reduce_all(
        [tf.reduce_all(tf.math.is_finite(gradient)) for gradient in divided]
    )
    return [tf.where(finite, gradient, 0.0) for gradient in divided]


def _current(loss_scale: Any) -> tf.Tensor:
    """Returns the scale of this step, a float32 scalar."""
    value: Any = loss_scale
    if callable(value) and not isinstance(value, keras_api.Optimizer):
        value = value()
    if isinstance(value, keras_api.Optimizer):
        value = keras_api.scale_loss(value, tf.constant(1.0))
    try:
        scale = tf.convert_to_tensor(value)
    except (TypeError, ValueError) as error:
        raise _not_a_scale(value) from error
    number = scale.dtype.is_floating or scale.dtype.is_integer
    if not number or not scale.shape.is_compatible_with([]):
        raise _not_a_scale(value)
    return tf.cast(scale, tf.float32)


def _not_a_scale(value: object) -> TypeError:
    return TypeError(
        "The callable given as `loss_scale` must return a number, a scalar tensor or "
        f"variable, or a Keras optimizer. Received: {value!r} of type "
        f"{type_name(value)}."
    )
