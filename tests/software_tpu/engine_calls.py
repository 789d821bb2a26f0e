"""Configures the software TPU's embedding engine and calls its ops, one by one."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import tensorflow as tf
from tensorflow.core.protobuf.tpu import tpu_embedding_configuration_pb2

from tpu_embedding.testing import SoftwareTPUStrategy

Config = tpu_embedding_configuration_pb2.TPUEmbeddingConfiguration
ROWS, WIDTH, SAMPLES, RATE = 6, 2, 3, 0.5
# As many as a test waits for in vain.
PATIENCE = 0.25


def config_of(num_cores: int = 1, **fields: Any) -> Any:
    """One table "films" [6, 2], trained by SGD, and one feature of three samples."""
    config = Config(
        mode=Config.TRAINING, num_hosts=1, num_tensor_cores=num_cores, **fields
    )
    add_table(config, "films")
    config.feature_descriptor.add(name="watched", table_id=0, input_shape=[SAMPLES])
    return config


def add_table(config: Any, name: str, optimizer: str = "") -> Any:
    """Adds a table of ROWS rows and returns its parameters."""
    table = config.table_descriptor.add(
        name=name, vocabulary_size=ROWS, dimension=WIDTH
    )
    parameters = table.optimization_parameters
    parameters.learning_rate.constant = RATE
    getattr(parameters, optimizer or "stochastic_gradient_descent").SetInParent()
    return parameters


def named_rows() -> np.ndarray:
    """A table whose values name their row."""
    return np.arange(ROWS, dtype=np.float32)[:, np.newaxis] * np.ones(WIDTH, np.float32)


class Program:
    """A configured TPU with the table `named_rows()`, and its calls."""

    def __init__(self, config: Any, num_devices: int = 1, patience: float = 20.0):
        self.strategy = SoftwareTPUStrategy("v4", num_devices, meeting_timeout=patience)
        self.attribute = config.SerializeToString()
        self.num_outputs = len(config.feature_descriptor) or len(
            config.table_descriptor
        )
        tf.raw_ops.ConfigureTPUEmbedding(config=self.attribute)
        for table in config.table_descriptor:
            parameters = table.optimization_parameters
            if parameters.HasField("stochastic_gradient_descent"):
                load(table.name)

    def receive(self) -> list[tf.Tensor]:
        """To be called in a replica."""
        return tf.raw_ops.RecvTPUEmbeddingActivations(
            num_outputs=self.num_outputs, config=self.attribute
        )

    def send(self, gradients: Sequence[tf.Tensor], rates: Sequence[Any] = ()) -> None:
        """To be called in a replica."""
        tf.raw_ops.SendTPUEmbeddingGradients(
            inputs=gradients,
            learning_rates=[tf.constant(rate, tf.float32) for rate in rates],
            config=self.attribute,
        )

    def train(self) -> list[tf.Tensor]:
        """To be called in a replica: all gradients are 1."""
        activations = self.receive()
        self.send([tf.ones_like(value) for value in activations])
        return activations

    def run(self, fn: Any) -> list[list[np.ndarray]]:
        """The outputs of `fn` by replica."""
        outputs = self.strategy.run(fn)
        by_output = [self.strategy.experimental_local_results(o) for o in outputs]
        return [[v.numpy() for v in own] for own in zip(*by_output, strict=True)]


def load(table: str) -> None:
    """Loads the table `named_rows()` from the one host that there is."""
    tf.raw_ops.LoadTPUEmbeddingStochasticGradientDescentParameters(
        parameters=named_rows(), table_name=table, num_shards=1, shard_id=0
    )


def rows() -> np.ndarray:
    """The first column of the table "films"."""
    retrieved = tf.raw_ops.RetrieveTPUEmbeddingStochasticGradientDescentParameters(
        table_name="films", num_shards=1, shard_id=0
    )
    return retrieved.numpy()[:, 0]


def enqueue(ids: Sequence[int], core: int = -1, **changes: Any) -> None:
    """Enqueues one id for each sample of the one feature, for training."""
    arguments: dict[str, Any] = {
        "sample_indices_or_row_splits": [tf.zeros([0], tf.int32)],
        "embedding_indices": [tf.constant(ids, tf.int32)],
        "aggregation_weights": [tf.zeros([0])],
        "mode_override": "train",
        "device_ordinal": core,
        "combiners": ["sum"],
    }
    op = changes.pop("op", "EnqueueTPUEmbeddingArbitraryTensorBatch")
    getattr(tf.raw_ops, op)(**{**arguments, **changes})


def first_column(outputs: list[list[np.ndarray]]) -> list[list[float]]:
    """Of the first output, by replica."""
    return [own[0][..., 0].tolist() for own in outputs]
