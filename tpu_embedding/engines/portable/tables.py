"""The update of one table, and its rounding, made of TensorFlow's ops."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import tensorflow as tf

from tpu_embedding.engines.rates import UpdateScalars
from tpu_embedding.layout.plan import TableSpec
from tpu_embedding.lookup.combine import sum_segments
from tpu_embedding.lookup.entries import Entries
from tpu_embedding.optimizers.base import ArrayOps, apply_rule
from tpu_embedding.tables.codes import random_bits
from tpu_embedding.tables.variables import TableVariables

# Of the bits of a float32.
_INFINITY = 0x7F800000
_LARGEST = 0x7F7FFFFF
_QUIET = 0x00400000


def row_sums(
    spec: TableSpec, entries: Sequence[Entries], gradients: Sequence[tf.Tensor | None]
) -> tuple[tf.Tensor, tf.Tensor]:
    """Returns the rows that a batch touches, each once, and their summed gradients."""
    parts = []
    for feature in spec.features:
        own, gradient = entries[feature], gradients[feature]
        if gradient is None:
            parts.append(tf.zeros([tf.size(own.rows), spec.config.dim]))
        else:
            of_samples = tf.reshape(gradient, [-1, spec.config.dim])
            gains = own.gains[:, tf.newaxis]
            parts.append(tf.gather(of_samples, own.samples) * gains)
    rows = tf.concat([entries[f].rows for f in spec.features], 0)
    unique = tf.unique(rows, out_idx=tf.int64)
    size = tf.size(unique.y)
    sums = sum_segments(tf.concat(parts, 0), unique.idx, size)
    return unique.y, sums


def update_table(
    spec: TableSpec,
    variables: TableVariables,
    numbers: UpdateScalars,
    number: tf.Tensor,
    rows: tf.Tensor,
    gradient: tf.Tensor,
) -> None:
    """Applies one update, the n-th for `number` n, to a table and its slots."""
    assert spec.optimizer is not None
    optimizer = spec.optimizer.with_hyperparameters(numbers.hyperparameters)
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
        row = round_rows(row, rows, spec.rounding_seed, number)
    for variable, value in zip(state, (row, *slots), strict=True):
        if optimizer.touches_all_rows:
            variable.assign(value)
        else:
            variable.scatter_update(tf.IndexedSlices(value, rows))


class _TensorFlowOps:
    """The `ArrayOps` of TensorFlow."""

    sqrt = staticmethod(tf.sqrt)
    pow = staticmethod(tf.pow)
    abs = staticmethod(tf.abs)
    sign = staticmethod(tf.sign)
    where = staticmethod(tf.where)
    maximum = staticmethod(tf.maximum)
    minimum = staticmethod(tf.minimum)

    mean_last = staticmethod(functools.partial(tf.reduce_mean, axis=-1, keepdims=True))

    @staticmethod
    def map_rows(function: Callable[..., Any], arrays: Sequence[Any]) -> Sequence[Any]:
        """Applies `function` to the first, second, ... row of all arrays."""
        return tf.vectorized_map(lambda rows: function(*rows), tuple(arrays))


TENSORFLOW_OPS: ArrayOps = _TensorFlowOps()


def round_rows(
    values: tf.Tensor, rows: tf.Tensor, seed: int, number: tf.Tensor
) -> tf.Tensor:
    """Rounds each value to one of the two nearest bfloat16 (docs/semantics.md).

    The bits equal those of ops/cc/core/bfloat16.h. Values are float32 [n, D], and rows
    of the table int64 [n]. `number` is the number of updates before this one.
    """
    bits = tf.cast(tf.bitcast(values, tf.uint32), tf.int64)
    size = bits & 0x7FFFFFFF
    dim = values.shape[-1]
    assert dim is not None  # A table's own.
    random = random_bits(rows, dim, seed, number)
    finite = tf.minimum(size + random, _LARGEST)
    other = tf.where(size == _INFINITY, size, size | _QUIET)
    rounded = tf.where(size < _INFINITY, finite, other) | (bits & 0x80000000)
    halves = tf.cast(tf.bitwise.right_shift(rounded, 16), tf.uint16)
    return tf.bitcast(halves, tf.bfloat16)
