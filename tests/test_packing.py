"""Packed batches hold what their features hold, and give the same bits."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf
from replica_values import mirrored, of_replicas
from software_tpu.calls import strategy_of
from steps import train_on

import tpu_embedding as te
from tpu_embedding.compat import tfrs_layer

V, D, B = 11, 3, 5


pytestmark = pytest.mark.usefixtures("engine")


def config() -> dict[str, Any]:
    """Features of each kind of input, with each combiner and a sequence."""
    table = {
        combiner: te.TableConfig(
            V, D, te.RowIdInitializer(offset), combiner=combiner, name=combiner
        )
        for offset, combiner in enumerate(("sum", "mean", "sqrtn"))
    }
    return {
        "one": te.FeatureConfig(table["sum"]),
        "several": (te.FeatureConfig(table["mean"]), te.FeatureConfig(table["sqrtn"])),
        "sequence": te.FeatureConfig(table["sum"], max_sequence_length=2),
        "sparse": te.FeatureConfig(table["mean"]),
    }


def ragged(rng: np.random.Generator, dtype: Any = tf.int64) -> tf.RaggedTensor:
    lengths = rng.integers(0, 4, B)
    ids = tf.constant(rng.integers(0, V, lengths.sum()), dtype)
    return tf.RaggedTensor.from_row_lengths(ids, lengths)


def batch(rng: np.random.Generator) -> tuple[dict[str, Any], dict[str, Any]]:
    """Features in the structure of `config`, and weights of some of them."""
    features = {
        "one": tf.constant(rng.integers(0, V, B), tf.int32),
        "several": (tf.constant(rng.integers(0, V, (B, 2))), ragged(rng, tf.int32)),
        "sequence": ragged(rng),
        "sparse": ragged(rng).to_sparse(),
    }
    several = features["several"]
    weights = {
        "one": None,
        "several": (
            tf.constant(rng.random((B, 2)) + 0.1, tf.float32),
            several[1].with_values(
                tf.constant(rng.random(several[1].values.shape), tf.float32)
            ),
        ),
        "sequence": None,
        "sparse": features["sparse"].with_values(
            tf.constant(rng.random(features["sparse"].values.shape), tf.float64)
        ),
    }
    return features, weights


def rows(value: Any) -> list[list[Any]]:
    """The entries of each sample, by NumPy and Python alone."""
    if isinstance(value, tf.SparseTensor):
        value = tf.RaggedTensor.from_sparse(value)
    if isinstance(value, tf.RaggedTensor):
        return value.to_list()
    return [np.atleast_1d(row).tolist() for row in value.numpy()]


def flat(value: Any) -> list[Any]:
    return list(itertools.chain.from_iterable(rows(value)))


def test_a_packed_batch_holds_each_entry_in_order(rng: np.random.Generator):
    features, weights = batch(rng)
    packed = te.pack(features, weights)
    assert packed.values.dtype == packed.row_splits.dtype == tf.int64
    assert packed.row_splits.shape == [5, B + 1]
    assert packed.weights is not None
    ids, given = packed.values.numpy().tolist(), packed.weights.numpy().tolist()
    leaves = tf.nest.flatten(features)
    for value, weight, splits in zip(
        leaves, tf.nest.flatten(weights), packed.row_splits.numpy(), strict=True
    ):
        for sample, entries in enumerate(rows(value)):
            size = splits[sample + 1] - splits[sample]
            expected = [1.0] * len(entries)
            if weight is not None:
                expected = np.float32(rows(weight)[sample]).tolist()
            assert ids[:size] == entries
            assert given[:size] == expected
            ids, given = ids[size:], given[size:]
    assert ids == given == []
    assert te.pack(features).weights is None


class Queue:
    """TPUEmbedding, called as the other classes are."""

    def __init__(self) -> None:
        self.embedding = te.TPUEmbedding(config(), te.Adagrad(0.1))

    def step(self, features: Any, weights: Any) -> Any:
        return train_on(self.embedding, features, tf.sin, weights=weights)


class HandedOut:
    """TPUEmbeddingV2."""

    def __init__(self) -> None:
        self.embedding = te.TPUEmbeddingV2(config(), te.Adagrad(0.1))

    def step(self, features: Any, weights: Any) -> Any:
        activations, preserved = self.embedding(features, weights)
        gradients = tf.nest.map_structure(tf.sin, activations)
        self.embedding.apply_gradients(gradients, preserved)
        return activations


class Prepared(HandedOut):
    """TPUEmbeddingV2 with batches that are laid out first."""

    def step(self, features: Any, weights: Any) -> Any:
        return super().step(self.embedding.preprocess_features(features, weights), None)


class Layer:
    """The Keras layer."""

    def __init__(self) -> None:
        self.embedding = te.keras.TPUEmbedding(config(), te.Adagrad(0.1))
        self.embedding.build()

    def step(self, features: Any, weights: Any) -> Any:
        with tf.GradientTape() as tape:
            activations = self.embedding(features, weights)
            loss = tf.add_n([tf.reduce_sum(a**2) for a in tf.nest.flatten(activations)])
        tape.gradient(loss, self.embedding.trainable_variables)
        return activations


class Variables:
    """TPUEmbeddingV0, whose tables are the variables of an optimizer."""

    def __init__(self) -> None:
        self.embedding = te.TPUEmbeddingV0(config(), te.Adagrad(0.1))

    def step(self, features: Any, weights: Any) -> Any:
        tables = list(self.embedding.embedding_tables.values())
        with tf.GradientTape() as tape:
            activations = self.embedding(features, weights)
            loss = tf.add_n([tf.reduce_sum(a**2) for a in tf.nest.flatten(activations)])
        for table, gradient in zip(tables, tape.gradient(loss, tables), strict=True):
            table.assign_sub(0.1 * tf.convert_to_tensor(gradient))
        return activations


@pytest.mark.parametrize(("weighted", "graph"), [(False, False), (True, True)])
@pytest.mark.parametrize("kind", [Queue, HandedOut, Prepared, Layer, Variables])
def test_training_has_the_bits_of_the_features(
    kind: Callable[[], Any], weighted: bool, graph: bool, rng: np.random.Generator
):
    plain, packed = kind(), kind()

    def step(features: Any, weights: Any) -> tuple[Any, Any]:
        batch = te.pack(features, weights)
        return plain.step(features, weights), packed.step(batch, None)

    run = tf.function(step) if graph else step
    for _ in range(3):
        features, weights = batch(rng)
        for expected, found in zip(
            *map(tf.nest.flatten, run(features, weights if weighted else None)),
            strict=True,
        ):
            np.testing.assert_array_equal(found, expected)
    for expected, found in zip(
        plain.embedding.embedding_tables.values(),
        packed.embedding.embedding_tables.values(),
        strict=True,
    ):
        np.testing.assert_array_equal(found, expected)


def test_batches_of_tf_data_are_two_or_three_arguments(
    rng: np.random.Generator, monkeypatch: pytest.MonkeyPatch
):
    # Graphs of the portable engine round otherwise than its eager ops.
    monkeypatch.setenv("TPU_EMBEDDING_ENGINE", "host")
    features, weights = batch(rng)
    plain, embedding = Queue(), Queue()
    traces = []

    @tf.function
    def step(packed: Any) -> Any:
        traces.append(packed)
        return embedding.step(packed, None)

    data = tf.data.Dataset.from_tensors((features, weights)).repeat(2)
    for packed in data.map(te.pack).prefetch(1):
        assert len(tf.nest.flatten(packed)) == 3
        step(packed)
        plain.step(features, weights)
    assert len(traces) == 1
    (packed,) = data.take(1).map(lambda ids, _: te.pack(ids))
    for found, expected in zip(
        *map(tf.nest.flatten, (step(packed), plain.step(features, None))), strict=True
    ):
        np.testing.assert_array_equal(found, expected)


def test_weight_gradients_of_packed_batches(rng: np.random.Generator):
    features, weights = batch(rng)
    embedding = te.TPUEmbedding(config(), te.SGD(0.1))
    packed: Any = te.pack(features, weights)
    found = []
    for ids, given in ((features, weights), (packed, None)):
        embedding.enqueue(ids, given)
        gradients = tf.nest.map_structure(tf.sin, embedding.dequeue())
        found.append(embedding.weight_gradients(gradients, ids, given))
        embedding.reset()
    expected, unpacked = found
    for path in (0, 1):
        ours, theirs = unpacked["several"][path], expected["several"][path]
        np.testing.assert_array_equal(flat(ours), flat(theirs))
    layer = te.TPUEmbeddingV2(config(), te.SGD(0.1))
    with tf.GradientTape() as tape:
        tape.watch(packed.weights)
        activations, _ = layer(packed)
        loss = tf.reduce_sum(activations["several"][0])
    gradient: Any = tape.gradient(loss, packed.weights)
    assert gradient.shape == packed.weights.shape
    by_feature = np.split(gradient, np.cumsum(packed.row_splits[:, -1])[:-1])
    # In the order of tf.nest: one, sequence, both of several, sparse.
    assert [bool(np.any(own)) for own in by_feature] == [False] * 2 + [True] + [
        False
    ] * 2


def test_replicas_take_their_own(
    rng: np.random.Generator, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setenv("TPU_EMBEDDING_ENGINE", "host")  # The portable one has one.
    strategy = mirrored(2)
    embeddings = []
    for _ in range(2):
        with strategy.scope():
            embeddings.append(te.TPUEmbedding(config(), te.Adagrad(0.1)))
    parts = [batch(rng)[0] for _ in range(2)]
    packed = [te.pack(part) for part in parts]

    def step(embedding: Any, features: Any) -> Any:
        activations = train_on(embedding, features, tf.sin)
        return activations["one"]

    given = [
        tf.nest.map_structure(lambda *leaves: of_replicas(strategy, leaves), *each)
        for each in (parts, packed)
    ]
    found = [
        strategy.experimental_local_results(strategy.run(step, args))
        for args in zip(embeddings, given, strict=True)
    ]
    np.testing.assert_array_equal(found[0], found[1])
    with pytest.raises(ValueError, match=r"one value for each replica\. Each replica"):
        embeddings[1].enqueue(given[1])


def test_models_of_keras_fit(rng: np.random.Generator):
    class Model(keras.Model):
        def __init__(self) -> None:
            super().__init__()
            self.embedding = te.keras.TPUEmbedding(config(), te.Adagrad(0.1))
            self.head = keras.layers.Dense(1, kernel_initializer="ones")

        def call(self, features: Any) -> Any:
            return self.head(self.embedding(features)["several"][1])

    features, weights = batch(rng)
    labels = tf.zeros([B, 1])
    data = tf.data.Dataset.from_tensors((te.pack(features, weights), labels))
    model, plain = Model(), Model()
    model.compile("sgd", "mse")
    model.fit(data.repeat(3), shuffle=False, verbose=0)
    assert model.predict(data.map(lambda x, _: (x,)), verbose=0).shape == (B, 1)
    for _ in range(3):
        with tf.GradientTape() as tape:
            looked_up = plain.embedding(features, weights)["several"][1]
            loss = tf.reduce_mean(plain.head(looked_up) ** 2)
        variables = plain.trainable_variables
        for variable, gradient in zip(
            variables, tape.gradient(loss, variables), strict=True
        ):
            if variable.shape.rank:
                variable.assign_sub(0.01 * gradient)
    for found, expected in zip(model.weights, plain.weights, strict=True):
        np.testing.assert_allclose(found, expected, rtol=1e-6, atol=1e-7)


def test_sparse_cores_take_what_is_prepared_outside(
    rng: np.random.Generator, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.delenv("TPU_EMBEDDING_ENGINE")
    strategy = strategy_of("v5p", 1)
    ids = tf.constant(rng.integers(0, V, (8, 2)), tf.int32)
    table = te.TableConfig(V, 8, te.RowIdInitializer(), combiner="sum", name="t")
    feature = {"ids": te.FeatureConfig(table, output_shape=[8])}
    with strategy.scope():
        embedding = te.TPUEmbeddingV2(feature, te.SGD(0.1))
    embedding.build()
    packed = te.pack({"ids": ids})
    found = [
        strategy.run(
            tf.function(lambda batch: embedding.dequeue(batch)[0]["ids"]),
            (embedding.preprocess_features(features),),
        )
        for features in ({"ids": ids}, packed)
    ]
    np.testing.assert_array_equal(found[0], found[1])
    with pytest.raises(NotImplementedError, match="cannot be unpacked in a TPU prog"):
        strategy.run(tf.function(lambda batch: embedding(batch)[0]), (packed,))


def test_batch_sizes_that_differ():
    features = {"a": tf.constant([1, 2]), "b": tf.ragged.constant([[1], [], [2]])}
    text = r"Feature a has 2 samples, and feature b has 3\. Pass the features themse"
    with pytest.raises(ValueError, match=text):
        te.pack(features)
    with pytest.raises(tf.errors.InvalidArgumentError, match=text):
        tf.function(
            te.pack,
            input_signature=[
                {
                    "a": tf.TensorSpec([None], tf.int32),
                    "b": tf.RaggedTensorSpec([None, None], tf.int32, ragged_rank=1),
                }
            ],
        )(features)


def sparse(indices: list[list[int]]) -> tf.SparseTensor:
    return tf.SparseTensor(indices, list(range(len(indices))), [3, 3])


@pytest.mark.parametrize("indices", [[[0, 1]], [[1, 0], [0, 0]], [[0, 0], [0, 0]]])
@pytest.mark.parametrize("graph", [False, True])
def test_sparse_ids_with_gaps_or_out_of_order(indices: list[list[int]], graph: bool):
    call = tf.function(te.pack) if graph else te.pack
    with pytest.raises(
        tf.errors.InvalidArgumentError, match=r"Feature x: te\.pack takes sparse ids in"
    ):
        call({"x": sparse(indices)})


def test_sparse_ids_of_empty_batches():
    empty = tf.SparseTensor(tf.zeros([0, 2], tf.int64), tf.zeros([0], tf.int64), [0, 3])
    packed = te.pack({"x": empty, "y": tf.zeros([0], tf.int64)})
    assert packed.row_splits.numpy().tolist() == [[0], [0]]
    padded = te.pack(sparse([[1, 0], [1, 1]]))
    assert padded.row_splits.numpy().tolist() == [[0, 0, 2, 2]]


def malformed(splits: list[int]) -> tf.RaggedTensor:
    return tf.RaggedTensor.from_row_splits(
        tf.constant([1, 2, 3]), tf.constant(splits, tf.int64), validate=False
    )


@pytest.mark.parametrize(
    ("features", "weights", "error", "text"),
    [
        ({"x": [1, 2]}, None, ValueError, "Feature x/0 must be a tf.Tensor"),
        ({"x": tf.constant([0.5])}, None, ValueError, "must be a whole number"),
        ({"x": tf.constant(["a"])}, None, TypeError, "StringLookup"),
        (tf.zeros([2, 3, 4], tf.int64), None, ValueError, "a dense input of rank 3"),
        (
            tf.SparseTensor([[0, 0, 0]], [1], [2, 2, 2]),
            *(None, ValueError, "a sparse input of rank 3"),
        ),
        (malformed([0, 2]), None, ValueError, "has 3 ids, but its row splits end at 2"),
        (
            tf.ragged.constant([[1], [2, 3]]),
            tf.ragged.constant([[0.1, 0.2], [0.3]]),
            *(ValueError, "The weights of feature feature must have the"),
        ),
        (
            {"x": tf.constant([1])},
            {"x": tf.constant([[0.1]])},
            *(ValueError, "must have the shape of its ids"),
        ),
    ],
)
def test_what_cannot_be_packed(features: Any, weights: Any, error: Any, text: str):
    if error is ValueError:
        error = (ValueError, tf.errors.InvalidArgumentError)
    with pytest.raises(error, match=text):
        te.pack(features, weights)


def test_packed_batches_that_do_not_fit(rng: np.random.Generator):
    embedding = te.TPUEmbeddingV2(config(), te.SGD(0.1))
    packed = te.pack([tf.constant([1, 2])] * 5)
    with pytest.raises(ValueError, match="has the features 0, 1, 2, 3, 4, but `feat"):
        embedding(packed)
    with pytest.raises(ValueError, match=r"pass them to te\.pack"):
        embedding(packed, [None] * 4)
    untyped: list[Any] = [[1], [[0, 1]], None, te.pack(batch(rng)[0]).names]
    with pytest.raises(TypeError, match="A packed batch must hold tensors"):
        embedding(te.PackedFeatures(*untyped))
    layer = te.keras.TPUEmbedding(config(), "sgd")
    untyped[:2] = [keras.Input((), dtype="int64"), keras.Input((6,), dtype="int64")]
    with pytest.raises(TypeError, match=r"functional Keras model takes the features"):
        layer(te.PackedFeatures(*untyped))
    layer = tfrs_layer.TPUEmbedding(config(), "sgd")
    with pytest.raises(NotImplementedError, match="As a replacement of TFRS's layer"):
        layer(te.pack(batch(rng)[0]))
