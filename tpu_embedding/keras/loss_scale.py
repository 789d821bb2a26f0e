"""The scale of the loss: gradients reach the tables before Keras unscales them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import keras
import tensorflow as tf

from tpu_embedding.keras import errors, running, serialization
from tpu_embedding.optimizers.checks import check_positive, is_number


def check_loss_scale(value: Any) -> None:
    """Raises unless it is None, a number > 0, an optimizer of Keras or a callable."""
    if is_number(value):
        check_positive("loss_scale", value)
    elif value is not None and not _is_optimizer(value) and not callable(value):
        raise errors.loss_scale_type(value)


def encode_loss_scale(value: Any) -> Any:
    """As JSON.

    Raises:
      ValueError: If it is an optimizer, or nothing that Keras can serialise.
    """
    if _is_optimizer(value):
        raise errors.saved_loss_scale(type(value).__name__)
    if is_number(value):
        return float(value)
    return serialization.encode_object("`loss_scale`", value)


def check_scale_is_known(loss_scale: Any) -> None:
    """Raises a ValueError in the step of a model whose scale is not `loss_scale`.

    As far as that can be seen: not what a callable would return, nor a number.
    """
    unscaled = loss_scale is None or (is_number(loss_scale) and loss_scale == 1)
    if not unscaled and not _is_optimizer(loss_scale):
        return
    for model in running.models_in_training():
        optimizer = model.optimizer
        factor = getattr(optimizer, "loss_scale_factor", None)
        dynamic = isinstance(optimizer, keras.optimizers.LossScaleOptimizer)
        scales = dynamic or factor not in (None, 1)
        if scales and optimizer is not loss_scale:
            name = type(optimizer).__name__
            raise errors.loss_scale_missing(f"With the optimizer {name} of the model")


def unscaled(
    gradients: Sequence[tf.Tensor], loss_scale: Any, *, check_numerics: bool
) -> list[tf.Tensor]:
    """The gradients, divided by what the loss was multiplied by.

    Args:
      gradients: float32, of one call.
      loss_scale: What the layer was given.
      check_numerics: Whether infinite gradients stay, to be an error; else all of
        the call count as 0.

    Raises:
      TypeError: If a callable does not return a number or an optimizer.
    """
    if loss_scale is None:
        return list(gradients)
    scale = _current(loss_scale)
    divided = [gradient / scale for gradient in gradients]
    if check_numerics:
        return divided
    # A scale grows until a gradient overflows; Keras leaves such steps out.
    finite = tf.reduce_all(
        [tf.reduce_all(tf.math.is_finite(gradient)) for gradient in divided]
    )
    return [tf.where(finite, gradient, 0.0) for gradient in divided]


def _current(loss_scale: Any) -> tf.Tensor:
    """The scale now, a float32 scalar."""
    called = callable(loss_scale) and not _is_optimizer(loss_scale)
    value: Any = loss_scale() if called else loss_scale
    if _is_optimizer(value):
        value = value.scale_loss(tf.constant(1.0))  # Knows a scale before it is built.
    try:
        scale = tf.convert_to_tensor(value)
    except (TypeError, ValueError) as error:
        raise errors.loss_scale_returned(value) from error
    number = scale.dtype.is_floating or scale.dtype.is_integer
    if not number or not scale.shape.is_compatible_with([]):
        raise errors.loss_scale_returned(value)
    return tf.cast(scale, tf.float32)


def _is_optimizer(value: Any) -> bool:
    return isinstance(value, keras.optimizers.Optimizer)
