"""The update of one table in stock ops."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import tensorflow as tf

from tpu_embedding.engines.array_ops import TENSORFLOW_OPS
from tpu_embedding.engines.portable.rounding import Rounding, round_rows
from tpu_embedding.engines.rates import TableNumbers
from tpu_embedding.engines.variables import TableVariables
from tpu_embedding.lookup.entries import Entries
from tpu_embedding.optimizers import Optimizer
from tpu_embedding.optimizers.base import apply_rule


@dataclasses.dataclass(frozen=True)
class TableStep:
    """How one update changes a table.

    Attributes:
      optimizer: The table's own.
      numbers: The learning rate, and those of a rule of the user's.
      rounding: How rows that are stored as bfloat16 are rounded.
    """

    optimizer: Optimizer
    numbers: TableNumbers
    rounding: Rounding


def entry_gradients(gradient: tf.Tensor, entries: Entries, dim: int) -> tf.Tensor:
    """float32 [n, dim], what each entry adds to the gradient of its row.

    Args:
      gradient: float32 [*entries.shape, dim], of the activation.
      entries: What was looked up.
      dim: D.
    """
    of_samples = tf.reshape(gradient, [-1, dim])
    of_entries = tf.gather(of_samples, entries.samples)
    return of_entries * entries.gains[:, tf.newaxis]


def sum_by_row(rows: tf.Tensor, values: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
    """The sums of the values of each row.

    Args:
      rows: int64 [n].
      values: float32 [n, D].

    Returns:
      (rows [u], each once; sums [u, D]).
    """
    unique = tf.unique(rows, out_idx=tf.int64)
    return unique.y, tf.math.unsorted_segment_sum(values, unique.idx, tf.size(unique.y))


def merge(
    replicas: Sequence[tuple[tf.Tensor, tf.Tensor]],
) -> tuple[tf.Tensor, tf.Tensor]:
    """The rows and sums of all replicas as one, summed in replica order."""
    if len(replicas) == 1:
        return replicas[0]
    rows, sums = zip(*replicas, strict=True)
    return sum_by_row(tf.concat(rows, 0), tf.concat(sums, 0))


def update(
    variables: TableVariables,
    step: TableStep,
    rows: tf.Tensor,
    gradient: tf.Tensor,
) -> None:
    """Applies one update to a table and its slots.

    Args:
      variables: The table and its slots.
      step: How.
      rows: int64 [n], each once.
      gradient: float32 [n, D], summed.
    """
    numbers = step.numbers
    optimizer = step.optimizer.with_hyperparameters(numbers.hyperparameters)
    state = [variables.parameters, *variables.slots.values()]
    if optimizer.touches_all_rows:
        gradient = tf.math.unsorted_segment_sum(
            gradient, rows, variables.parameters.shape[0]
        )
        rows = tf.range(tf.shape(gradient, tf.int64)[0])
        stored, *slots = [tf.convert_to_tensor(variable) for variable in state]
    else:
        stored, *slots = [tf.gather(variable, rows) for variable in state]
    row = tf.cast(stored, tf.float32)
    row, *slots = apply_rule(
        optimizer, TENSORFLOW_OPS, gradient, row, slots, numbers.rate
    )
    if stored.dtype != tf.float32:
        row = round_rows(row, rows, step.rounding)
    for variable, value in zip(state, (row, *slots), strict=True):
        if optimizer.touches_all_rows:
            variable.assign(value)
        else:
            variable.scatter_update(tf.IndexedSlices(value, rows))
