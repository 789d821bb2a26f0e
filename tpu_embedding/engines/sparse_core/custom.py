"""The user's functions in the form in which TensorFlow's ops call them.

A stack is wider than its tables. The values from the ops are cut to the width of the
table before the user's function gets them, and padded afterwards. The ops call a
combiner once for all samples of a replica, and the user's function is for one sample,
so it is vectorized here.
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
      combine: (valencies [S], vectors [S, max_valency, width][, weights [S,
        num_weights]]) -> activations [S, width].
      table_vjp: The same arguments and gradients [S, width] -> gradients of the
        vectors.
      weights_vjp: The same arguments -> gradients of the weights of each sample.
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
        None if combiner is None else _combiner(spec.name, combiner, dim, stack),
    )


def _rule(table: str, optimizer: CustomOptimizer, dim: int, width: int) -> Any:
    row = tf.TensorSpec([1, width], tf.float32)
    count = 1 + len(optimizer.slots)

    def rule(gradient: tf.Tensor, *values: tf.Tensor) -> tuple[tf.Tensor, ...]:
        state, numbers = values[:count], values[count:]
        cut = [value[:, :dim] for value in state]
        scalars = [tf.reshape(number, [-1])[0] for number in numbers]
        new = optimizer.compute(
            gradient[:, :dim], cut[0], cut[1:], *scalars, table=table
        )
        return tuple(
            tf.concat([value, old[:, dim:]], 1)
            for value, old in zip(new, state, strict=True)
        )

    rows = [row] * (1 + count)
    numbers = [_NUMBER] * (1 + len(optimizer.hyperparameters))
    return _trace(table, "CustomOptimizer", rule, [*rows, *numbers])


def _combiner(
    table: str, combiner: CustomCombiner, dim: int, stack: Stack
) -> CombinerFunctions:
    samples, width = stack.samples, stack.width
    vectors = tf.TensorSpec([samples, combiner.max_valency, width], tf.float32)
    weights = tf.TensorSpec([samples, combiner.num_weights], tf.float32)
    own = [weights] if combiner.num_weights else []
    inputs = [tf.TensorSpec([samples], tf.int32), vectors, *own]
    gradients = tf.TensorSpec([samples, width], tf.float32)

    def one_sample(arguments: Sequence[tf.Tensor]) -> tf.Tensor:
        valency, vectors, *weights = arguments
        found = combiner.compute(valency, vectors[:, :dim], *weights, table=table)
        return tf.pad(found, [[0, width - dim]])

    def combine(*arguments: tf.Tensor) -> tf.Tensor:
        return tf.vectorized_map(one_sample, arguments)

    def vjp(index: int) -> Callable[..., tf.Tensor]:
        def differentiate(*arguments: tf.Tensor) -> tf.Tensor:
            *values, gradients = arguments
            with tf.GradientTape() as tape:
                tape.watch(values[1:])
                found = combine(*values)
            (found,) = tape.gradient(
                [found],
                [values[index]],
                [gradients],
                unconnected_gradients=tf.UnconnectedGradients.ZERO,
            )
            return tf.convert_to_tensor(found)

        return differentiate

    def no_weights(*arguments: tf.Tensor) -> tf.Tensor:
        del arguments  # The op requires the function.
        return tf.zeros([samples, 0])

    def trace(function: Any, specs: Sequence[tf.TensorSpec]) -> Any:
        return _trace(table, "CustomCombiner", function, specs)

    return CombinerFunctions(
        combiner,
        trace(combine, inputs),
        trace(vjp(1), [*inputs, gradients]),
        trace(vjp(2) if own else no_weights, [*inputs, gradients]),
    )


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
