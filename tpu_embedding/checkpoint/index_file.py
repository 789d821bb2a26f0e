"""The index of a TensorFlow checkpoint: a sorted table of keys and values.

The format is that of LevelDB (doc/table_format.md in its sources):

    [block | type, 1 byte | masked CRC, 4 bytes] ... [metaindex] [index] [footer, 48]
    entry of a block: shared, unshared, length (varints), end of the key, value
    end of a block:   offsets of restarts, their number (4 bytes each)
    footer:           handle of metaindex, handle of index, padding, magic, 8 bytes
    handle:           offset, size (varints)

TensorFlow writes these blocks without compression.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator

import tensorflow as tf

from tpu_embedding.checkpoint import crc32c, errors

_FOOTER = 48
_MAGIC = bytes.fromhex("57fb808b247547db")
_TRAILER = 5
_UNCOMPRESSED = 0


def read_index(path: str) -> dict[bytes, bytes]:
    """All keys and values of an index file, each block checked.

    Raises:
      tf.errors.DataLossError: If the file is truncated or damaged.
    """
    with tf.io.gfile.GFile(path, "rb") as file:
        content: bytes = file.read()
    footer = content[-_FOOTER:]
    if len(footer) < _FOOTER or not footer.endswith(_MAGIC):
        raise errors.corrupted(path, "its end is missing")
    try:
        cursor = _Cursor(footer)
        for _ in range(2):
            cursor.varint()  # The handle of the metaindex, which is empty.
        entries = {}
        for _, handle in _entries(_block(path, content, cursor)):
            entries.update(_entries(_block(path, content, _Cursor(handle))))
    except IndexError as error:
        raise errors.corrupted(path, "an entry does not end") from error
    return entries


@dataclasses.dataclass
class _Cursor:
    """A place in some bytes, moved by each read."""

    data: bytes
    at: int = 0

    def varint(self) -> int:
        result = shift = 0
        while True:
            octet = self.data[self.at]
            self.at += 1
            result |= (octet & 0x7F) << shift
            if octet < 0x80:
                return result
            shift += 7

    def take(self, count: int) -> bytes:
        if self.at + count > len(self.data):
            raise IndexError(count)
        taken = self.data[self.at : self.at + count]
        self.at += count
        return taken


def _block(path: str, content: bytes, handle: _Cursor) -> bytes:
    """The block that a handle points to, without its end."""
    start, size = handle.varint(), handle.varint()
    block = content[start : start + size + _TRAILER]
    if len(block) < size + _TRAILER:
        raise errors.corrupted(path, "a block is cut off")
    stored = int.from_bytes(block[-4:], "little")
    if crc32c.extend(0, block[:-4]) != crc32c.unmask(stored):
        raise errors.corrupted(path, "the checksum of a block differs")
    if block[size] != _UNCOMPRESSED:
        raise errors.corrupted(
            path, "its blocks are compressed, which no TensorFlow does"
        )
    restarts = int.from_bytes(block[size - 4 : size], "little")
    return block[: size - 4 * (restarts + 1)]


def _entries(block: bytes) -> Iterator[tuple[bytes, bytes]]:
    cursor, key = _Cursor(block), b""
    while cursor.at < len(block):
        shared, unshared, length = cursor.varint(), cursor.varint(), cursor.varint()
        key = key[:shared] + cursor.take(unshared)
        yield key, cursor.take(length)
