"""The TPUEmbedding layer of TensorFlow Recommenders, under legacy Keras."""

from __future__ import annotations

import os
from collections.abc import Callable

os.environ["TF_USE_LEGACY_KERAS"] = "1"  # Read when TensorFlow is imported.

import tensorflow as tf
import tensorflow_recommenders as tfrs

from benchmarks import feed
from benchmarks.scenarios import Scenario
from benchmarks.timing import timed

RULE = "the model's Keras optimizer on IndexedSlices"

_OPTIMIZERS = {
    "sgd": lambda: tf.keras.optimizers.legacy.SGD(0.01),
    "adagrad": lambda: tf.keras.optimizers.legacy.Adagrad(0.01),
    "adam": lambda: tf.keras.optimizers.legacy.Adam(0.01),
    "ftrl": lambda: tf.keras.optimizers.legacy.Ftrl(0.01),
}


def prepare(scenario: Scenario, optimizer: str) -> dict[str, Callable[[], float]]:
    """Makes the layer and traces the steps."""
    if optimizer not in _OPTIMIZERS:
        raise NotImplementedError(f"The layer takes no {optimizer}.")
    embedding = tf.tpu.experimental.embedding
    features = [
        embedding.FeatureConfig(
            embedding.TableConfig(rows, scenario.dim, combiner="sum", name=f"table{i}")
        )
        for i, rows in enumerate(scenario.rows)
    ]
    rule = _OPTIMIZERS[optimizer]()
    layer = tfrs.layers.embedding.TPUEmbedding(features, rule)
    given = feed.gradients(scenario)
    next_batch = feed.sparse(scenario.batches(4))

    @tf.function
    def lookup() -> list[tf.Tensor]:
        return layer(next_batch())

    @tf.function
    def step() -> None:
        with tf.GradientTape() as tape:
            activations = layer(next_batch())
        variables = layer.trainable_variables
        gradients = tape.gradient(activations, variables, given)
        rule.apply_gradients(zip(gradients, variables, strict=True))

    return {"step": timed(step), "lookup": timed(lookup)}
