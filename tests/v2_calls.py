"""Embeddings and batches that the tests of TPUEmbeddingV2 share, on any engine."""

from __future__ import annotations

from typing import Any

import numpy as np
import tensorflow as tf

import tpu_embedding as te


def films(**arguments: Any) -> te.TableConfig:
    return te.TableConfig(
        8, 2, initializer=te.RowIdInitializer(), name="films", **arguments
    )


def two_tables(
    optimizer: Any = None, output_shape: Any = None, **arguments: Any
) -> te.TPUEmbeddingV2:
    """Makes films and users, which are stacked, and two features of films."""
    first = films(combiner="sum")
    second = te.TableConfig(
        5, 2, initializer=te.RowIdInitializer(100), name="users", combiner="sum"
    )
    features = {
        name: te.FeatureConfig(table, output_shape=output_shape, name=name)
        for name, table in (("a", first), ("b", second), ("c", first))
    }
    return te.TPUEmbeddingV2(features, optimizer or te.SGD(1.0), **arguments)


BATCH = {
    "a": tf.constant([7, 0]),
    "b": tf.ragged.constant([[4, 4], []], dtype=tf.int64),
    "c": tf.sparse.from_dense([[2, 0, 3], [0, 0, 0]]),
}


def table(embedding: te.TPUEmbeddingV2, name: str) -> np.ndarray:
    tables = {key.name: value for key, value in embedding.embedding_tables.items()}
    return tables[name].numpy()
