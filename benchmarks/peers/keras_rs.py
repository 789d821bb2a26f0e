"""DistributedEmbedding of Keras Recommenders, on TensorFlow."""

from __future__ import annotations

import os
from collections.abc import Callable

os.environ["KERAS_BACKEND"] = "tensorflow"  # Read when Keras is imported.

import keras
import keras_rs
import tensorflow as tf

from benchmarks import feed
from benchmarks.scenarios import Scenario
from benchmarks.timing import timed

RULE = "the model's Keras optimizer (the tables' own is ignored)"

_OPTIMIZERS = {
    "sgd": lambda: keras.optimizers.SGD(0.01),
    "adagrad": lambda: keras.optimizers.Adagrad(0.01),
    "adam": lambda: keras.optimizers.Adam(0.01),
    "ftrl": lambda: keras.optimizers.Ftrl(0.01),
}


def prepare(scenario: Scenario, optimizer: str) -> dict[str, Callable[[], float]]:
    """Makes the layer and traces the steps."""
    if optimizer not in _OPTIMIZERS:
        raise NotImplementedError(f"Keras has no {optimizer}.")
    features = _features(scenario)
    layer = keras_rs.layers.DistributedEmbedding(features)
    given = feed.gradients(scenario)
    next_batch = feed.dense(scenario.batches(4))

    def named() -> dict[str, tf.Tensor]:
        return dict(zip(features, next_batch(), strict=True))

    layer(named())
    rule = _OPTIMIZERS[optimizer]()
    rule.build(layer.trainable_variables)

    @tf.function
    def lookup() -> dict[str, tf.Tensor]:
        return layer(named())

    @tf.function
    def step() -> None:
        with tf.GradientTape() as tape:
            found = layer(named())
            activations = [found[name] for name in features]
        values = [variable.value for variable in layer.trainable_variables]
        gradients = tape.gradient(activations, values, given)
        rule.apply(gradients, layer.trainable_variables)

    return {"step": timed(step), "lookup": timed(lookup)}


def _features(scenario: Scenario) -> dict[str, keras_rs.layers.FeatureConfig]:
    """A table for each feature."""
    features = {}
    for i, rows in enumerate(scenario.rows):
        table = keras_rs.layers.TableConfig(
            name=f"table{i:02}",
            vocabulary_size=rows,
            embedding_dim=scenario.dim,
            combiner="sum",
        )
        features[f"feature{i:02}"] = keras_rs.layers.FeatureConfig(
            name=f"feature{i:02}",
            table=table,
            input_shape=(scenario.batch_size, scenario.ids_per_sample[i]),
            output_shape=(scenario.batch_size, scenario.dim),
        )
    return features
