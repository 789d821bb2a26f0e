"""Trains by Model.fit of tf_keras under ParameterServerStrategy, and in one process.

Two servers and one worker are in this process, which prints "passed".
"""

from __future__ import annotations

import sys
from typing import Any

import numpy as np
import tensorflow as tf
import tf_keras  # pyright: ignore[reportMissingImports]
from parameter_servers import cluster as servers

import tpu_embedding as te
from tpu_embedding.ops import library

RANDOM = np.random.default_rng(0)
IDS = {
    "film": RANDOM.integers(0, servers.V, [64, 3]),
    "user": RANDOM.integers(0, servers.V, [64, 1]),
}
RATINGS = RANDOM.standard_normal([64, 1]).astype(np.float32)


def samples(context: Any = None) -> tf.data.Dataset:
    return tf.data.Dataset.from_tensor_slices((IDS, RATINGS)).repeat().batch(16)


def make() -> tuple[Any, Any]:
    tables = [
        te.TableConfig(
            servers.V,
            servers.D,
            initializer=tf.constant_initializer(servers.START[k]),
            placement=placement,
        )
        for k, placement in enumerate(("rows", "whole"))
    ]
    configs = {name: te.FeatureConfig(t) for name, t in zip(IDS, tables, strict=True)}
    layer = te.keras.TPUEmbedding(configs, te.Adagrad(0.1))
    inputs = {
        name: tf_keras.Input(ids.shape[1:], dtype=tf.int64) for name, ids in IDS.items()
    }
    found = layer(inputs)
    joined = tf_keras.layers.Concatenate()([found[name] for name in IDS])
    rating = tf_keras.layers.Dense(1, kernel_initializer="ones")(joined)
    model = tf_keras.Model(inputs, rating)
    model.compile("sgd", "mse", steps_per_execution=1)
    return model, layer


def main() -> None:
    library.load()
    cluster, kept = servers.start_cluster(2, workers=1)
    resolver = tf.distribute.cluster_resolver.SimpleClusterResolver(
        cluster, rpc_layer="grpc"
    )
    strategy = tf.distribute.ParameterServerStrategy(resolver)
    with strategy.scope():
        served, served_layer = make()
    one, layer = make()
    creator = tf_keras.utils.experimental.DatasetCreator(samples)
    fit = {"epochs": 2, "steps_per_epoch": 4, "verbose": 0}
    found, expected = served.fit(creator, **fit), one.fit(samples(), **fit)
    np.testing.assert_allclose(found.history["loss"], expected.history["loss"], 1e-6)
    pairs = zip(
        layer.embedding_tables.values(),
        served_layer.embedding_tables.values(),
        servers.START,
        strict=False,
    )
    for table, other, start in pairs:
        assert (table.numpy() != start).any()
        np.testing.assert_array_equal(other.numpy(), table.numpy())
    loss = served.evaluate(creator, steps=4, verbose=0)
    np.testing.assert_allclose(loss, one.evaluate(samples(), steps=4, verbose=0), 1e-6)
    print("passed")
    sys.stdout.flush()
    del kept


if __name__ == "__main__":
    main()
