"""Batches as the stock enqueue op takes them: everything becomes row splits.

  sparse sequence, L = 2:  [[7, .], [3, 5]]     ids:     [ 7, 3, 5 ]
                                                splits:  [ 0, 1, 1, 2, 3 ]

Each position of a sequence, and each last axis of a dense input, is a sample; ids are
checked against the vocabulary on the host, before the op narrows them. One id for each
sample, without weights, needs no splits.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import tensorflow as tf

from tpu_embedding.lookup.entries import Selection


@dataclasses.dataclass(frozen=True)
class CoreBatch:
    """The batch of one core, an item for each feature.

    Attributes:
      splits: int32 [samples + 1], or [0] where each sample has one id.
      ids: int64 [n].
      weights: float32 [n], or [0] where all are 1.
    """

    splits: list[tf.Tensor]
    ids: list[tf.Tensor]
    weights: list[tf.Tensor]


def core_batches(selections: Sequence[Selection], cores: int) -> list[CoreBatch]:
    """Deals the batch of a replica out to its cores, along the first axis.

    Args:
      selections: What each feature looks up; their number of samples is divisible.
      cores: Of the replica.
    """
    parts = [_parts(selection, cores) for selection in selections]
    return [
        CoreBatch(*(list(column) for column in zip(*features, strict=True)))
        for features in zip(*parts, strict=True)
    ]


def _parts(
    selection: Selection, cores: int
) -> list[tuple[tf.Tensor, tf.Tensor, tf.Tensor]]:
    """(splits, ids, weights) of each core."""
    if selection.one_each and selection.weights is None:
        nothing = tf.zeros([0], tf.int32), tf.zeros([0], tf.float32)
        return [
            (nothing[0], ids, nothing[1])
            for ids in tf.split(tf.reshape(selection.rows, [-1]), cores)
        ]
    count = selection.num_samples
    # After the checks: a sparse input may claim any number of samples.
    with tf.control_dependencies([selection.samples]):
        ends = tf.range(count + 1)
    splits = tf.searchsorted(selection.samples, ends, side="left", out_type=tf.int32)
    if cores == 1:
        return [(splits, selection.rows, _weights(selection, 0, None))]
    parts = []
    for core in range(cores):
        begin, end = count * core // cores, count * (core + 1) // cores
        own = splits[begin : end + 1]
        first, last = own[0], own[-1]
        parts.append(
            (own - first, selection.rows[first:last], _weights(selection, first, last))
        )
    return parts


def _weights(selection: Selection, first: tf.Tensor | int, last: tf.Tensor | None):
    if selection.weights is None:
        return tf.zeros([0], tf.float32)
    return selection.weights[first:last]
