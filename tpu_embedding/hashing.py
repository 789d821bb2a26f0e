"""Computes the rows of ids in hashed tables, and mixes bits, with TensorFlow's ops."""

from __future__ import annotations

import functools
import operator
from collections.abc import Sequence

import numpy as np
import tensorflow as tf

from tpu_embedding.vocabulary import MIXING, Hashing, RowHash


def rows_of(ids: tf.Tensor, row_hash: RowHash) -> tf.Tensor:
    """Returns the row of each id, int64 of the shape of the ids.

    >>> from tpu_embedding.vocabulary import Hashing
    >>> row_hash = RowHash(Hashing(1000), 0)
    >>> rows_of(tf.constant([7, -1], tf.int64), row_hash).numpy().tolist()
    [473, 267]
    """
    words = tf.bitwise.bitwise_xor(tf.cast(ids, tf.int64), row_hash.key_bits)
    mixed = mixed_bits(words)
    return shifted(shifted(mixed, 32) * row_hash.hashing.num_rows, 32)


def join_rows(parts: Sequence[tf.Tensor], hashing: Hashing) -> tf.Tensor:
    """Joins what each hash looked up for the ids: side by side, or as a sum."""
    if len(parts) == 1:
        return parts[0]
    if hashing.combine == "sum":
        return functools.reduce(operator.add, parts)
    return tf.concat(parts, -1)


def ids_of_strings(strings: tf.Tensor) -> tf.Tensor:
    """Returns the Fingerprint64 of each string, modulo 2**63 - 1."""
    return tf.strings.to_hash_bucket_fast(strings, 2**63 - 1)


def mixed_bits(words: tf.Tensor) -> tf.Tensor:
    """Mixes the bits of each int64, as MixBits of core/id_map.h does; a bijection."""
    return _mixed(words, MIXING)


def unmixed_bits(words: tf.Tensor) -> tf.Tensor:
    """Inverts `mixed_bits`.

    >>> int(unmixed_bits(mixed_bits(tf.constant(-5, tf.int64))))
    -5
    """
    return _mixed(words, pow(MIXING, -1, 2**64))


def _mixed(words: tf.Tensor, factor: int) -> tf.Tensor:
    for _ in range(2):
        folded = tf.bitwise.bitwise_xor(words, shifted(words, 32))
        words = folded * np.uint64(factor).view(np.int64)
    return tf.bitwise.bitwise_xor(words, shifted(words, 32))


def shifted(words: tf.Tensor, count: int) -> tf.Tensor:
    """Shifts words to the right as unsigned numbers."""
    bits = tf.bitcast(words, tf.uint64)
    moved = tf.bitwise.right_shift(bits, tf.constant(count, tf.uint64))
    return tf.bitcast(moved, tf.int64)
