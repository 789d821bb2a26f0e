"""Errors of the layer's arguments and calls."""

from __future__ import annotations

import importlib.util
import json
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf
from keras_layer import models

import tpu_embedding as te
from tpu_embedding.keras import TPUEmbedding
from tpu_embedding.keras.rows import converting

EmbeddingFeature = tf.tpu.experimental.HardwareFeature.EmbeddingFeature


def make(optimizer: Any = "sgd", **options: Any) -> TPUEmbedding:
    config = {"a": te.FeatureConfig(te.TableConfig(4, 2, name="t"))}
    return TPUEmbedding(config, optimizer, **options)


def test_pipelining_is_ignored_with_a_warning(caplog: pytest.LogCaptureFixture):
    layer = make(te.SGD(1.0), pipeline_execution_with_tensor_core=True)
    ids = {"a": tf.constant([1])}
    before = layer(ids)["a"]
    with tf.GradientTape() as tape:
        loss = tf.reduce_sum(layer(ids)["a"])
    tape.gradient(loss, layer.trainable_variables)
    np.testing.assert_allclose(layer(ids)["a"], before - 1.0, rtol=1e-6)
    assert layer.get_config()["pipeline_execution_with_tensor_core"]
    make(pipeline_execution_with_tensor_core=True)
    warnings = [r for r in caplog.records if "applies each update at once" in r.message]
    assert len(warnings) <= 1  # One for a process, which an earlier test may have had.


@pytest.mark.parametrize("name", ["V1", "V2", "UNSUPPORTED"])
def test_hints_for_tpus_are_kept(name: str):
    stock = tf.tpu.experimental.embedding.SparseCoreEmbeddingConfig
    limits = {"t": 512}
    layer = make(
        embedding_feature=EmbeddingFeature[name],
        sparse_core_embedding_config=stock(max_ids_per_table=limits),
    )
    config = json.loads(json.dumps(layer.get_config()))
    assert config["embedding_feature"] == name
    assert config["sparse_core_embedding_config"]["max_ids_per_table"] == limits
    again = TPUEmbedding.from_config(config).get_config()
    kept = again["sparse_core_embedding_config"]
    stock_fields = config["sparse_core_embedding_config"]  # Our class has more.
    assert {name: kept[name] for name in stock_fields} == stock_fields
    assert again["embedding_feature"] == name


def test_options_of_several_processes_are_kept():
    options = te.DistributedOptions("rows", "bfloat16", 7)
    config = json.loads(json.dumps(make(distributed_options=options).get_config()))
    again = TPUEmbedding.from_config(config)
    assert again.core.options.distributed == options
    del config["distributed_options"]  # As in files of earlier releases.
    assert TPUEmbedding.from_config(config).get_config()["distributed_options"] is None
    with pytest.raises(TypeError, match="`distributed_options` must be a Distr"):
        make(distributed_options="rows")
    with pytest.raises(ValueError, match="do not support `distributed_options="):
        make(distributed_options=options, trainable_tables=True)


@pytest.mark.parametrize(
    "option", ["embedding_feature", "sparse_core_embedding_config"]
)
def test_hints_of_the_wrong_type(option: str):
    with pytest.raises(TypeError, match=f"`{option}` must be None or an? .*Received"):
        make(**{option: "V1"})


def test_another_backend(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(keras.backend, "backend", lambda: "jax")
    with pytest.raises(RuntimeError) as raised:
        make()
    assert str(raised.value) == (
        "tpu_embedding.keras.TPUEmbedding needs Keras on TensorFlow, and Keras runs on "
        "'jax'. Set the environment variable KERAS_BACKEND to \"tensorflow\" before "
        "Keras is imported."
    )
    model = keras.Sequential()
    for name, call in {
        "RowSparseOptimizer": lambda: te.keras.RowSparseOptimizer("adam"),
        "convert": lambda: te.keras.convert(model),
        "Embedding": lambda: te.keras.Embedding(3, 2),
    }.items():
        with pytest.raises(RuntimeError, match=rf"keras\.{name} needs Keras on"):
            call()
    with pytest.raises(RuntimeError, match=r"keras\.convert needs Keras on"):
        converting.convert_process()  # `run --keras` and `try`.


@pytest.mark.skipif(
    importlib.util.find_spec("tf_keras") is None, reason="tf_keras is not installed"
)
def test_objects_of_the_keras_that_the_process_does_not_use():
    import tf_keras

    variable = "from tf_keras: set TF_USE_LEGACY_KERAS=1 before Python"
    with pytest.raises(TypeError, match=variable):
        te.keras.RowSparseOptimizer(tf_keras.optimizers.Adam())
    with pytest.raises(TypeError, match=variable):
        te.keras.convert(tf_keras.Sequential())


@pytest.mark.parametrize("value", ["2", True, [2.0], tf.constant(2.0)])
def test_loss_scale_of_the_wrong_type(value: Any):
    with pytest.raises(TypeError, match="`loss_scale` must be None, a number, a Keras"):
        make(loss_scale=value)


@pytest.mark.parametrize("value", [0, -1.0, float("nan")])
def test_loss_scale_of_no_use(value: float):
    with pytest.raises(ValueError, match="`loss_scale` must be"):
        make(loss_scale=value)


@pytest.mark.parametrize(
    ("options", "error", "text"),
    [
        ({"batch_size": 0}, ValueError, "`batch_size` must be an int >= 1"),
        ({"invalid_ids": "skip"}, ValueError, "`invalid_ids` must be one of"),
        ({"check_numerics": 1}, TypeError, "`check_numerics` must be a bool"),
        ({"trainable_tables": "no"}, TypeError, "`trainable_tables` must be a bool"),
        (
            {"pipeline_execution_with_tensor_core": 1},
            TypeError,
            "`pipeline_execution_with_tensor_core` must be a bool",
        ),
        ({"activity": 1}, (TypeError, ValueError), "activity"),
    ],
)
def test_arguments_are_checked_at_birth(options: Any, error: Any, text: str):
    with pytest.raises(error, match=text):
        make(**options)


def test_batches_of_another_size_than_promised():
    layer = make(batch_size=4)
    layer({"a": tf.constant([0, 1, 2, 3])})
    for call in (layer, tf.function(layer)):
        with pytest.raises(ValueError, match="batch of 3 where 4 was expected"):
            call({"a": tf.constant([0, 1, 2])})


def test_batches_of_another_size_in_graphs_that_know_no_size():
    layer = make(batch_size=2)
    inputs = {"a": keras.Input((), dtype="int64", name="a")}
    model = keras.Model(inputs, layer(inputs)["a"])
    model.compile("sgd", "mse")
    text = r"Feature a: the input gives output shape \(3,\), not \(2,\) that batch_size"
    sizes = tf.data.Dataset.from_generator(
        # One row of labels: else the loss may be the first to see three of them.
        lambda: (({"a": ids}, tf.zeros([1, 2])) for ids in ([0, 1], [0, 1, 2])),
        output_signature=(
            {"a": tf.TensorSpec([None], tf.int64)},
            tf.TensorSpec([None, 2]),
        ),
    )
    runs = {model.fit: {"shuffle": False}, model.evaluate: {}, model.predict: {}}
    for run, options in runs.items():
        with pytest.raises(tf.errors.InvalidArgumentError, match=text):
            run(sizes, verbose=0, **options)


def test_exported_graphs_take_any_batch_size():
    layer = make(batch_size=4)
    serve = tf.function(layer, input_signature=[{"a": tf.TensorSpec([None], tf.int64)}])
    assert serve({"a": tf.constant([3], tf.int64)})["a"].shape == (1, 2)


@pytest.mark.parametrize(
    ("features", "error", "text"),
    [
        ({"b": tf.constant([1])}, ValueError, "missing keys \\['a'\\]"),
        ([tf.constant([1])], TypeError, "expected a dict, got one of type list"),
        ({"a": tf.constant(["1"])}, TypeError, "must be int32, int64 or floating"),
    ],
)
@pytest.mark.parametrize("graph", [False, True])
def test_features_are_checked(features: Any, error: Any, text: str, graph: bool):
    layer = make()
    layer.build()
    with pytest.raises(error, match=text):
        (tf.function(layer) if graph else layer)(features)


def test_a_call_with_weights_of_the_caller():
    ids = {"a": tf.constant([1])}
    for options in ({}, {"trainable_tables": True}):
        layer = make(None, **options)
        layer.build()
        weights = [layer.trainable_variables, layer.non_trainable_variables]
        zeros = [[tf.zeros_like(w) for w in variables] for variables in weights]
        if options:
            outputs = layer.stateless_call(*zeros, ids)[0]
            assert outputs["a"].numpy().tolist() == [[0, 0]]
        else:
            with pytest.raises(NotImplementedError, match="`stateless_call` passes"):
                layer.stateless_call(*zeros, ids)


def test_keys_of_several_types():
    feature = te.FeatureConfig(te.TableConfig(4, 2))
    with pytest.raises(
        TypeError, match="keys of the dict at b cannot be sorted: 'c', 3"
    ):
        TPUEmbedding({"b": {"c": feature, 3: feature}}, "sgd")


def test_a_sequential_without_an_input_says_what_it_needs():
    layer = TPUEmbedding(te.FeatureConfig(te.TableConfig(4, 2)), "sgd")
    model = keras.Sequential([layer])
    model.compile("sgd", "mse")
    text = "layer of a Sequential model, which otherwise assumes float32"
    with pytest.raises(TypeError, match=text):
        model.fit(np.array([0, 1]), np.zeros([2, 2]), verbose=0)


def test_tables_of_other_layers():
    table = te.TableConfig(4, 2, name="t")
    with pytest.raises(ValueError, match="The layer has no table for TableConfig"):
        make().update_embedding_table(table, tf.zeros([4, 2]))


def test_an_unbuilt_layer_cannot_be_called_under_another_strategy():
    with models.mirrored(2).scope():
        layer = make()
    layer.build()
    other = models.mirrored(1)
    with pytest.raises(RuntimeError, match="was created under MirroredStrategy but"):
        other.run(lambda: layer({"a": tf.constant([1])}))
