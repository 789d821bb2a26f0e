"""What servers refuse, and in which words."""

from __future__ import annotations

import numpy as np
import pytest
import tensorflow as tf
from parameter_servers.cluster import (
    FEATURES,
    JOB,
    START,
    B,
    D,
    H,
    V,
    batch,
    features,
    make,
)

import tpu_embedding as te

pytestmark = pytest.mark.second_tier


def test_calls_in_the_wrong_order_are_errors() -> None:
    _, served = make(te.TPUEmbedding, features(), te.SGD(0.1))
    order = tf.errors.FailedPreconditionError
    with pytest.raises(order, match="in the same function"):
        served.dequeue()
    served.enqueue(batch(0))
    with pytest.raises(order, match="no batch is enqueued"):
        tf.function(served.dequeue)()
    with pytest.raises(order, match="was not dequeued"):
        served.apply_gradients(dict.fromkeys(FEATURES))
    served.dequeue()
    served.enqueue(batch(1))
    with pytest.raises(order, match="still owes its gradients"):
        served.dequeue()
    served.apply_gradients(dict.fromkeys(FEATURES))
    served.reset()
    served.enqueue(batch(2), training=False)
    served.dequeue()
    with pytest.raises(order, match="training=False"):
        served.apply_gradients(dict.fromkeys(FEATURES))


def test_what_is_not_carried_is_refused_by_name() -> None:
    custom = te.CustomOptimizer(lambda g, table, *_: table - g, learning_rate=0.1)
    combiner = te.CustomCombiner(lambda n, v: v[0], max_valency=3)
    with JOB.strategy.scope():
        with pytest.raises(NotImplementedError, match=r"t0.*CustomOptimizer"):
            te.TPUEmbeddingV2(features(), custom)
        for kind in (te.TPUEmbedding, te.TPUEmbeddingV2):
            given = te.DistributedOptions(timeout_seconds=9)
            with pytest.raises(NotImplementedError, match="timeout_seconds"):
                kind(features(), te.SGD(0.1), distributed_options=given)
        table = te.TableConfig(V, D, combiner=combiner)
        with pytest.raises(NotImplementedError, match="CustomCombiner"):
            te.TPUEmbeddingV2(te.FeatureConfig(table), te.SGD(0.1))


def test_fit_of_keras_3_is_an_error_of_tensorflow() -> None:
    with JOB.strategy.scope():
        layer = te.keras.TPUEmbedding(features()["b"], te.Adagrad(0.1))
        ids = tf.keras.Input([H], dtype="int64")
        model = tf.keras.Model(ids, tf.keras.layers.Dense(1)(layer(ids)))
        model.compile("sgd", "mse")
    with pytest.raises(ValueError, match="create_per_worker_dataset"):
        model.fit(tf.zeros([B, H], tf.int64), tf.zeros([B, 1]), verbose=0)
    (table,) = layer.embedding_tables.values()
    np.testing.assert_array_equal(table.numpy(), START[1])


def test_the_coordinator_is_ours() -> None:
    assert isinstance(JOB.coordinator, te.ClusterCoordinator)
    assert te.ClusterCoordinator(JOB.strategy) is JOB.coordinator
    with pytest.raises(TypeError, match=r"only accepts a `tf\.function`"):
        JOB.coordinator.schedule(lambda: None)
