"""The forms of tables for serving: unchanged, in 16 bits, or quantized by row.

A quantized row has a scale and an offset in bfloat16, and one code for each value:

    value = offset + scale * (code - middle),   code in 0 .. levels - 1,
    middle = (levels - 1) / 2

The offset is the middle of the row's values, and the scale is rounded up, so that every
value lies within half a step, scale / 2, of its code. A code of 8 bits is a byte. Two
codes of 4 bits share a byte, whose low bits hold the first half of the columns.
"""

from __future__ import annotations

import abc
from collections.abc import Callable
from typing import Any, ClassVar

import numpy as np
import tensorflow as tf
from tensorflow.python.ops.resource_variable_ops import UninitializedVariable

from tpu_embedding.serving.conversion import Converted, ConvertedTable, Source
from tpu_embedding.tables.codes import decode, encode
from tpu_embedding.tables.readers import TableReader
from tpu_embedding.tables.waiting import flush_before

# A function of (name, shape, dtype) that makes the holder of a part of a table.
_MakePart = Callable[[str, list[int], tf.DType], Any]


class WholeTable(TableReader, tf.Module):
    """An unconverted table, in the variable that stores it."""

    def __init__(self, table: tf.Variable) -> None:
        super().__init__()
        self.table = table

    def read(self, rows: tf.Tensor) -> tf.Tensor:
        return tf.cast(tf.gather(_values(self.table), rows), tf.float32)

    def operand(self, rows: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
        return _values(self.table), rows


def _values(table: Any) -> tf.Tensor:
    # This copies nothing, because nothing updates a served table. After one gather
    # from the variable itself, every read of the variable would copy it.
    with flush_before():  # An exported graph has no op of this package.
        return table.read_value()


class RowsOfFloat32(ConvertedTable):
    """A float32 table that is read row by row, as a read of all of it would copy it."""

    storage = "float32"
    largest = None

    def __init__(self, rows: int, dim: int, make: _MakePart | None = None) -> None:
        super().__init__()
        self.table = (make or _unfilled)("table", [rows, dim], tf.float32)

    @classmethod
    def row_bytes(cls, dim: int) -> int:
        return 4 * dim

    @property
    def parts(self) -> dict[str, tf.Variable]:
        return {"table": self.table}

    def convert(self, values: np.ndarray) -> Converted:
        return Converted([values], values, np.zeros([len(values), 1]))

    def read(self, rows: tf.Tensor) -> tf.Tensor:
        return tf.gather(self.table, rows)


class Float32Table(RowsOfFloat32):
    """A float32 copy of a table in parts or of another dtype; it stores any value."""

    def read(self, rows: tf.Tensor) -> tf.Tensor:
        return tf.gather(_values(self.table), rows)

    def operand(self, rows: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
        return _values(self.table), rows


class _HalfTable(ConvertedTable):
    """A table of 16-bit floats."""

    dtype: ClassVar[tf.DType]
    kept_as: ClassVar[tf.DType]  # A dtype with the same bits.
    unit_roundoff: ClassVar[float]
    smallest: ClassVar[float]  # The distance between adjacent numbers near 0.

    def __init__(self, rows: int, dim: int, make: _MakePart | None = None) -> None:
        super().__init__()
        self.table = (make or _unfilled)("table", [rows, dim], self.kept_as)

    @classmethod
    def row_bytes(cls, dim: int) -> int:
        return 2 * dim

    @property
    def parts(self) -> dict[str, tf.Variable]:
        return {"table": self.table}

    def convert(self, values: np.ndarray) -> Converted:
        stored = values.astype(self.dtype.as_numpy_dtype)
        largest = np.abs(values).max(axis=1, keepdims=True).astype(np.float64)
        bounds = largest * self.unit_roundoff + self.smallest / 2
        kept = stored.view(self.kept_as.as_numpy_dtype)
        return Converted([kept], stored.astype(np.float32), bounds)

    def read(self, rows: tf.Tensor) -> tf.Tensor:
        values = tf.bitcast(tf.gather(self.table, rows), self.dtype)
        return tf.cast(values, tf.float32)


class Bfloat16Table(_HalfTable):
    """A table of bfloat16."""

    storage = "bfloat16"
    dtype = kept_as = tf.bfloat16
    unit_roundoff, smallest = 2.0**-8, 2.0**-133
    largest = 3.38e38  # Larger values are rounded to infinity.


class Float16Table(_HalfTable):
    """A table of float16."""

    storage = "float16"
    dtype, kept_as = tf.float16, tf.int16  # RestoreV2 cannot join slices of float16.
    unit_roundoff, smallest = 2.0**-11, 2.0**-24
    largest = 65504.0


class _CodedTable(ConvertedTable):
    """A table of codes with a scale and an offset for each row."""

    levels: ClassVar[int]

    def __init__(self, rows: int, dim: int, make: _MakePart | None = None) -> None:
        super().__init__()
        self._dim = dim
        make = make or _unfilled
        self.codes = make("codes", [rows, self._code_bytes(dim)], tf.uint8)
        self.scale_offset = make("scale_offset", [rows, 2], tf.bfloat16)

    @classmethod
    @abc.abstractmethod
    def _code_bytes(cls, dim: int) -> int:
        """Returns the number of bytes for the codes of a row."""

    @classmethod
    def row_bytes(cls, dim: int) -> int:
        return cls._code_bytes(dim) + 4

    @property
    def parts(self) -> dict[str, tf.Variable]:
        return {"codes": self.codes, "scale_offset": self.scale_offset}

    def convert(self, values: np.ndarray) -> Converted:
        codes, scale, offset = encode(values, self.levels)
        parts = [self._pack(codes), np.concatenate([scale, offset], axis=1)]
        return Converted(parts, *decode(codes, scale, offset, self.levels))

    def read(self, rows: tf.Tensor) -> tf.Tensor:
        codes = self._unpack(tf.gather(self.codes, rows))
        pairs = tf.cast(tf.gather(self.scale_offset, rows), tf.float32)
        scale, offset = tf.split(pairs, 2, axis=1)
        middle = (self.levels - 1) / 2
        return (tf.cast(codes, tf.float32) - middle) * scale + offset

    @abc.abstractmethod
    def _pack(self, codes: np.ndarray) -> np.ndarray:
        """Converts codes [n, D] to bytes."""

    @abc.abstractmethod
    def _unpack(self, packed: tf.Tensor) -> tf.Tensor:
        """Converts bytes to codes [n, D]."""


class Int8Table(_CodedTable):
    """A table with one byte for each value."""

    storage = "int8"
    levels = 256
    keeps_codes = True

    @classmethod
    def _code_bytes(cls, dim: int) -> int:
        return dim

    def _pack(self, codes: np.ndarray) -> np.ndarray:
        return codes

    def _unpack(self, packed: tf.Tensor) -> tf.Tensor:
        return packed


class Int4Table(_CodedTable):
    """A table with a byte for two values; if `dim` is odd, one value has its own."""

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
        return codes[:, : self._dim] if self._dim % 2 else codes


class _UnfilledVariable(UninitializedVariable):
    """A variable that TensorFlow's saver leaves out.

    The saver leaves out variables without a value only if all variables are on one
    machine, but those of the user's model may be on parameter servers.
    """

    def _serialize_to_tensors(self) -> dict[str, Any]:
        return {
            key: type(value)(lambda: None, dtype=value.dtype, device=value.device)
            for key, value in super()._serialize_to_tensors().items()
        }


def _unfilled(name: str, shape: list[int], dtype: tf.DType) -> Any:
    """Makes a variable whose value exists only in the files of the exported model."""
    del name
    return _UnfilledVariable(shape=shape, dtype=dtype, trainable=False)


_STORAGES: dict[str, Callable[..., ConvertedTable]] = {
    table.storage: table
    for table in (Float32Table, Bfloat16Table, Float16Table, Int8Table, Int4Table)
}
STORAGES = tuple(_STORAGES)


def stored_form(
    source: Source,
    storage: str,
    spare: int | None = None,
    mapped: _MakePart | None = None,
) -> WholeTable | ConvertedTable:
    """Makes the form in which a table is exported.

    Args:
      source: The table.
      storage: One of `STORAGES`. A row so short that its codes would be larger than
        its values stays float32.
      spare: The number of spare rows of a table that changes while it is served.
      mapped: A function that makes the parts of a mapped table, or None.
    """
    chosen: Any = _STORAGES[storage]
    dim = source.shape[1]
    if chosen.row_bytes(dim) > Float32Table.row_bytes(dim):
        chosen = Float32Table
    if spare is not None:
        return form_of_rows(chosen.storage, source.shape[0] + spare, dim)
    variable = source.variable if mapped is None else None
    if chosen is Float32Table and variable is not None and _is_here(variable):
        return WholeTable(variable)
    return chosen(*source.shape, mapped)


def form_of_rows(
    storage: str, rows: int, dim: int, make: _MakePart | None = None
) -> ConvertedTable:
    """Makes a table in the form `storage`, for lookups that read row by row."""
    chosen = RowsOfFloat32 if storage == "float32" else _STORAGES[storage]
    return chosen(rows, dim, make)


def converter(storage: str, dim: int) -> ConvertedTable:
    """Makes a table without rows, which converts the rows of other tables."""
    return _STORAGES[storage](0, dim)


def _is_here(variable: Any) -> bool:
    """Returns whether a variable is in this process, not on a parameter server."""
    place, here = (
        tf.DeviceSpec.from_string(device)
        for device in (variable.device, tf.constant(0).device)
    )
    return (place.job, place.task) == (here.job, here.task)
