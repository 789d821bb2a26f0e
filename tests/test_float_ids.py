"""Ids of a floating point dtype: whole numbers are ids, all others are refused."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import tensorflow as tf
from replica_values import mirrored, of_replicas
from software_tpu.calls import strategy_of

import tpu_embedding as te
from tpu_embedding.inputs import to_id_batch
from tpu_embedding.keras import TPUEmbedding as TPUEmbeddingLayer
from tpu_embedding.testing import SoftwareTPUStrategy

V, D = 8, 2
TABLE = np.arange(V * D, dtype=np.float32).reshape(V, D)
DTYPES = [tf.float16, tf.bfloat16, tf.float32, tf.float64]


def dense(ids: list[float], dtype: tf.DType) -> tf.Tensor:
    return tf.reshape(tf.constant(ids, dtype), [2, 2])


def sparse(ids: list[float], dtype: tf.DType) -> tf.SparseTensor:
    indices = [[0, 0], [0, 2], [1, 1], [1, 2]]
    return tf.SparseTensor(indices, tf.constant(ids, dtype), [2, 3])


def ragged(ids: list[float], dtype: tf.DType) -> tf.RaggedTensor:
    return tf.RaggedTensor.from_row_splits(tf.constant(ids, dtype), [0, 2, 4])


KINDS = {"dense": dense, "sparse": sparse, "ragged": ragged}
WHOLE, EXPECTED = [3.0, 0.0, 7.0, 1.0], [[6.0, 8.0], [16.0, 18.0]]


def feature(**arguments: Any) -> te.FeatureConfig:
    table = te.TableConfig(
        V, D, lambda shape, dtype: tf.constant(TABLE), name="films", combiner="sum"
    )
    return te.FeatureConfig(table, name="film", **arguments)


def queued() -> Callable[[Any], Any]:
    embedding = te.TPUEmbedding(feature(), te.SGD(1.0))

    def look_up(ids: Any) -> Any:
        embedding.enqueue(ids, training=False)
        return embedding.dequeue()

    return look_up


def handed_out() -> Callable[[Any], Any]:
    embedding = te.TPUEmbeddingV2(feature(), te.SGD(1.0))
    return lambda ids: embedding(ids)[0]


def served() -> Callable[[Any], Any]:
    config = feature()
    tables = {config.table: tf.constant(TABLE)}
    return lambda ids: te.serving_embedding_lookup(ids, None, tables, config)


def layer() -> Callable[[Any], Any]:
    made = TPUEmbeddingLayer(feature(), te.SGD(1.0))
    made.build()
    return made


LOOKUPS = {
    "TPUEmbedding": queued,
    "TPUEmbeddingV2": handed_out,
    "TPUEmbeddingV0": lambda: te.TPUEmbeddingV0(feature(), None),
    "serving": served,
    "keras": layer,
}


@pytest.mark.usefixtures("engine")
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", LOOKUPS)
def test_every_class(name: str, kind: str) -> None:
    look_up = LOOKUPS[name]()
    for call in (look_up, tf.function(look_up)):
        np.testing.assert_array_equal(call(KINDS[kind](WHOLE, tf.float32)), EXPECTED)
        with pytest.raises(
            tf.errors.InvalidArgumentError,
            match=r"Feature \w+: sample 1 has id 7\.5, but a floating point id must be",
        ):
            call(KINDS[kind]([3.0, 0.0, 7.5, 1.0], tf.float32))
        with pytest.raises(tf.errors.InvalidArgumentError, match="has id 9, but ids"):
            call(KINDS[kind]([3.0, 0.0, 9.0, 1.0], tf.float32))


@pytest.mark.parametrize("dtype", DTYPES, ids=lambda dtype: dtype.name)
@pytest.mark.parametrize(
    "wrong", [0.5, -0.25, float("nan"), float("inf"), -float("inf"), 2.0**63, 1e30]
)
def test_values_that_are_no_ids(wrong: float, dtype: tf.DType) -> None:
    text = "Feature a: sample 1 has id .*, but a floating point id must be a whole"
    for call in (to_id_batch, tf.function(lambda *a: to_id_batch(*a).ids)):
        with pytest.raises(tf.errors.InvalidArgumentError, match=text):
            call("a", tf.constant([3, wrong], dtype))


def test_exact_values_of_any_size() -> None:
    ids = tf.constant([2.0**53, -(2.0**63), 2.0**62], tf.float64)
    assert to_id_batch("a", ids).ids.numpy().tolist() == [2**53, -(2**63), 2**62]


def test_shapes_and_samples() -> None:
    """Static shapes are kept; the sample is that of all axes but the last."""
    spec = tf.TensorSpec([2, None, 3], tf.float32)
    traced = tf.function(lambda ids: to_id_batch("a", ids).ids, input_signature=[spec])
    assert traced.get_concrete_function().output_shapes.as_list() == [2, None, 3]
    ids = np.zeros([2, 2, 3], np.float32)
    ids[1, 0, 2] = 0.5
    for value in (tf.constant(ids), tf.sparse.from_dense(ids)):
        with pytest.raises(
            tf.errors.InvalidArgumentError, match=r"sample 2 has id 0\.5,"
        ):
            to_id_batch("a", value)


def test_integers_cost_no_op() -> None:
    traced = tf.function(lambda ids: to_id_batch("a", ids).ids)
    graph = traced.get_concrete_function(tf.TensorSpec([4], tf.int32)).graph
    types = {op.type for op in graph.get_operations()}
    assert not types & {"If", "StatelessIf", "Cast", "Floor"}


def test_replicas() -> None:
    """One replica with a bad id refuses the batch of all; the next step trains."""
    strategy = mirrored(2)
    with strategy.scope():
        config = feature()
        embedding = te.TPUEmbedding(config, te.SGD(1.0))

    def distributed(ids: list[list[float]]) -> Any:
        return of_replicas(strategy, list(map(tf.constant, ids)))

    with pytest.raises(tf.errors.InvalidArgumentError, match=r"sample 1 has id 2\.5"):
        embedding.enqueue(distributed([[1.0, 2.0], [1.0, 2.5]]))
    embedding.enqueue(distributed([[1.0, 2.0], [1.0, 3.0]]))
    strategy.run(lambda: embedding.apply_gradients(tf.ones_like(embedding.dequeue())))
    expected = TABLE.copy()
    expected[1:4] -= [[2.0], [1.0], [1.0]]
    np.testing.assert_array_equal(embedding.embedding_tables[config.table], expected)


@pytest.mark.parametrize("kind", KINDS)
def test_sparse_cores(kind: str) -> None:
    strategy = strategy_of("v6e", 1)
    with strategy.scope():
        embedding = te.TPUEmbeddingV2(feature(output_shape=[2]), te.SGD(1.0))

    @tf.function
    def look_up(ids: Any) -> Any:
        batch = embedding.preprocess_features(ids)
        return strategy.run(lambda: embedding.embedding_lookup(batch)[0])

    found = look_up(KINDS[kind](WHOLE, tf.float32))
    np.testing.assert_array_equal(found, EXPECTED)
    with pytest.raises(tf.errors.InvalidArgumentError, match=r"sample 1 has id 7\.5"):
        look_up(KINDS[kind]([3.0, 0.0, 7.5, 1.0], tf.float32))


@pytest.mark.parametrize("kind", KINDS)
def test_tpu_v4(kind: str) -> None:
    strategy = SoftwareTPUStrategy("v4", 1)  # A new one: a TPU has one engine.
    with strategy.scope():
        embedding = te.TPUEmbedding(feature(output_shape=[2]), te.SGD(1.0))
    with pytest.raises(tf.errors.InvalidArgumentError, match=r"sample 1 has id 7\.5"):
        embedding.enqueue(KINDS[kind]([3.0, 0.0, 7.5, 1.0], tf.float32), training=False)
    embedding.enqueue(KINDS[kind](WHOLE, tf.float32), training=False)
    found = strategy.run(tf.function(embedding.dequeue))
    np.testing.assert_array_equal(found, EXPECTED)
