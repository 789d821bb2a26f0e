"""The user's own functions, traced once before anything is made or changed."""

from __future__ import annotations

from typing import Any

import tensorflow as tf

from tpu_embedding.combiners import CustomCombiner
from tpu_embedding.engines import table_errors
from tpu_embedding.layout.plan import Plan
from tpu_embedding.optimizers import CustomOptimizer


def check_functions(plan: Plan) -> None:
    """Traces each CustomOptimizer and CustomCombiner for its table.

    Raises:
      ValueError: If a function returns another shape, or number of tensors.
      TypeError: If it takes other arguments, or returns what is no float32 tensor.
    """
    for table in plan.tables:
        optimizer, combiner = table.optimizer, table.config.custom_combiner
        if isinstance(optimizer, CustomOptimizer):
            _check_rule(table.name, optimizer, table.config.dim)
        if combiner is not None:
            _check_combiner(table.name, combiner, table.config.dim)


def _check_rule(table: str, optimizer: CustomOptimizer, dim: int) -> None:
    row = tf.TensorSpec([1, dim])
    slots = [tf.TensorSpec([1]) if slot.per_row else row for slot in optimizer.slots]
    numbers = [tf.TensorSpec([])] * (1 + len(optimizer.hyperparameters))

    def rule(gradient: Any, row: Any, *values: Any) -> Any:
        own, numbers = values[: len(slots)], values[len(slots) :]
        return optimizer.compute(gradient, row, own, *numbers, table=table)

    _trace(table, "CustomOptimizer", rule, [row, row, *slots, *numbers])


def _check_combiner(table: str, combiner: CustomCombiner, dim: int) -> None:
    weights = [tf.TensorSpec([combiner.num_weights])] if combiner.num_weights else []

    def combine(valency: Any, vectors: Any, *weights: Any) -> Any:
        return combiner.compute(valency, vectors, *weights, table=table)

    vectors = tf.TensorSpec([combiner.max_valency, dim])
    inputs = [tf.TensorSpec([], tf.int32), vectors, *weights]
    _trace(table, "CustomCombiner", combine, inputs)


def _trace(table: str, what: str, function: Any, inputs: list[tf.TensorSpec]) -> None:
    with table_errors.function_of(table, what):
        tf.function(function, autograph=False).get_concrete_function(*inputs)
