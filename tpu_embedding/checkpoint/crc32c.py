"""CRC-32C (Castagnoli) of large buffers, in NumPy.

TensorFlow keeps one of these with each stored tensor, but checks it only while it
reads the whole tensor into memory. Here a file is checked in pieces.

The checksum without its first and last inversion is linear over GF(2), so a buffer
is cut into lanes that are summed side by side, and the sums are joined afterwards.
"""

from __future__ import annotations

import functools

import numpy as np

_POLYNOMIAL = 0x82F63B78  # Castagnoli, bits reversed.
_ONES = 0xFFFFFFFF
_MASK_DELTA = 0xA282EAD8  # What TensorFlow adds to a checksum that it stores.
_LANES = 4096  # Enough that a NumPy call costs more than its overhead.
_WORD = 4


def extend(crc: int, data: bytes | memoryview | np.ndarray) -> int:
    """The checksum of some bytes followed by `data`.

    >>> hex(extend(0, b"123456789"))
    '0xe3069283'

    Args:
      crc: The checksum of the bytes before, 0 for none.
      data: What follows, any contiguous buffer.
    """
    octets = np.frombuffer(data, np.uint8)
    state = crc ^ _ONES
    length = octets.size // (_LANES * _WORD) * _WORD  # Of a lane, in bytes.
    if length:
        state = _zeros(state, length * _LANES) ^ _sum_lanes(octets, length)
    byte_table = _tables()[0]
    for octet in octets[length * _LANES :].tolist():
        state = (state >> 8) ^ byte_table[(state ^ octet) & 0xFF]
    return state ^ _ONES


def unmask(stored: int) -> int:
    """The checksum that TensorFlow stored as `stored`."""
    rotated = (stored - _MASK_DELTA) & _ONES
    return ((rotated >> 17) | (rotated << 15)) & _ONES


def _sum_lanes(octets: np.ndarray, length: int) -> int:
    """The linear part for the first `_LANES * length` bytes."""
    words = octets[: length * _LANES].view("<u4").reshape(_LANES, length // _WORD)
    low, high = _tables()[1]
    state = np.zeros(_LANES, np.uint32)
    for word in np.ascontiguousarray(words.T):
        state ^= word
        state = low[state & 0xFFFF] ^ high[state >> 16]
    while state.size > 1:  # Neighbours are joined until one is left.
        tables = _shift_tables(length)
        state = _shift(tables, state[::2]) ^ state[1::2]
        length *= 2
    return int(state[0])


def _zeros(state: int, count: int) -> int:
    """The state after `count` more bytes of zeros."""
    return int(_shift(_shift_tables(count), np.array([state], np.uint32))[0])


def _shift(tables: np.ndarray, states: np.ndarray) -> np.ndarray:
    result = tables[0][states & 0xFF]
    for index in range(1, _WORD):
        result = result ^ tables[index][(states >> (8 * index)) & 0xFF]
    return result


@functools.cache
def _tables() -> tuple[list[int], tuple[np.ndarray, np.ndarray]]:
    """What one byte adds; what the two halves of a word add, 4 bytes later."""
    table = np.arange(256, dtype=np.uint32)
    for _ in range(8):
        table = (table >> 1) ^ np.where(table & 1, np.uint32(_POLYNOMIAL), 0).astype(
            np.uint32
        )
    state = np.arange(1 << 16, dtype=np.uint32)
    for _ in range(2):
        state = (state >> 8) ^ table[state & 0xFF]
    low = state  # Two bytes have gone in, two zeros must follow.
    for _ in range(2):
        low = (low >> 8) ^ table[low & 0xFF]
    return table.tolist(), (low, state)


@functools.cache
def _shift_tables(count: int) -> np.ndarray:
    """uint32 [4, 256]: each byte of a state, `count` bytes of zeros later."""
    table = np.array(_tables()[0], np.uint32)
    octets = np.arange(256, dtype=np.uint32)
    tables = np.stack([octets << (8 * index) for index in range(_WORD)])
    one = (tables >> 8) ^ table[tables & 0xFF]  # One byte of zeros.
    result, power = tables, one
    while count:
        if count & 1:
            result = _shift(power, result)
        power = _shift(power, power)
        count >>= 1
    return result
