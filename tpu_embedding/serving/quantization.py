"""Tables as they are kept for serving: as they are, in 16 bits, or quantised by row.

A quantised row has a scale and an offset in bfloat16, and one code for each value:

    value = offset + scale * (code - middle),   code in 0 .. levels - 1,
    middle = (levels - 1) / 2

The offset is the middle of the row's values, and the scale is rounded up, so that every
value lies within half a step, scale / 2, of its code. Codes of 8 bits are bytes; those
of 4 bits share a byte, the first half of the columns in its low bits.
"""

from __future__ import annotations

import abc
import dataclasses
from collections.abc import Callable, Iterator
from typing import Any, ClassVar

import numpy as np
import tensorflow as tf

from tpu_embedding.lookup.combine import TableReader
from tpu_embedding.serving import errors
from tpu_embedding.serving.report import TableReport

SLICE_BYTES = 1 << 20  # of float32 values that are converted at once
_BFLOAT16: Any = tf.bfloat16.as_numpy_dtype


@dataclasses.dataclass(frozen=True)
class Source:
    """A table to be stored.

    Attributes:
      name: The table's, for messages.
      values: A variable or tensor [V, D].
    """

    name: str
    values: Any

    @property
    def shape(self) -> tuple[int, int]:
        """(V, D)."""
        rows, dim = self.values.shape
        return rows, dim

    def slices(self) -> Iterator[tuple[int, np.ndarray]]:
        """Yields (first row, float32 rows), so that no copy of the table is made."""
        rows, dim = self.shape
        step = max(1, SLICE_BYTES // (4 * dim))
        for begin in range(0, rows, step):
            # gather reads these rows of a variable, and [begin:end] all of it.
            index = tf.range(begin, min(begin + step, rows))
            yield begin, tf.cast(tf.gather(self.values, index), tf.float32).numpy()


class StoredTable(TableReader, tf.Module):
    """A table in the form in which it is exported; reads rows as float32."""

    storage: ClassVar[str]

    @classmethod
    @abc.abstractmethod
    def num_bytes(cls, rows: int, dim: int) -> int:
        """What a table of this form takes."""

    @abc.abstractmethod
    def fill(self, source: Source) -> TableReport:
        """Takes the values of a table, slice by slice."""


class WholeTable(StoredTable):
    """The table itself: if it is a variable, the very same one."""

    storage = "float32"

    def __init__(self, rows: int, dim: int) -> None:
        super().__init__()
        self._shape = rows, dim
        self.table: Any = None

    @classmethod
    def num_bytes(cls, rows: int, dim: int) -> int:
        return 4 * rows * dim

    def fill(self, source: Source) -> TableReport:
        values = source.values
        if not isinstance(values, tf.Variable) or values.dtype != tf.float32:
            values = tf.Variable(tf.cast(values, tf.float32), trainable=False)
        self.table = values
        size = self.num_bytes(*self._shape)
        return TableReport(
            source.name, *self._shape, self.storage, size, size, 0.0, 0.0, 0.0
        )

    def read(self, rows: tf.Tensor) -> tf.Tensor:
        return tf.gather(self._values(), rows)

    def operand(self, rows: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
        return self._values(), rows

    def _values(self) -> tf.Tensor:
        # Nothing updates a served table, so that this copies nothing. But one gather
        # from the variable itself, and from then on each reading of it does.
        return self.table.read_value()


class _ConvertedTable(StoredTable):
    """A table whose slices are converted one by one."""

    largest: ClassVar[float] = float(np.finfo(np.float32).max)  # that can be stored

    def __init__(self, rows: int, dim: int) -> None:
        super().__init__()
        self._shape = rows, dim

    @abc.abstractmethod
    def _convert(self, values: np.ndarray) -> tuple[list[np.ndarray], _Decoded]:
        """The parts of a slice, in the order of `_parts`, and what they mean."""

    @abc.abstractmethod
    def _parts(self) -> list[tf.Variable]:
        """The variables of the table."""

    def fill(self, source: Source) -> TableReport:
        errors_found = _Errors()
        for begin, values in source.slices():
            self._refuse(source.name, begin, values)
            parts, decoded = self._convert(values)
            for variable, part in zip(self._parts(), parts, strict=True):
                _assign_rows(variable, begin, part)
            errors_found.add(values, decoded)
        rows, dim = self._shape
        return TableReport(
            name=source.name,
            rows=rows,
            dim=dim,
            storage=self.storage,
            bytes_before=4 * rows * dim,
            bytes_after=self.num_bytes(rows, dim),
            max_error=errors_found.largest,
            rms_error=(errors_found.squares / (rows * dim)) ** 0.5,
            bound=errors_found.bound,
        )

    def _refuse(self, name: str, begin: int, values: np.ndarray) -> None:
        bad = ~(np.abs(values) <= self.largest)
        if bad.any():
            row, column = np.argwhere(bad)[0]
            raise errors.unstorable(
                name, begin + int(row), float(values[row, column]), self.storage
            )


@dataclasses.dataclass(frozen=True)
class _Decoded:
    """What stored values mean, [n, D], and how far off they may be, [n, 1]."""

    values: np.ndarray
    bounds: np.ndarray


class _Errors:
    """The differences between a table and what is stored of it."""

    def __init__(self) -> None:
        self.largest, self.squares, self.bound = 0.0, 0.0, 0.0

    def add(self, values: np.ndarray, decoded: _Decoded) -> None:
        """Takes one slice."""
        difference = np.abs(values.astype(np.float64) - decoded.values)
        self.largest = max(self.largest, float(difference.max()))
        self.squares += float(np.square(difference).sum())
        self.bound = max(self.bound, float(decoded.bounds.max()))


class _HalfTable(_ConvertedTable):
    """A table of 16-bit floats."""

    dtype: ClassVar[tf.DType]
    unit_roundoff: ClassVar[float]
    smallest: ClassVar[float]  # The distance of the numbers next to 0.

    def __init__(self, rows: int, dim: int) -> None:
        super().__init__(rows, dim)
        self.table = _zeros([rows, dim], self.dtype)

    @classmethod
    def num_bytes(cls, rows: int, dim: int) -> int:
        return 2 * rows * dim

    def _parts(self) -> list[tf.Variable]:
        return [self.table]

    def _convert(self, values: np.ndarray) -> tuple[list[np.ndarray], _Decoded]:
        stored = values.astype(self.dtype.as_numpy_dtype)
        largest = np.abs(values).max(axis=1, keepdims=True).astype(np.float64)
        bounds = largest * self.unit_roundoff + self.smallest / 2
        return [stored], _Decoded(stored.astype(np.float32), bounds)

    def read(self, rows: tf.Tensor) -> tf.Tensor:
        return tf.cast(tf.gather(self.table, rows), tf.float32)


class Bfloat16Table(_HalfTable):
    """A table of bfloat16."""

    storage = "bfloat16"
    dtype = tf.bfloat16
    unit_roundoff, smallest = 2.0**-8, 2.0**-133
    largest = 3.38e38  # What is larger is rounded to infinity.


class Float16Table(_HalfTable):
    """A table of float16."""

    storage = "float16"
    dtype = tf.float16
    unit_roundoff, smallest = 2.0**-11, 2.0**-24
    largest = 65504.0


class _CodedTable(_ConvertedTable):
    """A table of codes with a scale and an offset for each row."""

    levels: ClassVar[int]

    def __init__(self, rows: int, dim: int) -> None:
        super().__init__(rows, dim)
        self.codes = _zeros([rows, self._code_bytes(dim)], tf.uint8)
        self.scale_offset = _zeros([rows, 2, 1], tf.bfloat16)

    @classmethod
    @abc.abstractmethod
    def _code_bytes(cls, dim: int) -> int:
        """Bytes for the codes of a row."""

    @classmethod
    def num_bytes(cls, rows: int, dim: int) -> int:
        return rows * (cls._code_bytes(dim) + 4)

    def _parts(self) -> list[tf.Variable]:
        return [self.codes, self.scale_offset]

    def _convert(self, values: np.ndarray) -> tuple[list[np.ndarray], _Decoded]:
        codes, scale, offset = encode(values, self.levels)
        parts = [self._pack(codes), np.stack([scale, offset], axis=1)]
        return parts, decode(codes, scale, offset, self.levels)

    def read(self, rows: tf.Tensor) -> tf.Tensor:
        codes = self._unpack(tf.gather(self.codes, rows))
        pairs = tf.cast(tf.gather(self.scale_offset, rows), tf.float32)
        scale, offset = tf.unstack(pairs, axis=1)
        middle = (self.levels - 1) / 2
        return (tf.cast(codes, tf.float32) - middle) * scale + offset

    @abc.abstractmethod
    def _pack(self, codes: np.ndarray) -> np.ndarray:
        """Codes [n, D] as bytes."""

    @abc.abstractmethod
    def _unpack(self, packed: tf.Tensor) -> tf.Tensor:
        """Bytes as codes [n, D]."""


class Int8Table(_CodedTable):
    """A byte for each value."""

    storage = "int8"
    levels = 256

    @classmethod
    def _code_bytes(cls, dim: int) -> int:
        return dim

    def _pack(self, codes: np.ndarray) -> np.ndarray:
        return codes

    def _unpack(self, packed: tf.Tensor) -> tf.Tensor:
        return packed


class Int4Table(_CodedTable):
    """A byte for two values; of an odd number of columns the last stands alone."""

    storage = "int4"
    levels = 16

    @classmethod
    def _code_bytes(cls, dim: int) -> int:
        return (dim + 1) // 2

    def _pack(self, codes: np.ndarray) -> np.ndarray:
        half = self._code_bytes(codes.shape[1])
        packed = codes[:, :half].copy()
        packed[:, : codes.shape[1] - half] |= codes[:, half:] << 4
        return packed

    def _unpack(self, packed: tf.Tensor) -> tf.Tensor:
        low = tf.bitwise.bitwise_and(packed, tf.constant(15, tf.uint8))
        high = tf.bitwise.right_shift(packed, tf.constant(4, tf.uint8))
        codes = tf.concat([low, high], axis=1)
        dim = self._shape[1]
        return codes[:, :dim] if dim % 2 else codes


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
    # Made larger by what bfloat16 may take off again: the ends stay within reach.
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
) -> _Decoded:
    """What codes mean: the reading of `encode`."""
    step = scale.astype(np.float64)
    values = (codes - (levels - 1) / 2) * step + offset.astype(np.float64)
    return _Decoded(values, step / 2)


def _assign_rows(variable: tf.Variable, begin: int, rows: np.ndarray) -> None:
    """variable[begin:...].assign(rows), which would read and copy all of it first."""
    tf.raw_ops.ResourceStridedSliceAssign(
        ref=variable.handle,
        begin=[begin],
        end=[begin + len(rows)],
        strides=[1],
        value=tf.constant(rows, variable.dtype),
    )


def _zeros(shape: list[int], dtype: tf.DType) -> tf.Variable:
    return tf.Variable(tf.zeros(shape, dtype), trainable=False)


_STORAGES: dict[str, Callable[[int, int], StoredTable]] = {
    table.storage: table
    for table in (WholeTable, Bfloat16Table, Float16Table, Int8Table, Int4Table)
}
STORAGES = tuple(_STORAGES)


def store(source: Source, storage: str) -> tuple[StoredTable, TableReport]:
    """Keeps a table in a form of its own.

    Args:
      source: The table.
      storage: One of `STORAGES`. A row so short that its codes would take more than
        its values stays float32.

    Raises:
      ValueError: If there is no such storage.
      tf.errors.InvalidArgumentError: If a value cannot be stored.
    """
    if storage not in _STORAGES:
        raise errors.unknown_storage(storage, STORAGES)
    chosen: Any = _STORAGES[storage]
    if chosen.num_bytes(*source.shape) > WholeTable.num_bytes(*source.shape):
        chosen = WholeTable
    table = chosen(*source.shape)
    return table, table.fill(source)
