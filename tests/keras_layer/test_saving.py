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
from keras_layer.trained import ALL_SLOTS, assert_same_bits, everything, fit, make_model

import tpu_embedding as te
from tpu_embedding import distribution


def optimizer_state(model: Any) -> list[np.ndarray]:
    return [variable.numpy() for variable in model.optimizer.variables]


def assert_goes_on(model: Any, before: Any, steps: Any, after: Any) -> None:
    """That a restored model is where another was, and comes where that one came."""
    assert_same_bits(model, before)
    fit(model, steps)
    assert_same_bits(model, after)


def test_all_that_restores_continues_to_the_same_bits(
    tmp_path: pathlib.Path, seed: int
):
    steps = models.batches(seed, 3)
    model = make_model()
    fit(model, steps)
    before = everything(model)
    model.save(tmp_path / "model.keras")
    model.save_weights(tmp_path / "model.weights.h5")
    checkpoint = tf.train.Checkpoint(model=model, optimizer=model.optimizer)
    path = checkpoint.save(tmp_path / "checkpoint")
    alone = tf.train.Checkpoint(model=model).save(tmp_path / "alone")
    weights, of_optimizer = model.get_weights(), optimizer_state(model)
    fit(model, steps)
    after = everything(model)
    assert after["_updates"] == 6

    loaded: Any = keras.models.load_model(tmp_path / "model.keras")
    assert everything(loaded).keys() == {*ALL_SLOTS, "head"}
    assert_goes_on(loaded, before, steps, after)

    other = make_model()
    other.optimizer.build(other.trainable_variables)  # It is in the files too.
    restored = tf.train.Checkpoint(model=other, optimizer=other.optimizer)
    restored.restore(path).assert_existing_objects_matched()
    assert_goes_on(other, before, steps, after)
    other.load_weights(tmp_path / "model.weights.h5")
    assert_goes_on(other, before, steps, after)
    other.set_weights(weights)
    for own, value in zip(other.optimizer.variables, of_optimizer, strict=True):
        own.assign(value)
    assert_goes_on(other, before, steps, after)
    # The optimizer's zero slots for the virtual weight need not be in the file.
    restored.restore(alone).expect_partial()
    assert_same_bits(other, before)
    fit(other, steps)

    found: list[str] = []
    with h5py.File(tmp_path / "model.weights.h5") as file:
        file["layers/tpu_embedding/vars"].visit(found.append)
    assert set(found) == ALL_SLOTS


def test_an_interrupted_fit_is_resumed_to_the_same_bits(
    tmp_path: pathlib.Path, seed: int
):
    data = models.dataset(models.batches(seed, 3))

    def run(model: Any, *more: Any) -> None:
        backup = keras.callbacks.BackupAndRestore(tmp_path / "backup")
        model.fit(data, epochs=3, shuffle=False, verbose=0, callbacks=[backup, *more])

    def interrupt(batch: int, logs: Any) -> None:
        if batch == 1 and (tmp_path / "backup").exists():
            raise KeyboardInterrupt  # In the second epoch.

    whole, broken = make_model(), make_model()
    broken.set_weights(whole.get_weights())
    run(whole)
    callback = keras.callbacks.LambdaCallback(on_train_batch_end=interrupt)
    with pytest.raises(KeyboardInterrupt):
        run(broken, callback)
    assert everything(broken)["_updates"] == 5
    run(broken)  # From the end of the first epoch, with nothing of the second left.
    assert_same_bits(broken, whole)


def test_the_portable_engine_continues_to_the_same_bits(
    tmp_path: pathlib.Path, seed: int, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setenv(distribution.ENGINE_VARIABLE, "portable")
    steps = models.batches(seed, 2)
    model = make_model()
    fit(model, steps)
    before = everything(model)
    checkpoint = tf.train.Checkpoint(model=model, optimizer=model.optimizer)
    path = checkpoint.save(tmp_path / "checkpoint")
    fit(model, steps)
    after = everything(model)
    checkpoint.restore(path).assert_consumed()
    assert_goes_on(model, before, steps, after)


# Keras 3.15.1 warns of what it skips, before the layer says what is missing.
@pytest.mark.filterwarnings("ignore:Skipping nested container:UserWarning")
def test_a_file_that_does_not_fit_changes_nothing(tmp_path: pathlib.Path, seed: int):
    path = tmp_path / "model.weights.h5"
    models.make_model("sgd").save_weights(path)
    model = make_model()
    before = everything(model)
    with pytest.raises(ValueError, match=r"lacks some or all of .*films/momenta, "):
        model.load_weights(path)
    tables = models.table_configs()
    tables["films"] = te.TableConfig(12, 3, name="films")
    other = models.make_model("sgd", feature_config=models.feature_config(tables))
    with pytest.raises(ValueError, match=r"films of the layer .* has shape \(12, 3\)"):
        other.load_weights(path)
    assert_same_bits(model, before)


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
    tensors = {"accumulators": tf.ones([11, 3])}
    for made in ({}, None, [tf.Variable(tf.ones([11, 3]))], tensors):
        wrong = te.Adagrad(0.1, slot_variable_creation_fn=lambda *_, made=made: made)
        with pytest.raises(ValueError, match="must return a dict with a float32 vari"):
            models.make_model(wrong)
