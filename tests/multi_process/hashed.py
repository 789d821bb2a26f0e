"""What the processes of a job do with hashed tables."""

from __future__ import annotations

from typing import Any

import numpy as np
import tensorflow as tf
from multi_process.calls import failure, rank
from reference import hashing as oracle
from steps import look_up

import tpu_embedding as te

OWN = te.Hashing(9, hashes=2, salt=5)


def _made(strategy: Any, kind: Any, size: Any, dim: int, placement: str) -> Any:
    table = te.TableConfig(
        size, dim, te.RowIdInitializer(), name="films", placement=placement
    )
    count = 1 if isinstance(size, te.Hashing) else OWN.hashes
    features = [te.FeatureConfig(table) for _ in range(count)]
    with strategy.scope():
        return kind(features, te.Adagrad(0.1)), table


def _train(embedding: Any, batches: list[Any], width: int) -> None:
    for step, features in enumerate(batches):
        activations, preserved = look_up(embedding, features)
        rows = tf.shape(features[0])[0]
        upstream = tf.random.stateless_normal([rows, 2 * width], [step, 1])
        parts = [upstream] if len(features) == 1 else tf.split(upstream, 2, -1)
        assert [a.shape for a in activations] == [p.shape for p in parts]
        embedding.apply_gradients(parts, *preserved)


def train(strategy: Any, version: int, placement: str, path: str) -> Any:
    """Tables by hashes, and by the rows that the oracle chooses; a refused restore."""
    kind = te.TPUEmbedding if version == 1 else te.TPUEmbeddingV2
    own = rank(strategy)
    ids = [np.array([3, -7, 2**40 + own]), np.array([own, 3, -(2**50)])]
    hashed, table = _made(strategy, kind, OWN, 4, placement)
    _train(hashed, [[tf.constant(i)] for i in ids], 2)
    rows = [
        [
            tf.constant([oracle.row(int(n), OWN.num_rows, OWN.salt, k) for n in i])
            for k in range(OWN.hashes)
        ]
        for i in ids
    ]
    plain, other = _made(strategy, kind, OWN.num_rows, 2, placement)
    _train(plain, rows, 2)
    te.checkpoint.save(hashed, path)
    again, same = _made(strategy, kind, OWN, 4, placement)
    te.checkpoint.restore(again, path)
    salted = te.Hashing(9, hashes=2, salt=6)
    wrong, _ = _made(strategy, kind, salted, 4, placement)
    refused = failure(lambda: te.checkpoint.restore(wrong, path))
    tables = (hashed, table), (plain, other), (again, same)
    return [e.embedding_tables[t].numpy() for e, t in tables], refused
