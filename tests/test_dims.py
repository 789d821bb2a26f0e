"""A dim that the kernels know gives the same bits as any other dim.

A column of a table does not depend on those beside it. So the columns of a table whose
dim is compiled as a constant (ops/cc/core/dims.h) are held against the same columns of
one that has a column more, in the library as it is installed.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import optimizer_cases
import pytest
import tensorflow as tf

import tpu_embedding as te

KNOWN = (16, 32, 64, 128)
ROWS, STEPS = 40, 3
# The rules that treat all columns alike.
CASES = [
    case
    for case in optimizer_cases.OPTIMIZERS
    if not any(slot.per_row for slot in case.cls().slots)
]


def make_feature(case: Any, dim: int, values: np.ndarray) -> te.FeatureConfig:
    """A table that starts with the first `dim` columns of `values`."""
    optimizer = case.cls(**{**case.options[-1], "learning_rate": 0.1})
    start = tf.constant(values[:, :dim])
    table = te.TableConfig(ROWS, dim, lambda shape, dtype: start, optimizer)
    return te.FeatureConfig(table)


@pytest.mark.parametrize("dim", KNOWN)
def test_columns_have_the_same_bits(
    dim: int, rng: np.random.Generator, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TPU_EMBEDDING_ENGINE", "host")
    values = rng.normal(size=[ROWS, dim + 1]).astype(np.float32)
    features = {
        (case.name, width): make_feature(case, width, values)
        for case in CASES
        for width in (dim, dim + 1)
    }
    embedding = te.TPUEmbedding(list(features.values()), None)
    for _ in range(STEPS):
        ids = tf.constant(rng.integers(0, ROWS, (30, 3)))
        embedding.enqueue([ids] * len(features))
        found = dict(zip(features, embedding.dequeue(), strict=True))
        given = tf.constant(rng.normal(size=[30, dim + 1]), tf.float32)
        embedding.apply_gradients([given[:, :width] for _, width in features])
        for case in CASES:
            np.testing.assert_array_equal(
                found[case.name, dim], found[case.name, dim + 1][:, :dim]
            )
    for case in CASES:
        own, wider = (
            embedding.variables[features[case.name, width].table]
            for width in (dim, dim + 1)
        )
        for name, variable in own.items():
            np.testing.assert_array_equal(variable, wider[name][:, :dim])
        assert not np.array_equal(own["parameters"], values[:, :dim])
