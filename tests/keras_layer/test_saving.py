"""Configurations, weight files and checkpoints, and going on from them."""

from __future__ import annotations

import json
import pathlib
from typing import Any

import h5py
import keras
import numpy as np
import pytest
import tensorflow as tf
from keras_layer import models

import tpu_embedding as te
from tpu_embedding.keras import TPUEmbedding, translate_keras_optimizer

# Keras asks its variables for arrays in a way that NumPy 2 would rather not see.
pytestmark = pytest.mark.filterwarnings("ignore:__array__ impl:DeprecationWarning")

ALL_SLOTS = {
    "films",
    "films%2Fmomenta",
    "films%2Fvelocities",
    "users",
    "users%2Faccumulators",
    "_updates",
}


def make_model() -> keras.Model:
    """With two optimizers, one of them of Keras, and a schedule."""
    schedule = keras.optimizers.schedules.InverseTimeDecay(0.1, 2, 0.5)
    tables = {
        "films": te.TableConfig(
            11,
            3,
            models.TableInitializer("films"),
            optimizer=keras.optimizers.Adam(schedule, epsilon=1e-3),
            name="films",
        ),
        "users": te.TableConfig(7, 2, combiner="sum", name="users"),
    }
    config = models.feature_config(tables)
    model = models.make_model(te.Adagrad(0.2), feature_config=config)
    model.compile(keras.optimizers.Adam(0.01), "mse")
    return model


def fit(model: Any, steps: list[Any]) -> None:
    model.fit(models.dataset(steps), shuffle=False, verbose=0)


def everything(model: Any) -> dict[str, np.ndarray]:
    state = models.state(models.embedding_of(model))
    kernel = model.get_layer("head").kernel.numpy()
    return {**state, "head": kernel}


def assert_same_bits(actual: Any, expected: Any) -> None:
    actual, expected = everything(actual), everything(expected)
    assert actual.keys() == expected.keys()
    for name, value in expected.items():
        np.testing.assert_array_equal(actual[name], value, err_msg=name)


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


def test_a_checkpoint_continues_to_the_same_bits(tmp_path: pathlib.Path, seed: int):
    steps = models.batches(seed, 6)
    model = make_model()
    fit(model, steps[:3])
    checkpoint = tf.train.Checkpoint(model=model, optimizer=model.optimizer)
    path = checkpoint.save(tmp_path / "checkpoint")
    fit(model, steps[3:])
    other = make_model()
    other.optimizer.build(other.trainable_variables)
    status = tf.train.Checkpoint(model=other, optimizer=other.optimizer).restore(path)
    status.assert_existing_objects_matched()
    fit(other, steps[3:])
    assert_same_bits(other, model)


def test_names_in_checkpoints(tmp_path: pathlib.Path):
    layer = models.embedding_of(make_model())
    path = tf.train.Checkpoint(layer=layer).save(tmp_path / "checkpoint")
    names = {
        key.removeprefix("layer/").removesuffix("/.ATTRIBUTES/VARIABLE_VALUE")
        for key, _ in tf.train.list_variables(path)
        if key.startswith("layer/")
    }
    assert names == {name.replace("%2F", ".S") for name in ALL_SLOTS}


def test_checkpoints_of_the_layer_and_of_tpu_embedding_fit(tmp_path: pathlib.Path):
    tables = models.table_configs()
    core = te.TPUEmbedding(models.feature_config(tables), te.Adagrad(0.1))
    core.build()
    core.embedding_tables[tables["films"]].assign(tf.fill([11, 3], 7.0))
    path = tf.train.Checkpoint(layer=core).save(tmp_path / "checkpoint")
    layer = TPUEmbedding(models.feature_config(tables), te.Adagrad(0.1))
    layer.build()
    status = tf.train.Checkpoint(layer=layer).restore(path)
    status.assert_existing_objects_matched()
    assert layer.embedding_tables[tables["films"]].numpy()[10, 2] == 7.0


def test_a_checkpoint_restored_before_the_layer_is_built(tmp_path: pathlib.Path):
    tables = models.table_configs()
    layer = TPUEmbedding(models.feature_config(tables), "adagrad")
    layer.update_embedding_table(tables["films"], tf.fill([11, 3], 7.0))
    path = tf.train.Checkpoint(layer=layer).save(tmp_path / "checkpoint")
    other = TPUEmbedding(models.feature_config(tables), "adagrad")
    tf.train.Checkpoint(layer=other).restore(path)
    assert other.embedding_tables[tables["films"]].numpy()[10, 2] == 7.0


@pytest.mark.parametrize("with_slots", [False, True])
def test_the_models_optimizer_may_know_the_virtual_weight_or_not(
    with_slots: bool, tmp_path: pathlib.Path, seed: int
):
    """Its zero slots for that weight do no harm, nor does their absence."""
    steps = models.batches(seed, 4)
    model, other = make_model(), make_model()
    fit(model, steps[:2])
    checkpoint = tf.train.Checkpoint(model=model)
    if with_slots:
        checkpoint = tf.train.Checkpoint(model=model, optimizer=model.optimizer)
    path = checkpoint.save(tmp_path / "checkpoint")
    other.optimizer.build(other.trainable_variables)
    restored = tf.train.Checkpoint(model=other, optimizer=other.optimizer)
    restored.restore(path).expect_partial()
    assert_same_bits(other, model)
    fit(other, steps[2:])


def tables_of_all_kinds() -> list[Any]:
    stock = tf.tpu.experimental.embedding
    return [
        te.TableConfig(
            5,
            2,
            keras.initializers.RandomNormal(stddev=0.1, seed=3),
            te.FTRL(0.1, beta=0.5, clipvalue=(-1.0, 2.0), clip_weight_max=3.0),
            "sqrtn",
            "a",
            te.QuantizationConfig(4, -1.0, 1.0),
            invalid_ids="mod",
        ),
        te.TableConfig(5, 2, te.RowIdInitializer(3), "adam", name="b"),
        te.TableConfig(5, 2, tf.constant_initializer(2.0), name="c"),
        stock.TableConfig(5, 2, optimizer=stock.Adagrad(0.5), combiner="sum"),
        te.TableConfig(5, 2, optimizer=keras.optimizers.Ftrl(0.25, beta=0.5)),
    ]


def layer_of_all_kinds(tables: list[Any]) -> TPUEmbedding:
    stock = tf.tpu.experimental.embedding
    config = {
        "x": [te.FeatureConfig(tables[0]), te.FeatureConfig(tables[0], 3)],
        "y": (te.FeatureConfig(tables[1], output_shape=(None, 2), name="f"),),
        "z": {
            "2": te.FeatureConfig(tables[2]),
            "3": stock.FeatureConfig(tables[3]),
            "4": te.FeatureConfig(tables[4]),
        },
    }
    return TPUEmbedding(
        config, te.SGD(0.5), batch_size=4, loss_scale=2.0, invalid_ids="drop"
    )


def test_configurations_survive_json():
    layer = layer_of_all_kinds(tables_of_all_kinds())
    written = json.loads(json.dumps(layer.get_config()))
    other = TPUEmbedding.from_config(written)
    # Keras says "ftrl" of its Ftrl, and "Ftrl" of one that it has read.
    again = json.dumps(other.get_config())
    assert again.lower() == json.dumps(written).lower()
    layer.build()
    other.build()
    for name, value in models.state(layer).items():
        if name not in ("table_3", "table_4"):  # Truncated normal, without a seed.
            np.testing.assert_array_equal(models.state(other)[name], value)


def test_tables_and_optimizers_survive_json():
    tables = tables_of_all_kinds()
    layer = layer_of_all_kinds(tables)
    other = TPUEmbedding.from_config(json.loads(json.dumps(layer.get_config())))
    ours, theirs = (each._parts.resolved.plan.tables for each in (layer, other))
    for before, after in zip(ours, theirs, strict=True):
        assert before.name == after.name
        assert before.features == after.features
        for field in ("vocabulary_size", "dim", "combiner", "invalid_ids"):
            assert getattr(before.config, field) == getattr(after.config, field)
        quantization = before.config.quantization_config
        assert after.config.quantization_config == quantization
        assert type(before.optimizer) is type(after.optimizer)
    optimizers: list[Any] = [table.optimizer for table in theirs]
    assert optimizers[0] == tables[0].optimizer
    assert optimizers[2] == te.SGD(0.5)
    assert optimizers[4].learning_rate() == 0.25


def test_rates_that_are_objects_of_keras_survive(tmp_path: pathlib.Path):
    schedule = keras.optimizers.schedules.ExponentialDecay(0.5, 10, 0.9)
    for optimizer in (
        te.SGD(schedule),
        translate_keras_optimizer(keras.optimizers.Adam(0.5), bias_correction=True),
        translate_keras_optimizer(
            keras.optimizers.Adam(schedule), bias_correction=True
        ),
        translate_keras_optimizer(keras.optimizers.SGD(0.5)),
    ):
        layer = TPUEmbedding(models.feature_config(), optimizer)
        other = TPUEmbedding.from_config(json.loads(json.dumps(layer.get_config())))
        rates: list[Any] = []
        for each in (layer, other):
            resolved: Any = each._parts.resolved.plan.tables[0].optimizer
            rates.append(resolved.learning_rate)
        takes_step = (
            not isinstance(optimizer, te.SGD) or optimizer.learning_rate is schedule
        )
        arguments = [tf.constant(7)] if takes_step else []
        np.testing.assert_array_equal(rates[1](*arguments), rates[0](*arguments))


def no_name(shape: Any, dtype: Any) -> tf.Tensor:
    return tf.zeros(shape, dtype)


@pytest.mark.parametrize(
    ("options", "what"),
    [
        ({"optimizer": te.SGD(lambda: 0.1)}, "`learning_rate` of the optimizer of the"),
        ({"loss_scale": lambda: 2.0}, "`loss_scale`"),
        ({"initializer": no_name}, "The initializer of table 't'"),
    ],
)
def test_what_cannot_be_saved_says_so(options: dict[str, Any], what: str):
    table = te.TableConfig(3, 2, options.pop("initializer", None), name="t")
    layer = TPUEmbedding(te.FeatureConfig(table), **{"optimizer": "sgd", **options})
    with pytest.raises(ValueError, match=rf"^{what}.* cannot be saved: .*register_ker"):
        layer.get_config()


def test_clones_are_new_models_of_the_same_kind(seed: int):
    model = make_model()
    clone = keras.models.clone_model(model)
    assert everything(clone).keys() == everything(model).keys()
    clone.compile("sgd", "mse")
    before = everything(model)
    fit(clone, models.batches(seed, 2))
    for name, value in before.items():
        np.testing.assert_array_equal(everything(model)[name], value)


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
