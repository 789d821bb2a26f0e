"""Calls of TensorFlow's SparseCore ops; each optimizer names its op as data.

A user's function must have the form in which these ops call it. A stack is wider than
its tables. The values from the ops are cut to the width of the table before the user's
function gets them, and padded afterwards. A rule that computes each column from that
column alone gets the padding, too: libtpu calls a rule for all touched rows at once, by
replacing each leading dimension of 1, and does not compile a rule that cuts columns
off.

The ops call a combiner once for all samples of a replica, but the user's function takes
one sample, so it is vectorized here.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import tensorflow as tf

from tpu_embedding.combiners import CustomCombiner
from tpu_embedding.config import QuantizationConfig
from tpu_embedding.engines.rates import UpdateScalars, trace_function
from tpu_embedding.layout.csr import (
    CombinedCsrFormatTensor,
    PartitionedCsrFormatTensor,
    PartitionedStack,
    Partitioning,
)
from tpu_embedding.layout.plan import Plan
from tpu_embedding.layout.stacking import Stack
from tpu_embedding.optimizers import CustomOptimizer
from tpu_embedding.optimizers.base import Optimizer
from tpu_embedding.tpu_generations import VALENCY_MULTIPLE

Batch = PartitionedCsrFormatTensor | CombinedCsrFormatTensor
MINIBATCHES = "num_minibatches_per_physical_sparse_core"
# The scalars of a custom rule, in one tensor; the op takes them one by one.
_HYPERPARAMETERS = "hyperparameters"
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


def check_combiners(plan: Plan) -> None:
    """Checks that this TensorFlow, which may be older than 2.20, has the ops."""
    op = "XlaSparseDenseMatmulCustomCombinerOnTcWithCsrInput"
    for table in plan.tables:
        if table.config.custom_combiner is not None and not hasattr(tf.raw_ops, op):
            raise NotImplementedError(
                f"Table {table.name!r}: a CustomCombiner on SparseCores needs "
                f"TensorFlow 2.20 or newer. This is TensorFlow {tf.__version__}, which "
                f"lacks the op {op}. Use another combiner, or the host engine."
            )


def look_up(
    stack: PartitionedStack,
    batch: Batch,
    parameters: tf.Tensor,
    quantization: QuantizationConfig | None,
) -> tf.Tensor:
    """Returns the activations of one stack, float32 [samples, width]."""
    return tf.raw_ops.XlaSparseDenseMatmulWithStaticBufferSize(
        **_entries(batch),
        **_minibatches(batch),
        embedding_table=parameters,
        **_lookup_attributes(stack, quantization),
        **_limits(stack),
    )


def look_up_combined(
    stack: PartitionedStack,
    batch: CombinedCsrFormatTensor,
    state: tuple[tf.Tensor, tf.Tensor],
    quantization: QuantizationConfig | None,
    functions: CombinerFunctions,
) -> tuple[tf.Tensor, CombinedCsrFormatTensor]:
    """Returns activations of a CustomCombiner's stack, and the batch for its update."""
    parameters, weights = state
    raw = tf.raw_ops.XlaSparseDenseMatmulCustomCombinerOnTcWithCsrInput
    found: Any = raw(
        **_entries(batch),
        sorted_pos_ids=batch.sorted_pos_ids,
        embedding_table=parameters,
        weights=weights,
        combiner_computation=_in_graph(functions.combine),
        **_lookup_attributes(stack, quantization),
        **_combiner_attributes(functions),
        table_name=stack.name,
    )
    return found.activations, batch._replace(
        valencies=found.preserved_valencies,
        vectors=found.preserved_vectors,
        weights=weights,
    )


def update(
    stack: PartitionedStack,
    optimizer: Optimizer,
    functions: CustomFunctions,
    inputs: Mapping[str, Any],
    state: Sequence[tf.Tensor],
) -> list[tf.Tensor]:
    """Returns the values of a stack after an update, in the order of `state`.

    All replicas must call it for the same update. `state` has the part of the stack on
    this device, the parts of its slots in the order of `Optimizer.slots`, and the
    weights of a CustomCombiner, if there is one.
    """
    inputs = dict(inputs)
    combiner = functions.combiner
    tables = state if combiner is None else state[:-1]
    if functions.optimizer is None:
        rule = _built_in_rule(optimizer, inputs, tables)
    else:
        rule = _custom_rule(functions, inputs, tables)
    if combiner is not None:
        form = f"CustomCombinerOnTcGrad{rule.name}CsrInput"
        extra = {
            "weights": state[-1],
            "combiner_table_vjp_computation": _in_graph(combiner.table_vjp),
            "combiner_weights_vjp_computation": _in_graph(combiner.weights_vjp),
            **_combiner_attributes(combiner),
        }
    elif functions.optimizer is not None:
        form, extra = f"Grad{rule.name}CsrInput", {}
    else:
        form, extra = f"Grad{rule.name}StaticBufferSize", _limits(stack)
    call = getattr(tf.raw_ops, f"XlaSparseDenseMatmul{form}")
    found = call(**{"table_name": stack.name, **inputs, **rule.arguments, **extra})
    return tf.nest.flatten(tuple(found) if isinstance(found, tuple) else found)


def update_inputs(
    batch: Batch,
    gradient: tf.Tensor,
    numbers: UpdateScalars,
    functions: CustomFunctions,
) -> dict[str, tf.Tensor]:
    """Returns the inputs of the update of a stack, by input name of the op."""
    inputs = {
        **_entries(batch),
        "activation_gradients": gradient,
        "learning_rate": numbers.rate,
    }
    if functions.optimizer is not None:
        del inputs["learning_rate"]
        inputs[_HYPERPARAMETERS] = tf.stack([numbers.rate, *numbers.hyperparameters])
    if not isinstance(batch, CombinedCsrFormatTensor):
        return {**inputs, **_minibatches(batch)}
    return {
        **inputs,
        "sorted_pos_ids": batch.sorted_pos_ids,
        "preserved_valencies": batch.valencies,
        "preserved_vectors": batch.vectors,
        "preserved_weights": batch.weights,
        "combiner_weights_learning_rate": numbers.combiner_rate,
    }


def update_input_specs(
    partitioning: Partitioning,
    stack: PartitionedStack,
    width: int,
    functions: CustomFunctions,
) -> dict[str, tf.TensorSpec]:
    """Returns shape and dtype of each of `update_inputs`, for full buffers."""
    ids = stack.samples * partitioning.max_ids_per_chip_per_sample
    pointers = partitioning.num_row_pointers
    specs = {
        "row_pointers": tf.TensorSpec([pointers], tf.int32),
        "sorted_sample_ids": tf.TensorSpec([ids], tf.int32),
        "sorted_token_ids": tf.TensorSpec([ids], tf.int32),
        "sorted_gains": tf.TensorSpec([ids], tf.float32),
        "activation_gradients": tf.TensorSpec([stack.samples, width], tf.float32),
    }
    if functions.optimizer is None:
        specs["learning_rate"] = tf.TensorSpec([], tf.float32)
    else:
        numbers = 1 + len(functions.optimizer.hyperparameters)
        specs[_HYPERPARAMETERS] = tf.TensorSpec([numbers], tf.float32)
    if functions.combiner is None:
        return {**specs, MINIBATCHES: tf.TensorSpec([], tf.int32)}
    config = functions.combiner.config
    vectors = [stack.samples, functions.combiner.max_valency, width]
    return {
        **specs,
        "sorted_pos_ids": tf.TensorSpec([ids], tf.int32),
        "preserved_valencies": tf.TensorSpec([stack.samples], tf.int32),
        "preserved_vectors": tf.TensorSpec(vectors, tf.float32),
        "preserved_weights": tf.TensorSpec([config.num_weights], tf.float32),
        "combiner_weights_learning_rate": tf.TensorSpec([], tf.float32),
    }


class _Rule(NamedTuple):
    """The call of an update rule: its part of the op's name, and its arguments."""

    name: str
    arguments: dict[str, Any]


def _built_in_rule(
    optimizer: Optimizer, inputs: Mapping[str, Any], tables: Sequence[tf.Tensor]
) -> _Rule:
    del inputs  # They contain the learning rate already.
    op = optimizer.sparse_core_op
    assert op is not None
    names = ("embedding_table", *op.slots)
    return _Rule(
        f"With{op.name}And",
        {
            **dict(zip(names, tables, strict=True)),
            **op.attributes(optimizer),
            **_clip_attributes(optimizer),
        },
    )


def _custom_rule(
    functions: CustomFunctions, inputs: dict[str, Any], tables: Sequence[tf.Tensor]
) -> _Rule:
    assert functions.optimizer is not None
    numbers = inputs.pop(_HYPERPARAMETERS)
    attribute = "custom_computation"
    if functions.combiner is not None:
        attribute = "optimizer_custom_computation"
    return _Rule(
        "With",
        {
            "tables": list(tables),
            "hyperparameters": tf.unstack(
                numbers, 1 + len(functions.optimizer.hyperparameters)
            ),
            attribute: _in_graph(functions.rule),
        },
    )


def _in_graph(function: Any) -> Any:
    # A function attribute contains only the name of the function.
    function.add_to_graph(tf.compat.v1.get_default_graph())
    return function


def _entries(batch: Batch) -> dict[str, tf.Tensor]:
    return {
        "row_pointers": batch.row_pointers,
        "sorted_sample_ids": batch.sorted_sample_ids,
        "sorted_token_ids": batch.sorted_token_ids,
        "sorted_gains": batch.sorted_gains,
    }


def _minibatches(batch: Batch) -> dict[str, tf.Tensor]:
    return {MINIBATCHES: batch.num_minibatches_per_physical_sparse_core}


def _lookup_attributes(
    stack: PartitionedStack, quantization: QuantizationConfig | None
) -> dict[str, Any]:
    return {
        "input_size": stack.samples,
        "quantization_config_low": quantization.lower if quantization else 0.0,
        "quantization_config_high": quantization.upper if quantization else 0.0,
        "quantization_config_num_buckets": (
            quantization.num_buckets if quantization else 0
        ),
    }


def _combiner_attributes(combiner: CombinerFunctions) -> dict[str, int]:
    return {
        "max_valency": combiner.max_valency,
        "num_weights": combiner.config.num_weights,
    }


def _limits(stack: PartitionedStack) -> dict[str, Any]:
    return {
        "max_ids_per_sparse_core": stack.max_ids_per_partition,
        "max_unique_ids_per_sparse_core": stack.max_unique_ids_per_partition,
        "table_name": stack.name,
    }


def _clip_attributes(optimizer: Optimizer) -> dict[str, float]:
    limits = {
        "clip_weight_min": optimizer.clip_weight_min,
        "clip_weight_max": optimizer.clip_weight_max,
    }
    return {name: limit for name, limit in limits.items() if limit is not None}


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
