"""Losses that were scaled, by Keras or by the user."""

from __future__ import annotations

from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf

import tpu_embedding as te
from tpu_embedding.keras import TPUEmbedding


def test_float16_needs_the_scale_of_the_loss():
    table = te.TableConfig(6, 1, name="t")
    layer = TPUEmbedding(te.FeatureConfig(table), "sgd", dtype="mixed_float16")
    with pytest.raises(ValueError, match="loss_scale") as raised:
        layer(tf.constant([1]))
    assert "mixed_bfloat16" in str(raised.value)
    assert "compile(auto_scale_loss=False)" in str(raised.value)


def _scaling(factor: float) -> Any:
    return keras.optimizers.SGD(0.1, loss_scale_factor=factor)


@pytest.mark.parametrize(
    "scale",
    [
        64.0,
        np.float32(64),
        lambda: tf.constant(64),
        _scaling(64),
        lambda: _scaling(64),
        # Not built, as before the first step of `fit`.
        keras.optimizers.LossScaleOptimizer(_scaling(2), initial_scale=64.0),
    ],
    ids=["float", "numpy", "callable", "optimizer", "its callable", "dynamic"],
)
def test_scaled_losses_are_unscaled(scale: Any):
    table = te.TableConfig(4, 1, te.RowIdInitializer(), name="t")
    layer = TPUEmbedding(
        te.FeatureConfig(table), te.SGD(1.0), loss_scale=scale, dtype="mixed_float16"
    )
    with tf.GradientTape() as tape:
        out = layer(tf.constant([1]))
        loss = 64.0 * tf.cast(tf.reduce_sum(out), tf.float32)
    tape.gradient(loss, layer.trainable_variables)
    assert out.dtype == tf.float16
    assert layer.embedding_tables[table].numpy()[1] == 0.0


def test_a_scale_that_overflows_costs_a_step_and_not_the_tables():
    keras.config.set_dtype_policy("mixed_float16")
    table = te.TableConfig(4, 1, te.RowIdInitializer(), name="t")
    layer = TPUEmbedding(
        te.FeatureConfig(table), te.SGD(0.1), loss_scale=lambda: model.optimizer
    )
    ids = keras.Input((), dtype="int64")
    model: Any = keras.Model(ids, keras.layers.Dense(1)(layer(ids)))
    model.compile("sgd", "mse")  # Makes a LossScaleOptimizer of it.
    model.fit(np.arange(4), np.full((4, 1), 30000.0), verbose=0)
    assert float(model.optimizer.dynamic_scale) == 2.0**14  # It did overflow.
    rows = layer.embedding_tables[table].numpy()
    np.testing.assert_array_equal(rows[:, 0], [0, 1, 2, 3])


def _scaled_by_factor() -> Any:
    return _scaling(8.0)


def _scaled_dynamically() -> Any:
    return keras.optimizers.LossScaleOptimizer(keras.optimizers.SGD(0.1))


class Subclassed(keras.Model):
    """Of another policy than its layer, for which Keras scales the loss."""

    def __init__(self, dtype: str, loss_scale: Any) -> None:
        super().__init__(dtype=dtype)
        table = te.TableConfig(4, 1, te.RowIdInitializer(), name="t")
        feature = te.FeatureConfig(table)
        self.embedding = TPUEmbedding(feature, te.SGD(0.5), loss_scale=loss_scale)

    def call(self, inputs: Any) -> Any:
        return self.embedding(inputs)


@pytest.mark.parametrize(
    "loss_scale", [None, 1, _scaling(8.0)], ids=["none", "one", "of another"]
)
@pytest.mark.parametrize(
    ("dtype", "optimizer"),
    [
        ("mixed_float16", lambda: "sgd"),
        ("float32", _scaled_by_factor),
        ("float32", _scaled_dynamically),
    ],
    ids=["policy", "factor", "dynamic"],
)
def test_scaled_losses_are_noticed_in_fit(dtype: str, optimizer: Any, loss_scale: Any):
    model = Subclassed(dtype, loss_scale)
    model.compile(optimizer(), "mse")
    with pytest.raises(ValueError, match="of the model Keras scales the loss and"):
        model.fit(np.arange(4), np.zeros((4, 1)), verbose=0)
    rows = model.embedding.get_weights()[-1]
    np.testing.assert_array_equal(rows[:, 0], [0, 1, 2, 3])


def test_a_factor_that_the_layer_knows():
    made = []
    for optimizer, scale in (("sgd", None), (_scaled_by_factor(), 8.0)):
        model = Subclassed("float32", scale)
        model.compile(optimizer, "mse")
        model.fit(np.arange(4), np.zeros((4, 1)), verbose=0)
        made.append(model.embedding.get_weights()[-1])
    np.testing.assert_array_equal(*made)  # 8 is a power of 2.
    np.testing.assert_array_equal(made[0][:, 0], [0, 0.75, 1.5, 2.25])


@pytest.mark.parametrize("value", ["2", [1.0, 2.0], None, object()])
def test_a_callable_that_returns_no_scale(value: Any):
    table = te.TableConfig(4, 1, te.RowIdInitializer(), name="t")
    layer = TPUEmbedding(te.FeatureConfig(table), "sgd", loss_scale=lambda: value)
    with tf.GradientTape() as tape:
        loss = tf.reduce_sum(layer(tf.constant([1])))
    with pytest.raises(TypeError, match="`loss_scale` must return a number, a scalar"):
        tape.gradient(loss, layer.trainable_variables)
    assert layer.embedding_tables[table].numpy()[1] == 1


def test_an_optimizer_is_not_saved_as_a_scale():
    feature = te.FeatureConfig(te.TableConfig(4, 1, name="t"))
    layer = TPUEmbedding(feature, "sgd", loss_scale=_scaling(8.0))
    with pytest.raises(ValueError, match="here SGD, cannot be saved or cloned"):
        layer.get_config()
