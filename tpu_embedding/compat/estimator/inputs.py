"""Converts the features of a TPUEstimator's batch by the rules of TensorFlow 1.

A dense id of 0 means no entry (unless the table has no combiner), sequences are
truncated and padded, and ids and weights are removed from the features. The lookup
itself follows docs/semantics.md.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import tensorflow as tf

from tpu_embedding import errors
from tpu_embedding.compat.interop.columns import SEQUENCE_LENGTH_SUFFIX, FeatureConfig
from tpu_embedding.lookup.graph_checks import Check, first, require, text
from tpu_embedding.lookup.input_rows import MAX_ROWS_PER_ID, MAX_UNBACKED_ROWS


@dataclasses.dataclass(frozen=True)
class EmbeddingInputs:
    """One batch, ready to be looked up.

    Attributes:
      ids: A SparseTensor [rows, n], or a Tensor [rows], for each feature. The rows of a
        sequence are its positions, sample after sample.
      weights: A SparseTensor of the same layout, or None, for each feature.
      others: The features that are left, and the lengths of sequences.
    """

    ids: dict[str, Any]
    weights: dict[str, Any]
    others: dict[str, Any]

    def naming_row_0(self, features: Sequence[str]) -> EmbeddingInputs:
        """Returns the inputs with (id 0, weight 0) in each empty sample of `features`.

        safe_embedding_lookup_sparse does the same, and so do the columns on a CPU. The
        entry adds nothing to an activation or gradient, but row 0 counts as touched:
        FTRL and Adam then change it, as in the reference runs.
        """
        ids, weights = dict(self.ids), dict(self.weights)
        for key in features:
            if isinstance(ids[key], tf.SparseTensor):
                ids[key], weights[key] = _filled(ids[key], weights[key])
        return EmbeddingInputs(ids, weights, self.others)


def split_inputs(
    features: Mapping[str, Any],
    configs: Mapping[str, FeatureConfig],
    combiners: Mapping[str, str | None],
) -> EmbeddingInputs:
    """Takes the ids and weights of embeddings out of a batch's features."""
    if not isinstance(features, Mapping):
        raise errors.argument_type("features", features, "a dict")
    others = dict(features)
    ids: dict[str, Any] = {}
    weights: dict[str, Any] = {}
    for key in sorted(configs):
        config = configs[key]
        if key not in others:
            raise ValueError(
                f"Feature {key!r} of the EmbeddingConfigSpec is not among the "
                f"features of the input_fn: {errors.quoted(sorted(others))}."
            )
        value = _ids(key, others.pop(key), config, combiners[config.table_id])
        weight = None
        if config.weight_key is not None:
            weight = _weights(key, config.weight_key, others, value)
        length = config.max_sequence_length
        if length:
            others[key + SEQUENCE_LENGTH_SUFFIX] = _lengths(value, length)
            positions = _Positions(key, value, length)
            value = positions.of(value)
            weight = None if weight is None else positions.of(weight)
        ids[key], weights[key] = value, weight
    return EmbeddingInputs(ids, weights, others)


def _ids(key: str, value: Any, config: FeatureConfig, combiner: str | None) -> Any:
    if isinstance(value, tf.RaggedTensor):
        raise ValueError(
            f"Feature {key!r} is a RaggedTensor, which feature columns do not take. "
            "Convert it with `.to_sparse()` in the input_fn."
        )
    if value.dtype == tf.string:
        raise ValueError(
            f"Feature {key!r} holds strings. A TPU takes integer ids only, so "
            "vocabularies have to be looked up in the input_fn."
        )
    flat = not config.max_sequence_length
    if flat and value.shape.rank is not None and value.shape.rank > 2:
        raise ValueError(
            f"Feature {key!r}: ids must be of shape [batch] or [batch, n]. Received "
            f"shape {value.shape}. Only sequence columns take ids of rank 3."
        )
    if isinstance(value, tf.SparseTensor):
        return _checked(key, value)
    value = tf.convert_to_tensor(value)
    if combiner is None and flat:
        if value.shape.rank != 1 and value.shape[-1] != 1:
            raise ValueError(
                f"Feature {key!r}: a table without combiner takes one id for each "
                f"sample, of shape [batch] or [batch, 1]. Received shape {value.shape}"
                "."
            )
        return tf.reshape(value, [-1])
    if value.shape.rank == 1:
        value = value[:, tf.newaxis]
    return tf.sparse.from_dense(value)  # Without the zeros.


def _weights(key: str, weight_key: str, others: dict[str, Any], ids: Any) -> Any:
    if weight_key not in others:
        raise ValueError(
            f"Cannot find the weights {weight_key!r} of feature {key!r} among the "
            "features. Each weighted feature needs a weight feature of its own."
        )
    weights = others.pop(weight_key)
    if not isinstance(weights, tf.SparseTensor) or not isinstance(ids, tf.SparseTensor):
        raise ValueError(
            f"Feature {key!r} and its weights {weight_key!r} must both be "
            "SparseTensors on a TPU. Convert dense ones in the input_fn."
        )
    return tf.cast(_checked(weight_key, weights), tf.float32)


def _checked(key: str, sparse: tf.SparseTensor) -> tf.SparseTensor:
    """Returns `sparse`, to be read after a check of its shape and indices.

    A shape of many rows without entries would take memory here before a lookup can
    refuse it, and an index outside of the shape would name another sample.
    """
    indices, shape = sparse.indices, sparse.dense_shape
    num_entries = tf.size(sparse.values, tf.int64)
    most = tf.maximum(MAX_ROWS_PER_ID * num_entries, MAX_UNBACKED_ROWS)
    outside = tf.reduce_any((indices < 0) | (indices >= shape), axis=1)

    def of_shape(*words: Any) -> tf.Tensor:
        axes = tf.strings.reduce_join(tf.strings.as_string(shape), separator=", ")
        return text(f"Feature {key}: ", *words, " the dense_shape [", axes, "].")

    checks = [
        Check(
            tf.reduce_all(shape >= 0) & (shape[0] <= most),
            lambda: of_shape("there are ", num_entries, " sparse entries, too few for"),
        ),
        Check(
            ~tf.reduce_any(outside),
            lambda: of_shape("sparse entry ", first(outside), " is outside of"),
        ),
    ]
    with tf.control_dependencies(require(checks)):
        return tf.SparseTensor(
            tf.identity(indices), tf.identity(sparse.values), tf.identity(shape)
        )


def _filled(
    ids: tf.SparseTensor, weights: tf.SparseTensor | None
) -> tuple[tf.SparseTensor, tf.SparseTensor]:
    """Returns ids and weights with the entry (id 0, weight 0) in each empty row."""
    # Room for the entry; by axis, so that TensorFlow still knows the batch size.
    rows, columns = tf.unstack(ids.dense_shape, num=2)
    shape = tf.stack([rows, tf.maximum(columns, 1)])
    values = tf.ones_like(ids.values, tf.float32) if weights is None else weights.values
    indices = ids.indices if weights is None else weights.indices
    ids = tf.SparseTensor(ids.indices, ids.values, shape)
    weights = tf.SparseTensor(indices, values, shape)
    zero = tf.zeros([], ids.dtype)
    return (
        tf.sparse.fill_empty_rows(ids, zero)[0],
        tf.sparse.fill_empty_rows(weights, 0.0)[0],
    )


def _lengths(ids: tf.SparseTensor, max_length: int) -> tf.Tensor:
    """Returns int64 [B], each sample's last position that has an entry, plus 1."""
    ends = tf.math.unsorted_segment_max(
        ids.indices[:, 1] + 1, ids.indices[:, 0], ids.dense_shape[0]
    )
    return tf.clip_by_value(ends, 0, max_length)  # No entry: the lowest int64.


class _Positions:
    """Converts the positions of sequences into samples, up to `max_length`."""

    def __init__(self, key: str, ids: tf.SparseTensor, max_length: int) -> None:
        rank = ids.shape.rank
        if rank not in (2, 3):
            raise ValueError(
                f"Sequence feature {key!r} must be of rank 2 [batch, position], or of "
                f"rank 3 [batch, position, entry]. Received rank {rank}."
            )
        sample, position = ids.indices[:, 0], ids.indices[:, 1]
        self._kept = position < max_length
        column = ids.indices[:, 2] if rank == 3 else tf.zeros_like(position)
        indices = tf.stack([sample * max_length + position, column], axis=1)
        self._indices = tf.boolean_mask(indices, self._kept)
        columns = ids.dense_shape[2] if rank == 3 else tf.constant(1, tf.int64)
        self._shape = tf.stack([ids.dense_shape[0] * max_length, columns])

    def of(self, values: tf.SparseTensor) -> tf.SparseTensor:
        """Returns ids or weights as [samples * positions, entries]."""
        kept = tf.boolean_mask(values.values, self._kept)
        return tf.SparseTensor(self._indices, kept, self._shape)
