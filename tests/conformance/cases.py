"""What the conformance suite runs over: kinds of input, their data, tolerances.

A new kind of input is a line in INPUTS and inherits all tests over it; a new
optimizer is one in optimizer_cases; a new engine is picked up from the package.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
from typing import Any

import numpy as np
import tensorflow as tf

EPSILON = 2.0**-24  # The unit roundoff of float32.
# One update has at most 16 roundings after its gradient is summed (FTRL: two sums,
# two powers of up to 4 units each, six products and quotients).
UPDATE_ROUNDINGS = 16
# A gain has two roundings (divisor and quotient), its product with a value a third.
GAIN_ROUNDINGS = 3


def tolerance(terms: int, scale: float, steps: int = 0) -> float:
    """Returns how far float32 may be from the reference, absolutely.

    A float32 sum of `terms` products is off by at most (terms - 1 + roundings of a
    product) * EPSILON times the sum of their magnitudes (Higham, Accuracy and
    Stability of Numerical Algorithms, section 3.1), here at most terms * scale.
    An update divides that sum by something of at least its own size (or, for SGD,
    multiplies it by a rate below 1), so that it adds (terms + UPDATE_ROUNDINGS)
    roundings of size `scale`; the next step starts from there.

    Args:
      terms: The most terms that one sum has: entries of a sample, or of a row.
      scale: The largest magnitude among what is summed, and the result.
      steps: How many updates the compared value went through.
    """
    roundings = GAIN_ROUNDINGS + terms + steps * (terms + UPDATE_ROUNDINGS)
    return roundings * EPSILON * scale


def assert_close(actual: Any, expected: Any, bound: float, what: str) -> None:
    """Asserts `actual` to be float32, shaped as `expected`, and at most `bound` off."""
    actual = np.asarray(actual)
    assert actual.dtype == np.float32, what
    assert actual.shape == expected.shape, what
    np.testing.assert_allclose(actual, expected, rtol=0, atol=bound, err_msg=what)


def named_values(rows: int, dim: int) -> np.ndarray:
    """A table whose values name their row (in quarters) and column (in 64ths).

    All are exact in float32, between -rows / 8 and rows / 8 + dim / 64.
    """
    row = np.arange(rows)[:, np.newaxis] - rows // 2
    return (row / 4 + np.arange(dim) / 64).astype(np.float32)


def drawn_rows(rows: int) -> np.ndarray:
    """Returns the ids that inputs draw from: the first, the last, most between."""
    return np.setdiff1d(np.arange(rows), [1, rows // 2])


@dataclasses.dataclass(frozen=True)
class Input:
    """A feature's input: its kind, its shape and what is declared of it.

    Attributes:
      kind: "dense", "sparse" or "ragged".
      shape: The input's shape; for ragged (rows, the longest row).
    """

    name: str
    kind: str
    shape: tuple[int, ...]
    max_sequence_length: int = 0
    output_shape: tuple[int | None, ...] | None = None

    def draw(
        self, rng: np.random.Generator, rows: int, dtype: tf.DType = tf.int64
    ) -> Any:
        """Draws ids with duplicates and, where possible, empty and full samples."""
        ids = rng.choice(drawn_rows(rows), self.shape)
        ids.flat[0], ids.flat[-1] = 0, rows - 1
        if ids.shape[-1] > 1 and ids.ndim > 1:
            ids.flat[1] = ids.flat[0]  # Twice in one sample.
        return _BUILDERS[self.kind](rng, ids, dtype)


def _dense(rng: np.random.Generator, ids: np.ndarray, dtype: tf.DType) -> Any:
    return tf.constant(ids, dtype)


def _sparse(rng: np.random.Generator, ids: np.ndarray, dtype: tf.DType) -> Any:
    present = rng.random(ids.shape) < 0.6
    present.reshape(-1, ids.shape[-1])[0] = True
    present.reshape(-1, ids.shape[-1])[2] = False
    present.flat[-1] = True
    return tf.SparseTensor(
        np.argwhere(present), tf.constant(ids[present], dtype), ids.shape
    )


def _ragged(rng: np.random.Generator, ids: np.ndarray, dtype: tf.DType) -> Any:
    lengths = rng.integers(1, ids.shape[1] + 1, ids.shape[0])
    lengths[[0, 2, -1]] = ids.shape[1], 0, ids.shape[1]
    present = np.arange(ids.shape[1]) < lengths[:, np.newaxis]
    splits = np.concatenate([[0], np.cumsum(lengths)])
    values = tf.constant(ids[present], dtype)
    return tf.RaggedTensor.from_row_splits(values, splits, validate=False)


_BUILDERS = {"dense": _dense, "sparse": _sparse, "ragged": _ragged}

INPUTS = (
    Input("dense1", "dense", (6,)),
    Input("dense2", "dense", (6, 3)),
    Input("dense3", "dense", (3, 2, 3)),
    Input("sparse2", "sparse", (6, 4)),
    Input("sparse3", "sparse", (3, 2, 4)),
    Input("ragged", "ragged", (6, 4)),
    Input("ragged_shaped", "ragged", (6, 4), output_shape=(3, 2)),
    Input("ragged_positions", "ragged", (4, 4), output_shape=(2, 2, 3)),
    Input("dense_sequence", "dense", (4, 3), max_sequence_length=2),
    Input("sparse_sequence", "sparse", (4, 4), max_sequence_length=3),
    Input("ragged_sequence", "ragged", (4, 4), max_sequence_length=3),
)
INPUT_BY_NAME = {case.name: case for case in INPUTS}
COMBINERS = ("sum", "mean", "sqrtn")


def values_of(value: Any) -> np.ndarray:
    """The values of a tensor of any kind, as a copy."""
    return np.array(value if isinstance(value, tf.Tensor) else value.values)


def with_values(value: Any, values: Any) -> Any:
    """Makes a tensor of the layout of `value`, with its row_splits or indices."""
    if isinstance(value, tf.Tensor):
        return tf.convert_to_tensor(values)
    return value.with_values(tf.convert_to_tensor(values))


def samples_of(value: Any) -> list[slice]:
    """Returns where `values_of` has each sample's entries; not for sequences."""
    if isinstance(value, tf.RaggedTensor):
        splits = value.row_splits.numpy()
    elif isinstance(value, tf.SparseTensor):
        shape = value.dense_shape.numpy()
        rows = np.ravel_multi_index(value.indices.numpy()[:, :-1].T, shape[:-1])
        splits = np.searchsorted(rows, np.arange(math.prod(shape[:-1]) + 1))
    else:
        length = value.shape[-1] if value.shape.rank > 1 else 1
        splits = np.arange(0, tf.size(value) + 1, length)
    return [slice(a, b) for a, b in itertools.pairwise(splits)]


def positive_weights(rng: np.random.Generator, value: Any) -> Any:
    """Weights of 0 or in [0.5, 2), and one sample where all are 0."""
    size = values_of(value).size
    weights = rng.uniform(0.5, 2, size) * (rng.random(size) < 0.8)
    weights[samples_of(value)[-1]] = 0
    return with_values(
        value, weights.reshape(values_of(value).shape).astype(np.float32)
    )


def signed_weights(rng: np.random.Generator, value: Any) -> tuple[Any, float]:
    """Weights of either sign, and the largest sum |w| / |sum w| of a sample.

    The ratio is at most 1000; beyond, a sum in float32 means nothing. In the first
    sample of two or more entries the weights add up to exactly 0.
    """
    weights = np.empty(values_of(value).size, np.float32)
    worst, cancelled = 1.0, False
    for sample in samples_of(value):
        size = sample.stop - sample.start
        if size >= 2 and not cancelled:
            weights[sample] = [1.5, -1.5] + [0] * (size - 2)
            cancelled = True
            continue
        ratio = math.inf
        while ratio > 1000:
            weights[sample] = rng.uniform(-2, 2, size)
            total = abs(weights[sample].sum(dtype=np.float64))
            ratio = np.abs(weights[sample]).sum() / total if size else 1.0
        worst = max(worst, ratio)
    return with_values(value, weights.reshape(values_of(value).shape)), worst
