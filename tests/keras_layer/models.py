"""A small model with all kinds of input, and data for it."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
import tensorflow as tf
from keras_layer.version import keras

import tpu_embedding as te
from tpu_embedding.keras import TPUEmbedding

VOCABULARY = {"films": 11, "users": 7}
DIM = {"films": 3, "users": 2}
BATCH = 6
# Feature -> table; in the order of tf.nest.
FEATURES = {"liked": "films", "seen": "films", "user": "users"}


def initial_table(name: str) -> np.ndarray:
    shape = (VOCABULARY[name], DIM[name])
    numbers = np.random.default_rng(len(name)).normal(size=shape)
    return numbers.astype(np.float32) * 0.3


@keras.saving.register_keras_serializable("tests")
@dataclasses.dataclass(frozen=True)
class TableInitializer:
    """The same values each time."""

    table: str

    def __call__(self, shape: Any, dtype: Any = tf.float32) -> tf.Tensor:
        return tf.constant(initial_table(self.table), dtype)

    def get_config(self) -> dict[str, Any]:
        return {"table": self.table}

    @classmethod
    def from_config(cls, config: dict[str, Any]) -> TableInitializer:
        return cls(**config)


def table_configs(prefix: str = "", **options: Any) -> dict[str, te.TableConfig]:
    combiners = {"films": "mean", "users": "sum"}
    return {
        name: te.TableConfig(
            VOCABULARY[name],
            DIM[name],
            initializer=TableInitializer(name),
            combiner=combiners[name],
            name=prefix + name,
            **options,
        )
        for name in VOCABULARY
    }


def feature_config(tables: Mapping[str, Any] | None = None) -> dict[str, Any]:
    tables = tables or table_configs()
    return {feature: te.FeatureConfig(tables[t]) for feature, t in FEATURES.items()}


def inputs() -> dict[str, Any]:
    return {
        "liked": keras.Input((None,), dtype="int64", sparse=True, name="liked"),
        "seen": keras.Input((None,), dtype="int64", ragged=True, name="seen"),
        "user": keras.Input((), dtype="int64", name="user"),
    }


def head(activations: Mapping[str, Any]) -> Any:
    """A prediction from the activations, with a dense layer that starts fixed."""
    ordered = [activations[feature] for feature in FEATURES]
    joined = keras.layers.Concatenate(name="joined")(ordered)
    ones = keras.initializers.Constant(0.5)
    return keras.layers.Dense(
        1, use_bias=False, kernel_initializer=ones, name="head", dtype="float32"
    )(joined)


def make_model(optimizer: Any = None, **options: Any) -> Any:
    """A functional model whose layer "embedding" has the features above."""
    config = options.pop("feature_config", None) or feature_config()
    layer = TPUEmbedding(config, optimizer, name="embedding", **options)
    features = inputs()
    return keras.Model(features, head(layer(features)))


def embedding_of(model: Any) -> Any:
    return model.get_layer("embedding")


def state(layer: Any) -> dict[str, np.ndarray]:
    """Tables and slots of a layer by name."""
    store: dict[str, Any] = {}
    layer.save_own_variables(store)
    return {name: np.array(value) for name, value in store.items()}


def batch(rng: np.random.Generator, size: int = BATCH) -> tuple[dict[str, Any], Any]:
    """Features and labels; some samples have no ids, some rows come twice."""
    lengths = rng.integers(0, 4, size)
    films = rng.integers(0, VOCABULARY["films"], lengths.sum())
    seen = tf.RaggedTensor.from_row_lengths(tf.constant(films), lengths)
    liked = rng.integers(1, VOCABULARY["films"], (size, 3))
    liked[rng.random((size, 3)) < 0.4] = 0
    features = {
        "liked": tf.sparse.from_dense(tf.constant(liked)),
        "seen": seen,
        "user": tf.constant(rng.integers(0, VOCABULARY["users"], size)),
    }
    labels = tf.constant(rng.normal(size=(size, 1)), tf.float32)
    return features, labels


def batches(seed: int, count: int, size: int = BATCH) -> list[tuple[Any, Any]]:
    rng = np.random.default_rng(seed)
    return [batch(rng, size) for _ in range(count)]


def dataset(steps: list[tuple[Any, Any]]) -> tf.data.Dataset:
    """The batches one by one."""
    signature = (
        {
            "liked": tf.SparseTensorSpec([None, None], tf.int64),
            "seen": tf.RaggedTensorSpec([None, None], tf.int64, ragged_rank=1),
            "user": tf.TensorSpec([None], tf.int64),
        },
        tf.TensorSpec([None, steps[0][1].shape[1]], tf.float32),
    )

    def generate() -> Iterator[Any]:
        yield from steps

    made = tf.data.Dataset.from_generator(generate, output_signature=signature)
    return made.apply(tf.data.experimental.assert_cardinality(len(steps)))


def train_step(model: Any, optimizer: Any, features: Any, labels: Any) -> tf.Tensor:
    """One step of a custom loop."""
    with tf.GradientTape() as tape:
        predictions = model(features)
        loss = tf.reduce_mean((predictions - labels) ** 2)
    gradients = tape.gradient(loss, model.trainable_variables)
    optimizer.apply_gradients(zip(gradients, model.trainable_variables, strict=True))
    return loss


def mirrored(replicas: int) -> tf.distribute.Strategy:
    """Over logical CPUs, without collective ops.

    Those of a second strategy in one process trip over those of the first: seen with
    Keras alone, in TensorFlow 2.21.
    """
    devices = [f"CPU:{i}" for i in range(replicas)]
    reduction = tf.distribute.ReductionToOneDevice()
    return tf.distribute.MirroredStrategy(devices, cross_device_ops=reduction)
