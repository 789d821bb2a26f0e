"""From what is selected to activations: rows are read, and summed by sample."""

from __future__ import annotations

import abc
import dataclasses
from collections.abc import Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from tpu_embedding.config import QuantizationConfig
from tpu_embedding.lookup.entries import Entries, Selection


class TableReader(abc.ABC):
    """A table, in whatever form it is kept, as lookups see it."""

    @abc.abstractmethod
    def read(self, rows: tf.Tensor) -> tf.Tensor:
        """The rows, float32 [n, D], for int64 [n]."""

    def operand(self, rows: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
        """Data, float32 [m, D], and the indices, int64 [n], of the rows in it."""
        return self.read(rows), tf.range(tf.size(rows, tf.int64))


class StoredReader(TableReader):
    """A table in variables."""

    @property
    @abc.abstractmethod
    def variables(self) -> Sequence[Any]:
        """What it reads."""


@dataclasses.dataclass(frozen=True)
class VariableReader(StoredReader):
    """A table that may be trained meanwhile.

    Only its rows are read: where updates are made in place, to read the whole
    variable is to copy it.

    Attributes:
      table: A variable or tensor [V, D] of any floating point dtype.
    """

    table: Any

    def read(self, rows: tf.Tensor) -> tf.Tensor:
        """See `TableReader.read`."""
        return tf.cast(tf.gather(self.table, rows), tf.float32)

    @property
    def variables(self) -> Sequence[Any]:
        """See `StoredReader.variables`."""
        return (self.table,)


@dataclasses.dataclass(frozen=True)
class SimulatedQuantization(TableReader):
    """Another reader's values, moved to levels (docs/semantics.md, section 1).

    In the forward pass only: the gradient is that of the value itself.
    """

    reader: TableReader
    config: QuantizationConfig

    def read(self, rows: tf.Tensor) -> tf.Tensor:
        """See `TableReader.read`."""
        quantize = tf.grad_pass_through(lambda x: _quantize(x, self.config))
        return quantize(self.reader.read(rows))


def reader_of(
    reader: TableReader, quantization: QuantizationConfig | None
) -> TableReader:
    """The reader, through the simulated quantization if there is one."""
    if quantization is None:
        return reader
    return SimulatedQuantization(reader, quantization)


# Sums of rows by sample, with zeros for samples without any.
_SEGMENT_OPS = {
    "sum": tf.raw_ops.SparseSegmentSumWithNumSegments,
    "mean": tf.raw_ops.SparseSegmentMeanWithNumSegments,
    "sqrtn": tf.raw_ops.SparseSegmentSqrtNWithNumSegments,
}


def combine(selection: Selection, reader: TableReader) -> tf.Tensor:
    """The activation of what is selected, in as few ops as it takes.

    Args:
      selection: What to look up.
      reader: The table.

    Returns:
      float32 [*selection.axes, D].
    """
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


def look_up(reader: TableReader, entries: Entries) -> tf.Tensor:
    """For each sample the sum of its rows, each times its gain.

    Args:
      reader: The table.
      entries: What to look up.

    Returns:
      float32 [*entries.shape, D].
    """
    values = reader.read(entries.rows)
    sums = tf.math.unsorted_segment_sum(
        values * entries.gains[:, tf.newaxis], entries.samples, entries.num_samples
    )
    return _shaped(sums, entries.shape)


def _shaped(sums: tf.Tensor, shape: tf.Tensor) -> tf.Tensor:
    """[samples, D] -> [*shape, D]."""
    return tf.reshape(sums, tf.concat([shape, tf.shape(sums, tf.int64)[1:]], 0))


def _quantize(values: tf.Tensor, quantization: QuantizationConfig) -> tf.Tensor:
    """The nearest of `num_buckets` levels, in float32 as in the C++ core."""
    lower, upper = np.float32(quantization.lower), np.float32(quantization.upper)
    step = (upper - lower) / np.float32(quantization.num_buckets - 1)
    clipped = tf.minimum(tf.maximum(values, lower), upper)
    return tf.floor((clipped - lower) / step + 0.5) * step + lower
