"""Lookups in programs of TPUs: shapes do not depend on values, and nothing can fail.

  ragged [[7, 2], [], [7]], combiner mean      rows:  [[ 7, 2 ], [-1,-1 ], [ 7,-1 ]]
                                               gains: [[.5,.5 ], [ 0, 0 ], [ 1, 0 ]]

A host makes the two tensors, after all checks; what is left are a gather and a sum.
Where nothing is, the gather reads the sample's first row once more, so that a gradient
names no row that the batch has not; only a sample without entries reads row 0.
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
      rows: int32 [*output shape, K], the entries of a sample first, then -1; or
        without K where each sample has one entry, of weight 1.
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

    # Zeros are what a scatter leaves: they become the -1.
    rows = spread(tf.cast(entries.rows, tf.int32) + 1) - 1
    return Padded(rows, spread(entries.gains))


def combine_padded(padded: Padded, reader: TableReader) -> tf.Tensor:
    """The activation of what is padded.

    Args:
      padded: What to look up.
      reader: The table.

    Returns:
      float32 [*output shape, D].
    """
    if padded.gains is None:
        return reader.read(padded.rows)
    is_entry = padded.rows >= 0
    first = tf.maximum(tf.gather(padded.rows, [0], axis=-1), 0)
    values = reader.read(tf.where(is_entry, padded.rows, first))
    # A row may hold a NaN: it counts where it is an entry, of gain 0, too.
    products = values * tf.expand_dims(padded.gains, -1)
    products = tf.where(tf.expand_dims(is_entry, -1), products, 0.0)
    return tf.reduce_sum(products, axis=-2)
