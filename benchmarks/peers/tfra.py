"""The hash tables of TensorFlow Recommenders Addons, under legacy Keras."""

from __future__ import annotations

import os
from collections.abc import Callable

os.environ["TF_USE_LEGACY_KERAS"] = "1"  # Read when TensorFlow is imported.

import numpy as np
import tensorflow as tf
import tf_keras
from tensorflow_recommenders_addons import dynamic_embedding

from benchmarks import feed
from benchmarks.scenarios import Scenario
from benchmarks.timing import timed

RULE = "the model's Keras optimizer on the rows of distinct ids"

_OPTIMIZERS = {
    "sgd": lambda: tf_keras.optimizers.legacy.SGD(0.01),
    "adagrad": lambda: tf_keras.optimizers.legacy.Adagrad(0.01),
    "adam": lambda: tf_keras.optimizers.legacy.Adam(0.01),
}


def prepare(scenario: Scenario, optimizer: str) -> dict[str, Callable[[], float]]:
    """Makes tables with rows for the ids that occur, and traces the steps."""
    if optimizer not in _OPTIMIZERS:
        raise NotImplementedError(f"The tables take no {optimizer} here.")
    layers = [
        dynamic_embedding.keras.layers.Embedding(
            scenario.dim,
            key_dtype=tf.int64,
            value_dtype=tf.float32,
            initializer=tf_keras.initializers.RandomUniform(-0.01, 0.01),
            devices=["/CPU:0"],
            init_capacity=rows,
            name=f"table{i}",
            with_unique=True,
        )
        for i, rows in enumerate(scenario.rows)
    ]
    rule = dynamic_embedding.DynamicEmbeddingOptimizer(_OPTIMIZERS[optimizer]())
    given = feed.gradients(scenario)
    batches = scenario.batches(4)
    next_batch = feed.dense([[x.astype(np.int64) for x in b] for b in batches])

    def activations() -> list[tf.Tensor]:
        found = zip(layers, next_batch(), strict=True)
        return [tf.reduce_sum(layer(ids), axis=1) for layer, ids in found]

    @tf.function
    def lookup() -> list[tf.Tensor]:
        return activations()

    @tf.function
    def step() -> None:
        with tf.GradientTape() as tape:
            found = activations()
        variables = [v for layer in layers for v in layer.trainable_variables]
        gradients = tape.gradient(found, variables, given)
        rule.apply_gradients(zip(gradients, variables, strict=True))

    for _ in batches:
        step()  # After these steps no id of the batches is new.
    return {"step": timed(step), "lookup": timed(lookup)}
