"""Files of tf_keras."""

from __future__ import annotations

import pathlib
from typing import Any

import numpy as np
import pytest
import tensorflow as tf
from keras_layer import models
from keras_layer.trained import assert_same_bits, fit, make_model
from keras_layer.version import keras as tf_keras

import tpu_embedding as te
from tpu_embedding.keras import TPUEmbedding

# `.h5` is "considered legacy" by tf_keras.
pytestmark = pytest.mark.filterwarnings("ignore:You are saving your model as an HDF5")


def assert_goes_on(model: Any, loaded: Any, steps: list[Any]) -> None:
    """Both have the same bits, now and after more steps."""
    assert_same_bits(loaded, model)
    fit(model, steps)
    fit(loaded, steps)
    assert_same_bits(loaded, model)


@pytest.mark.parametrize("name", ["model.keras", "model.h5", "folder"])
def test_whole_models(name: str, tmp_path: pathlib.Path, seed: int):
    steps = models.batches(seed, 3)
    model = make_model()
    # SavedModels of tf_keras are without the state of Adam.
    model.compile("sgd", "mse")
    fit(model, steps)
    model.save(tmp_path / name)
    loaded = tf_keras.models.load_model(tmp_path / name)
    assert type(models.embedding_of(loaded)) is TPUEmbedding
    assert_goes_on(model, loaded, steps)


class Subclassed(tf_keras.Model):
    """Without `get_config`, so that a SavedModel has only its functions."""

    def __init__(self) -> None:
        super().__init__()
        table = te.TableConfig(8, 2, name="films")
        self.embedding = TPUEmbedding(te.FeatureConfig(table), "sgd")

    def call(self, ids: Any) -> Any:
        return self.embedding(ids)


def test_a_subclassed_model_from_a_saved_model_says_how_to_train(
    tmp_path: pathlib.Path,
):
    model = Subclassed()
    model.compile("sgd", "mse")
    data = tf.data.Dataset.from_tensors((tf.constant([1, 2]), tf.zeros([2, 2])))
    model.fit(data, verbose=0)
    model.save(tmp_path / "folder")
    loaded = tf_keras.models.load_model(tmp_path / "folder")
    np.testing.assert_array_equal(
        loaded.predict(data, verbose=0), model.predict(data, verbose=0)
    )
    # AutoGraph makes another error of TensorFlow's LookupError.
    with pytest.raises(Exception, match="create the model in code, and load"):
        loaded.fit(data, verbose=0)


@pytest.mark.parametrize("name", ["model.weights.h5", "weights.h5", "checkpoint"])
def test_weights(name: str, tmp_path: pathlib.Path, seed: int):
    steps = models.batches(seed, 3)
    model = make_model()
    fit(model, steps)
    model.save_weights(tmp_path / name)
    loaded = make_model()
    loaded.load_weights(tmp_path / name)
    assert_same_bits(loaded, model)


def test_exports_hold_tensorflows_ops_only(tmp_path: pathlib.Path, seed: int):
    ((features, _),) = models.batches(seed, 1)
    del features["liked"]  # `export` takes no sparse input.
    features["seen"] = features["seen"].to_tensor(1)
    layer = TPUEmbedding({k: models.feature_config()[k] for k in features}, "adam")
    inputs = {
        "seen": tf_keras.Input((None,), dtype="int64", name="seen"),
        "user": models.inputs()["user"],
    }
    model = tf_keras.Model(inputs, layer(inputs)["seen"])
    model.compile("sgd", "mse")
    model.fit(features, np.zeros((models.BATCH, 3)), verbose=0)
    model.export(tmp_path / "export")
    tf.saved_model.save(model, tmp_path / "model")
    served = tf.saved_model.load(tmp_path / "model").signatures["serving_default"]
    assert served.structured_outputs
    model.save(tmp_path / "training")
    for name, slots in (("model", 0), ("export", 0), ("training", 2)):
        graph = (tmp_path / name / "saved_model.pb").read_bytes()
        assert b"ResourceGather" in graph
        assert b"TpuEmbedding" not in graph.replace(b"TPUEmbedding", b"")
        # Each table once; its slots only where training goes on.
        stored = tf.train.list_variables(str(tmp_path / name / "variables/variables"))
        assert [shape for _, shape in stored].count([11, 3]) == 1 + slots
        loaded = tf.saved_model.load(tmp_path / name).signatures["serving_default"]
        (served,) = loaded(**features).values()
        np.testing.assert_allclose(served, model(features), rtol=1e-6)


@pytest.mark.parametrize("trained", [False, True])
@pytest.mark.parametrize("rows", [60, te.Hashing(60, 2)])
def test_saved_models_of_row_embeddings(
    rows: Any, trained: bool, tmp_path: pathlib.Path
):
    ids = tf_keras.Input([3], dtype="int64")
    values = tf_keras.layers.Flatten()(te.keras.Embedding(rows, 4)(ids))
    model = tf_keras.Model(ids, tf_keras.layers.Dense(1)(values))
    batches = np.array([[[1, 2, 3]], [[2, 3, 4]], [[3, 4, 5]]])
    if trained:  # Then rows 1 and 2 wait for updates.
        optimizer = te.keras.RowSparseOptimizer(tf_keras.optimizers.Adam(0.1))
        model.compile(optimizer, "mse")
        for batch in batches:
            model.train_on_batch(batch, np.ones([1, 1]))
    model.save(tmp_path / "model")
    graph = (tmp_path / "model" / "saved_model.pb").read_bytes()
    assert b"TpuEmbedding" not in graph
    loaded = tf_keras.models.load_model(tmp_path / "model")
    asked = batches[:, 0]
    np.testing.assert_array_equal(loaded(asked), model(asked))


class RowModel(tf_keras.Model):
    """Without `get_config`, so that a SavedModel has only its functions."""

    def __init__(self, combiner: str | None, in_model: bool) -> None:
        super().__init__()
        rows: Any = te.keras.Embedding(9, 4, combiner=combiner)
        if in_model:  # Which tf_keras calls while it loads.
            ids = tf_keras.Input([1], dtype="int64")
            rows = tf_keras.Model(ids, rows(ids))
        self.rows = rows
        self.dense = tf_keras.layers.Dense(1)

    def call(self, ids: Any) -> Any:
        return self.dense(self.rows(ids))


@pytest.mark.filterwarnings("ignore:RowSparseOptimizer updates all rows:UserWarning")
@pytest.mark.parametrize(
    ("combiner", "in_model", "converts"),
    [(None, False, True), ("sum", False, False), ("sum", True, True)],
)
def test_functions_of_saved_models_read_rows_that_are_caught_up(
    combiner: str | None, in_model: bool, converts: bool, tmp_path: pathlib.Path
):
    model = RowModel(combiner, in_model)
    batches = [np.array([[n % 9]]) for n in (1, 2, 1, 3, 4, 1, 2)]
    model(batches[0])
    model.save(tmp_path / "model")
    loaded = tf_keras.models.load_model(tmp_path / "model")
    loaded.rows(batches[0])  # `call` of the layer itself.
    found = []
    for each in (model, loaded):
        optimizer = tf_keras.optimizers.Adam(0.1)
        if not converts:
            optimizer = te.keras.RowSparseOptimizer(optimizer)
        each.compile(optimizer, "mse")
        if converts:
            te.keras.convert(each)
        losses = [each.train_on_batch(ids, np.ones([1, 1])) for ids in batches]
        found.append(losses)
    np.testing.assert_allclose(*found, rtol=1e-5)


@pytest.mark.filterwarnings("ignore:RowSparseOptimizer updates all rows:UserWarning")
@pytest.mark.parametrize("combiner", [None, "sum"])
def test_functions_around_a_converted_part_of_a_saved_model_read_its_rows(
    combiner: str | None, tmp_path: pathlib.Path
):
    model = RowModel(combiner, in_model=True)
    model(np.array([[1]]))
    model.save(tmp_path / "model")
    loaded = tf_keras.models.load_model(tmp_path / "model")
    part = te.keras.convert(loaded.rows)
    part.compile(te.keras.RowSparseOptimizer(tf_keras.optimizers.Adam(0.1)), "mse")
    for n in (1, 2, 2, 2):
        part.train_on_batch(np.array([[n]]), np.ones([1, 4]))
    around = loaded(np.array([[1]]))
    np.testing.assert_allclose(around, loaded.dense(part(np.array([[1]]))), rtol=1e-5)


def test_rows_of_saved_models_without_functions_wait_once_converted(
    tmp_path: pathlib.Path,
):
    ids = tf_keras.Input([1], dtype="int64")
    tf_keras.Model(ids, te.keras.Embedding(9, 4, combiner="sum")(ids)).save(
        tmp_path / "model"
    )
    loaded = te.keras.load_model(tmp_path / "model")
    loaded.compile(te.keras.RowSparseOptimizer(tf_keras.optimizers.Adam(0.1)), "mse")
    loaded.train_on_batch(np.array([[1]]), np.ones([1, 4]))
    assert loaded.layers[1].embeddings.waiting is not None


def test_exports_of_growing_tables_hold_ids(tmp_path: pathlib.Path):
    table = te.TableConfig(te.GrowingVocabulary(20, unknown="shared_row"), 4)
    layer = TPUEmbedding({"film": te.FeatureConfig(table)}, te.Adagrad(0.5))
    inputs = {"film": tf_keras.Input((), dtype="int64", name="film")}
    model = tf_keras.Model(inputs, layer(inputs)["film"])
    model.compile("sgd", "mse")
    ids = np.array([5, -7, 2**62, 5], np.int64)
    model.fit({"film": ids}, np.ones((4, 4)), verbose=0)
    model.export(tmp_path / "export")
    asked = np.array([*ids, 99], np.int64)
    loaded = tf.saved_model.load(tmp_path / "export")  # Keeps its variables.
    served = loaded.serve(tf.constant(asked))
    assert np.array_equal(served, model.predict({"film": asked}, verbose=0))


def test_checkpoints(tmp_path: pathlib.Path, seed: int):
    steps = models.batches(seed, 3)
    model = make_model()
    fit(model, steps)
    path = tf.train.Checkpoint(model=model, optimizer=model.optimizer).save(
        tmp_path / "checkpoint"
    )
    loaded = make_model()
    status = tf.train.Checkpoint(model=loaded, optimizer=loaded.optimizer).restore(path)
    loaded.optimizer.build(loaded.trainable_variables)
    status.assert_consumed()
    assert_goes_on(model, loaded, steps)


@pytest.mark.parametrize("name", ["model.keras", "model.h5", "folder"])
def test_a_serving_config_is_saved(name: str, tmp_path: pathlib.Path):
    films = te.TableConfig(8, 2, initializer=te.RowIdInitializer(), name="films")
    layer = TPUEmbedding({"f": te.FeatureConfig(films)}, "sgd", name="embedding")
    inputs = {"other": tf_keras.Input((), dtype="int64", name="other")}
    config = {"other": te.FeatureConfig(films)}
    model = tf_keras.Model(inputs, layer(inputs, serving_config=config)["other"])
    model.save(tmp_path / name)
    loaded = tf_keras.models.load_model(tmp_path / name)
    ids = {"other": tf.constant([3, 5], tf.int64)}
    np.testing.assert_array_equal(loaded(ids), [[3.0, 3.0], [5.0, 5.0]])
