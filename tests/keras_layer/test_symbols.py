"""Symbolic calls: the shapes they give, and what they refuse before there are ids."""

from __future__ import annotations

from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf

import tpu_embedding as te
from tpu_embedding.keras import TPUEmbedding, symbols

TABLE = te.TableConfig(6, 2, name="t")
CONFIG = [
    te.FeatureConfig(TABLE),
    te.FeatureConfig(TABLE),
    te.FeatureConfig(TABLE, max_sequence_length=5),
    te.FeatureConfig(TABLE, output_shape=(4, 3)),
]
SHAPES = [(None, 2), (None, 3, 2), (None, 5, 2), (4, 3, 2)]


def test_symbolic_shapes():
    inputs = [
        keras.Input((), dtype="int32"),
        keras.Input((3, 4), dtype="int64"),
        keras.Input((None,), dtype="int64", ragged=True),
        keras.Input((None,), dtype="int64", ragged=True),
    ]
    layer = TPUEmbedding(CONFIG, "sgd", dtype="mixed_bfloat16")
    for outputs in (layer(inputs), layer.compute_output_spec(inputs)):
        assert [output.shape for output in outputs] == SHAPES
        assert {output.dtype for output in outputs} == {"bfloat16"}


def test_shapes_from_shapes():
    layer = TPUEmbedding(CONFIG, "sgd")
    shapes: list[Any] = [(None,), [None, 3, 4], tf.TensorShape([None, None]), (12, 7)]
    assert layer.compute_output_shape(shapes) == SHAPES
    single = TPUEmbedding(CONFIG[0], "sgd")
    assert single.compute_output_shape((8, 1)) == (8, 2)
    timed = keras.layers.TimeDistributed(single)
    assert timed.compute_output_shape((8, 5, 1)) == (8, 5, 2)
    assert not single.built


@pytest.mark.parametrize(
    ("shapes", "error", "text"),
    [
        ({"a": (3,)}, ValueError, "missing keys \\['b'\\]"),
        (
            [(3,), (3,)],
            TypeError,
            "`input_shape` .* expected a dict, got one of type list",
        ),
        ({"a": (3,), "b": ()}, ValueError, "Feature b: the rank of a dense input"),
        ({"a": (3,), "b": None}, ValueError, "must hold the shape of feature b"),
        ({"a": (3,), "b": "x"}, ValueError, "must hold the shape of feature b"),
        ({"a": (5,), "b": (3,)}, ValueError, r"a: the output shape \(3,\) .* \(5,\)"),
    ],
)
def test_shapes_that_are_wrong(shapes: Any, error: Any, text: str):
    config = {"a": te.FeatureConfig(TABLE, output_shape=(3,)), "b": CONFIG[0]}
    with pytest.raises(error, match=text):
        TPUEmbedding(config, "sgd").compute_output_shape(shapes)


@pytest.mark.parametrize(
    ("options", "error", "text"),
    [
        ({"shape": (2,)}, TypeError, "ids of feature a must be int32 or int64"),
        ({"shape": (), "sparse": True}, ValueError, "of a sparse input must be >= 2"),
        ({"shape": (2, 3), "ragged": True}, ValueError, "of a ragged input must be 2"),
    ],
)
def test_symbolic_ids_that_are_wrong(options: Any, error: Any, text: str):
    layer = TPUEmbedding({"a": CONFIG[0]}, "sgd")
    dtype = "float32" if error is TypeError else "int64"
    with pytest.raises(error, match=text):
        layer({"a": keras.Input(dtype=dtype, **options)})


@pytest.mark.parametrize(
    ("weights", "error", "text"),
    [
        (lambda: {"b": keras.Input((3,))}, ValueError, "`weights` .* keys \\['b'\\]"),
        (
            lambda: [keras.Input((3,))],
            TypeError,
            "`weights` .* dict, got one of type list",
        ),
        (lambda: keras.Input((3,)), TypeError, "`weights` .* expected a dict"),
        (
            lambda: {"a": keras.Input((3,), dtype="int64")},
            TypeError,
            "weights of feature a must be of a floating point dtype. Received: int64",
        ),
        (
            lambda: {"a": keras.Input((4,))},
            ValueError,
            r"shape of its ids, \(None, 3\). Received: \(None, 4\)",
        ),
        (lambda: {"a": keras.Input(())}, ValueError, r"Received: \(None,\)"),
        (
            lambda: {"a": keras.Input((3,), sparse=True)},
            ValueError,
            "like the feature itself, a dense keras.Input",
        ),
    ],
    ids=["keys", "list", "bare", "dtype", "shape", "rank", "sparse"],
)
def test_symbolic_weights_that_are_wrong(weights: Any, error: Any, text: str):
    layer = TPUEmbedding({"a": CONFIG[0]}, "sgd")
    ids = {"a": keras.Input((3,), dtype="int64")}
    with pytest.raises(error, match=text):
        layer(ids, weights())


def test_an_input_that_is_combined_is_told_once(monkeypatch: pytest.MonkeyPatch):
    said: list[str] = []
    monkeypatch.setattr(
        symbols.logging, "log_first_n", lambda level, text, n: said.append(text)
    )
    layer = TPUEmbedding(te.FeatureConfig(TABLE), "sgd")
    sequence = te.FeatureConfig(TABLE, max_sequence_length=5)
    for shape in ((), (1,), (2, 3)):
        layer(keras.Input(shape, dtype="int64"))
    layer(keras.Input((5,), dtype="int64", ragged=True))
    TPUEmbedding(sequence, "sgd")(keras.Input((5,), dtype="int64"))
    assert not said
    layer(keras.Input((5,), dtype="int64"))
    (text,) = said
    assert "(None, 5): the ids of its last axis are combined ('mean')" in text
    assert "FeatureConfig(max_sequence_length=5)" in text


DENSE = np.array([[3, -1, 2], [0, 1, 9]])
RAGGED = tf.ragged.constant([[3, -1, 2], [9, 4]], dtype=tf.int64)
SPARSE = tf.SparseTensor([[0, 0], [0, 2], [0, 6], [1, 1]], [3, 9, 2, 1], [2, 7])


@pytest.mark.parametrize(
    ("ids", "policy", "length", "expected"),
    [
        (DENSE % 3, "error", 4, [[1, 1, 1, 0], [1, 1, 1, 0]]),
        (DENSE, "drop", 2, [[1, 0], [1, 1]]),
        (DENSE, "drop", 4, [[1, 0, 1, 0], [1, 1, 0, 0]]),
        (RAGGED, "mod", 3, [[1, 1, 1], [1, 1, 0]]),
        (RAGGED, "drop", 4, [[1, 0, 1, 0], [0, 1, 0, 0]]),
        (SPARSE, "mod", 4, [[1, 0, 1, 0], [0, 1, 0, 0]]),
        (SPARSE, "drop", 4, [[1, 0, 0, 0], [0, 1, 0, 0]]),
    ],
    ids=range(7),
)
def test_sequences_carry_a_mask(ids: Any, policy: str, length: int, expected: Any):
    table = te.TableConfig(8, 2, te.RowIdInitializer(), invalid_ids=policy)
    config = te.FeatureConfig(table, max_sequence_length=length)
    layer = TPUEmbedding({"a": config, "b": te.FeatureConfig(table)}, "sgd")
    features = {"a": ids, "b": tf.constant([0, 1])}
    for call in (layer, tf.function(lambda given: layer(given)["a"]._keras_mask)):
        found = call(features)
        if isinstance(found, dict):
            assert getattr(found["b"], "_keras_mask", None) is None
            pooled = keras.layers.GlobalAveragePooling1D()(found["a"])
            present = np.array(expected, bool)[..., np.newaxis]
            values = found["a"].numpy()
            expected_mean = np.sum(values, 1, where=present) / present.sum(1)
            np.testing.assert_allclose(pooled, expected_mean)
            found = found["a"]._keras_mask
        np.testing.assert_array_equal(found, np.array(expected, bool))


@pytest.mark.parametrize("kind", ["sparse", "ragged"])
def test_symbolic_weights_of_each_kind(kind: str):
    layer = TPUEmbedding({"a": CONFIG[0], "b": CONFIG[0]}, "sgd")
    ids = {"a": keras.Input((None,), dtype="int64", **{kind: True})}
    ids["b"] = keras.Input((), dtype="int64")
    weights = {"a": keras.Input((None,), dtype="float16", **{kind: True}), "b": None}
    assert layer(ids, weights)["a"].shape == (None, 2)
    with pytest.raises(ValueError, match=f"a keras.Input with {kind}=True. Received:"):
        layer(ids, {**weights, "a": keras.Input((None,))})


def test_graphs_keep_static_batch_sizes():
    layer = TPUEmbedding([CONFIG[0]] * 4 + [CONFIG[2]], "sgd")
    layer.build()
    features = [
        tf.TensorSpec([16], tf.int64),
        tf.TensorSpec([16, 2, 3], tf.int64),
        tf.SparseTensorSpec([16, None], tf.int64),
        tf.RaggedTensorSpec([16, None], tf.int64, ragged_rank=1),
        tf.RaggedTensorSpec([16, None], tf.int64, ragged_rank=1),
    ]
    shapes = []

    @tf.function(input_signature=[features])
    def step(ids: Any) -> None:
        with tf.GradientTape() as tape:
            activations = layer(ids)
            shapes.extend(a.shape.as_list() for a in activations)
            loss = tf.add_n([tf.reduce_sum(a) for a in activations])
        tape.gradient(loss, layer.trainable_variables)

    step.get_concrete_function()
    expected = [[16, 2], [16, 2, 2], [16, 2], [16, 2], [16, 5, 2]]
    assert shapes == expected
    evaluation = tf.function(layer, input_signature=[features])
    found = evaluation.get_concrete_function().structured_outputs
    assert [activation.shape.as_list() for activation in found] == expected
