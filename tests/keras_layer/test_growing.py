"""Growing tables in the Keras layer: fit, evaluation, files."""

from __future__ import annotations

import functools
import pathlib
from typing import Any

import numpy as np
import pytest
import tensorflow as tf
from keras_layer.version import keras
from serving import exported

import tpu_embedding as te

IDS = np.array([5, -7, 2**62, 5, 11, -7, 3, 5], np.int64)
LABELS = np.arange(8, dtype=np.float32) % 2


def _model(dtype: str = "float32", dim: int = 0) -> tuple[Any, Any, te.TableConfig]:
    """One id for each example; a dense layer of ones."""
    vocabulary = te.GrowingVocabulary(20, eviction="lru", unknown="shared_row")
    dim = dim or (16 if dtype == "int8" else 4)
    table = te.TableConfig(vocabulary, dim, "uniform", name="films", dtype=dtype)
    layer = te.keras.TPUEmbedding({"film": te.FeatureConfig(table)}, te.Adagrad(0.5))
    film = keras.Input((), dtype="int64", name="film")
    output = keras.layers.Dense(1, kernel_initializer="ones")(
        layer({"film": film})["film"]
    )
    model = keras.Model({"film": film}, output)
    model.compile("sgd", "mse")
    return model, layer, table


def _fit(model: Any, epochs: int = 2) -> None:
    model.fit({"film": IDS}, LABELS, batch_size=4, epochs=epochs, verbose=0)


def _predict(model: Any, ids: Any = IDS) -> np.ndarray:
    return model.predict({"film": np.asarray(ids, np.int64)}, verbose=0)


def test_fit_gives_rows_and_evaluation_does_not() -> None:
    model, layer, table = _model()
    before = _predict(model)
    assert layer.vocabularies[table].ids.size == 0
    _fit(model)
    contents = layer.vocabularies[table]
    assert contents.ids.tolist() == sorted(set(IDS.tolist()))
    assert contents.hits.tolist() == [4, 2, 6, 2, 2]
    after = _predict(model)
    assert not np.allclose(before, after)
    loss = model.evaluate({"film": IDS}, LABELS, verbose=0)
    assert loss < np.mean((before[:, 0] - LABELS) ** 2)
    unknown = _predict(model, [99, 100])
    assert unknown[0] == unknown[1]
    assert layer.vocabularies[table].ids.size == 5
    assert layer.embedding_tables[table].shape[1] == 4


def test_trains_as_a_custom_loop() -> None:
    """A model called in a function and eagerly has the same bits."""
    found = []
    for in_function in (True, False):
        model, layer, table = _model()
        step = functools.partial(_step, model)
        train = tf.function(step) if in_function else step
        for start in (0, 4):
            part = slice(start, start + 4)
            train(tf.constant(IDS[part]))
        found.append(layer.embedding_tables[table].numpy())
    assert np.array_equal(*found)


def _step(model: Any, ids: tf.Tensor) -> None:
    # The gradients are ones, whatever the order of TensorFlow's sums.
    with tf.GradientTape() as tape:
        loss = tf.reduce_sum(model({"film": ids}))
    tape.gradient(loss, model.trainable_variables)


@pytest.mark.parametrize("dtype", ["float32", "int8"])
@pytest.mark.parametrize("name", ["model.keras", "model.weights.h5", "tensorflow"])
def test_files_keep_ids_and_slots(
    name: str, dtype: str, tmp_path: pathlib.Path
) -> None:
    model, layer, table = _model(dtype)
    _fit(model)
    path = str(tmp_path / name)
    if name.endswith(".keras"):
        model.save(path)
        loaded: Any = keras.models.load_model(path)
        (own,) = (x for x in loaded.layers if isinstance(x, te.keras.TPUEmbedding))
    else:
        loaded, own, _ = _model(dtype)
        if name.endswith(".h5"):
            model.save_weights(path)
            loaded.load_weights(path)
        else:
            tf.train.Checkpoint(model=model).write(path)
            tf.train.Checkpoint(model=loaded).read(
                path
            ).assert_existing_objects_matched()
    (restored,) = own.vocabularies.values()
    for ours, theirs in zip(layer.vocabularies[table], restored, strict=True):
        assert np.array_equal(ours, theirs)
    assert np.array_equal(_predict(model, [*IDS, 99]), _predict(loaded, [*IDS, 99]))
    for each in (model, loaded):
        each.compile("sgd", "mse")
        _fit(each, 1)
    assert np.array_equal(_predict(model), _predict(loaded))


def test_files_of_int8_are_read_by_value_and_bit_by_bit(tmp_path: pathlib.Path) -> None:
    model, layer, table = _model("int8")
    _fit(model)
    path = str(tmp_path / "model.weights.h5")
    model.save_weights(path)
    floats, _, _ = _model("float32", 16)
    floats.load_weights(path)
    assert np.array_equal(_predict(floats), _predict(model))
    embedding = te.TPUEmbedding({"film": te.FeatureConfig(table)}, te.Adagrad(0.5))
    te.checkpoint.restore(embedding, path)
    found, expected = (e.core.growing()["films"].read() for e in (embedding, layer))
    for name, values in expected.items():
        assert np.array_equal(found[name], values), name
    floats.save_weights(path)
    model.load_weights(path)
    scales = layer.core.growing()["films"].read()["scale_offset"][:, 0]
    bound = 16 * float(scales.max()) / 2  # The dense layer adds 16 columns.
    np.testing.assert_allclose(_predict(model), _predict(floats), rtol=1e-6, atol=bound)


def test_static_and_growing_files_are_not_mixed_up(tmp_path: pathlib.Path) -> None:
    model, layer, _ = _model()
    _fit(model)
    static = te.keras.TPUEmbedding(
        {"film": te.FeatureConfig(te.TableConfig(6, 4, name="films"))}, te.Adagrad(0.5)
    )
    static.build()
    path = str(tmp_path / "saved")
    tf.train.Checkpoint(layer=layer).write(path)
    with pytest.raises(ValueError, match="Table 'films' grows in"):
        tf.train.Checkpoint(layer=static).read(path)


@pytest.mark.parametrize("dtype", ["float32", "int8"])
def test_exported_models_have_ids(dtype: str, tmp_path: pathlib.Path) -> None:
    """Those of the moment, by ops of TensorFlow; training goes on."""
    model, layer, _ = _model(dtype)
    asked = np.array([*IDS, 99, -(2**63)], np.int64)
    for number in range(2):
        _fit(model, 1)
        path = tmp_path / str(number)
        model.export(str(path))
        loaded: Any = tf.saved_model.load(str(path))
        expected = _predict(model, asked)
        (argument,) = loaded.serve.concrete_functions[0].structured_input_signature[0]
        ids = tf.constant(asked)  # tf_keras takes the only input by itself.
        served = loaded.serve({"film": ids} if isinstance(argument, dict) else ids)
        np.testing.assert_allclose(served, expected, rtol=1e-6)
        assert "LookupTableFindV2" in exported.ops_of(path)
    te.serving.export(layer, tmp_path / "layer", signatures=["dense"])
    of_layer: Any = tf.saved_model.load(str(tmp_path / "layer"))
    found = of_layer.signatures["dense"](film=tf.constant(asked))["film"]
    assert np.array_equal(found, layer({"film": tf.constant(asked)})["film"])


def test_what_is_refused(tmp_path: pathlib.Path) -> None:
    model, layer, table = _model()
    _fit(model)
    with pytest.raises(NotImplementedError, match=r"only `model.export` and"):
        tf.saved_model.save(model, str(tmp_path / "model"))
    with pytest.raises(NotImplementedError, match="`serving_config` does not support"):
        layer({"a": tf.constant([1])}, serving_config={"a": te.FeatureConfig(table)})
    plain = tf.function(lambda ids: layer({"film": ids})["film"])
    traced = plain.get_concrete_function(tf.TensorSpec([2], tf.int64))
    with (
        tf.GradientTape(),
        pytest.raises(LookupError, match=r"without a recording tf\.GradientTape"),
    ):
        traced(tf.constant([5, 6], tf.int64))
