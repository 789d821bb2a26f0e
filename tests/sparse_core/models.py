"""Small embeddings on SparseCores, whose values name their rows."""

from __future__ import annotations

from typing import Any

import tensorflow as tf
from software_tpu.calls import strategy_of

import tpu_embedding as te

BATCH = {
    "a": tf.constant([7, 0]),
    "b": tf.ragged.constant([[4, 4], []], dtype=tf.int64),
    "c": tf.sparse.from_dense([[2, 0, 3], [0, 0, 0]]),
}
SYSTEM = ("v6e", 2)


def two_tables(
    system: tuple[str, int] = SYSTEM, optimizer: Any = None, **arguments: Any
) -> te.TPUEmbeddingV2:
    """Films and users, which are stacked, and two features of films."""
    tables = [
        te.TableConfig(8, 2, te.RowIdInitializer(), name="films", combiner="sum"),
        te.TableConfig(5, 2, te.RowIdInitializer(100), name="users", combiner="sum"),
    ]
    features = {
        name: te.FeatureConfig(table, output_shape=[2], name=name)
        for name, table in zip("abc", [tables[0], tables[1], tables[0]], strict=True)
    }
    with strategy_of(*system).scope():
        return te.TPUEmbeddingV2(features, optimizer or te.SGD(1.0), **arguments)


def films(**arguments: Any) -> te.TPUEmbeddingV2:
    """One table, one feature of two samples."""
    config = te.TableConfig(8, 2, te.RowIdInitializer(), combiner="sum", name="films")
    with strategy_of(*arguments.pop("system", SYSTEM)).scope():
        return te.TPUEmbeddingV2(
            te.FeatureConfig(config, output_shape=[2], name="film"),
            arguments.pop("optimizer", te.SGD(1.0)),
            **arguments,
        )


def table(embedding: Any, name: str) -> Any:
    """One table as an array."""
    return {k.name: v for k, v in embedding.embedding_tables.items()}[name].numpy()
