"""Packs batches into a few tensors, which a tf.function takes at little cost."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import tensorflow as tf

from tpu_embedding import distribution
from tpu_embedding.errors import type_name
from tpu_embedding.inputs import IdBatch, InputKind, to_id_batch
from tpu_embedding.lookup.feature_structure import FeatureStructure
from tpu_embedding.lookup.graph_checks import Check, require, text
from tpu_embedding.nest_utils import Structure


class PackedFeatures(NamedTuple):
    """Holds the ids of all F features of a batch of B samples; `te.pack` makes it.

    Attributes:
      values: int64 [n], the ids of the first feature, then those of the second one, and
        so on, in the order of tf.nest.
      row_splits: int64 [F, B + 1]. Sample b of feature f has the ids from
        row_splits[f, b] to row_splits[f, b + 1] of those of the feature.
      weights: float32 [n], or None if no feature has weights.
      names: A dict whose only key has the paths of the features, and whose value is
        empty: it holds no tensor, but passes wherever tensors do.
    """

    values: tf.Tensor
    row_splits: tf.Tensor
    weights: tf.Tensor | None
    names: dict[str, tuple[()]]


@tf.autograph.experimental.do_not_convert
def pack(features: Any, weights: Any = None) -> PackedFeatures:
    """Packs the features of a batch into two tensors, or three with weights.

    For a small batch, passing 26 ragged tensors to a tf.function costs more than the
    lookup. Call `te.pack` in tf.data, and pass its result instead of features and
    weights to `TPUEmbedding.enqueue` or to a call of TPUEmbeddingV2,
    TPUEmbeddingV0 or `te.keras.TPUEmbedding`. The numbers are the same:

    >>> import tensorflow as tf
    >>> import tpu_embedding as te
    >>> films = te.TableConfig(8, 2, te.RowIdInitializer(), combiner="sum")
    >>> config = {"liked": te.FeatureConfig(films), "seen": te.FeatureConfig(films)}
    >>> embedding = te.TPUEmbedding(config, te.SGD(0.5))
    >>> liked = tf.ragged.constant([[3, 5], []], dtype=tf.int64)
    >>> data = tf.data.Dataset.from_tensors({"liked": liked, "seen": [1, 2]})
    >>> for batch in data.map(te.pack):
    ...     embedding.enqueue(batch)
    >>> batch.row_splits.numpy().tolist()
    [[0, 2, 2], [0, 1, 2]]
    >>> embedding.dequeue()["liked"].numpy().tolist()
    [[8.0, 8.0], [0.0, 0.0]]

    A TPU program does not take packed batches: pass it the features themselves, or, to
    TPUEmbeddingV2, what `preprocess_features` makes of the packed batch. Keras takes
    a tuple for (x, y, sample_weight), so a dataset for `predict` must yield
    `(te.pack(features),)`.

    Args:
      features: The ids of each feature in the structure of `feature_config`: a
        tf.Tensor [B] or [B, k], a tf.RaggedTensor [B, None] or a tf.SparseTensor
        [B, k] in row-major order whose rows have no gaps. B is the same for all. Ids
        are int32, int64, or whole numbers of a floating point dtype.
      weights: None, or the same structure with floating point weights in the layout of
        each feature, or None for a feature whose weights are 1.

    Raises:
      TypeError: If ids or weights are of another dtype.
      ValueError: If a feature is not a tensor, or has another rank, or another batch
        size than the first one, as far as shapes are known while tracing.
      tf.errors.InvalidArgumentError: If batch sizes differ, ids of a sparse feature
        have gaps, or splits or weights do not fit the ids.
    """
    structure = Structure(features)
    paths, values = structure.paths, structure.flatten("features", features)
    for path, value in zip(paths, values, strict=True):
        if getattr(value, "dtype", None) == tf.string:
            raise TypeError(
                f"Feature {path}: te.pack does not take strings. Convert them with "
                "keras.layers.StringLookup, or for a table with `string_ids=True` with "
                "tf.strings.to_hash_bucket_fast(strings, 2**63 - 1)."
            )
    flat_weights = structure.flatten_weights(weights)
    batches = [
        to_id_batch(path, value, weight)
        for path, value, weight in zip(paths, values, flat_weights, strict=True)
    ]
    _require_packable(paths, batches)
    splits = [_row_splits(batch) for batch in batches]
    with tf.control_dependencies(require(_checks(paths, batches, splits))):
        given = None
        if any(batch.weights is not None for batch in batches):
            given = tf.concat([_flat_weights(batch) for batch in batches], 0)
        ids = [tf.reshape(tf.cast(batch.ids, tf.int64), [-1]) for batch in batches]
        names: dict[str, tuple[()]] = {", ".join(paths): ()}
        return PackedFeatures(tf.concat(ids, 0), tf.stack(splits), given, names)


def flatten_batch(
    structure: FeatureStructure, features: Any, weights: Any
) -> tuple[list[Any], list[Any]]:
    """Returns the ids and the weights or None of each feature of the plan.

    Args:
      structure: The structure of `feature_config`.
      features: The features in this structure, or a packed batch.
      weights: The weights in this structure, or None; None with a packed batch.

    Raises:
      TypeError: If a container is of another type, or a packed batch has no tensors.
      ValueError: If a container has another size or other keys, or a packed batch has
        other features, weights beside it, or one value for each replica.
      NotImplementedError: If a packed batch is given inside a TPU program.
    """
    if isinstance(features, PackedFeatures):
        flat = _unpacked(structure, features, weights)
    else:
        flat = (
            structure.flatten("features", features),
            structure.flatten_weights(weights),
        )
    return structure.for_plan(flat[0]), structure.for_plan(flat[1])


def _unpacked(
    structure: Structure, features: PackedFeatures, weights: Any
) -> tuple[list[Any], list[Any]]:
    """Returns the ragged ids and weights of a packed batch, in the order of tf.nest."""
    number = len(structure.paths)
    if weights is not None:
        raise ValueError(
            "`weights` cannot be passed with a packed batch: pass them to te.pack."
        )
    _require_usable(features, structure.paths)
    splits = tf.unstack(features.row_splits, number)
    sizes = features.row_splits[:, -1]
    ragged: Any = tf.RaggedTensor
    values = [
        ragged.from_row_splits(ids, own, validate=False)
        for ids, own in zip(
            tf.split(features.values, sizes, num=number), splits, strict=True
        )
    ]
    if features.weights is None:
        return values, [None] * number
    given = tf.split(features.weights, sizes, num=number)
    return values, [
        value.with_values(own) for value, own in zip(values, given, strict=True)
    ]


def _require_usable(packed: PackedFeatures, paths: Sequence[str]) -> None:
    given, own = ", ".join(packed.names), ", ".join(paths)
    if given != own:
        raise ValueError(
            f"The packed batch has the features {given}, but `feature_config` has "
            f"{own}. Pass the features to te.pack in the structure of `feature_config`."
        )
    for tensor in (packed.values, packed.row_splits):
        if isinstance(tensor, tf.distribute.DistributedValues):
            raise ValueError(
                "A packed batch has one value for each replica. Each replica unpacks "
                "its own: call enqueue in the function that you pass to `strategy.run`."
            )
        if not tf.is_tensor(tensor):
            raise TypeError(
                "A packed batch must hold tensors, as te.pack returns it. Received: "
                f"{tensor!r} of type {type_name(tensor)}. A functional Keras model "
                "takes the features themselves: call the layer in a subclass of "
                "keras.Model."
            )
    if distribution.current().program() is not None:
        raise NotImplementedError(
            "A packed batch cannot be unpacked in a TPU program. Pass the features "
            "themselves; TPUEmbeddingV2.preprocess_features takes a packed batch "
            "outside of strategy.run."
        )


def _require_packable(paths: Sequence[str], batches: Sequence[IdBatch]) -> None:
    first = batches[0].static_shape[0]
    for path, batch in zip(paths, batches, strict=True):
        if batch.static_shape.rank not in (1, 2):
            raise ValueError(
                f"Feature {path}: te.pack takes inputs of rank 1 and 2. Received: a "
                f"{batch.kind.value} input of rank {batch.static_shape.rank}. Pass the "
                "features themselves."
            )
        if not batch.static_shape[:1].is_compatible_with([first]):
            raise ValueError(
                f"te.pack needs one batch size for all features. Feature {paths[0]} "
                f"has {first} samples, and feature {path} has {batch.static_shape[0]}. "
                "Pass the features themselves."
            )


def _row_splits(batch: IdBatch) -> tf.Tensor:
    """Returns row splits, int64 [B + 1]; a sparse batch must be sorted by row."""
    if batch.kind is InputKind.RAGGED:
        return batch.structure
    rows = tf.range(batch.shape[0] + 1)
    if batch.kind is InputKind.SPARSE:
        return tf.searchsorted(batch.structure[:, 0], rows, out_type=tf.int64)
    return rows if batch.static_shape.rank == 1 else rows * batch.shape[1]


def _flat_weights(batch: IdBatch) -> tf.Tensor:
    if batch.weights is None:
        return tf.ones([tf.size(batch.ids)])
    return tf.reshape(batch.weights, [-1])


def _checks(
    paths: Sequence[str], batches: Sequence[IdBatch], splits: Sequence[tf.Tensor]
) -> list[Check]:
    checks = []
    for path, batch, own in zip(paths, batches, splits, strict=True):
        checks.append(_of_one_size(paths[0], path, splits[0], own))
        if batch.kind is InputKind.RAGGED:
            checks.append(_splits_fit(path, batch, own))
        if batch.kind is InputKind.SPARSE:
            checks.append(_without_gaps(path, batch, own))
        if batch.weight_structure is not None:
            checks.append(_weights_fit(path, batch))
    return checks


def _of_one_size(first: str, path: str, expected: Any, splits: Any) -> Check:
    sizes = tf.size(expected) - 1, tf.size(splits) - 1
    return Check(
        sizes[0] == sizes[1],
        lambda: text(
            f"te.pack needs one batch size for all features. Feature {first} has ",
            *(sizes[0], f" samples, and feature {path} has ", sizes[1]),
            ". Pass the features themselves.",
        ),
    )


def _splits_fit(path: str, batch: IdBatch, splits: tf.Tensor) -> Check:
    number = tf.size(batch.ids, tf.int64)
    return Check(
        splits[-1] == number,
        lambda: text(
            *(f"Feature {path} has ", number, " ids, but its row splits end at "),
            *(splits[-1], "."),
        ),
    )


def _without_gaps(path: str, batch: IdBatch, splits: tf.Tensor) -> Check:
    rows, columns = batch.structure[:, 0], batch.structure[:, 1]
    last = tf.maximum(batch.shape[0] - 1, 0)
    starts = tf.gather(splits, tf.clip_by_value(rows, 0, last))
    places = tf.range(tf.size(rows, tf.int64)) - starts
    ordered = tf.concat([[True], rows[1:] >= rows[:-1]], 0)[: tf.size(rows)]
    inside = (rows >= 0) & (rows <= last)
    return Check(
        ordered & inside & (columns == places),
        lambda: text(
            f"Feature {path}: te.pack takes sparse ids in row-major order, whose "
            "columns in each row are 0, 1, 2 and so on. Pass the features themselves, "
            "or a tf.RaggedTensor."
        ),
    )


def _weights_fit(path: str, batch: IdBatch) -> Check:
    own: Any = batch.weight_structure

    def same() -> tf.Tensor:
        return tf.reduce_all(own == batch.structure)

    alike = tf.reduce_all(tf.shape(own) == tf.shape(batch.structure))
    return Check(
        tf.cond(alike, same, lambda: False),
        lambda: text(
            f"The weights of feature {path} must have the indices or row splits of its "
            "ids."
        ),
    )
