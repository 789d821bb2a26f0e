"""One feature as it comes in: a tensor of ids, of any of the three kinds.

This is the only place that asks of what class an input is.
"""

from __future__ import annotations

import dataclasses
import enum
from typing import Any

import tensorflow as tf

from tpu_embedding import errors


class InputKind(enum.Enum):
    """How the ids of a feature are laid out. The values are the ops' own words."""

    DENSE = "dense"
    SPARSE = "sparse"
    RAGGED = "ragged"


@dataclasses.dataclass(frozen=True)
class IdBatch:
    """The ids of one feature for one replica.

    Attributes:
      kind: What the fields below mean.
      ids: int32 or int64; the dense tensor itself, else the values [n].
      structure: int64; sparse: indices [n, rank]; ragged: row_splits; dense: [0].
      shape: int64 [rank], the input's shape; for ragged input [number of rows].
      static_shape: What is known of the input's shape while tracing.
      weights: float32, laid out as `ids`, or None where all weights are 1.
      weight_structure: As `structure`, where the weights brought their own.
    """

    kind: InputKind
    ids: tf.Tensor
    structure: tf.Tensor
    shape: tf.Tensor
    static_shape: tf.TensorShape
    weights: tf.Tensor | None = None
    weight_structure: tf.Tensor | None = None


_CLASSES: dict[InputKind, type] = {
    InputKind.DENSE: tf.Tensor,
    InputKind.SPARSE: tf.SparseTensor,
    InputKind.RAGGED: tf.RaggedTensor,
}


def to_id_batch(path: str, value: Any, weights: Any = None) -> IdBatch:
    """Reads one feature and its weights.

    Args:
      path: The feature's place in the structure, for messages.
      value: A tf.Tensor of rank >= 1, a tf.SparseTensor of rank >= 2 or a
        tf.RaggedTensor of rank 2, of dtype int32 or int64.
      weights: None, or of the same class and layout, of a floating point dtype.

    Raises:
      ValueError: If the class or rank of either is not allowed.
      TypeError: If the dtype of either is not allowed.
    """
    kind = kind_of(value)
    if kind is None:
        raise errors.feature_kind(path, value)
    if value.dtype not in (tf.int32, tf.int64):
        raise errors.ids_dtype(path, value.dtype.name)
    batch = _READERS[kind](path, value)
    if weights is None:
        return batch
    if kind_of(weights) is not kind:
        raise errors.weights_kind(path, f"tf.{_CLASSES[kind].__name__}", weights)
    if not weights.dtype.is_floating:
        raise errors.weights_dtype(path, weights.dtype.name)
    return _with_weights(batch, path, value, weights)


def kind_of(value: Any) -> InputKind | None:
    """How the ids in a value are laid out, or None if it is no tensor."""
    kinds = (kind for kind, of in _CLASSES.items() if isinstance(value, of))
    return next(kinds, None)


def _read_dense(path: str, value: tf.Tensor) -> IdBatch:
    if value.shape.rank is None or value.shape.rank < 1:
        raise errors.input_rank(path, "dense", value.shape.rank, ">= 1 and known")
    return IdBatch(
        kind=InputKind.DENSE,
        ids=value,
        structure=tf.constant([], tf.int64),
        shape=tf.shape(value, out_type=tf.int64),
        static_shape=value.shape,
    )


def _read_sparse(path: str, value: tf.SparseTensor) -> IdBatch:
    if value.shape.rank is None or value.shape.rank < 2:
        raise errors.input_rank(path, "sparse", value.shape.rank, ">= 2 and known")
    return IdBatch(
        kind=InputKind.SPARSE,
        ids=value.values,
        structure=value.indices,
        shape=value.dense_shape,
        static_shape=value.shape,
    )


def _read_ragged(path: str, value: tf.RaggedTensor) -> IdBatch:
    if value.ragged_rank != 1 or value.flat_values.shape.rank != 1:
        raise errors.input_rank(path, "ragged", value.shape.rank, "2")
    splits = tf.cast(value.row_splits, tf.int64)
    return IdBatch(
        kind=InputKind.RAGGED,
        ids=value.values,
        structure=splits,
        shape=tf.shape(splits, out_type=tf.int64) - 1,
        static_shape=value.shape,
    )


_READERS = {
    InputKind.DENSE: _read_dense,
    InputKind.SPARSE: _read_sparse,
    InputKind.RAGGED: _read_ragged,
}


def _with_weights(batch: IdBatch, path: str, value: Any, weights: Any) -> IdBatch:
    own = _READERS[batch.kind](path, weights)
    if not batch.static_shape.is_compatible_with(own.static_shape):
        raise errors.weights_shape(path, batch.static_shape, own.static_shape)
    if batch.kind is InputKind.DENSE:
        structure = None
    elif batch.kind is InputKind.SPARSE:
        structure = None if value.indices is weights.indices else own.structure
    else:
        same = value.row_splits is weights.row_splits
        structure = None if same else own.structure
    return dataclasses.replace(
        batch,
        weights=tf.cast(own.ids, tf.float32),
        weight_structure=structure,
    )
