"""TensorFlow's own TPUEmbeddingForServing as a second oracle for lookups.

It serves rank-1 dense, sparse and ragged input with valid ids and weights > 0; for
anything else it refuses or differs (docs/semantics.md, section 8).
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import tensorflow as tf

import tpu_embedding as te

stock = tf.tpu.experimental.embedding
V, D, BATCH, MOST = 50, 5, 12, 6


pytestmark = pytest.mark.usefixtures("engine")


def lookups(config: Any, values: np.ndarray, features: Any, weights: Any) -> list[Any]:
    """What TensorFlow's class and ours give for the same table."""
    theirs = stock.TPUEmbeddingForServing(config, optimizer=None)
    theirs.build()
    ours = te.TPUEmbedding(config, None)
    for embedding in (theirs, ours):
        for table in embedding.embedding_tables.values():
            table.assign(values)
    ours.enqueue(features, weights, training=False)
    return [theirs(features, weights), ours.dequeue()]


@pytest.mark.parametrize("combiner", ["sum", "mean", "sqrtn"])
@pytest.mark.parametrize("weighted", [False, True])
def test_lookups(combiner: str, weighted: bool, rng: np.random.Generator) -> None:
    table = stock.TableConfig(V, D, combiner=combiner, name="table")
    values = rng.standard_normal((V, D)).astype(np.float32)
    rows = [list(rng.integers(0, V, rng.integers(0, MOST))) for _ in range(BATCH)]
    ragged = tf.ragged.constant(rows, dtype=tf.int64)
    positive = ragged.with_values(
        tf.constant(rng.uniform(0.5, 2.0, ragged.values.shape[0]), tf.float32)
    )
    # A call of the stock class takes sparse or ragged features, not both.
    for to_form in (lambda x: x, lambda x: x.to_sparse()):
        features = {"ids": to_form(ragged)}
        weights = {"ids": to_form(positive)} if weighted else None
        expected, actual = lookups(
            {"ids": stock.FeatureConfig(table)}, values, features, weights
        )
        # At most MOST terms of size below 2 * max|T|, each rounded a few times.
        np.testing.assert_allclose(
            actual["ids"], expected["ids"], rtol=0, atol=8 * MOST * 8 * 2**-24
        )


@pytest.mark.parametrize("dtype", [tf.int32, tf.int64])
def test_dense(dtype: tf.DType, rng: np.random.Generator) -> None:
    table = stock.TableConfig(V, D, name="table")
    values = rng.standard_normal((V, D)).astype(np.float32)
    features = {"ids": tf.constant(rng.integers(0, V, BATCH), dtype)}
    expected, actual = lookups(
        {"ids": stock.FeatureConfig(table)}, values, features, None
    )
    np.testing.assert_array_equal(actual["ids"], expected["ids"])
