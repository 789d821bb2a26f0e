"""Rows of 8 bits: codes, and a scale and an offset for each row.

A row of an int8 table has the form of `te.serving.export(storage="int8")`. Column d is

    offset + scale * (code - 127.5),   formed in float32.

ops/cc/core/int8-inl.h stores updates and first values. `encode` stores values that are
assigned or restored, rounded to the nearest.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import tensorflow as tf

from tpu_embedding.tables.readers import StoredReader, TableReader
from tpu_embedding.tables.rows import (
    PARAMETERS,
    SCALE_OFFSET,
    MutableTableRows,
    ProcessGroup,
    TableRows,
)

_BFLOAT16: Any = tf.bfloat16.as_numpy_dtype
CODED_DTYPES = np.dtype(np.uint8), np.dtype(_BFLOAT16)  # Codes; scales, offsets.
_MIDDLE = np.float32(127.5)
_BLOCK_ROWS = 1 << 14


def encode(
    values: np.ndarray, levels: int
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Returns codes uint8 [n, D], and scale and offset bfloat16 [n, 1], of rows [n, D].

    >>> codes, scale, offset = encode(np.float32([[-1.0, 0.25, 1.0], [3, 3, 3]]), 16)
    >>> codes[0].tolist(), float(offset[0, 0]), float(offset[1, 0])
    ([0, 9, 15], 0.0, 3.0)
    """
    precise = values.astype(np.float64)
    low = precise.min(axis=1, keepdims=True)
    high = precise.max(axis=1, keepdims=True)
    offset = ((low + high) / 2).astype(_BFLOAT16)
    middle = (levels - 1) / 2
    spread = np.maximum(high - offset.astype(np.float64), offset - low)
    # Rounding to bfloat16 may reduce the scale. The factor keeps the ends in range.
    scale = (spread * (1 + 2.0**-8) / middle).astype(_BFLOAT16)
    steps = np.divide(
        precise - offset.astype(np.float64),
        scale.astype(np.float64),
        out=np.zeros_like(precise),
        where=scale > 0,
    )
    codes = np.clip(np.rint(steps + middle), 0, levels - 1).astype(np.uint8)
    return codes, scale, offset


def decode(
    codes: np.ndarray, scale: np.ndarray, offset: np.ndarray, levels: int
) -> tuple[np.ndarray, np.ndarray]:
    """Returns the values [n, D] of codes, and the bounds [n, 1] of their errors."""
    step = scale.astype(np.float64)
    values = (codes - (levels - 1) / 2) * step + offset.astype(np.float64)
    return values, step / 2


def values_of(codes: np.ndarray, scale_offset: np.ndarray) -> np.ndarray:
    """Returns the values of rows, float32 [n, D], in the arithmetic of lookups."""
    scale, offset = np.split(scale_offset.astype(np.float32), 2, axis=1)
    return (codes.astype(np.float32) - _MIDDLE) * scale + offset


def stored_rows(values: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Returns the codes [n, D], and scales and offsets [n, 2], nearest to values.

    A row whose scale bfloat16 cannot hold, or with a NaN or infinity, reads as NaN.
    """
    values = np.asarray(values, np.float32)
    with np.errstate(over="ignore", invalid="ignore"):
        finite = np.isfinite(values.max(axis=1) - values.min(axis=1))[:, np.newaxis]
        codes, scale, offset = encode(np.where(finite, values, 0), 256)
        finite &= np.isfinite(scale) & np.isfinite(offset)
    scale = np.where(finite, np.where(scale < 2.0**-100, 0, scale), np.nan)
    codes = np.where(scale > 0, codes, np.uint8(128))
    small = np.abs(offset.astype(np.float32)) < np.finfo(np.float32).tiny
    offset = np.where(finite & ~small, offset, 0)
    return codes, np.concatenate([scale, offset], axis=1).astype(_BFLOAT16)


def first_coded(values: tf.Tensor, numbers: tf.Tensor, seed: int) -> tf.Tensor:
    """Returns first values as int8-inl.h stores them, by TensorFlow's ops.

    Args:
      values: The first values, float32 [n, D].
      numbers: The numbers of the rows, int64 [n] from 0 to 2^32 - 1.
      seed: The rounding seed of the table.
    """
    low, high = (
        tf.cast(reduce(values, 1, keepdims=True), tf.float64)
        for reduce in (tf.reduce_min, tf.reduce_max)
    )
    offset = _as_bfloat16((low + high) / 2)
    middle = tf.cast(offset, tf.float64)
    reach = tf.maximum(high - middle, middle - low) * (1 + 2.0**-8)
    scale = _as_bfloat16(reach / float(_MIDDLE))
    scale = tf.where(scale < 2.0**-100, 0.0, scale)
    finite = tf.math.is_finite(tf.cast(high - low, tf.float32))
    finite &= tf.math.is_finite(scale) & tf.math.is_finite(offset)
    steps = tf.math.divide_no_nan(values - offset, scale) * 65536.0
    fixed = tf.cast(tf.round(steps), tf.int64) + (255 << 15)
    dim: Any = values.shape[1]
    rounded = tf.bitwise.right_shift(fixed + random_bits(numbers, dim, seed, 0), 16)
    codes = tf.cast(tf.clip_by_value(rounded, 0, 255), tf.float32)
    codes = tf.where(scale > 0, codes, 128.0)
    return tf.where(finite, (codes - _MIDDLE) * scale + offset, np.nan)


def _as_bfloat16(values: tf.Tensor) -> tf.Tensor:
    rounded = tf.cast(tf.cast(values, tf.float32), tf.bfloat16)
    return tf.cast(rounded, tf.float32)


# The rotations of Threefry4x32-20 (Salmon et al., SC 2011; core/bfloat16-inl.h), of
# words 0 and 2 of each round.
_ROTATIONS = (
    ((10, 26), (11, 21), (13, 27), (23, 5)),
    ((6, 20), (17, 11), (25, 10), (18, 20)),
)
_WORD = 2**32 - 1


def random_bits(rows: tf.Tensor, dim: int, seed: int, number: Any) -> tf.Tensor:
    """Returns the random bits of rows int64 [n] in an update, for each column.

    `number` is the number of updates before, and the bits are int64 [n, dim] below
    2^16.
    """
    columns = np.arange(dim)
    blocks, places = np.unique(
        columns // 64 * 8 + columns // 2 % 8, return_inverse=True
    )
    keys = [seed & _WORD, seed >> 32, number & _WORD, number // 2**32]
    keys.append(0x1BD11BDA ^ keys[0] ^ keys[1] ^ keys[2] ^ keys[3])
    zeros = tf.zeros_like(rows)[:, tf.newaxis] + tf.zeros([len(blocks)], tf.int64)
    x = [blocks + zeros, rows[:, tf.newaxis] + zeros, zeros, zeros]
    x = [(word + key) & _WORD for word, key in zip(x, keys, strict=False)]
    for turn in range(1, 6):
        for place, bits in enumerate(_ROTATIONS[(turn - 1) % 2]):
            for first, second, by in zip((0, 2), (1, 3), bits, strict=True):
                other = second if place % 2 == 0 else 4 - second
                x[first] = (x[first] + x[other]) & _WORD
                left = tf.bitwise.left_shift(x[other], by) & _WORD
                x[other] = (left | tf.bitwise.right_shift(x[other], 32 - by)) ^ x[first]
        x = [(word + keys[(turn + i) % 5]) & _WORD for i, word in enumerate(x)]
        x[3] = (x[3] + turn) & _WORD
    words = tf.gather(tf.concat(x, 1), columns // 16 % 4 * len(blocks) + places, axis=1)
    upper = tf.bitwise.right_shift(words, tf.constant(columns % 2 * 16, tf.int64))
    return upper & 0xFFFF


class CodedRows(MutableTableRows):
    """An int8 table, read and written by its values.

    Attributes:
      codes: The codes, [V, D].
      scale_offset: The scales and offsets, [V, 2].
    """

    def __init__(self, codes: TableRows, scale_offset: TableRows) -> None:
        super().__init__(codes.shape, np.dtype(np.float32))
        self.codes, self.scale_offset = codes, scale_offset
        self.row_bytes = codes.row_bytes + scale_offset.row_bytes
        self.nbytes = codes.nbytes + scale_offset.nbytes
        if self.slice_rows > _BLOCK_ROWS:  # Slices are whole blocks.
            self.slice_rows -= self.slice_rows % _BLOCK_ROWS
        self.coded: Mapping[str, TableRows] = {
            PARAMETERS: codes,
            SCALE_OFFSET: scale_offset,
        }

    @property
    def group(self) -> ProcessGroup | None:
        return self.codes.group

    def read(self, start: int, stop: int) -> np.ndarray:
        values = np.empty([stop - start, self.shape[1]], np.float32)
        for begin in range(start, stop, _BLOCK_ROWS):
            end = min(begin + _BLOCK_ROWS, stop)
            values[begin - start : end - start] = values_of(
                self.codes.read(begin, end), self.scale_offset.read(begin, end)
            )
        return values

    def write(self, start: int, values: np.ndarray) -> None:
        """Replaces rows; rows that already have these values keep their bits."""
        codes, scale_offset = self.codes, self.scale_offset
        assert isinstance(codes, MutableTableRows), codes
        assert isinstance(scale_offset, MutableTableRows), scale_offset
        for begin in range(0, len(values), _BLOCK_ROWS):
            block = np.asarray(values[begin : begin + _BLOCK_ROWS], np.float32)
            first = start + begin
            stop = first + len(block)
            own = codes.read(first, stop), scale_offset.read(first, stop)
            keeps = block.view(np.uint32) == values_of(*own).view(np.uint32)
            same = keeps.all(axis=1, keepdims=True)
            new = stored_rows(block)
            codes.write(first, np.where(same, own[0], new[0]))
            scale_offset.write(first, np.where(same, own[1], new[1]))

    def verify(self) -> None:
        self.codes.verify()
        self.scale_offset.verify()

    def release(self) -> None:
        self.codes.release()
        self.scale_offset.release()


def joined_codes(arrays: Mapping[str, Any]) -> dict[str, Any]:
    """Returns a table's arrays by name, with its values in place of codes."""
    joined = {**arrays}
    if SCALE_OFFSET in joined:
        scale_offset = joined.pop(SCALE_OFFSET)
        joined[PARAMETERS] = CodedRows(joined[PARAMETERS], scale_offset)
    return joined


def joined_values(arrays: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Returns the `joined_codes` of NumPy arrays."""
    joined = {**arrays}
    if SCALE_OFFSET in joined:
        joined[PARAMETERS] = values_of(joined[PARAMETERS], joined.pop(SCALE_OFFSET))
    return joined


def stored_as_codes(values: np.ndarray) -> dict[str, np.ndarray]:
    """Returns the arrays of `stored_rows` by name."""
    return dict(zip((PARAMETERS, SCALE_OFFSET), stored_rows(values), strict=True))


class CodedReader(StoredReader):
    """A reader of an int8 table in variables.

    Attributes:
      parts: Readers of the codes, and of the scales and offsets.
    """

    def __init__(self, codes: StoredReader, scale_offset: StoredReader) -> None:
        self.parts = codes, scale_offset

    def read(self, rows: tf.Tensor) -> tf.Tensor:
        return _decoded(*self.parts, rows)

    def in_steps(self) -> TableReader:
        return _InSteps(*(part.in_steps() for part in self.parts))

    @property
    def variables(self) -> list[Any]:
        return [variable for part in self.parts for variable in part.variables]


class _InSteps(TableReader):
    """See `StoredReader.in_steps`."""

    def __init__(self, codes: TableReader, scale_offset: TableReader) -> None:
        self._codes, self._scale_offset = codes, scale_offset

    def read(self, rows: tf.Tensor) -> tf.Tensor:
        return _decoded(self._codes, self._scale_offset, rows)


def _decoded(
    codes: TableReader, scale_offset: TableReader, rows: tf.Tensor
) -> tf.Tensor:
    scale, offset = tf.split(scale_offset.read(rows), 2, axis=1)
    return (codes.read(rows) - 127.5) * scale + offset
