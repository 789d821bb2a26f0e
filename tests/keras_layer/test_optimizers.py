"""translate_keras_optimizer: each option is carried or refused by name."""

from __future__ import annotations

import inspect
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf
from keras_layer import optimizer_contract as contract
from keras_layer.optimizer_contract import make_layer, step

import tpu_embedding as te
from tpu_embedding.keras import TPUEmbedding, translate_keras_optimizer

each_class = pytest.mark.parametrize("name", contract.CARRIED)
REFUSED_ALIKE = {**contract.REFUSED_ALIKE, **contract.REFUSED_IN_KERAS_3}


@each_class
def test_options_are_carried(name: str):
    contract.check_options_are_carried(keras.optimizers, name)


@pytest.mark.parametrize(
    ("name", "option", "value"),
    [
        (name, option, value)
        for name, refused in contract.REFUSED.items()
        for option, value in {**REFUSED_ALIKE, **refused}.items()
    ],
)
def test_options_are_refused_by_name(name: str, option: str, value: Any):
    contract.check_option_is_refused(getattr(keras.optimizers, name), option, value)


@each_class
def test_no_option_of_keras_is_forgotten(name: str):
    signature = inspect.signature(getattr(keras.optimizers, name).__init__)
    handled = {"self", "name", "learning_rate", "clipvalue", "kwargs"}
    carried, refused = contract.CARRIED[name], contract.REFUSED[name]
    assert set(signature.parameters) == {*handled, *REFUSED_ALIKE, *carried, *refused}


@pytest.mark.parametrize(
    "optimizer", [keras.optimizers.RMSprop(), keras.optimizers.AdamW(), te.SGD(), "sgd"]
)
def test_other_classes_are_refused(optimizer: Any):
    with pytest.raises(
        ValueError, match="It accepts SGD, Adagrad, Adam, Ftrl of Keras"
    ):
        translate_keras_optimizer(optimizer)


def test_the_scale_of_a_loss_is_no_rule_for_tables():
    optimizer = keras.optimizers.LossScaleOptimizer(keras.optimizers.SGD())
    with pytest.raises(ValueError, match="Pass its `inner_optimizer` instead, and"):
        translate_keras_optimizer(optimizer)


def test_subclasses_are_refused():
    class SGD(keras.optimizers.SGD):
        pass

    with pytest.raises(ValueError, match=r"cannot convert .*SGD\. It accepts"):
        translate_keras_optimizer(SGD())


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("SGD", {}),
        ("SGD", {"clipvalue": 0.5}),
        ("Adagrad", {}),
        ("Ftrl", {"l1_regularization_strength": 0.1, "beta": 0.2}),
        ("Ftrl", {"l2_regularization_strength": 0.1, "learning_rate_power": -0.7}),
        ("Adam", {"beta_1": 0.5, "epsilon": 1e-2}),
    ],
)
def test_the_numbers_are_those_of_keras(name: str, options: dict[str, Any]):
    """On rows that every step touches."""
    optimizer = getattr(keras.optimizers, name)(0.25, **options)
    layer, table = make_layer(optimizer)
    expected = keras.Variable([[1.0, 1.0]])
    optimizer.build([expected])
    for scale in (1.0, -0.5, 2.0, 0.3):
        step(layer, scale)
        optimizer.apply([keras.ops.full((1, 2), scale)], [expected])
    np.testing.assert_allclose(
        layer.embedding_tables[table].numpy()[1:2], expected.numpy(), rtol=1e-5
    )


@pytest.mark.parametrize("engine", ["host", "portable"])
def test_adam_is_that_of_keras_only_as_an_object_of_keras(
    engine: str, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setenv("TPU_EMBEDDING_ENGINE", engine)
    adam = keras.optimizers.Adam(0.25)
    rule_of_tpus = translate_keras_optimizer(adam, bias_correction=False)
    # In the first step m / sqrt(v) is (1 - 0.9) / sqrt(1 - 0.999) on a TPU.
    for optimizer, expected in [
        (adam, 0.25),
        (rule_of_tpus, 0.25 * 0.1 / np.sqrt(0.001)),
        (te.Adam(0.25), 0.25 * 0.1 / np.sqrt(0.001)),
        ("adam", 0.001 * 0.1 / np.sqrt(0.001)),
    ]:
        for arguments in ((optimizer,), (te.SGD(), optimizer)):  # Also of a table.
            layer, table = make_layer(*arguments)
            step(layer)
            moved = 1 - layer.embedding_tables[table].numpy()[1]
            np.testing.assert_allclose(moved, expected, rtol=1e-3)


def test_a_plain_rate_is_read_at_each_update():
    contract.check_a_plain_rate_is_read_at_each_update(keras.optimizers)


def test_a_schedule_is_evaluated_at_the_layers_own_count():
    contract.check_a_schedule_is_evaluated_at_the_layers_own_count(keras.optimizers)


def test_callbacks_reach_the_rate():
    optimizer = keras.optimizers.SGD(0.5)
    layer, table = make_layer(optimizer)
    inputs = keras.Input((), dtype="int64")
    model = keras.Model(inputs, keras.layers.Dense(1)(layer(inputs)))
    model.compile(optimizer, "mse")
    callbacks = (
        keras.callbacks.LearningRateScheduler(lambda epoch: 0.0),
        keras.callbacks.ReduceLROnPlateau(
            "loss", factor=1e-9, patience=0, min_delta=1e9
        ),
    )
    ids, labels = np.array([1]), np.array([[1.0]])
    for callback in callbacks:
        optimizer.learning_rate = 0.5
        model.fit(ids, labels, epochs=3, callbacks=[callback], verbose=0)
        before = layer.embedding_tables[table].numpy()
        model.fit(ids, labels, epochs=1, verbose=0)
        np.testing.assert_allclose(
            layer.embedding_tables[table].numpy(), before, atol=1e-6
        )
    optimizer.learning_rate = 0.5
    model.fit(ids, labels - 9, epochs=1, verbose=0)
    assert np.abs(layer.embedding_tables[table].numpy() - before).max() > 0.01


@pytest.mark.parametrize("name", ["sgd", "adagrad", "adam", "ftrl"])
def test_names_mean_our_optimizers(name: str):
    ours = {"sgd": te.SGD, "adagrad": te.Adagrad, "adam": te.Adam, "ftrl": te.FTRL}
    by_name, by_name_table = make_layer(name)
    by_object, by_object_table = make_layer(ours[name]())
    for layer in (by_name, by_object):
        step(layer)
    np.testing.assert_array_equal(
        by_name.embedding_tables[by_name_table].numpy(),
        by_object.embedding_tables[by_object_table].numpy(),
    )


@pytest.mark.parametrize("name", ["rmsprop", "SGD", ""])
def test_other_names_are_refused(name: str):
    with pytest.raises(ValueError, match="Known names: 'sgd', 'adagrad', 'adam', "):
        make_layer(name)
    with pytest.raises(ValueError, match=r"for table 't'\. Known names: 'sgd'"):
        make_layer("sgd", name)


@pytest.mark.parametrize(
    "optimizer",
    [
        te.SGD(0.125),
        tf.tpu.experimental.embedding.SGD(0.125),
        keras.optimizers.SGD(0.125),
    ],
)
def test_a_table_has_its_own_optimizer_of_any_kind(optimizer: Any):
    layer, table = make_layer("adam", optimizer)
    step(layer)
    np.testing.assert_array_equal(layer.embedding_tables[table].numpy()[1], 0.875)


def test_the_configurations_of_tensorflow_itself():
    stock = tf.tpu.experimental.embedding
    table = stock.TableConfig(4, 2, te.RowIdInitializer(), name="t")
    layer = TPUEmbedding(stock.FeatureConfig(table), stock.SGD(0.125))
    step(layer)
    np.testing.assert_array_equal(layer.embedding_tables[table].numpy()[1], 0.875)
    assert table.optimizer is None


@pytest.mark.parametrize("optimizer", [3, object(), keras.optimizers.RMSprop()])
def test_what_is_no_optimizer_is_refused(optimizer: Any):
    with pytest.raises(ValueError, match="optimizer"):
        make_layer(optimizer)


def test_a_schedule_that_comes_late_says_so():
    optimizer = keras.optimizers.SGD(0.5)
    layer, table = make_layer(optimizer)
    step(layer)
    optimizer.learning_rate = keras.optimizers.schedules.ExponentialDecay(0.5, 1, 0.5)
    with pytest.raises(RuntimeError, match="SGD was a number when the layer was c"):
        step(layer)
    np.testing.assert_array_equal(contract.row_1(layer, table), [0.5, 0.5])
