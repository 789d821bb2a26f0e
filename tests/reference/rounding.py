"""Section 4: bfloat16 tables, rounded one element at a time with Python's integers."""

from __future__ import annotations

import functools
import zlib

import numpy as np

WORD = 2**32


ROTATIONS = (
    ((10, 26), (11, 21), (13, 27), (23, 5)),
    ((6, 20), (17, 11), (25, 10), (18, 20)),
)


@functools.cache  # Eight columns share a block.
def threefry(counter: tuple[int, ...], key: tuple[int, ...]) -> tuple[int, ...]:
    """Computes Threefry4x32-20 (Salmon et al., "Parallel random numbers", SC 2011)."""
    keys = [*key, 0x1BD11BDA ^ key[0] ^ key[1] ^ key[2] ^ key[3]]
    x = [(word + k) % WORD for word, k in zip(counter, key, strict=True)]
    for number in range(1, 6):
        for place, bits in enumerate(ROTATIONS[(number - 1) % 2]):
            for first, second, by in zip((0, 2), (1, 3), bits, strict=True):
                other = second if place % 2 == 0 else 4 - second
                x[first] = (x[first] + x[other]) % WORD
                rotated = x[other] * 2**by % WORD + x[other] // 2 ** (32 - by)
                x[other] = rotated ^ x[first]
        x = [(word + keys[(number + i) % 5]) % WORD for i, word in enumerate(x)]
        x[3] = (x[3] + number) % WORD
    return tuple(x)


def random_bits(seed: int, step: int, row: int, column: int) -> int:
    """Returns the 16 random bits of one element."""
    block = column // 64 * 8 + column // 2 % 8
    key = (seed % WORD, seed // WORD, step % WORD, step // WORD)
    word = threefry((block, row, 0, 0), key)[column // 16 % 4]
    return word // 2**16 if column % 2 else word % 2**16


def seed_of(name: str) -> int:
    """Returns the seed of a table for which none was given."""
    return zlib.crc32(name.encode())


def round_value(value: np.float32, random: int) -> np.float32:
    """Returns one of the two bfloat16 around a float32, as a float32."""
    if np.isnan(value) or np.isinf(value):
        return value
    bits = int(np.abs(value).view(np.uint32)) + random
    bits = min(bits - bits % 2**16, 0x7F7F0000)
    return np.copysign(np.uint32(bits).view(np.float32), value)


def round_row(values: np.ndarray, seed: int, step: int, row: int) -> np.ndarray:
    """Rounds a row after an update, to float32 [D] that bfloat16 can hold."""
    return np.array(
        [
            round_value(value, random_bits(seed, step, row, column))
            for column, value in enumerate(np.float32(values))
        ],
        np.float32,
    )


def nearest(values: np.ndarray) -> np.ndarray:
    """Rounds each to the nearest bfloat16, ties to even, as initial values are."""
    bits = np.ascontiguousarray(values, np.float32).view(np.uint32)
    odd = bits >> np.uint32(16) & np.uint32(1)
    bits = (bits + np.uint32(0x7FFF) + odd) & np.uint32(0xFFFF0000)
    return bits.view(np.float32)
