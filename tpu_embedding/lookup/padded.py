"""Lookups in programs of TPUs: shapes do not depend on values, and nothing can fail.

  ragged [[7, 2], [], [7]], combiner mean      rows:  [[ 7, 2 ], [ 0, 0 ], [ 7, 0 ]]
                                               gains: [[.5,.5 ], [ 0, 0 ], [ 1, 0 ]]

A host makes the two tensors, after all checks; what is left are a gather and a sum.
"""

from __future__ import annotations

import dataclasses

import tensorflow as tf

from tpu_embedding.lookup.combine import TableReader
from tpu_embedding.lookup.entries import Selection


@dataclasses.dataclass(frozen=True)
class Padded:
    """The entries of one feature, as many for each sample.

    Attributes:
      rows: int32 [*output shape, K], or without K where each sample has one entry, of
        weight 1.
      gains: float32 [*output shape, K], 0 where there is no entry; else None.
    """

    rows: tf.Tensor
    gains: tf.Tensor | None


def pad(
    selection: Selection, shape: tuple[int | None, ...], most: int | None
) -> Padded:
    """Pads what a feature looks up.

    Args:
      selection: What it is.
      shape: What is known of the output shape, without the embedding axis.
      most: The most entries that a sample can have, or None: as many as one has.
    """
    axes = tf.stack(selection.axes)
    if selection.one_each and selection.weights is None:
        rows = tf.reshape(tf.cast(selection.rows, tf.int32), axes)
        return Padded(tf.ensure_shape(rows, shape), None)
    entries = selection.entries()
    count = entries.num_samples
    begins = tf.searchsorted(entries.samples, tf.range(count), out_type=tf.int64)
    index = tf.range(tf.size(entries.rows, tf.int64))
    position = index - tf.gather(begins, entries.samples)
    known = None if most is None else max(most, 1)
    width = tf.constant(known or 1, tf.int64)
    if known is None:  # At least 1, without entries too.
        width = tf.maximum(tf.reduce_max(position) + 1, width)
    places = tf.stack([entries.samples, position], axis=1)

    def spread(values: tf.Tensor) -> tf.Tensor:
        padded = tf.scatter_nd(places, values, tf.stack([count, width]))
        padded = tf.reshape(padded, tf.concat([axes, [width]], 0))
        return tf.ensure_shape(padded, (*shape, known))

    return Padded(spread(tf.cast(entries.rows, tf.int32)), spread(entries.gains))


def combine_padded(padded: Padded, reader: TableReader) -> tf.Tensor:
    """The activation of what is padded.

    Args:
      padded: What to look up.
      reader: The table.

    Returns:
      float32 [*output shape, D].
    """
    values = reader.read(padded.rows)
    if padded.gains is None:
        return values
    # Not a plain product: row 0, which stands where nothing is, may hold a NaN.
    gains = tf.expand_dims(padded.gains, -1)
    return tf.reduce_sum(tf.math.multiply_no_nan(values, gains), axis=-2)
