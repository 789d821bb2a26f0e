"""TensorFlow's documented loops: only the strategy differs."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import tensorflow as tf
from documented_loops import BATCH, assert_same, dataset, feature_config, loops, stock

import tpu_embedding as te
from tpu_embedding.testing import SoftwareTPUStrategy


def one_device() -> tf.distribute.Strategy:
    return tf.distribute.OneDeviceStrategy("CPU:0")


def two_replicas() -> tf.distribute.Strategy:
    return tf.distribute.MirroredStrategy(["CPU:0", "CPU:1"])


def three_replicas() -> tf.distribute.Strategy:
    return tf.distribute.MirroredStrategy(["CPU:0", "CPU:1", "CPU:2"])


def two_cores() -> tf.distribute.Strategy:
    return SoftwareTPUStrategy("v4", 2)


@pytest.mark.parametrize("make", [three_replicas, two_cores])
def test_loops(make: Any) -> None:
    results = []
    for strategy in (one_device(), make()):
        with strategy.scope():
            embedding = te.TPUEmbedding(
                feature_config=feature_config(), optimizer=stock.Adagrad(0.1)
            )
        results.append([np.asarray(value) for value in loops(embedding, strategy)])
    assert_same(results)


@pytest.mark.parametrize("make", [two_replicas, two_cores])
def test_constructor_of_2_3(make: Any) -> None:
    """(feature_config, batch_size, optimizer), as the page of TensorFlow 2.3 has it."""
    strategy = make()
    with strategy.scope():
        embedding = te.TPUEmbedding(
            feature_config=feature_config(), batch_size=BATCH, optimizer=stock.SGD(0.1)
        )
    loops(embedding, strategy)


def test_enqueue_core_by_core() -> None:
    """The finer grained form: each replica enqueues its own part in strategy.run."""
    strategy = two_replicas()
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


def test_enqueue_core_by_core_with_the_device() -> None:
    """The finer grained form that the documentation prints, with `device`."""
    strategy = two_cores()
    with strategy.scope():
        embedding = te.TPUEmbedding(feature_config(), stock.SGD(0.1))
    iterator = iter(
        strategy.distribute_datasets_from_function(
            dataset, tf.distribute.InputOptions(experimental_fetch_to_device=False)
        )
    )
    features, _ = next(iterator)
    per_core = {
        name: strategy.experimental_local_results(value)
        for name, value in features.items()
    }

    def per_core_enqueue(ctx: Any) -> tf.Tensor:
        core_id = ctx.replica_id_in_sync_group
        device = strategy.extended.worker_devices[core_id]
        own = {name: values[core_id] for name, values in per_core.items()}
        embedding.enqueue(own, training=False, device=device)
        return tf.constant(core_id)

    with pytest.raises(ValueError, match=r"of the strategy, .*CPU:0, .*CPU:1\. Rec.*7"):
        embedding.enqueue(features, device="/CPU:7")
    strategy.experimental_distribute_values_from_function(per_core_enqueue)
    activations = strategy.run(embedding.dequeue)["bought"]
    for ids, found in zip(per_core["bought"], activations.values, strict=True):
        np.testing.assert_array_equal(found[:, 0], tf.cast(ids, tf.float32))
