"""trainable_tables=True: the tables are weights that the model's optimizer trains."""

from __future__ import annotations

import pathlib
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf
from keras_layer import models

import tpu_embedding as te
from tpu_embedding.keras import TPUEmbedding

IDS = tf.constant([1, 2, 1])


def make_layer(optimizer: Any, **options: Any) -> Any:
    table = te.TableConfig(4, 2, te.RowIdInitializer(), name="t")
    layer = TPUEmbedding(te.FeatureConfig(table), optimizer, **options)
    layer.build()
    return layer


def test_trainable_tables_are_plain_weights():
    layer = make_layer(None, trainable_tables=True)
    (table,) = layer.trainable_variables
    assert table.shape == (4, 2)
    with tf.GradientTape() as tape:
        loss = tf.reduce_sum(layer(IDS))
    (of_table,) = tape.gradient(loss, layer.trainable_variables)
    np.testing.assert_array_equal(tf.convert_to_tensor(of_table)[1], [2, 2])
    keras.optimizers.SGD(1.0).apply([of_table], [table])
    expected = [[0, 0], [-1, -1], [1, 1], [3, 3]]
    np.testing.assert_array_equal(table.numpy(), expected)


def test_trainable_tables_have_no_optimizer_of_their_own():
    with pytest.raises(ValueError, match="so table t cannot have its own optimizer"):
        make_layer("sgd", trainable_tables=True)


def test_trainable_tables_pass_gradients_through_quantization():
    quantization = te.QuantizationConfig(3, 0.0, 2.0)
    table = te.TableConfig(
        3, 1, tf.constant_initializer(0.7), quantization_config=quantization
    )
    layer = TPUEmbedding(te.FeatureConfig(table), None, trainable_tables=True)
    with tf.GradientTape() as tape:
        activations = layer(tf.constant([1]))
    np.testing.assert_allclose(activations, [[1.0]])
    (of_table,) = tape.gradient(activations, layer.trainable_variables)
    np.testing.assert_array_equal(tf.convert_to_tensor(of_table), [[0], [1], [0]])


def test_trainable_tables_learn_as_the_model_says(tmp_path: pathlib.Path, seed: int):
    """SGD is the same rule wherever it is applied."""
    steps = models.batches(seed, 5)
    own = models.make_model(te.SGD(0.1))
    plain = models.make_model(None, trainable_tables=True)
    for model in (own, plain):
        model.compile(keras.optimizers.SGD(0.1), "mse")
        model.fit(models.dataset(steps), shuffle=False, verbose=0)
    by_layer, by_model = (
        models.state(models.embedding_of(model)) for model in (own, plain)
    )
    assert set(by_model) == set(models.VOCABULARY)
    plain.save(tmp_path / "model.keras")
    loaded = keras.models.load_model(tmp_path / "model.keras")
    saved = models.state(models.embedding_of(loaded))
    for name, table in by_model.items():
        np.testing.assert_allclose(by_layer[name], table, atol=1e-6)
        np.testing.assert_array_equal(saved[name], table)


@pytest.mark.parametrize(("option", "value"), [("batch_size", 4), ("loss_scale", 2.0)])
def test_options_for_updates_are_refused(option: str, value: Any):
    with pytest.raises(ValueError, match=f"do not support `{option}={value}`"):
        make_layer(None, trainable_tables=True, **{option: value})


def test_float16_needs_no_scale_of_the_loss():
    layer = make_layer(None, trainable_tables=True, dtype="mixed_float16")
    assert layer(IDS).dtype == tf.float16
    (table,) = layer.trainable_variables
    assert table.dtype == "float32"
