"""Where the replicas cut their batches into minibatches: all at the same places."""

from __future__ import annotations

import tensorflow as tf

_CUTS = 63  # Places where 64 buckets of rows can be cut apart.


def to_flags(splits: tf.Tensor) -> tf.Tensor:
    """int32 [stacks, 63]: 1 where the word of a stack, int64 [stacks], has a bit."""
    bits = tf.range(_CUTS, dtype=tf.int64)
    words = tf.broadcast_to(splits[:, tf.newaxis], [splits.shape[0], _CUTS])
    return tf.cast(
        tf.bitwise.bitwise_and(tf.bitwise.right_shift(words, bits), 1), tf.int32
    )


def from_flags(flags: tf.Tensor) -> tf.Tensor:
    """The words again, where several replicas may have counted one bit."""
    bits = tf.cast(flags > 0, tf.int64)
    places = tf.range(_CUTS, dtype=tf.int64)
    return tf.reduce_sum(tf.bitwise.left_shift(bits, places), 1)


def union(flags: tf.Tensor) -> tf.Tensor:
    """The flags of all replicas added up; to be called in each of them."""
    context = tf.distribute.get_replica_context()
    assert context is not None
    return context.all_reduce(tf.distribute.ReduceOp.SUM, flags)
