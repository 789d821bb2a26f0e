"""Model.fit of tf_keras, in the processes of a job and in replicas of one."""

from __future__ import annotations

from typing import Any

import numpy as np
import tensorflow as tf
import tf_keras  # pyright: ignore[reportMissingImports]
from multi_process import training

import tpu_embedding as te

RANDOM = np.random.default_rng(0)
ROWS, DIM, BATCH = 40, 4, 8  # BATCH is that of all replicas.
IDS = {
    "film": RANDOM.integers(0, ROWS, [64, 3]),
    "user": RANDOM.integers(0, ROWS, [64, 1]),
}
RATINGS = RANDOM.standard_normal([64, 1]).astype(np.float32)


def fit(strategy: Any) -> tuple[list[float], float, dict[str, np.ndarray]]:
    """The losses of two epochs, that of `evaluate`, and whole tables and slots."""
    tables = [
        te.TableConfig(ROWS, DIM, training.initializer(k), placement=p, name=name)
        for k, (name, p) in enumerate((("films", "rows"), ("users", "whole")))
    ]
    configs = {name: te.FeatureConfig(t) for name, t in zip(IDS, tables, strict=True)}
    with strategy.scope():
        layer = te.keras.TPUEmbedding(configs, te.Adagrad(0.1))
        inputs = {
            name: tf_keras.Input(ids.shape[1:], dtype=tf.int64)
            for name, ids in IDS.items()
        }
        found = layer(inputs)
        joined = tf_keras.layers.Concatenate()([found[name] for name in IDS])
        rating = tf_keras.layers.Dense(1, kernel_initializer="ones")(joined)
        model: Any = tf_keras.Model(inputs, rating)
        model.compile("sgd", "mse")
    data = tf.data.Dataset.from_tensor_slices((IDS, RATINGS)).batch(BATCH)
    options = tf.data.Options()
    options.experimental_distribute.auto_shard_policy = (
        tf.data.experimental.AutoShardPolicy.DATA
    )
    data = data.with_options(options)
    losses = model.fit(data, epochs=2, verbose=0).history["loss"]
    return losses, model.evaluate(data, verbose=0), training.tables_of(layer)
