"""tf.train.Checkpoint: names, other classes and other strategies."""

from __future__ import annotations

import pathlib

import numpy as np
import pytest
import tensorflow as tf
from keras_layer import models
from keras_layer.trained import ALL_SLOTS, assert_same_bits, everything, make_model
from keras_layer.version import keras

import tpu_embedding as te
from tpu_embedding import checkpoint
from tpu_embedding.keras import TPUEmbedding


@pytest.mark.parametrize("replicas", [(1, 2), (2, 1)])
def test_checkpoints_fit_under_any_strategy(
    replicas: tuple[int, int], tmp_path: pathlib.Path, seed: int
):
    made = []
    for count in replicas:
        with models.mirrored(count).scope():
            made.append(make_model())
    model, other = made
    layer = models.embedding_of(model)
    for variable in layer.state_of_tables:
        variable.assign(np.full(variable.shape, seed % 100))
    path = tf.train.Checkpoint(model=model).save(tmp_path / "checkpoint")
    tf.train.Checkpoint(model=other).restore(path).expect_partial()
    assert_same_bits(other, model)
    assert models.state(models.embedding_of(other))["films"][0, 0] == seed % 100


def test_a_model_that_is_not_built_is_refused(tmp_path: pathlib.Path):
    class Model(keras.Model):
        def __init__(self) -> None:
            super().__init__()
            films = te.TableConfig(9, 2, name="films")
            self.rows = TPUEmbedding(te.FeatureConfig(films), te.SGD(0.1))
            self.dense = keras.layers.Dense(1)

        def call(self, inputs: tf.Tensor) -> tf.Tensor:
            return self.dense(self.rows(inputs))

    ids = tf.range(9)
    model, other = Model(), Model()
    model(ids)
    path = checkpoint.save(model, tmp_path / "saved")
    with pytest.raises(ValueError, match=r"The model .* is not built.*Call the model"):
        checkpoint.restore(other, path)
    other(ids)
    checkpoint.restore(other, path)
    assert (other.rows(ids).numpy() == model.rows(ids).numpy()).all()


@pytest.mark.parametrize("whole", [False, True])
def test_save_and_restore_take_a_layer_or_a_model(whole: bool, tmp_path: pathlib.Path):
    """A vocabulary that grew by a day's new films, and the slots of the old ones."""
    model, other = make_model(), make_model()
    layer = models.embedding_of(model)
    layer._built.tables.variables()["_updates"].assign(7)
    for variable in layer.state_of_tables[:-1]:
        variable.assign(np.random.default_rng(1).normal(size=variable.shape))
    path = checkpoint.save(model if whole else layer, tmp_path / "saved")
    checkpoint.restore(other if whole else models.embedding_of(other), path)
    assert_same_bits(models.state(models.embedding_of(other)), models.state(layer))
    model.save(tmp_path / "day1.keras")
    films = te.TableConfig(15, 3, optimizer=te.Adam(), name="films")
    users = te.TableConfig(7, 2, combiner="sum", name="users")
    config = models.feature_config({"films": films, "users": users})
    grown = models.make_model(te.Adagrad(0.2), feature_config=config)
    given = grown if whole else models.embedding_of(grown)
    with pytest.raises(ValueError, match=r"Table films has shape \[15, 3\], but in"):
        checkpoint.restore(given, tmp_path / "day1.keras")
    checkpoint.restore(given, tmp_path / "day1.keras", resize=True)
    found = models.state(models.embedding_of(grown))
    for name, value in models.state(layer).items():
        if name != "_updates":
            np.testing.assert_array_equal(found[name][: len(value)], value)
    with pytest.raises(TypeError, match="The first two also take a"):
        checkpoint.save(keras.layers.Dense(1), tmp_path / "dense")
    two = keras.Sequential([model, other])
    with pytest.raises(ValueError, match="several layers with tables: "):
        checkpoint.save(two, tmp_path / "two")


@pytest.mark.parametrize("name", ["old.keras", "old.weights.h5"])
def test_tables_of_layers_of_keras_are_restored_by_name(
    name: str, tmp_path: pathlib.Path
):
    inputs = keras.Input((3,)), keras.Input(())
    films = keras.layers.Embedding(9, 2, name="films")
    users = keras.layers.Embedding(5, 2, name="people")
    dense = keras.layers.Dense(2)(films(inputs[0]))
    old = keras.Model(inputs, [dense, users(inputs[1])])
    (old.save if name.endswith(".keras") else old.save_weights)(tmp_path / name)
    tables = {n: te.TableConfig(v, 2, name=n) for n, v in (("films", 9), ("users", 5))}
    config = {n: te.FeatureConfig(table) for n, table in tables.items()}
    layer = TPUEmbedding(config, "adagrad")
    checkpoint.restore(layer, tmp_path / name, rename={"users": "people"})
    for table, before in ((tables["films"], films), (tables["users"], users)):
        np.testing.assert_array_equal(
            layer.embedding_tables[table], before.get_weights()[0]
        )


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


def test_clones_are_new_models_of_the_same_kind():
    model = make_model()
    clone = keras.models.clone_model(model)
    before = everything(model)
    assert everything(clone).keys() == before.keys()
    for variable in clone.variables:
        variable.assign(np.ones(variable.shape))
    assert_same_bits(model, before)
