"""Stochastic rounding to bfloat16, in TensorFlow's ops."""

from __future__ import annotations

import tensorflow as tf

_ROTATIONS = (
    ((10, 26), (11, 21), (13, 27), (23, 5)),
    ((6, 20), (17, 11), (25, 10), (18, 20)),
)
_PARITY = 0x1BD11BDA
_WORD = 0xFFFFFFFF
_INFINITY = 0x7F800000
_LARGEST = 0x7F7FFFFF
_QUIET = 0x00400000


def round_rows(
    values: tf.Tensor, rows: tf.Tensor, seed: int, number: tf.Tensor
) -> tf.Tensor:
    """Rounds each value to one of the two nearest bfloat16 (docs/semantics.md).

    The bits are those of ops/cc/core/bfloat16.h. Values are float32 [n, D], rows int64
    [n] of the table; `number` is that of the updates before this one.
    """
    bits = tf.cast(tf.bitcast(values, tf.uint32), tf.int64)
    size = bits & 0x7FFFFFFF
    dim = values.shape[-1]
    assert dim is not None  # A table's own.
    random = _random_bits(rows, dim, seed, number)
    finite = tf.minimum(size + random, _LARGEST)
    other = tf.where(size == _INFINITY, size, size | _QUIET)
    rounded = tf.where(size < _INFINITY, finite, other) | (bits & 0x80000000)
    halves = tf.cast(tf.bitwise.right_shift(rounded, 16), tf.uint16)
    return tf.bitcast(halves, tf.bfloat16)


def _random_bits(rows: tf.Tensor, dim: int, seed: int, number: tf.Tensor) -> tf.Tensor:
    """int64 [n, dim], 16 random bits for each column of each row."""
    chunks = -(-dim // 64)
    blocks, of_rows = tf.meshgrid(tf.range(8 * chunks, dtype=tf.int64), rows)
    nothing = tf.zeros_like(blocks)
    key = [
        tf.constant(seed & _WORD, tf.int64),
        tf.constant(seed >> 32, tf.int64),
        number & _WORD,
        tf.bitwise.right_shift(number, tf.constant(32, tf.int64)),
    ]
    words = _threefry(
        [tf.cast(word, tf.uint32) for word in (blocks, of_rows, nothing, nothing)],
        [tf.cast(word, tf.uint32) for word in key],
    )
    # [n, chunk, word, block of the chunk, half] is the order of the columns.
    shape = [tf.shape(rows)[0], chunks, 8]
    whole = tf.stack([tf.reshape(word, shape) for word in words], 2)
    whole = tf.cast(whole, tf.int64)
    halves = tf.stack([whole & 0xFFFF, tf.bitwise.right_shift(whole, 16)], -1)
    return tf.reshape(halves, [shape[0], 64 * chunks])[:, :dim]


def _threefry(x: list[tf.Tensor], key: list[tf.Tensor]) -> list[tf.Tensor]:
    """Threefry4x32-20 (Salmon et al., SC 2011) over words of uint32."""
    key = [*key, key[0] ^ key[1] ^ key[2] ^ key[3] ^ _PARITY]
    x = [word + k for word, k in zip(x, key[:4], strict=True)]
    for number in range(1, 6):
        for place, (left, right) in enumerate(_ROTATIONS[(number - 1) % 2]):
            # Every other round swaps the second and the fourth word.
            b, d = (1, 3) if place % 2 == 0 else (3, 1)
            x[0], x[b] = _mix(x[0], x[b], left)
            x[2], x[d] = _mix(x[2], x[d], right)
        x = [word + key[(number + i) % 5] for i, word in enumerate(x)]
        x[3] += tf.constant(number, tf.uint32)
    return x


def _mix(a: tf.Tensor, b: tf.Tensor, by: int) -> tuple[tf.Tensor, tf.Tensor]:
    a += b
    rotated = tf.bitwise.left_shift(b, by) | tf.bitwise.right_shift(b, 32 - by)
    return a, rotated ^ a
