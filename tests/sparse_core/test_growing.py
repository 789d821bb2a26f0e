"""Growing tables go on as static ones on SparseCores."""

from __future__ import annotations

import numpy as np
import tensorflow as tf
from software_tpu.calls import strategy_of

import tpu_embedding as te


def test_frozen_tables_train_on_sparse_cores() -> None:
    table = te.TableConfig(te.GrowingVocabulary(20), 8, name="films")
    growing = te.TPUEmbedding({"film": te.FeatureConfig(table)}, te.SGD(0.5))
    ids = tf.constant([7, -3, 2**62, 7], tf.int64)

    def train(factor: float) -> np.ndarray:
        growing.enqueue({"film": ids})
        found = growing.dequeue()["film"]
        growing.apply_gradients({"film": factor * tf.cos(found)})
        return found.numpy()

    train(1.0)
    frozen = growing.freeze_vocabulary(table)
    strategy = strategy_of("v6e", 2)
    feature = te.FeatureConfig(frozen.config, output_shape=[4])
    with strategy.scope():
        embedding = te.TPUEmbeddingV2({"film": feature}, te.SGD(0.5))

    def step(batch: dict[str, tf.Tensor]) -> tf.Tensor:
        activations, preserved = embedding(batch)
        found = activations["film"]
        embedding.apply_gradients({"film": tf.cos(found)}, preserved)
        return found

    for _ in range(3):
        expected = train(2.0)  # Both replicas have the same batch.
        found = strategy.run(step, ({"film": frozen.rows_of(ids)},))
        for replica in strategy.experimental_local_results(found):
            np.testing.assert_allclose(replica, expected, rtol=1e-6)
