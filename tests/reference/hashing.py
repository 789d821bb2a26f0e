"""The rows of hashed tables, in Python's integers."""

from __future__ import annotations

_WORD = 2**64


def mixed(word: int) -> int:
    """Mixes the 64 bits of a word."""
    for _ in range(2):
        word = ((word ^ (word >> 32)) * 0xD6E8FEB86659FD93) % _WORD
    return word ^ (word >> 32)


def row(number: int, num_rows: int, salt: int, k: int) -> int:
    """Returns the row of hash k of an id, a signed 64-bit integer."""
    key = mixed((mixed(salt) + k) % _WORD)
    return ((mixed((number % _WORD) ^ key) >> 32) * num_rows) >> 32
