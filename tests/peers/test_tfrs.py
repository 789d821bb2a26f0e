"""The layer of TFRS, in tf_keras, and ours, in Keras 3, learn the same.

On a CPU the TFRS layer hands its tables to the optimizer of the model.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf
import tf_keras  # pyright: ignore[reportMissingImports]
from keras_layer import models
from tensorflow_recommenders.layers.embedding import (  # pyright: ignore[reportMissingImports]
    tpu_embedding_layer,
)

from tpu_embedding.keras import TPUEmbedding

STEPS = 20
RATE = 0.1
stock = tf.tpu.experimental.embedding
OPTIMIZERS = {
    "SGD": (stock.SGD, tf_keras.optimizers.SGD, keras.optimizers.SGD),
    "Adagrad": (stock.Adagrad, tf_keras.optimizers.Adagrad, keras.optimizers.Adagrad),
}


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


def losses(
    layer: Any, optimizer: Any, steps: list[Any], apply: Callable[..., Any]
) -> list[float]:
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
        apply(optimizer, of_layer, variables)
        kernel.assign_sub(RATE * of_kernel)
        return loss

    return [float(step(features, labels)) for features, labels in steps]


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_the_losses_agree(name: str, seed: int):
    table_optimizer, of_tfrs, of_ours = (cls(RATE) for cls in OPTIMIZERS[name])
    steps = models.batches(seed, STEPS)
    for features, _ in steps:
        del features["liked"]
    theirs = losses(
        tpu_embedding_layer.TPUEmbedding(make_feature_config(), table_optimizer),
        of_tfrs,
        steps,
        lambda optimizer, g, v: optimizer.apply_gradients(zip(g, v, strict=True)),
    )
    ours = losses(
        TPUEmbedding(make_feature_config(), table_optimizer),
        of_ours,
        steps,
        lambda optimizer, g, v: optimizer.apply(g, v),
    )
    assert abs(theirs[-1] - theirs[0]) > 1e-2  # They do learn something.
    np.testing.assert_allclose(ours, theirs, atol=1e-5)
