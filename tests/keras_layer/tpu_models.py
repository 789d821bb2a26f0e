"""A model that fits the hosts and the TPUs alike, with data cut for two replicas."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import tensorflow as tf
from keras_layer import models
from keras_layer.version import keras
from replica_values import of_replicas

import tpu_embedding as te

REPLICAS = 2
BATCH = 8
Step = list[tuple[dict[str, Any], Any]]  # For each replica its features and labels.


def make_model(strategy: tf.distribute.Strategy) -> Any:
    """All kinds of input, two optimizers, one of them of Keras and with a schedule."""
    schedule = keras.optimizers.schedules.InverseTimeDecay(0.1, 2, 0.5)
    tables = models.table_configs()
    films = te.TableConfig(
        models.VOCABULARY["films"],
        models.DIM["films"],
        models.TableInitializer("films"),
        optimizer=keras.optimizers.Adam(schedule, epsilon=1e-3),
        name="films",
    )
    config = models.feature_config({**tables, "films": films})
    with strategy.scope():
        model = models.make_model(
            te.Adagrad(0.2), feature_config=config, batch_size=BATCH
        )
        model.compile(keras.optimizers.SGD(0.01), "mse")
        model.optimizer.build(model.trainable_variables)
    return model


def make_steps(seed: int, count: int) -> list[Step]:
    """Batches of one shape, so that a function is traced once for them."""
    rng = np.random.default_rng(seed)
    return [[make_part(rng) for _ in range(REPLICAS)] for _ in range(count)]


def make_part(rng: np.random.Generator) -> tuple[dict[str, Any], Any]:
    films, users = models.VOCABULARY["films"], models.VOCABULARY["users"]
    lengths = rng.permutation([0, 1, 2, 3])
    liked = rng.integers(1, films, (4, 3)) * rng.permuted(np.arange(12) > 3).reshape(
        4, 3
    )
    features = {
        "liked": tf.sparse.from_dense(tf.constant(liked)),
        "seen": tf.RaggedTensor.from_row_lengths(rng.integers(0, films, 6), lengths),
        "user": tf.constant(rng.integers(0, users, 4)),
    }
    return features, tf.constant(rng.normal(size=(4, 1)), tf.float32)


def whole(step: Step) -> Step:
    """The parts of all replicas as one batch."""
    features = [part[0] for part in step]
    joined = {
        "liked": tf.sparse.concat(0, [f["liked"] for f in features]),
        "seen": tf.concat([f["seen"] for f in features], 0),
        "user": tf.concat([f["user"] for f in features], 0),
    }
    return [(joined, tf.concat([part[1] for part in step], 0))]


def dense_data(seed: int, count: int) -> tf.data.Dataset:
    """Batches that Keras can cut for replicas, over the feature "user" alone."""
    rng = np.random.default_rng(seed)
    ids = rng.integers(0, models.VOCABULARY["users"], (count * BATCH, 2))
    labels = rng.normal(size=(count * BATCH, 1)).astype(np.float32)
    data = tf.data.Dataset.from_tensor_slices((ids, labels))
    return data.batch(BATCH, drop_remainder=True)


def make_trainer(model: Any, strategy: tf.distribute.Strategy) -> Callable[..., Any]:
    """The custom loop that TPUStrategy would run, over some steps; the losses."""
    variables = model.trainable_variables

    def replica_step(features: Any, labels: Any) -> tf.Tensor:
        with tf.GradientTape() as tape:
            loss = tf.reduce_sum((model(features) - labels) ** 2) / BATCH
        gradients = tape.gradient(loss, variables)
        model.optimizer.apply_gradients(zip(gradients, variables, strict=True))
        return loss

    @tf.function
    def step(features: Any, labels: Any) -> Any:
        return strategy.run(replica_step, (features, labels))

    def train(steps: Sequence[Step]) -> list[float]:
        losses = [step(*distribute(strategy, parts)) for parts in steps]
        local = strategy.experimental_local_results
        return [float(np.sum(local(loss))) for loss in losses]

    return train


def distribute(strategy: tf.distribute.Strategy, parts: Sequence[Any]) -> Any:
    """Each replica its part; where there is one replica, the part itself."""
    if strategy.num_replicas_in_sync == 1:
        return parts[0]
    return of_replicas(strategy, parts)
