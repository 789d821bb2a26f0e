"""What the gradients of one feature are checked for."""

from __future__ import annotations

import tensorflow as tf

from tpu_embedding.lookup.graph_checks import Check, text
from tpu_embedding.lookup.input_rows import first


def gradient_checks(
    path: str, gradient: tf.Tensor, expected: tf.Tensor, *, check_numerics: bool
) -> list[Check]:
    """That it has the shape of the activation, and is finite where that is asked for.

    Args:
      path: The feature.
      gradient: float32 [..., dim].
      expected: int64 [k], the shape of the activation.
      check_numerics: Whether it must be finite.
    """
    name = f"Feature {path}"
    shape = tf.shape(gradient, out_type=tf.int64)
    same_rank = tf.equal(tf.size(shape), tf.size(expected))
    size = tf.minimum(tf.size(shape), tf.size(expected))
    checks = [
        Check(
            same_rank & tf.reduce_all(tf.equal(shape[:size], expected[:size])),
            lambda: text(
                f"{name}: the gradient has shape ",
                _list_text(shape),
                ", but the activation had ",
                _list_text(expected),
                ".",
            ),
        )
    ]
    if check_numerics:
        values = tf.reshape(gradient, [-1])
        bad = ~tf.math.is_finite(values)

        def not_finite() -> tf.Tensor:
            at = tf.cast(first(bad), tf.int64)
            return text(
                f"{name}: the gradient of sample ",
                at // expected[-1],
                " is not finite (",
                values[at],
                ").",
            )

        checks.append(Check(~tf.reduce_any(bad), not_finite))
    return checks


def _list_text(shape: tf.Tensor) -> tf.Tensor:
    """The shape as TensorFlow's ops write it."""
    axes = tf.strings.reduce_join(tf.strings.as_string(shape), separator=",")
    return text("[", axes, "]")
