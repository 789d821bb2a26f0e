"""Makes activations: reads the selected rows and sums them by sample."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import numpy as np
import tensorflow as tf

from tpu_embedding.config import QuantizationConfig
from tpu_embedding.lookup.entries import Entries, Selection
from tpu_embedding.tables.readers import TableReader


@dataclasses.dataclass(frozen=True)
class SimulatedQuantization(TableReader):
    """Quantizes the values of another reader (docs/semantics.md, section 1).

    Gradients pass through unchanged.
    """

    reader: TableReader
    config: QuantizationConfig

    def read(self, rows: tf.Tensor) -> tf.Tensor:
        quantize = tf.grad_pass_through(lambda x: _quantize(x, self.config))
        return quantize(self.reader.read(rows))


def reader_of(
    reader: TableReader, quantization: QuantizationConfig | None
) -> TableReader:
    """Returns the reader, with simulated quantization if the table has one."""
    if quantization is None:
        return reader
    return SimulatedQuantization(reader, quantization)


_add_in_order = tf.math.unsorted_segment_sum
_BLOCK = 4096  # So many values are added one after the other, as in the C++ core.

# Combine rows by sample; a sample without rows gives zeros.
_SEGMENT_OPS = {
    "sum": tf.raw_ops.SparseSegmentSumWithNumSegments,
    "mean": tf.raw_ops.SparseSegmentMeanWithNumSegments,
    "sqrtn": tf.raw_ops.SparseSegmentSqrtNWithNumSegments,
}


def combine(selection: Selection, reader: TableReader) -> tf.Tensor:
    """Combines the rows of a feature in as few ops as possible, float32 [*axes, D]."""
    if selection.weights is not None:
        return look_up(reader, selection.entries())
    if selection.one_each:
        return reader.read(selection.rows)
    data, indices = reader.operand(selection.rows)
    sums = _SEGMENT_OPS[selection.combiner](
        data=data,
        indices=indices,
        segment_ids=selection.unchecked_samples,
        num_segments=selection.num_samples,
    )
    return sums if len(selection.axes) == 1 else _shaped(sums, tf.stack(selection.axes))


def look_up(
    reader: TableReader, entries: Entries, add: Callable[..., tf.Tensor] = _add_in_order
) -> tf.Tensor:
    """Sums the rows of each sample, each row times its gain: float32 [*shape, D]."""
    values = reader.read(entries.rows) * entries.gains[:, tf.newaxis]
    sums = add(values, entries.samples, entries.num_samples)
    return _shaped(sums, entries.shape)


def sum_segments(
    values: tf.Tensor, segments: tf.Tensor, num_segments: tf.Tensor
) -> tf.Tensor:
    """Adds the values, float32 [n, D], of each segment; long segments by blocks."""
    return tf.cond(
        _has_long_segment(segments, num_segments),
        lambda: _add_by_blocks(values, segments, num_segments),
        lambda: _add_in_order(values, segments, num_segments),
    )


def _has_long_segment(segments: tf.Tensor, num_segments: tf.Tensor) -> tf.Tensor:
    counts = tf.math.unsorted_segment_sum(
        tf.ones_like(segments, tf.int32), segments, num_segments
    )
    return tf.reduce_any(counts > _BLOCK)


def _add_by_blocks(
    values: tf.Tensor, segments: tf.Tensor, num_segments: tf.Tensor
) -> tf.Tensor:
    order = tf.argsort(segments, stable=True)
    ordered = tf.gather(segments, order)
    place = tf.range(tf.size(order)) - tf.searchsorted(ordered, ordered)
    begins = tf.equal(place % _BLOCK, 0)  # In graphs of TensorFlow 1 `==` is identity.
    block = tf.cumsum(tf.cast(begins, tf.int32)) - 1
    sums = tf.math.segment_sum(tf.gather(values, order), block)
    owners = tf.boolean_mask(ordered, begins)
    return tf.math.unsorted_segment_sum(sums, owners, num_segments)


def _shaped(sums: tf.Tensor, shape: tf.Tensor) -> tf.Tensor:
    """Reshapes [samples, D] to [*shape, D]."""
    return tf.reshape(sums, tf.concat([shape, tf.shape(sums, tf.int64)[1:]], 0))


def _quantize(values: tf.Tensor, quantization: QuantizationConfig) -> tf.Tensor:
    """Rounds to the nearest of `num_buckets` levels, in float32 as in the C++ core."""
    lower, upper = np.float32(quantization.lower), np.float32(quantization.upper)
    step = (upper - lower) / np.float32(quantization.num_buckets - 1)
    clipped = tf.minimum(tf.maximum(values, lower), upper)
    return tf.floor((clipped - lower) / step + 0.5) * step + lower


@dataclasses.dataclass(frozen=True)
class Padded:
    """The entries of one feature, padded to the same number for each sample.

      ragged [[7, 2], [], [7]], combiner mean      rows:  [[ 7, 2 ], [-1,-1 ], [ 7,-1 ]]
                                                   gains: [[.5,.5 ], [ 0, 0 ], [ 1, 0 ]]

    It serves TPU programs, whose shapes must not depend on values and which cannot
    fail: the host checks and pads the entries, and the program only gathers and sums.
    For padding it gathers the first row of the sample again, so that a gradient names
    only rows of the batch. A sample without entries reads row 0.

    Attributes:
      rows: The rows of a sample, then -1 for padding, int32 [*output shape, K]; or
        [*output shape] if each sample has exactly one entry, of weight 1.
      gains: The gains, 0 for padding, float32 [*output shape, K]; or None if each
        sample has exactly one entry, of weight 1.
    """

    rows: tf.Tensor
    gains: tf.Tensor | None


def pad(
    selection: Selection, shape: tuple[int | None, ...], most: int | None
) -> Padded:
    """Pads each sample's entries to `most`; None means the most that a sample has."""
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
    if known is None:  # At least 1, even if there are no entries.
        width = tf.maximum(tf.reduce_max(position) + 1, width)
    places = tf.stack([entries.samples, position], axis=1)

    def spread(values: tf.Tensor) -> tf.Tensor:
        padded = tf.scatter_nd(places, values, tf.stack([count, width]))
        padded = tf.reshape(padded, tf.concat([axes, [width]], 0))
        return tf.ensure_shape(padded, (*shape, known))

    # A scatter fills with zeros, which become -1.
    rows = spread(tf.cast(entries.rows, tf.int32) + 1) - 1
    return Padded(rows, spread(entries.gains))


def combine_padded(padded: Padded, reader: TableReader) -> tf.Tensor:
    """Combines the rows of a feature in a TPU program, float32 [*output shape, D]."""
    if padded.gains is None:
        return reader.read(padded.rows)
    is_entry = padded.rows >= 0
    first = tf.maximum(tf.gather(padded.rows, [0], axis=-1), 0)
    values = reader.read(tf.where(is_entry, padded.rows, first))
    # A NaN in a row must count for an entry of gain 0, but not for padding.
    products = values * tf.expand_dims(padded.gains, -1)
    products = tf.where(tf.expand_dims(is_entry, -1), products, 0.0)
    return tf.reduce_sum(products, axis=-2)
