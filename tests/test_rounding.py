"""The random bits of rounding: published answers, the reference, portable engine."""

from __future__ import annotations

import numpy as np
import pytest
import tensorflow as tf
from reference import rounding as reference

from tpu_embedding.engines.portable.engine import round_rows

# Published with the generator: counter, key, result.
KNOWN_ANSWERS = (
    (
        (0x00000000,) * 4,
        (0x00000000,) * 4,
        (0x9C6CA96A, 0xE17EAE66, 0xFC10ECD4, 0x5256A7D8),
    ),
    (
        (0xFFFFFFFF,) * 4,
        (0xFFFFFFFF,) * 4,
        (0x2A881696, 0x57012287, 0xF6C7446E, 0xA16A6732),
    ),
    (
        (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344),
        (0xA4093822, 0x299F31D0, 0x082EFA98, 0xEC4E6C89),
        (0x59CD1DBB, 0xB8879579, 0x86B5D00C, 0xAC8B6D84),
    ),
)
SEED, STEP = (123 << 32) + 77, (5 << 32) + 9
ROWS = (0, 3, 2**31 - 2)


@pytest.mark.parametrize(("counter", "key", "expected"), KNOWN_ANSWERS)
def test_the_reference_gives_the_known_answers(
    counter: tuple[int, ...], key: tuple[int, ...], expected: tuple[int, ...]
) -> None:
    assert reference.threefry(counter, key) == expected


@pytest.mark.parametrize("dim", [3, 10, 70])
def test_stock_ops_round_as_the_reference(dim: int, rng: np.random.Generator) -> None:
    values = rng.normal(size=(3, dim)).astype(np.float32)
    largest = np.finfo(np.float32).max
    values[0, :3] = np.nan, np.inf, -np.inf
    values[1, :3] = largest, -largest, 0.0
    values[2, :3] = 1e-40, -0.0, 1.5
    rounded = round_rows(
        tf.constant(values),
        tf.constant(ROWS, tf.int64),
        SEED,
        tf.constant(STEP, tf.int64),
    )
    assert rounded.dtype == tf.bfloat16
    expected = [
        reference.round_row(row, SEED, STEP, number)
        for row, number in zip(values, ROWS, strict=True)
    ]
    actual = np.float32(rounded.numpy())
    np.testing.assert_array_equal(actual, expected)
    np.testing.assert_array_equal(np.signbit(actual), np.signbit(values))


def test_nearest_is_that_of_tensorflow(rng: np.random.Generator) -> None:
    values = np.float32([*rng.normal(size=500), 1 + 2.0**-8, 1 + 3 * 2.0**-8])
    expected = np.float32(tf.cast(values, tf.bfloat16).numpy())
    np.testing.assert_array_equal(reference.nearest(values), expected)
