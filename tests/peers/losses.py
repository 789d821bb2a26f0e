"""Losses of 50 steps of the layers, with each optimizer; run as a program: Keras 3."""

from __future__ import annotations

import json
import sys
from typing import Any

import numpy as np
import tensorflow as tf
from keras_layer import models

from tpu_embedding.keras import TPUEmbedding

STEPS = 50
RATE = 0.1
OPTIMIZERS = ("SGD", "Adagrad", "Adam", "Ftrl")
stock = tf.tpu.experimental.embedding


def make_feature_config() -> dict[str, Any]:
    """TFRS refuses sparse beside ragged features: "liked" is left out."""
    combiners = {"films": "mean", "users": "sum"}
    tables = {
        name: stock.TableConfig(
            models.VOCABULARY[name],
            models.DIM[name],
            models.TableInitializer(name),
            combiner=combiner,
            name=name,
        )
        for name, combiner in combiners.items()
    }
    return {
        "seen": stock.FeatureConfig(tables["films"]),
        "user": stock.FeatureConfig(tables["users"]),
    }


def batches(seed: int) -> list[Any]:
    """Each has all rows: Adam of Keras moves the other rows, too."""
    rng = np.random.default_rng(seed)
    films, users = models.VOCABULARY["films"], models.VOCABULARY["users"]
    steps = []
    for _ in range(STEPS):
        more = rng.integers(0, films, 3)
        seen = rng.permutation(np.concatenate([np.arange(films), more]))
        lengths = rng.permutation([0, 1, 1, 2, 3, 3, 4])
        features = {
            "seen": tf.RaggedTensor.from_row_lengths(tf.constant(seen), lengths),
            "user": tf.constant(rng.permutation(users)),
        }
        steps.append((features, tf.constant(rng.normal(size=(users, 1)), tf.float32)))
    return steps


def losses(layer: Any, optimizer: Any, steps: list[Any]) -> list[float]:
    """Trains the layer and a dense kernel; returns the loss of each step."""
    kernel = tf.Variable(tf.fill([5, 1], 0.5))

    @tf.function(reduce_retracing=True)
    def step(features: Any, labels: Any) -> tf.Tensor:
        with tf.GradientTape() as tape:
            activations = layer(features)
            joined = tf.concat([activations["seen"], activations["user"]], -1)
            loss = tf.reduce_mean((joined @ kernel - labels) ** 2)
        variables = layer.trainable_variables
        *of_layer, of_kernel = tape.gradient(loss, [*variables, kernel])
        optimizer.apply_gradients(zip(of_layer, variables, strict=True))
        kernel.assign_sub(RATE * of_kernel)
        return loss

    return [float(step(features, labels)) for features, labels in steps]


def of_this_package(package: Any, name: str, seed: int) -> list[float]:
    """The losses of the layer of this package."""
    optimizer = getattr(package, name)(RATE)
    layer = TPUEmbedding(make_feature_config(), optimizer)
    return losses(layer, optimizer, batches(seed))


if __name__ == "__main__":
    import keras

    seed = int(sys.argv[1])
    found = {n: of_this_package(keras.optimizers, n, seed) for n in OPTIMIZERS}
    print(json.dumps(found))
