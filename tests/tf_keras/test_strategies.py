"""Models of tf_keras under strategies: as with one replica on the host."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import tensorflow as tf
from keras_layer import models, tpu_models
from keras_layer.trained import assert_same_bits, everything
from keras_layer.version import keras as tf_keras

import tpu_embedding as te
from tpu_embedding.keras import TPUEmbedding
from tpu_embedding.testing import SoftwareTPUStrategy

# tf_keras 2.18 draws the seeds of its initializers so.
pytestmark = pytest.mark.filterwarnings("ignore:non-integer arguments to randrange")

HOST = tf.distribute.get_strategy()
STRATEGIES = {
    "mirrored": lambda: models.mirrored(tpu_models.REPLICAS),
    "v4": lambda: SoftwareTPUStrategy("v4", tpu_models.REPLICAS),
    "v6e": lambda: SoftwareTPUStrategy("v6e", tpu_models.REPLICAS),
}
each_strategy = pytest.mark.parametrize("name", STRATEGIES)


def assert_close(actual: Any, expected: Any) -> None:
    actual, expected = everything(actual), everything(expected)
    for name, value in expected.items():
        np.testing.assert_allclose(
            actual[name], value, rtol=1e-4, atol=1e-5, err_msg=name
        )


@each_strategy
def test_a_custom_loop(name: str, seed: int):
    steps, strategy = tpu_models.make_steps(seed, 4), STRATEGIES[name]()
    host, model = tpu_models.make_model(HOST), tpu_models.make_model(strategy)
    assert_same_bits(model, host)
    joined = [tpu_models.whole(step) for step in steps]
    expected = tpu_models.make_trainer(host, HOST)(joined)
    losses = tpu_models.make_trainer(model, strategy)(steps)
    np.testing.assert_allclose(losses, expected, rtol=1e-5)
    assert_close(model, host)


@pytest.mark.parametrize("outside", [False, True])
@each_strategy
def test_fit(name: str, outside: bool, seed: int):
    """Also with an optimizer that was created outside of the scope, as for TPUs."""
    made = []
    for strategy in (HOST, STRATEGIES[name]()):
        optimizer = tf_keras.optimizers.SGD(0.01) if outside else None
        with strategy.scope():
            table = models.table_configs()["users"]
            inputs = tf_keras.Input((2,), dtype="int64")
            layer = TPUEmbedding(
                te.FeatureConfig(table),
                te.Adagrad(0.2),
                batch_size=tpu_models.BATCH,
                name="embedding",
            )
            model = tf_keras.Model(
                inputs, tf_keras.layers.Dense(1, name="head")(layer(inputs))
            )
            model.get_layer("head").kernel.assign([[0.5], [0.25]])
            model.compile(optimizer or tf_keras.optimizers.SGD(0.01), "mse")
        data = tpu_models.dense_data(seed, 5)
        history = model.fit(data, epochs=2, shuffle=False, verbose=0).history["loss"]
        made.append((model, history, model.evaluate(data, verbose=0)))
    (host, losses, evaluated), (model, other_losses, other_evaluated) = made
    np.testing.assert_allclose(other_losses, losses, rtol=1e-4)
    np.testing.assert_allclose(other_evaluated, evaluated, rtol=1e-4)
    assert_close(model, host)


class CountingModel(tf_keras.Model):
    """A step of its own, as in tfrs.Model, with a metric that is no loss."""

    def __init__(self) -> None:
        super().__init__()
        self.seen = tf_keras.metrics.Mean("seen")

    def train_step(self, data: tf.Tensor) -> dict[str, tf.Tensor]:
        self.seen.update_state(data)
        return {"seen": self.seen.result()}


@each_strategy
def test_metrics_of_a_step_of_ones_own(name: str):
    with STRATEGIES[name]().scope():
        model = CountingModel()
        model.compile()
    data = tf.data.Dataset.from_tensor_slices(tf.range(8.0)).batch(4)
    assert model.fit(data, verbose=0).history["seen"] == [3.5]
