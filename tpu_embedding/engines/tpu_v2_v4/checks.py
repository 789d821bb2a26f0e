"""What the engine of TPU v2 to v4 checks of tables, inputs and gradients."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence

import tensorflow as tf

from tpu_embedding.engines.tpu_v2_v4 import errors
from tpu_embedding.layout.plan import TableSpec
from tpu_embedding.lookup.graph_checks import Check, text
from tpu_embedding.lookup.input_rows import first


def check_table(table: TableSpec) -> None:
    """Raises for what the hardware, or its proto, has no place for."""
    if table.optimizer is None:
        raise errors.optimizer_required(table.name)
    if table.optimizer.tpu is None:
        kind = type(table.optimizer).__name__
        raise errors.refused(
            table.name, "optimizer", kind, "Give the table another optimizer."
        )
    for option, value in (
        ("slot_variable_creation_fn", table.optimizer.slot_variable_creation_fn),
        ("layout", table.config.layout),
    ):
        if value is not None:
            raise errors.refused(table.name, option, value, "Leave it at None.")


def symbolic(tensors: Sequence[tf.Tensor]) -> list[tf.Tensor]:
    """Those that an op can wait for."""
    return [tensor for tensor in tensors if tf.is_symbolic_tensor(tensor)]


def check_argument(path: str, tensor: tf.Tensor) -> None:
    """Raises unless a tensor comes straight from the arguments of strategy.run."""
    if tf.is_symbolic_tensor(tensor):
        if tensor.op.type == "Placeholder":
            return
        with contextlib.suppress(ValueError):  # No such attribute.
            if tensor.op.get_attr("_tpu_input_identity"):
                return
    raise errors.not_an_argument(path, tensor)


def check_finite(name: str, gradient: tf.Tensor) -> Check:
    """That the gradient of the feature `name`, float32 [..., dim], is finite."""
    values = tf.reshape(gradient, [-1])
    bad = ~tf.math.is_finite(values)
    dim = gradient.shape[-1]

    def not_finite() -> tf.Tensor:
        at = first(bad)
        return text(
            f"{name}: the gradient of sample ",
            at // dim,
            " is not finite (",
            values[at],
            ").",
        )

    return Check(~tf.reduce_any(bad), not_finite)
