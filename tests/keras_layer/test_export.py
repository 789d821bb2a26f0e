"""Exported graphs hold only TensorFlow ops, and compute what the model does."""

from __future__ import annotations

import pathlib
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf
from keras_layer import models
from serving.exported import ops_of

import tpu_embedding as te
from tpu_embedding.keras import TPUEmbedding, keras3
from tpu_embedding.tables.trackable import LogicalVariable

CONFIG = models.feature_config


def assert_stock(folder: pathlib.Path) -> None:
    """That a process which knows TensorFlow alone can load the folder."""
    assert "ResourceGather" in ops_of(folder)


def assert_one_table(folder: pathlib.Path) -> None:
    """That the folder has the table of `trained` once, and no slots of its shape."""
    stored = tf.train.list_variables(str(folder / "variables" / "variables"))
    assert [shape for _, shape in stored].count([9, 2]) == 1


@pytest.fixture(scope="module")
def trained() -> keras.Model:
    """Of one dense feature, which every way to export can describe."""
    table = te.TableConfig(9, 2, te.RowIdInitializer(), combiner="sum", name="t")
    layer = TPUEmbedding({"ids": te.FeatureConfig(table)}, te.Adagrad(0.1))
    inputs = {"ids": keras.Input((3,), dtype="int64", name="ids")}
    model: Any = keras.Model(inputs, keras.layers.Dense(1)(layer(inputs)["ids"]))
    model.compile("sgd", "mse")
    ids = np.arange(18).reshape(6, 3) % 9
    model.fit({"ids": ids}, np.ones((6, 1)), verbose=0)
    return model


IDS = tf.constant([[1, 2, 8], [0, 0, 5]], tf.int64)


@pytest.mark.parametrize("storage", ["float32", "int8", "int4"])
def test_serving_export_takes_the_layer(
    storage: str, trained: keras.Model, tmp_path: pathlib.Path
):
    _, layer, head = trained.layers
    report = te.serving.export(
        layer, tmp_path, lambda found: head(found["ids"]), storage=storage
    )
    assert [table.name for table in report.tables] == ["t"]
    stored = tf.train.list_variables(str(tmp_path / "variables" / "variables"))
    if storage == "float32":  # Neither slots nor a second copy.
        assert [shape for _, shape in stored].count([9, 2]) == 1
    ids = tf.constant([1, 2, 8], tf.int64)
    served = tf.saved_model.load(tmp_path).signatures["dense"](ids=ids)
    atol = 1e-6 if storage == "float32" else 16 * report.tables[0].max_error
    (found,) = served.values()
    np.testing.assert_allclose(found, head(layer({"ids": ids})["ids"]), atol=atol)
    with pytest.raises(TypeError, match="For a Keras model with a"):
        te.serving.export(trained, tmp_path / "model")


def test_export_straight_from_training(trained: keras.Model, tmp_path: pathlib.Path):
    expected = trained({"ids": IDS})
    trained.export(tmp_path / "export", verbose=False)
    assert_stock(tmp_path / "export")
    assert_one_table(tmp_path / "export")
    loaded = tf.saved_model.load(tmp_path / "export")
    served = loaded.serve({"ids": IDS})
    np.testing.assert_allclose(served, expected, rtol=1e-6)
    with pytest.raises(tf.errors.InvalidArgumentError, match="has id 9, but ids must"):
        loaded.serve({"ids": tf.constant([[1, 2, 9]], tf.int64)})


def test_saved_model_of_tensorflow(trained: keras.Model, tmp_path: pathlib.Path):
    expected = trained({"ids": IDS})
    tf.saved_model.save(trained, tmp_path / "export")
    assert_stock(tmp_path / "export")
    assert_one_table(tmp_path / "export")
    loaded = tf.saved_model.load(tmp_path / "export")
    (served,) = loaded.signatures["serving_default"](IDS).values()
    np.testing.assert_allclose(served, expected, rtol=1e-6)


def test_a_function_of_the_user(trained: keras.Model, tmp_path: pathlib.Path):
    class Module(tf.Module):
        def __init__(self) -> None:
            super().__init__()
            self.model = trained

        @tf.function(input_signature=[tf.TensorSpec([None, 3], tf.int64)])
        def serve(self, ids: tf.Tensor) -> Any:
            return self.model({"ids": ids})

    module = Module()
    expected = module.serve(IDS)  # Traced before the save.
    tf.saved_model.save(module, tmp_path / "export")
    assert_stock(tmp_path / "export")
    assert_one_table(tmp_path / "export")
    loaded = tf.saved_model.load(tmp_path / "export")
    served = loaded.serve(IDS)
    np.testing.assert_allclose(served, expected, rtol=1e-6)


def test_sparse_and_ragged_inputs_are_exported(tmp_path: pathlib.Path, seed: int):
    model = models.make_model("adagrad")
    ((features, _),) = models.batches(seed, 1)
    serve = tf.function(
        lambda liked, seen, user: model({"liked": liked, "seen": seen, "user": user}),
        input_signature=[
            tf.SparseTensorSpec([None, None], tf.int64),
            tf.RaggedTensorSpec([None, None], tf.int64, ragged_rank=1),
            tf.TensorSpec([None], tf.int64),
        ],
    )
    archive = tf.Module()
    archive.model, archive.serve = model, serve
    tf.saved_model.save(archive, tmp_path / "export")
    assert_stock(tmp_path / "export")
    loaded = tf.saved_model.load(tmp_path / "export")
    served = loaded.serve(*features.values())
    np.testing.assert_allclose(served, model(features), rtol=1e-6)


def ragged_model() -> tuple[Any, dict[str, tf.RaggedTensor]]:
    table = te.TableConfig(
        9, 2, te.RowIdInitializer(), combiner="mean", name="t", invalid_ids="drop"
    )
    layer = TPUEmbedding({"ids": te.FeatureConfig(table)}, "sgd")
    inputs = {"ids": keras.Input((None,), dtype="int64", ragged=True, name="ids")}
    rows = tf.ragged.constant([[1], [2, 4]], dtype=tf.int64)
    return keras.Model(inputs, layer(inputs)["ids"]), {"ids": rows}


def test_a_traced_function_is_exported_through_an_archive(tmp_path: pathlib.Path):
    model, features = ragged_model()
    spec = {"ids": tf.RaggedTensorSpec([None, None], tf.int64)}

    @tf.function(input_signature=[spec])
    def serve(features: Any) -> Any:
        return model(features)

    serve(features)
    archive = keras.export.ExportArchive()
    archive.track(model)
    archive.add_endpoint("serve", serve)
    archive.write_out(tmp_path / "export", verbose=False)
    assert_stock(tmp_path / "export")
    loaded = tf.saved_model.load(tmp_path / "export")
    np.testing.assert_array_equal(loaded.serve(features), [[1, 1], [3, 3]])


def test_padding_may_be_dropped_from_exported_ragged_inputs(tmp_path: pathlib.Path):
    model, features = ragged_model()
    model.export(tmp_path / "export", verbose=False)
    assert_stock(tmp_path / "export")
    loaded = tf.saved_model.load(tmp_path / "export")
    served = loaded.serve({"ids": features["ids"].to_tensor(-1)})
    np.testing.assert_array_equal(served, [[1, 1], [3, 3]])


@pytest.mark.parametrize("graph", [False, True])
def test_serving_config_looks_other_features_up(graph: bool):
    table = te.TableConfig(9, 2, te.RowIdInitializer(), combiner="sum", name="t")
    other = te.TableConfig(9, 3, te.RowIdInitializer(100), optimizer="adam")
    config = {"a": te.FeatureConfig(table), "b": te.FeatureConfig(other)}
    layer = TPUEmbedding(config, keras.optimizers.SGD(1.0))
    serving = [te.FeatureConfig(other), te.FeatureConfig(table, max_sequence_length=2)]

    def serve(first: Any, second: Any) -> Any:
        return layer([first, second], serving_config=serving)

    ragged = tf.ragged.constant([[1], [2, 3, 4]], dtype=tf.int64)
    out = (tf.function(serve) if graph else serve)(tf.constant([5]), ragged)
    assert isinstance(out, list)
    assert out[0].numpy().tolist() == [[105] * 3]
    assert out[1].numpy()[..., 0].tolist() == [[1, 0], [2, 3]]


@pytest.mark.parametrize("trainable", [False, True])
def test_serving_config_takes_other_batch_sizes_than_its_output_shape(trainable: bool):
    table = te.TableConfig(9, 2, te.RowIdInitializer(), name="t")
    optimizer = None if trainable else te.SGD(1.0)
    features = {"a": te.FeatureConfig(table)}
    layer = TPUEmbedding(features, optimizer, trainable_tables=trainable)
    serving = {"a": te.FeatureConfig(table, output_shape=[8])}
    out = layer({"a": tf.constant([1, 2])}, serving_config=serving)["a"]
    assert out.numpy().tolist() == [[1, 1], [2, 2]]


def test_serving_config_under_a_tape_trains_nothing():
    table = te.TableConfig(9, 2, te.RowIdInitializer(), name="t")
    layer = TPUEmbedding({"a": te.FeatureConfig(table)}, te.SGD(1.0))
    with tf.GradientTape() as tape:
        out = layer(tf.constant([5]), serving_config=te.FeatureConfig(table))
    assert tape.gradient(out, layer.trainable_variables) == [None]
    assert layer.embedding_tables[table].numpy()[5, 0] == 5


def test_serving_config_in_a_functional_model_is_saved(tmp_path: pathlib.Path):
    one = te.TableConfig(9, 2, te.RowIdInitializer(), name="one")
    two = te.TableConfig(9, 3, te.RowIdInitializer(50), name="two")
    config = {"a": te.FeatureConfig(one), "b": te.FeatureConfig(two)}
    layer = TPUEmbedding(config, "sgd")
    ids = keras.Input((2,), dtype="int64", name="ids")
    serving = [te.FeatureConfig(two, output_shape=(None,), name="x")]
    model: Any = keras.Model(ids, layer([ids], serving_config=serving))
    layer.update_embedding_table(two, tf.fill([9, 3], 7.0))
    model.save(tmp_path / "model.keras")
    loaded: Any = keras.models.load_model(tmp_path / "model.keras")
    for each in (model, loaded, keras.models.clone_model(model)):
        assert [output.shape for output in each.outputs] == [(None, 3)]
    activations = loaded(tf.constant([[1, 2]], tf.int64))
    np.testing.assert_array_equal(tf.nest.flatten(activations)[0], [[7, 7, 7]])
    model.compile("sgd", "mse")
    with pytest.raises(LookupError, match=r"with `serving_config`, which is for serv"):
        model.fit(np.array([[1, 2]]), [np.zeros([1, 3])], verbose=0)


def test_serving_config_of_a_foreign_table():
    table = te.TableConfig(9, 2, name="t")
    layer = TPUEmbedding({"a": te.FeatureConfig(table)}, "sgd")
    foreign = {"x": te.FeatureConfig(te.TableConfig(9, 2, name="t"))}
    with pytest.raises(ValueError, match="Feature x of `serving_config` has a Table"):
        layer({"x": tf.constant([1])}, serving_config=foreign)


@pytest.mark.parametrize("in_parts", [False, True])
def test_what_keras_tracks_of_a_table_saves_nothing(
    in_parts: bool, tmp_path: pathlib.Path
):
    """Keras 3.16 tracks the value of a weight, earlier ones the weight."""
    values = np.ones([3, 2], np.float32)
    table: Any = tf.Variable(values)
    if in_parts:
        table = LogicalVariable(
            "films", (3, 2), values.dtype, lambda: values, lambda _: None
        )
    layer = keras.layers.Layer()
    keras3.set_state(layer, {"films": table})
    (weight,) = layer.weights
    np.testing.assert_array_equal(weight, values)
    module = tf.Module()
    module.tracked = [weight, weight._value]
    tf.saved_model.save(module, tmp_path)
    stored = tf.train.list_variables(str(tmp_path / "variables" / "variables"))
    assert [3, 2] not in [shape for _, shape in stored]
