"""What an update checks of the gradients it is given."""

from __future__ import annotations

from collections.abc import Sequence

import tensorflow as tf

from tpu_embedding.layout.plan import Plan
from tpu_embedding.lookup.graph_checks import Check, require, text
from tpu_embedding.lookup.input_rows import first


def check_gradients(
    plan: Plan, gradients: Sequence[tf.Tensor | None]
) -> list[tf.Tensor | None]:
    """The same gradients, once all of them are known to be finite.

    Args:
      plan: Whose features they belong to.
      gradients: For each feature float32 [..., dim], or None.

    Raises:
      tf.errors.InvalidArgumentError: If a value is not finite.
    """
    checks = [
        _is_finite(spec.path, gradient)
        for spec, gradient in zip(plan.features, gradients, strict=True)
        if gradient is not None
    ]
    with tf.control_dependencies(require(checks)):
        return [None if g is None else tf.identity(g) for g in gradients]


def _is_finite(path: str, gradient: tf.Tensor) -> Check:
    values = tf.reshape(gradient, [-1])
    bad = ~tf.math.is_finite(values)

    def not_finite() -> tf.Tensor:
        at = first(bad)
        return text(
            f"Feature {path}: the gradient of sample ",
            at // gradient.shape[-1],
            " is not finite (",
            values[at],
            ").",
        )

    return Check(~tf.reduce_any(bad), not_finite)
