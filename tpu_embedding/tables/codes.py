"""Rows of 8 bits: codes, and a scale and an offset for each row.

A row of a table of int8 is that of `te.serving.export(storage="int8")`; column d is

    offset + scale * (code - 127.5),   formed in float32.

Updates and first values are stored by ops/cc/core/int8-inl.h. Values that are assigned
or restored are stored by `encode`, to the nearest.
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
CODED_DTYPES = np.dtype(np.uint8), np.dtype(_BFLOAT16)  # Of codes, and of the rest.
_MIDDLE = np.float32(127.5)
_BLOCK_ROWS = 1 << 14


def encode(
    values: np.ndarray, levels: int
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Codes uint8 [n, D], and scale and offset bfloat16 [n, 1], of rows [n, D].

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
    # Enlarged, because rounding to bfloat16 may reduce it: the ends stay in range.
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
    """The values [n, D] of codes, and the bounds [n, 1] of their errors."""
    step = scale.astype(np.float64)
    values = (codes - (levels - 1) / 2) * step + offset.astype(np.float64)
    return values, step / 2


def values_of(codes: np.ndarray, scale_offset: np.ndarray) -> np.ndarray:
    """The values of rows, float32 [n, D], in the arithmetic of lookups."""
    scale, offset = np.split(scale_offset.astype(np.float32), 2, axis=1)
    return (codes.astype(np.float32) - _MIDDLE) * scale + offset


def stored_rows(values: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Codes [n, D], and scales and offsets [n, 2], nearest to values.

    A row that bfloat16 cannot scale, with a NaN or an infinity, reads NaN.
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


class CodedRows(MutableTableRows):
    """A table of int8 by its values.

    Attributes:
      codes: [V, D].
      scale_offset: [V, 2].
    """

    def __init__(self, codes: TableRows, scale_offset: TableRows) -> None:
        super().__init__(codes.shape, np.dtype(np.float32))
        self.codes, self.scale_offset = codes, scale_offset
        self.row_bytes = codes.row_bytes + scale_offset.row_bytes
        self.nbytes = codes.nbytes + scale_offset.nbytes
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
        """Replaces rows; those that have these values keep their bits."""
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


class CodedReader(StoredReader):
    """A table of int8 in variables.

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
