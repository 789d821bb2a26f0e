"""The tensors of a TensorFlow checkpoint, read by ranges of rows.

RestoreV2 reads and checks a stored tensor whole, even where a part of it is asked
for. The values lie in the data files row by row, so here they are read in place.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import tensorflow as tf
from google.protobuf import message
from tensorflow.core.protobuf import tensor_bundle_pb2

from tpu_embedding.checkpoint import crc32c, errors
from tpu_embedding.checkpoint.index_file import read_index
from tpu_embedding.layout.table_arrays import SLICE_BYTES, Rows

_HEADER_KEY = b""
_SLICE_MARK = b"\0"  # Keys of slices begin with it, keys of tensors never.


@dataclasses.dataclass(frozen=True)
class Piece:
    """A block of a tensor that is stored in one place.

    Attributes:
      rows: [start, stop) of the rows that it holds.
      columns: [start, stop) of the columns.
      path: Of the data file.
      offset: Of its first byte in the file.
      size: In bytes.
      crc: The checksum of those bytes.
    """

    rows: tuple[int, int]
    columns: tuple[int, int]
    path: str
    offset: int
    size: int
    crc: int


class Bundle:
    """A TensorFlow checkpoint.

    Attributes:
      prefix: Its path without `.index`.
      entries: What the index says about each tensor, by key.
    """

    def __init__(self, prefix: str) -> None:
        """Reads the index.

        Raises:
          tf.errors.NotFoundError: If there is none.
          tf.errors.DataLossError: If it is damaged.
          NotImplementedError: If it comes from a big-endian machine.
        """
        self.prefix = prefix
        path = prefix + ".index"
        if not tf.io.gfile.exists(path):
            raise errors.not_found(prefix)
        self._index = read_index(path)
        try:
            header = tensor_bundle_pb2.BundleHeaderProto.FromString(
                self._index[_HEADER_KEY]
            )
            self.entries = {
                key.decode(): tensor_bundle_pb2.BundleEntryProto.FromString(value)
                for key, value in self._index.items()
                if key != _HEADER_KEY and not key.startswith(_SLICE_MARK)
            }
        except (KeyError, UnicodeDecodeError, message.DecodeError) as error:
            raise errors.corrupted(path, f"it cannot be parsed ({error})") from error
        self._num_shards = header.num_shards
        if header.endianness == tensor_bundle_pb2.BundleHeaderProto.BIG:
            raise errors.byte_order(path)

    def shape(self, key: str) -> tuple[int, ...]:
        """The shape of a tensor."""
        return tuple(axis.size for axis in self.entries[key].shape.dim)

    def dtype(self, key: str) -> tf.DType:
        """The dtype of a tensor."""
        return tf.as_dtype(self.entries[key].dtype)

    def rows(self, key: str) -> BundleRows:
        """A tensor of rank 2, to be read in slices."""
        return BundleRows(self, key)

    def value(self, key: str) -> Any:
        """A small tensor, whole: scalars and strings."""
        try:
            (value,) = tf.raw_ops.RestoreV2(
                prefix=self.prefix,
                tensor_names=[key],
                shape_and_slices=[""],
                dtypes=[self.dtype(key)],
            )
        except (tf.errors.OpError, UnicodeDecodeError) as error:
            path = self._data_path(self.entries[key].shard_id)
            raise errors.corrupted(path, f"{key} cannot be read ({error})") from error
        return value.numpy()

    def numpy_dtype(self, key: str) -> np.dtype[Any]:
        """As `dtype`, for NumPy."""
        return np.dtype(self.dtype(key).as_numpy_dtype)

    def pieces(self, key: str) -> list[Piece]:
        """Where the values of a tensor of rank 2 lie."""
        entry = self.entries[key]
        rows, columns = self.shape(key)
        if not entry.slices:
            return [self._piece((0, rows), (0, columns), entry)]
        pieces = []
        for stored in entry.slices:
            within = [
                _range(extent, axis)
                for extent, axis in zip(stored.extent, (rows, columns), strict=True)
            ]
            value = self._index.get(_slice_key(key, stored))
            if value is None:
                raise errors.corrupted(self.prefix + ".index", f"a part of {key} lacks")
            part = tensor_bundle_pb2.BundleEntryProto.FromString(value)
            pieces.append(self._piece(within[0], within[1], part))
        return pieces

    def _piece(
        self, rows: tuple[int, int], columns: tuple[int, int], entry: Any
    ) -> Piece:
        path = self._data_path(entry.shard_id)
        return Piece(
            rows, columns, path, entry.offset, entry.size, crc32c.unmask(entry.crc32c)
        )

    def _data_path(self, shard: int) -> str:
        return f"{self.prefix}.data-{shard:05d}-of-{self._num_shards:05d}"


class BundleRows(Rows):
    """One tensor of rank 2 of a checkpoint."""

    def __init__(self, bundle: Bundle, key: str) -> None:
        rows, columns = bundle.shape(key)
        self._shape = (rows, columns)
        self._dtype = bundle.numpy_dtype(key)
        self._pieces = bundle.pieces(key)
        self._verified = False
        self.key = key

    @property
    def shape(self) -> tuple[int, int]:
        return self._shape

    @property
    def dtype(self) -> np.dtype[Any]:
        return self._dtype

    def read(self, start: int, stop: int) -> np.ndarray:
        values = np.empty((stop - start, self._shape[1]), self._dtype)
        for piece in self._pieces:
            first, last = max(start, piece.rows[0]), min(stop, piece.rows[1])
            if first >= last:
                continue
            width = piece.columns[1] - piece.columns[0]
            row_bytes = width * self._dtype.itemsize
            offset = piece.offset + (first - piece.rows[0]) * row_bytes
            octets = _read(piece.path, offset, (last - first) * row_bytes)
            block = np.frombuffer(octets, self._dtype).reshape(-1, width)
            values[first - start : last - start, slice(*piece.columns)] = block
        return values

    def verify(self) -> None:
        if self._verified:
            return  # By another table of the same stack.
        for piece in self._pieces:
            rows = piece.rows[1] - piece.rows[0]
            columns = piece.columns[1] - piece.columns[0]
            if piece.size != rows * columns * self._dtype.itemsize:
                raise errors.corrupted(piece.path, f"{self.key} has another size")
            crc, end = 0, piece.offset + piece.size
            for offset in range(piece.offset, end, SLICE_BYTES):
                octets = _read(piece.path, offset, min(SLICE_BYTES, end - offset))
                crc = crc32c.extend(crc, octets)
            if crc != piece.crc:
                raise errors.corrupted(
                    piece.path, f"the checksum of {self.key} differs"
                )
        self._verified = True


def _read(path: str, offset: int, size: int) -> bytes:
    try:
        with tf.io.gfile.GFile(path, "rb") as file:
            file.seek(offset)
            octets = file.read(size)
    except tf.errors.NotFoundError as error:
        raise errors.corrupted(path, "it is missing") from error
    if len(octets) < size:
        raise errors.corrupted(path, "it is cut off")
    return octets


def _range(extent: Any, axis: int) -> tuple[int, int]:
    """[start, stop) of one axis of a stored slice; without a length it is the whole."""
    if extent.HasField("length"):
        return extent.start, extent.start + extent.length
    return 0, axis


def _slice_key(name: str, stored: Any) -> bytes:
    """The key under which the index holds one slice.

    TensorFlow writes it as ordered codes: 0, the name, the number of axes, then for
    each axis start and length, where the length is -1 for a whole axis.
    """
    # Bytes 0 and 255 would have to be escaped; names are UTF-8 and have neither.
    key = _ordered_unsigned(0) + name.encode() + b"\0\1"
    key += _ordered_unsigned(len(stored.extent))
    for extent in stored.extent:
        whole = not extent.HasField("length")
        key += _ordered_signed(0 if whole else extent.start)
        key += _ordered_signed(-1 if whole else extent.length)
    return key


def _ordered_unsigned(value: int) -> bytes:
    """The number of bytes, then the bytes, largest first; 0 has none."""
    octets = value.to_bytes((value.bit_length() + 7) // 8, "big")
    return bytes([len(octets)]) + octets


def _ordered_signed(value: int) -> bytes:
    """Two's complement of n bytes, whose first n bits after the sign say n.

    Those bits are flipped where the value is not negative, and the sign bit too.
    """
    bits = (value if value >= 0 else ~value).bit_length()
    length = bits // 7 + 1  # A byte has 7 bits of the value beside its share of n.
    octets = bytearray(value.to_bytes(length, "big", signed=True))
    header = ((1 << length) - 1) << (8 * 2 - length)  # The first n bits of two bytes.
    octets[0] ^= header >> 8
    if length > 1:
        octets[1] ^= header & 0xFF
    return bytes(octets)
