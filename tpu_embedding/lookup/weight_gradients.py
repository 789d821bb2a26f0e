"""Finds which gradients of the weights of ids are wanted, and computes them."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import tensorflow as tf
from tensorflow.python.eager import record

from tpu_embedding.hashing import ids_of_strings
from tpu_embedding.layout.plan import Plan
from tpu_embedding.lookup.features import FeatureLookup
from tpu_embedding.tables.readers import TableReader, VariableReader


def is_watched(value: Any) -> bool:
    """Returns whether a tf.GradientTape watches a tensor, sparse or ragged tensors too.

    In a tf.function it knows the tapes that are opened there, and which variables that
    are read there other tapes watch. TensorFlow has no public function for this.
    """
    leaves = tf.nest.flatten(value, expand_composites=True)
    floats = [x for x in leaves if isinstance(x, tf.Tensor) and x.dtype.is_floating]
    return bool(floats) and record.should_record_backprop(floats)


def watched(weights: Sequence[Any]) -> list[int]:
    """Returns the features whose weights a tape watches."""
    return [i for i, w in enumerate(weights) if w is not None and is_watched(w)]


def with_weight_gradients(
    activations: Sequence[tf.Tensor],
    features: Sequence[int],
    lookup: tuple[Plan, Mapping[int, TableReader]],
    values: Sequence[Any],
    weights: Sequence[Any],
) -> list[tf.Tensor]:
    """Makes the activations' gradient also reach the weights of `features`.

    The gradients come from a second lookup of these features by TensorFlow's ops. It
    reads the rows now, so later updates do not change the gradients. `lookup` is the
    plan, and the reader of each table by index.
    """
    plan, readers = lookup
    specs = [plan.features[i] for i in features]
    found = FeatureLookup(plan, readers)(
        specs, [values[i] for i in features], [weights[i] for i in features]
    )
    results = list(activations)
    for i, of_weights in zip(features, found, strict=True):
        results[i] = _join(results[i], of_weights)
    return results


Lookup = tuple[Plan, Mapping[int, TableReader]]


def with_rows_of_ids(
    features: Sequence[int],
    lookup: Lookup,
    values: Sequence[Any],
    reads: Mapping[int, Callable[[tf.Tensor], tf.Tensor]],
) -> tuple[Lookup, list[Any]]:
    """Returns the arguments of `with_weight_gradients`, without growing tables.

    Static tables replace them, whose rows are those of a batch's ids, in order.

    Args:
      features: Indices of the features.
      lookup: As for `with_weight_gradients`.
      values: As for `with_weight_gradients`.
      reads: For each growing table by index, a function that reads ids, int64 [n].
    """
    plan, readers = lookup
    tables, found, own = list(plan.tables), dict(readers), list(values)
    for table, read in reads.items():
        batch = [i for i in features if plan.features[i].table == table]
        if not batch:
            continue
        ids = [_flat_ids(values[i]) for i in batch]
        found[table] = VariableReader(read(tf.concat(ids, 0)))
        config = dataclasses.replace(
            plan.tables[table].config, vocabulary_size=2**31 - 1, string_ids=False
        )
        tables[table] = dataclasses.replace(plan.tables[table], config=config)
        first = tf.constant(0, tf.int64)
        for i, flat in zip(batch, ids, strict=True):
            own[i] = _with_flat_ids(
                values[i], first + tf.range(tf.size(flat, tf.int64))
            )
            first += tf.size(flat, tf.int64)
    return (Plan(tuple(tables), plan.features), found), own


def _flat_ids(value: Any) -> tf.Tensor:
    values = tf.convert_to_tensor(getattr(value, "values", value))
    if values.dtype == tf.string:
        values = ids_of_strings(values)
    return tf.reshape(tf.cast(values, tf.int64), [-1])


def _with_flat_ids(value: Any, ids: tf.Tensor) -> Any:
    if isinstance(value, tf.SparseTensor):
        return tf.SparseTensor(value.indices, ids, value.dense_shape)
    if isinstance(value, tf.RaggedTensor):
        return value.with_values(ids)
    return tf.reshape(ids, tf.shape(value))


@tf.custom_gradient
def _join(activation: tf.Tensor, of_weights: tf.Tensor) -> Any:
    """Returns the activation; both arguments get its gradient."""
    shape = tf.shape(of_weights)

    def gradient(upstream: tf.Tensor) -> Any:
        return upstream, tf.reshape(upstream, shape)

    return tf.identity(activation), gradient
