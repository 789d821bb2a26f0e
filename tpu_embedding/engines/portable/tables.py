"""The update of one table in stock ops."""

from __future__ import annotations

import tensorflow as tf

from tpu_embedding.engines.array_ops import TENSORFLOW_OPS
from tpu_embedding.engines.variables import TableVariables
from tpu_embedding.lookup.entries import Entries
from tpu_embedding.optimizers import Optimizer
from tpu_embedding.optimizers.base import apply_rule


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


def update(
    variables: TableVariables,
    optimizer: Optimizer,
    rows: tf.Tensor,
    gradient: tf.Tensor,
    rate: tf.Tensor,
) -> None:
    """Applies one update to a table and its slots.

    Args:
      variables: The table and its slots.
      optimizer: The table's own.
      rows: int64 [n], each once.
      gradient: float32 [n, D], summed.
      rate: float32 scalar, the learning rate.
    """
    state = [variables.parameters, *variables.slots.values()]
    if optimizer.touches_all_rows:
        table, *slots = state
        whole = tf.math.unsorted_segment_sum(gradient, rows, table.shape[0])
        updated = apply_rule(optimizer, TENSORFLOW_OPS, whole, table, slots, rate)
        for variable, value in zip(state, updated, strict=True):
            variable.assign(value)
    else:
        row, *slots = [tf.gather(variable, rows) for variable in state]
        updated = apply_rule(optimizer, TENSORFLOW_OPS, gradient, row, slots, rate)
        for variable, value in zip(state, updated, strict=True):
            variable.scatter_update(tf.IndexedSlices(value, rows))
