"""Checksums, against the definition and against what TensorFlow stores."""

from __future__ import annotations

import hypothesis
import numpy as np
import pytest
from hypothesis import strategies

from tpu_embedding.checkpoint import crc32c


def slow(data: bytes) -> int:
    """RFC 3720, appendix B.4: bit by bit."""
    crc = 0xFFFFFFFF
    for octet in data:
        crc ^= octet
        for _ in range(8):
            crc = (crc >> 1) ^ (0x82F63B78 if crc & 1 else 0)
    return crc ^ 0xFFFFFFFF


@pytest.mark.parametrize(
    ("data", "expected"),
    [
        (b"", 0),
        (b"123456789", 0xE3069283),
        (bytes(32), 0x8A9136AA),  # The examples of RFC 3720.
        (b"\xff" * 32, 0x62A8AB43),
        (bytes(range(32)), 0x46DD794E),
    ],
)
def test_known_values(data: bytes, expected: int) -> None:
    assert crc32c.extend(0, data) == expected == slow(data)


# Around the size of one word in each lane, and around two.
@pytest.mark.parametrize("size", [16383, 16384, 16385, 32767, 32768, 40001])
def test_lanes(size: int, rng: np.random.Generator) -> None:
    data = rng.integers(0, 256, size, dtype=np.uint8).tobytes()
    assert crc32c.extend(0, data) == slow(data)


@hypothesis.given(strategies.binary(max_size=100), strategies.binary(max_size=100))
def test_parts(first: bytes, second: bytes) -> None:
    assert crc32c.extend(crc32c.extend(0, first), second) == slow(first + second)


def test_parts_of_many_lanes(rng: np.random.Generator) -> None:
    data = rng.integers(0, 256, 100_000, dtype=np.uint8).tobytes()
    joined = 0
    for start in range(0, len(data), 33_333):
        joined = crc32c.extend(joined, data[start : start + 33_333])
    assert joined == crc32c.extend(0, data) == slow(data)


def test_unmask() -> None:
    # As TensorFlow writes it: rotated right by 15, plus a constant.
    crc = 0xE3069283
    stored = (((crc >> 15) | (crc << 17)) + 0xA282EAD8) & 0xFFFFFFFF
    assert crc32c.unmask(stored) == crc
