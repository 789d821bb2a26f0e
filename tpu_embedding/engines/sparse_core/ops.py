"""Calls of TensorFlow's SparseCore ops; each optimizer names its op as data."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import tensorflow as tf

from tpu_embedding.config import QuantizationConfig
from tpu_embedding.engines.rates import UpdateScalars
from tpu_embedding.engines.sparse_core.custom import CombinerFunctions, CustomFunctions
from tpu_embedding.layout.csr import (
    CombinedCsrFormatTensor,
    PartitionedCsrFormatTensor,
    PartitionedTable,
    Partitioning,
)
from tpu_embedding.layout.plan import Plan
from tpu_embedding.optimizers.base import Optimizer

Batch = PartitionedCsrFormatTensor | CombinedCsrFormatTensor
MINIBATCHES = "num_minibatches_per_physical_sparse_core"
# The scalars of a custom rule, in one tensor; the op takes them one by one.
_HYPERPARAMETERS = "hyperparameters"


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
    table: PartitionedTable,
    batch: Batch,
    parameters: tf.Tensor,
    quantization: QuantizationConfig | None,
) -> tf.Tensor:
    """Returns the activations of one stack, float32 [samples, width]."""
    return tf.raw_ops.XlaSparseDenseMatmulWithStaticBufferSize(
        **_entries(batch),
        **_minibatches(batch),
        embedding_table=parameters,
        **_lookup_attributes(table, quantization),
        **_limits(table),
    )


def look_up_combined(
    table: PartitionedTable,
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
        **_lookup_attributes(table, quantization),
        **_combiner_attributes(functions),
        table_name=table.name,
    )
    return found.activations, batch._replace(
        valencies=found.preserved_valencies,
        vectors=found.preserved_vectors,
        weights=weights,
    )


def update(
    table: PartitionedTable,
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
        form, extra = f"Grad{rule.name}StaticBufferSize", _limits(table)
    call = getattr(tf.raw_ops, f"XlaSparseDenseMatmul{form}")
    found = call(**{"table_name": table.name, **inputs, **rule.arguments, **extra})
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
    table: PartitionedTable,
    width: int,
    functions: CustomFunctions,
) -> dict[str, tf.TensorSpec]:
    """Returns shape and dtype of each of `update_inputs`, for full buffers."""
    ids = table.samples * partitioning.max_ids_per_chip_per_sample
    pointers = partitioning.num_row_pointers
    specs = {
        "row_pointers": tf.TensorSpec([pointers], tf.int32),
        "sorted_sample_ids": tf.TensorSpec([ids], tf.int32),
        "sorted_token_ids": tf.TensorSpec([ids], tf.int32),
        "sorted_gains": tf.TensorSpec([ids], tf.float32),
        "activation_gradients": tf.TensorSpec([table.samples, width], tf.float32),
    }
    if functions.optimizer is None:
        specs["learning_rate"] = tf.TensorSpec([], tf.float32)
    else:
        numbers = 1 + len(functions.optimizer.hyperparameters)
        specs[_HYPERPARAMETERS] = tf.TensorSpec([numbers], tf.float32)
    if functions.combiner is None:
        return {**specs, MINIBATCHES: tf.TensorSpec([], tf.int32)}
    config = functions.combiner.config
    vectors = [table.samples, functions.combiner.max_valency, width]
    return {
        **specs,
        "sorted_pos_ids": tf.TensorSpec([ids], tf.int32),
        "preserved_valencies": tf.TensorSpec([table.samples], tf.int32),
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
    table: PartitionedTable, quantization: QuantizationConfig | None
) -> dict[str, Any]:
    return {
        "input_size": table.samples,
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


def _limits(table: PartitionedTable) -> dict[str, Any]:
    return {
        "max_ids_per_sparse_core": table.max_ids_per_partition,
        "max_unique_ids_per_sparse_core": table.max_unique_ids_per_partition,
        "table_name": table.name,
    }


def _clip_attributes(optimizer: Optimizer) -> dict[str, float]:
    limits = {
        "clip_weight_min": optimizer.clip_weight_min,
        "clip_weight_max": optimizer.clip_weight_max,
    }
    return {name: limit for name, limit in limits.items() if limit is not None}
