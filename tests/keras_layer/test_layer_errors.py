"""The texts of the errors that only the layer has, and when they come."""

from __future__ import annotations

from typing import Any

import keras
import pytest
import tensorflow as tf
from keras_layer import models

import tpu_embedding as te
from tpu_embedding.keras import TPUEmbedding, errors

V2 = tf.tpu.experimental.HardwareFeature.EmbeddingFeature.V2


def make(optimizer: Any = "sgd", **options: Any) -> TPUEmbedding:
    config = {"a": te.FeatureConfig(te.TableConfig(4, 2, name="t"))}
    return TPUEmbedding(config, optimizer, **options)


@pytest.mark.parametrize(
    ("option", "value"),
    [
        ("pipeline_execution_with_tensor_core", True),
        ("embedding_feature", V2),
        ("sparse_core_embedding_config", object()),
    ],
)
def test_what_this_release_lacks(option: str, value: Any):
    with pytest.raises(NotImplementedError) as raised:
        make(**{option: value})
    assert str(raised.value) == (
        f"`{option}={value!r}` is not supported by this release of the layer. Leave it "
        "at its default."
    )


@pytest.mark.parametrize("name", ["V1", "UNSUPPORTED"])
def test_embedding_features_of_a_host(name: str):
    feature = getattr(tf.tpu.experimental.HardwareFeature.EmbeddingFeature, name)
    make(embedding_feature=feature)


def test_another_backend(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(keras.backend, "backend", lambda: "jax")
    with pytest.raises(RuntimeError) as raised:
        make()
    assert str(raised.value) == (
        "tpu_embedding.keras.TPUEmbedding needs Keras on TensorFlow, and Keras runs on "
        "'jax'. Set the environment variable KERAS_BACKEND to \"tensorflow\" before "
        "Keras is imported."
    )


@pytest.mark.parametrize("value", ["2", True, [2.0]])
def test_loss_scale_of_the_wrong_type(value: Any):
    with pytest.raises(TypeError, match="`loss_scale` must be None, a number or a cal"):
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


def test_exported_graphs_take_any_batch_size():
    layer = make(batch_size=4)
    serve = tf.function(layer, input_signature=[{"a": tf.TensorSpec([None], tf.int64)}])
    assert serve({"a": tf.constant([3], tf.int64)})["a"].shape == (1, 2)


@pytest.mark.parametrize(
    ("features", "error", "text"),
    [
        ({"b": tf.constant([1])}, ValueError, "missing keys \\['a'\\]"),
        ([tf.constant([1])], TypeError, "expected a dict, got a list"),
        ({"a": tf.constant([1.0])}, TypeError, "must be int32 or int64"),
        ({"a": tf.constant(1)}, ValueError, "rank"),
    ],
)
@pytest.mark.parametrize("graph", [False, True])
def test_features_are_checked(features: Any, error: Any, text: str, graph: bool):
    layer = make()
    layer.build()
    with pytest.raises(error, match=text):
        (tf.function(layer) if graph else layer)(features)


def test_tables_of_other_layers():
    table = te.TableConfig(4, 2, name="t")
    with pytest.raises(ValueError, match="The layer has no table for TableConfig"):
        make().update_embedding_table(table, tf.zeros([4, 2]))


def test_an_unbuilt_layer_cannot_be_called_under_another_strategy():
    with models.mirrored(2).scope():
        layer = make()
    layer.build()
    other = models.mirrored(1)
    with pytest.raises(RuntimeError, match="was created under MirroredStrategy and"):
        other.run(lambda: layer({"a": tf.constant([1])}))


def test_texts_are_plain_sentences():
    said = [
        errors.no_optimizer(["a", "b"]),
        errors.untranslatable(3, ["SGD"]),
        errors.refused_option("SGD", "momentum", 0.9, 0.0),
        errors.loss_scale_missing("mixed_float16"),
        errors.trainable_tables_optimizer("table t"),
        errors.serving_table("a/b"),
        errors.not_serializable("`learning_rate`", 3),
        errors.saved_state_missing("embedding", ["t", "t/momenta"]),
        errors.saved_state_shape("embedding", "t", (4, 2), (5, 2)),
    ]
    for error in said:
        assert str(error).endswith(".")
        assert "  " not in str(error)
