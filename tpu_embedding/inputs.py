"""Reads the ids of one feature: a dense, sparse or ragged tensor.

No other module checks the class of an input.
"""

from __future__ import annotations

import dataclasses
import enum
from collections.abc import Sequence
from typing import Any

import tensorflow as tf

from tpu_embedding import errors, hashing


class InputKind(enum.Enum):
    """The layout of a feature's ids. The ops take the enum's values as attributes."""

    DENSE = "dense"
    SPARSE = "sparse"
    RAGGED = "ragged"


@dataclasses.dataclass(frozen=True)
class IdBatch:
    """The ids of one feature for one replica.

    Attributes:
      kind: The layout of the fields below.
      ids: int32 or int64; the dense tensor itself, or the values [n].
      structure: The indices [n, rank] or row_splits, int64; None for dense input.
      static_shape: The input's shape as far as it is known while tracing.
      dense_shape: The shape of sparse input, int64 [rank]; None for other input.
      weights: float32, laid out as `ids`, or None if all weights are 1.
      weight_structure: The weights' own `structure`, or None if it is that of the ids.
    """

    kind: InputKind
    ids: tf.Tensor
    structure: Any  # tf.Tensor | None: readers know the kind.
    static_shape: tf.TensorShape
    dense_shape: tf.Tensor | None = None
    weights: tf.Tensor | None = None
    weight_structure: tf.Tensor | None = None

    @property
    def shape(self) -> tf.Tensor:
        """The input's shape, int64 [rank]; for ragged input [number of rows]."""
        if self.dense_shape is not None:
            return self.dense_shape
        if self.structure is None:
            return tf.shape(self.ids, out_type=tf.int64)
        return tf.shape(self.structure, out_type=tf.int64) - 1


def op_inputs(batches: Sequence[IdBatch]) -> list[tf.Tensor]:
    """Returns the inputs of an op that takes raw features; see kernels/prepare.cc.

    It leaves out what the op does not need, as the cost of an op grows with its inputs.
    """
    tensors: list[Any] = []
    for batch in batches:
        tensors += [batch.ids, batch.structure, batch.dense_shape]
        tensors += [batch.weights, batch.weight_structure]
    return [tensor for tensor in tensors if tensor is not None]


_CLASSES: dict[InputKind, type] = {
    InputKind.DENSE: tf.Tensor,
    InputKind.SPARSE: tf.SparseTensor,
    InputKind.RAGGED: tf.RaggedTensor,
}


def to_id_batch(
    path: str, value: Any, weights: Any = None, *, string_ids: bool = False
) -> IdBatch:
    """Reads one feature and its weights.

    Args:
      path: The feature's place in the structure, for messages.
      value: A tf.Tensor of rank >= 1, a tf.SparseTensor of rank >= 2 or a
        tf.RaggedTensor of rank 2, of dtype int32, int64 or floating point. Floating
        point ids must be whole numbers that fit int64; a graph checks it when it runs.
      weights: None, or weights in the class and layout of `value`, floating point.
      string_ids: Whether the dtype string is allowed, too.
    """
    kind = kind_of(value)
    if kind is None:
        raise errors.feature_kind(path, value)
    strings = value.dtype == tf.string
    if strings and not string_ids:
        raise errors.string_ids(path)
    integers = strings or value.dtype in (tf.int32, tf.int64)
    if not integers and not value.dtype.is_floating:
        raise TypeError(
            f"The ids of feature {path} must be int32, int64 or floating point. "
            f"Received: {value.dtype.name}. Convert them with tf.cast."
        )
    batch = _READERS[kind](path, value)
    if value.dtype.is_floating:
        batch = dataclasses.replace(batch, ids=_whole_numbers(path, batch))
    if strings:
        batch = dataclasses.replace(batch, ids=hashing.ids_of_strings(batch.ids))
    if weights is None:
        return batch
    if kind_of(weights) is not kind:
        raise errors.weights_kind(path, f"tf.{_CLASSES[kind].__name__}", weights)
    if not weights.dtype.is_floating:
        raise errors.weights_dtype(path, weights.dtype.name)
    return _with_weights(batch, path, value, weights)


def _whole_numbers(path: str, batch: IdBatch) -> tf.Tensor:
    """Returns floating point ids as int64 after a check that all are whole numbers."""
    values = tf.cast(batch.ids, tf.float64)  # Exact for every floating point dtype.
    limit = 2.0**63
    fits = (values >= -limit) & (values < limit)  # False for a NaN.
    valid = fits & tf.equal(values, tf.floor(values))

    def message() -> tf.Tensor:
        entry = tf.where(tf.reshape(~valid, [-1]))[0, 0]
        words = [
            f"Feature {path}: sample ",
            tf.strings.as_string(_sample_of(batch, entry)),
            " has id ",
            tf.strings.as_string(tf.reshape(values, [-1])[entry], shortest=True),
            ", but a floating point id must be a whole number that fits int64. Round "
            "the ids, or pass integers.",
        ]
        return tf.strings.join(words)

    if tf.executing_eagerly():
        if not tf.reduce_all(valid):
            text = tf.compat.as_str(message().numpy())
            raise tf.errors.InvalidArgumentError(None, None, text)
        checked: list[Any] = []
    else:
        checked = [
            tf.cond(
                tf.reduce_all(valid),
                tf.no_op,
                lambda: tf.debugging.Assert(False, [message()]),
            )
        ]
    with tf.control_dependencies(checked):
        return tf.cast(values, tf.int64)


def _sample_of(batch: IdBatch, entry: tf.Tensor) -> tf.Tensor:
    """Returns one entry's row: its index without the last axis, in row-major order."""
    if batch.kind is InputKind.RAGGED:
        return tf.searchsorted(batch.structure, entry[tf.newaxis], side="right")[0] - 1
    if batch.kind is InputKind.DENSE:
        return entry if batch.ids.shape.rank == 1 else entry // batch.shape[-1]
    # The strides of the axes in row-major order.
    places = tf.math.cumprod(batch.shape[:-1], exclusive=True, reverse=True)
    return tf.reduce_sum(batch.structure[entry][:-1] * places)


def kind_of(value: Any) -> InputKind | None:
    """Returns the layout of the ids in a value, or None if it is not a tensor."""
    kinds = (kind for kind, of in _CLASSES.items() if isinstance(value, of))
    return next(kinds, None)


def _read_dense(path: str, value: tf.Tensor) -> IdBatch:
    if value.shape.rank is None or value.shape.rank < 1:
        raise errors.input_rank(path, "dense", value.shape.rank, ">= 1 and known")
    return IdBatch(
        kind=InputKind.DENSE, ids=value, structure=None, static_shape=value.shape
    )


def _read_sparse(path: str, value: tf.SparseTensor) -> IdBatch:
    if value.shape.rank is None or value.shape.rank < 2:
        raise errors.input_rank(path, "sparse", value.shape.rank, ">= 2 and known")
    return IdBatch(
        kind=InputKind.SPARSE,
        ids=value.values,
        structure=value.indices,
        static_shape=value.shape,
        dense_shape=value.dense_shape,
    )


def _read_ragged(path: str, value: tf.RaggedTensor) -> IdBatch:
    if value.ragged_rank != 1 or value.flat_values.shape.rank != 1:
        raise errors.input_rank(path, "ragged", value.shape.rank, "2")
    return IdBatch(
        kind=InputKind.RAGGED,
        ids=value.values,
        structure=tf.cast(value.row_splits, tf.int64),
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
        batch, weights=tf.cast(own.ids, tf.float32), weight_structure=structure
    )
