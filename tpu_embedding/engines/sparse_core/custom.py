"""The user's functions in the form in which TensorFlow's ops call them.

A stack is wider than its tables. The values from the ops are cut to the width of the
table before the user's function gets them, and padded afterwards.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import tensorflow as tf

from tpu_embedding.combiners import CustomCombiner
from tpu_embedding.engines import errors
from tpu_embedding.layout.plan import Plan
from tpu_embedding.layout.stacking import Stack
from tpu_embedding.optimizers import CustomOptimizer

# TPUs pass the rate and hyperparameters as [1, D], the software TPU as scalars.
_ANY_SHAPE: Any = None
_NUMBER = tf.TensorSpec(_ANY_SHAPE, tf.float32)


@dataclasses.dataclass(frozen=True)
class CombinerFunctions:
    """A CustomCombiner and its derivatives, for one stack.

    Attributes:
      config: The user's configuration.
      combine: (valency, vectors[, weights]) -> activation.
      table_vjp: (valency, vectors[, weights], gradient) -> gradient of the vectors.
      weights_vjp: The same arguments -> gradient of the weights.
    """

    config: CustomCombiner
    combine: Any
    table_vjp: Any
    weights_vjp: Any


@dataclasses.dataclass(frozen=True)
class CustomFunctions:
    """The user's functions of one stack.

    Attributes:
      optimizer: The CustomOptimizer, or None.
      rule: (gradient, row, *slots, rate, *hyperparameters) -> (row, *slots), or None.
      combiner: The CustomCombiner, or None.
    """

    optimizer: CustomOptimizer | None
    rule: Any
    combiner: CombinerFunctions | None


def functions_of(plan: Plan, stack: Stack) -> CustomFunctions:
    """Traces the user's functions for one stack. Must be called eagerly.

    Raises:
      ValueError: If a function returns another shape or number, or uses a variable.
      TypeError: If a function returns no tensor, or one of another dtype.
    """
    spec = plan.tables[stack.tables[0]]
    dim, width = spec.config.dim, stack.width
    optimizer = spec.optimizer
    custom = optimizer if isinstance(optimizer, CustomOptimizer) else None
    combiner = spec.config.custom_combiner
    return CustomFunctions(
        custom,
        None if custom is None else _rule(spec.name, custom, dim, width),
        None if combiner is None else _combiner(spec.name, combiner, dim, width),
    )


def _rule(table: str, optimizer: CustomOptimizer, dim: int, width: int) -> Any:
    row = tf.TensorSpec([1, width], tf.float32)
    per_row = [slot.per_row for slot in optimizer.slots]
    vectors = [tf.TensorSpec([1], tf.float32) if one else row for one in per_row]

    def rule(gradient: tf.Tensor, *values: tf.Tensor) -> tuple[tf.Tensor, ...]:
        state, numbers = values[: 1 + len(per_row)], values[1 + len(per_row) :]
        wide = [True, *(not one for one in per_row)]
        cut = [
            value[:, :dim] if is_wide else value
            for value, is_wide in zip(state, wide, strict=True)
        ]
        scalars = [tf.reshape(number, [-1])[0] for number in numbers]
        new = optimizer.compute(
            gradient[:, :dim], cut[0], cut[1:], *scalars, table=table
        )
        return tuple(
            tf.concat([value, old[:, dim:]], 1) if is_wide else value
            for value, old, is_wide in zip(new, state, wide, strict=True)
        )

    numbers = [_NUMBER] * (1 + len(optimizer.hyperparameters))
    return _trace(table, "CustomOptimizer", rule, [row, row, *vectors, *numbers])


def _combiner(
    table: str, combiner: CustomCombiner, dim: int, width: int
) -> CombinerFunctions:
    vectors = tf.TensorSpec([combiner.max_valency, width], tf.float32)
    weights = tf.TensorSpec([combiner.num_weights], tf.float32)
    own = [weights] if combiner.num_weights else []
    inputs = [tf.TensorSpec([], tf.int32), vectors, *own]
    gradient = tf.TensorSpec([width], tf.float32)

    def combine(
        valency: tf.Tensor, vectors: tf.Tensor, *weights: tf.Tensor
    ) -> tf.Tensor:
        found = combiner.compute(valency, vectors[:, :dim], *weights, table=table)
        return tf.pad(found, [[0, width - dim]])

    def vjp(index: int) -> Callable[..., tf.Tensor]:
        def differentiate(*arguments: tf.Tensor) -> tf.Tensor:
            *values, gradient = arguments
            with tf.GradientTape() as tape:
                tape.watch(values[1:])
                found = combine(*values)
            (found,) = tape.gradient(
                [found],
                [values[index]],
                [gradient],
                unconnected_gradients=tf.UnconnectedGradients.ZERO,
            )
            return tf.convert_to_tensor(found)

        return differentiate

    def trace(function: Any, specs: Sequence[tf.TensorSpec]) -> Any:
        return _trace(table, "CustomCombiner", function, specs)

    return CombinerFunctions(
        combiner,
        trace(combine, inputs),
        trace(vjp(1), [*inputs, gradient]),
        trace(vjp(2) if own else _no_weights, [*inputs, gradient]),
    )


def _no_weights(*arguments: tf.Tensor) -> tf.Tensor:
    """The derivative if there are no weights; the op requires one."""
    del arguments
    return tf.zeros([0])


def _trace(
    table: str, what: str, function: Any, inputs: Sequence[tf.TensorSpec]
) -> Any:
    """Traces a function without captures, which an op's attribute cannot have."""
    with errors.function_of(table, what):
        traced = tf.function(function, autograph=False).get_concrete_function(*inputs)
    if traced.captured_inputs:
        way_out = "M"
        if what == "CustomOptimizer":
            way_out = "Pass numbers that change as `hyperparameters`, or m"
        raise ValueError(
            f"Table {table!r}: the function of its {what} uses tensors or variables "
            f"from outside, {traced.captured_inputs!r}, which SparseCores do not "
            f"support. {way_out}ake the tensors inside of the function."
        )
    return traced
