"""tf.train.Checkpoint: names, other classes and other strategies."""

from __future__ import annotations

import pathlib

import numpy as np
import pytest
import tensorflow as tf
from keras_layer import models
from keras_layer.trained import ALL_SLOTS, assert_same_bits, make_model

import tpu_embedding as te
from tpu_embedding.keras import TPUEmbedding

# Keras asks its variables for arrays in a way that NumPy 2 would rather not see.
pytestmark = pytest.mark.filterwarnings("ignore:__array__ impl:DeprecationWarning")


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
