"""TensorFlow's documented loops on the host engine."""

from __future__ import annotations

from typing import Any

import numpy as np
import tensorflow as tf
from documented_loops import BATCH, assert_same, dataset, feature_config, loops, stock

import tpu_embedding as te


def test_loops() -> None:
    results = []
    for make in (
        lambda: tf.distribute.OneDeviceStrategy("CPU:0"),
        lambda: tf.distribute.MirroredStrategy(["CPU:0", "CPU:1", "CPU:2"]),
    ):
        strategy = make()
        with strategy.scope():
            embedding = te.TPUEmbedding(
                feature_config=feature_config(), optimizer=stock.Adagrad(0.1)
            )
        results.append([np.asarray(value) for value in loops(embedding, strategy)])
    assert_same(results)


def test_constructor_of_2_3() -> None:
    """(feature_config, batch_size, optimizer), as the page of TensorFlow 2.3 has it."""
    strategy = tf.distribute.MirroredStrategy(["CPU:0", "CPU:1"])
    with strategy.scope():
        embedding = te.TPUEmbedding(
            feature_config=feature_config(), batch_size=BATCH, optimizer=stock.SGD(0.1)
        )
    loops(embedding, strategy)


def test_enqueue_core_by_core() -> None:
    """The finer grained form: each replica enqueues its own part in strategy.run."""
    strategy = tf.distribute.MirroredStrategy(["CPU:0", "CPU:1"])
    with strategy.scope():
        embedding = te.TPUEmbedding(feature_config(), stock.SGD(0.1))
    iterator = iter(strategy.distribute_datasets_from_function(dataset))

    @tf.function
    def step(features: Any) -> Any:
        def replica_step(own: Any) -> Any:
            embedding.enqueue(own, training=False)
            return embedding.dequeue()

        return strategy.run(replica_step, args=(features,))

    features, _ = next(iterator)
    activations = step(features)["bought"]
    for ids, found in zip(features["bought"].values, activations.values, strict=True):
        np.testing.assert_array_equal(found[:, 0], tf.cast(ids, tf.float32))
