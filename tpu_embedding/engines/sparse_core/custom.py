"""Converts the user's functions to the form in which TensorFlow's ops call them.

A stack is wider than its tables. The values from the ops are cut to the width of the
table before the user's function gets them, and padded afterwards. A rule that computes
each column from that column alone gets the padding, too: libtpu calls a rule for all
touched rows at once, by replacing each leading dimension of 1, and does not compile a
rule that cuts columns off.

The ops call a combiner once for all samples of a replica, but the user's function takes
one sample, so it is vectorized here.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from tpu_embedding.combiners import CustomCombiner
from tpu_embedding.engines.rates import trace_function
from tpu_embedding.layout.plan import Plan
from tpu_embedding.layout.stacking import Stack
from tpu_embedding.optimizers import CustomOptimizer
from tpu_embedding.tpu_generations import VALENCY_MULTIPLE

# TPUs pass the rate and hyperparameters as [1, D], the software TPU as scalars.
_ANY_SHAPE: Any = None
_NUMBER = tf.TensorSpec(_ANY_SHAPE, tf.float32)
# Types of ops that compute each column from the same column of their inputs.
_ELEMENTWISE = re.compile(
    "Abs|Add(N|V2)?|Cast|ClipByValue|Const|Cosh?|Div(NoNan)?|Elu|Equal|Erf|Exp(m1)?|"
    "Floor|Greater(Equal)?|Identity|Is(Finite|Inf|Nan)|LeakyRelu|Less(Equal)?|Log(1p)?|"
    "Logical(And|Not|Or)|Maximum|Minimum|Mul(NoNan)?|Neg|NotEqual|OnesLike|Pow|RealDiv|"
    "Reciprocal|Relu6?|Rsqrt|Select(V2)?|Sigmoid|Sign|Sinh?|Softplus|Softsign|Sqrt|"
    "Square|SquaredDifference|StopGradient|Sub|Tanh?|Xdivy|Xlogy|ZerosLike"
)


@dataclasses.dataclass(frozen=True)
class CombinerFunctions:
    """A CustomCombiner and its derivatives, for one stack.

    Attributes:
      config: The user's configuration.
      max_valency: The `max_valency` of the op, a multiple of 8, as libtpu requires.
      combine: (valencies [S], vectors [S, max_valency, width][, weights [S,
        num_weights]]) -> activations [S, width].
      table_vjp: (arguments of `combine`, gradients [S, width]) -> gradients of the
        vectors.
      weights_vjp: The arguments of `table_vjp` -> gradients of each sample's weights.
    """

    config: CustomCombiner
    max_valency: int
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
    """Traces and checks the user's functions for one stack; call it eagerly."""
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
    """Traces the rule for rows of `width` columns, of which the table has `dim`."""
    row = tf.TensorSpec([1, width], tf.float32)
    rows = [row] * (2 + len(optimizer.slots))
    inputs = [*rows, *[_NUMBER] * (1 + len(optimizer.hyperparameters))]

    def trace(columns: int) -> tuple[Any, list[tf.Operation]]:
        """Returns the rule for some columns, and the ops of the user function."""
        own: list[tf.Operation] = []

        def rule(*values: tf.Tensor) -> tuple[tf.Tensor, ...]:
            state, numbers = values[1 : len(rows)], values[len(rows) :]
            gradient, *cut = [value[:, :columns] for value in values[: len(rows)]]
            # All elements are equal, and libtpu compiles no slice of one of them.
            scalars = [tf.reduce_max(number) for number in numbers]
            before = len(_operations())
            new = optimizer.compute(gradient, cut[0], cut[1:], *scalars, table=table)
            own[:] = _operations()[before:]
            return tuple(
                tf.concat([value, old[:, columns:]], 1)
                for value, old in zip(new, state, strict=True)
            )

        return _trace(table, "CustomOptimizer", rule, inputs), own

    traced, ops = trace(dim)
    if dim == width or not all(_ELEMENTWISE.fullmatch(op.type) for op in ops):
        return traced
    try:
        padded, padded_ops = trace(width)
    except (ValueError, TypeError, tf.errors.OpError):
        return traced  # The rule depends on `dim`.
    return padded if _compute_alike(ops, padded_ops) else traced


def _operations() -> list[tf.Operation]:
    return tf.compat.v1.get_default_graph().get_operations()


def _compute_alike(first: list[tf.Operation], second: list[tf.Operation]) -> bool:
    """Returns whether ops for rows of two widths compute the same in each column."""
    if [op.type for op in first] != [op.type for op in second]:
        return False
    for one, other in zip(first, second, strict=True):
        if one.type == "Const":
            values = [tf.get_static_value(op.outputs[0]) for op in (one, other)]
            different = {
                value.tobytes() for array in values for value in np.ravel(array)
            }
            if not np.array_equal(*values) and len(different) > 1:
                return False
    return True


def _combiner(
    table: str, combiner: CustomCombiner, dim: int, stack: Stack
) -> CombinerFunctions:
    samples, width = stack.samples, stack.width
    max_valency = -(-combiner.max_valency // VALENCY_MULTIPLE) * VALENCY_MULTIPLE
    vectors = tf.TensorSpec([samples, max_valency, width], tf.float32)
    weights = tf.TensorSpec([samples, combiner.num_weights], tf.float32)
    own = [weights] if combiner.num_weights else []
    inputs = [tf.TensorSpec([samples], tf.int32), vectors, *own]
    gradients = tf.TensorSpec([samples, width], tf.float32)

    def one_sample(arguments: Sequence[tf.Tensor]) -> tf.Tensor:
        valency, vectors, *weights = arguments
        cut = vectors[: combiner.max_valency, :dim]
        found = combiner.compute(valency, cut, *weights, table=table)
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
        max_valency,
        trace(combine, inputs),
        trace(vjp(1), [*inputs, gradients]),
        trace(vjp(2) if own else no_weights, [*inputs, gradients]),
    )


def _trace(
    table: str, what: str, function: Any, inputs: Sequence[tf.TensorSpec]
) -> Any:
    """Traces a function without captures, which an op's attribute cannot have."""
    traced = trace_function(table, what, function, inputs)
    if traced.captured_inputs:
        way_out = "C"
        if what == "CustomOptimizer":
            way_out = "Pass numbers that change as `hyperparameters`, or c"
        raise ValueError(
            f"Table {table!r}: the function of its {what} captures tensors or "
            f"variables from outside, {traced.captured_inputs!r}, which SparseCores do "
            f"not support. {way_out}reate the tensors inside of the function."
        )
    return traced
