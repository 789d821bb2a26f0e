"""Embeddings and batches that the tests of TPUEmbeddingV2 share."""

from __future__ import annotations

from typing import Any

import numpy as np
import tensorflow as tf

import tpu_embedding as te


def films(**arguments: Any) -> te.TableConfig:
    return te.TableConfig(
        8, 2, initializer=te.RowIdInitializer(), name="films", **arguments
    )


def two_tables(**options: Any) -> te.TPUEmbeddingV2:
    """Films and users, which are stacked, and two features of films."""
    first = films(combiner="sum")
    second = te.TableConfig(
        5, 2, initializer=te.RowIdInitializer(100), name="users", combiner="sum"
    )
    features = {
        "a": te.FeatureConfig(first, **options),
        "b": te.FeatureConfig(second, **options),
        "c": te.FeatureConfig(first, **options),
    }
    return te.TPUEmbeddingV2(features, te.SGD(1.0))


BATCH = {
    "a": tf.constant([7, 0]),
    "b": tf.ragged.constant([[4, 4], []], dtype=tf.int64),
    "c": tf.sparse.from_dense([[2, 0, 3], [0, 0, 0]]),
}


def table(embedding: te.TPUEmbeddingV2, name: str) -> np.ndarray:
    tables = {key.name: value for key, value in embedding.embedding_tables.items()}
    return tables[name].numpy()
