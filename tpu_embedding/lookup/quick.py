"""Whether plain sparse features are valid, for all at once in few ops.

The exact checks take a dozen ops for each feature, and small batches are as slow as
their ops are many. What passes here is valid; what does not is checked exactly.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Sequence

import tensorflow as tf

from tpu_embedding.inputs import InputKind
from tpu_embedding.lookup.input_rows import (
    MOST_UNBACKED_ROWS,
    FeatureInput,
    Rows,
    axes_of,
    ids_in_range,
)

# Entries are ordered by row * _MOST_COLUMNS + column, which no shape overflows.
_MOST_COLUMNS = 2**31
_FIRST, _LAST = -1, 2**63 - 1  # Before and after all entries.


@dataclasses.dataclass(frozen=True)
class Plain:
    """A feature that `covers` takes.

    Attributes:
      feature: The feature.
      rows: Its rows.
      ids: int64 [n].
    """

    feature: FeatureInput
    rows: Rows
    ids: tf.Tensor


def covers(feature: FeatureInput) -> bool:
    """Whether there is a quick test: of a sparse matrix without weights."""
    batch = feature.batch
    return (
        batch.kind is InputKind.SPARSE
        and batch.static_shape.rank == 2
        and batch.weights is None
        and feature.declared is None
    )


def masks_of(features: Sequence[Plain]) -> list[tf.Tensor]:
    """Bool vectors; where they are true everywhere, the features are valid."""
    if not features:
        return []
    axes = [axis for f in features for axis in axes_of(f.feature)]
    shapes = tf.bitcast(tf.stack(axes), tf.uint64)
    most = [_most(f.feature) for f in features]
    masks = [shapes <= tf.constant(list(itertools.chain(*most)), tf.uint64)]
    bounds = tf.unstack(shapes, num=2 * len(features))
    indices = [index for f in features for index in (f.rows.row, f.rows.position)]
    # Without a sign, negative indices are the largest: one comparison.
    masks += [
        tf.bitcast(index, tf.uint64) < bound
        for index, bound in zip(indices, bounds, strict=True)
    ]
    masks += [
        ids_in_range(f.ids, f.feature.table.config.vocabulary_size)
        for f in features
        if f.feature.table.config.invalid_ids == "error"
    ]
    return [*masks, _same_sizes(features), _ascend(features)]


def _most(feature: FeatureInput) -> list[int]:
    """The most rows and columns for which the test is good."""
    positions = max(feature.spec.config.max_sequence_length, 1)
    rows = min(MOST_UNBACKED_ROWS, feature.most_samples) // positions
    return [rows, _MOST_COLUMNS]


def _same_sizes(features: Sequence[Plain]) -> tf.Tensor:
    """Whether there is an index for each id, bool [features]."""
    ids = tf.shape_n([f.ids for f in features], tf.int64)
    indices = tf.shape_n([f.rows.row for f in features], tf.int64)
    return tf.equal(_joined(ids), _joined(indices))


def _ascend(features: Sequence[Plain]) -> tf.Tensor:
    """Whether indices that are inside of their shapes ascend, bool [entries]."""
    first, last = (tf.constant([key], tf.int64) for key in (_FIRST, _LAST))
    keys = [f.rows.row * _MOST_COLUMNS + f.rows.position for f in features]
    before = tf.concat([part for own in keys for part in (first, own)], 0)
    after = tf.concat([part for own in keys for part in (own, last)], 0)
    return before < after


def _joined(parts: Sequence[tf.Tensor]) -> tf.Tensor:
    return parts[0] if len(parts) == 1 else tf.concat(parts, 0)
