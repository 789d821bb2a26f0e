"""Configurations, weight files and checkpoints, and going on from them."""

from __future__ import annotations

import pathlib
from typing import Any

import h5py
import keras
import numpy as np
import pytest
import tensorflow as tf
from keras_layer import models
from keras_layer.trained import (
    ALL_SLOTS,
    assert_same_bits,
    everything,
    fit,
    make_model,
)

import tpu_embedding as te

# Keras asks its variables for arrays in a way that NumPy 2 would rather not see.
pytestmark = pytest.mark.filterwarnings("ignore:__array__ impl:DeprecationWarning")

both_engines = pytest.mark.usefixtures("engine")


@both_engines
def test_a_keras_file_continues_to_the_same_bits(tmp_path: pathlib.Path, seed: int):
    steps = models.batches(seed, 6)
    model = make_model()
    fit(model, steps[:3])
    model.save(tmp_path / "model.keras")
    loaded = keras.models.load_model(tmp_path / "model.keras")
    assert_same_bits(loaded, model)
    assert everything(loaded).keys() == {*ALL_SLOTS, "head"}
    for each in (model, loaded):
        fit(each, steps[3:])
    assert_same_bits(loaded, model)
    assert everything(loaded)["_updates"] == 6


def test_weights_alone(tmp_path: pathlib.Path, seed: int):
    steps = models.batches(seed, 6)
    model, other = make_model(), make_model()
    other.optimizer.build(other.trainable_variables)  # It is in the file too.
    fit(model, steps[:3])
    model.save_weights(tmp_path / "model.weights.h5")
    other.load_weights(tmp_path / "model.weights.h5")
    assert_same_bits(other, model)


def test_the_virtual_weight_is_not_saved(tmp_path: pathlib.Path, seed: int):
    model = make_model()
    fit(model, models.batches(seed, 1))
    model.save_weights(tmp_path / "model.weights.h5")
    found: list[str] = []
    with h5py.File(tmp_path / "model.weights.h5") as file:
        file["layers/tpu_embedding/vars"].visit(found.append)
    assert set(found) == ALL_SLOTS
    assert set(models.state(models.embedding_of(model))) == ALL_SLOTS


def test_clones_are_new_models_of_the_same_kind(seed: int):
    model = make_model()
    clone = keras.models.clone_model(model)
    assert everything(clone).keys() == everything(model).keys()
    clone.compile("sgd", "mse")
    before = everything(model)
    fit(clone, models.batches(seed, 2))
    for name, value in before.items():
        np.testing.assert_array_equal(everything(model)[name], value)


# Keras 3.15.1 warns of what it skips, before the layer says what is missing.
@pytest.mark.filterwarnings("ignore:Skipping nested container:UserWarning")
def test_a_file_that_does_not_fit_changes_nothing(tmp_path: pathlib.Path, seed: int):
    path = tmp_path / "model.weights.h5"
    models.make_model("sgd").save_weights(path)
    model = make_model()
    before = everything(model)
    with pytest.raises(ValueError, match=r"misses some or all of .*films/momenta, "):
        model.load_weights(path)
    tables = models.table_configs()
    tables["films"] = te.TableConfig(12, 3, name="films")
    other = models.make_model("sgd", feature_config=models.feature_config(tables))
    with pytest.raises(ValueError, match=r"films of the layer .* has shape \(12, 3\)"):
        other.load_weights(path)
    for name, value in before.items():
        np.testing.assert_array_equal(everything(model)[name], value)


def test_lookup_only_layers_take_the_tables_of_trained_ones(tmp_path: pathlib.Path):
    path = tmp_path / "model.weights.h5"
    model = models.make_model("adagrad")
    tables = models.embedding_of(model).embedding_tables
    films = next(iter(tables))
    models.embedding_of(model).update_embedding_table(films, tf.fill([11, 3], 7.0))
    model.save_weights(path)
    other = models.make_model(None)
    other.load_weights(path)
    assert models.state(models.embedding_of(other))["films"][10, 2] == 7.0


def test_trainable_tables_are_saved_by_name_too(tmp_path: pathlib.Path, seed: int):
    steps = models.batches(seed, 4)
    model = models.make_model(None, trainable_tables=True)
    model.compile(keras.optimizers.Adam(0.1), "mse")
    fit(model, steps[:2])
    model.save(tmp_path / "model.keras")
    loaded = keras.models.load_model(tmp_path / "model.keras")
    assert set(models.state(models.embedding_of(loaded))) == {"films", "users"}
    for each in (model, loaded):
        fit(each, steps[2:])
    assert_same_bits(loaded, model)


@both_engines
def test_weights_given_and_taken_hold_tables_and_slots(seed: int):
    steps = models.batches(seed, 3)
    model, other = make_model(), make_model()
    fit(model, steps[:2])
    other.set_weights(model.get_weights())
    assert_same_bits(other, model)
    other.optimizer.build(other.trainable_variables)
    for own, its in zip(
        other.optimizer.variables, model.optimizer.variables, strict=True
    ):
        own.assign(its)
    for each in (model, other):
        fit(each, steps[2:])
    assert_same_bits(other, model)


def test_early_stopping_restores_the_tables(seed: int):
    model = make_model()
    data = models.dataset(models.batches(seed, 2))
    stop = keras.callbacks.EarlyStopping(
        "loss", mode="max", patience=1, restore_best_weights=True
    )
    model.fit(data, epochs=1, shuffle=False, verbose=0)
    history = []
    keep = keras.callbacks.LambdaCallback(
        on_epoch_end=lambda epoch, logs: history.append(everything(model))
    )
    model.fit(data, epochs=9, shuffle=False, verbose=0, callbacks=[keep, stop])
    assert len(history) == 2  # The loss falls, and "max" calls the first one best.
    for name, value in history[0].items():
        np.testing.assert_array_equal(everything(model)[name], value, err_msg=name)
    assert np.any(history[1]["films"] != history[0]["films"])


def test_slots_that_the_user_makes():
    calls = []

    def make_slots(table: Any, names: list[str], initializers: list[Any]) -> Any:
        calls.append((table.shape, names))
        return {
            name: tf.Variable(2 + initializer(table.shape, tf.float32))
            for name, initializer in zip(names, initializers, strict=True)
        }

    optimizer = te.Adagrad(0.1, slot_variable_creation_fn=make_slots)
    model = models.make_model(optimizer)
    assert calls == [((11, 3), ["accumulators"]), ((7, 2), ["accumulators"])]
    state = models.state(models.embedding_of(model))
    np.testing.assert_allclose(state["films%2Faccumulators"], 2.1)
    wrong = te.Adagrad(0.1, slot_variable_creation_fn=lambda *_: {})
    with pytest.raises(ValueError, match="must return a dict with a float32 variable"):
        models.make_model(wrong)
