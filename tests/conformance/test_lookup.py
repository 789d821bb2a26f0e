"""Lookups: every kind of input x combiner, with weights and without."""

from __future__ import annotations

import collections
import dataclasses
from typing import Any

import numpy as np
import pytest
import tensorflow as tf
from conformance import cases
from conformance.cases import Input
from conformance.twin import Batch, Feature, Table, Twin

import tpu_embedding as te

each_combiner = pytest.mark.parametrize("combiner", cases.COMBINERS)
each_input = pytest.mark.parametrize("kind", cases.INPUTS, ids=lambda kind: kind.name)


def one_table(kind: Input, weighted: bool = False, **table: Any) -> Twin:
    """One table, looked up with ids of either dtype."""
    features = {name: Feature("table", kind, weighted) for name in ("int32", "int64")}
    return Twin({"table": Table(**table)}, features, te.SGD(0.25))


@pytest.mark.parametrize("weighted", [False, True], ids=["plain", "weighted"])
@each_combiner
@each_input
def test_lookup(
    kind: Input, combiner: str, weighted: bool, rng: np.random.Generator
) -> None:
    twin = one_table(kind, weighted, combiner=combiner)
    twin.evaluate(twin.draw(rng))
    twin.evaluate(twin.draw(rng))


@each_combiner
@each_input
def test_weights_of_either_sign(
    kind: Input, combiner: str, rng: np.random.Generator
) -> None:
    twin = one_table(kind, combiner=combiner)
    batch = twin.draw(rng)
    for name, value in batch.values[0].items():
        weights, condition = cases.signed_weights(rng, value)
        batch.weights[0][name] = weights
        batch.condition = max(batch.condition, condition)
    twin.evaluate(batch)
    twin.step(rng, batch)
    twin.check_variables()


@each_combiner
def test_divisor_of_zero_gives_zeros(combiner: str) -> None:
    kind = Input("dense", "dense", (3, 2))
    twin = one_table(kind, combiner=combiner)
    ids, weights = tf.constant([[1, 2]] * 3), tf.constant([[2.5, -2.5], [0, 0], [1, 2]])
    names = ("int32", "int64")
    twin.evaluate(Batch([dict.fromkeys(names, ids)], [dict.fromkeys(names, weights)]))
    twin.embedding.enqueue(
        {"int32": ids, "int64": ids}, {"int32": weights, "int64": None}, training=False
    )
    activations = twin.embedding.dequeue()["int32"].numpy()
    assert (activations[1] == 0).all()
    assert (activations[0] == 0).all() == (combiner == "mean")


def empty(kind: str, shape: tuple[int, ...]) -> Any:
    ids = tf.constant([], tf.int64)
    if kind == "dense":
        return tf.zeros(shape, tf.int64)
    if kind == "sparse":
        return tf.SparseTensor(tf.zeros([0, len(shape)], tf.int64), ids, shape)
    return tf.RaggedTensor.from_row_splits(ids, [0] * (shape[0] + 1))


@each_combiner
@pytest.mark.parametrize("shape", [(0, 3), (3, 0), (0, 0), (0,)], ids=str)
@pytest.mark.parametrize("kind", ["dense", "sparse", "ragged"])
def test_inputs_without_an_entry(
    kind: str, shape: tuple[int, ...], combiner: str, rng: np.random.Generator
) -> None:
    if len(shape) == 1 and kind != "dense":
        shape = (*shape, 5)
    twin = one_table(Input("empty", kind, shape), combiner=combiner)
    ids = empty(kind, shape)
    weights = cases.with_values(ids, tf.zeros(cases.values_of(ids).shape))
    batch = Batch([{"int32": ids, "int64": ids}], [{"int32": None, "int64": weights}])
    twin.evaluate(batch)
    twin.step(rng, batch)
    twin.check_variables()


def test_batches_of_changing_size(rng: np.random.Generator) -> None:
    twin = one_table(cases.INPUT_BY_NAME["ragged"])
    for rows in (4, 9, 3):
        kind = Input("ragged", "ragged", (rows, 4))
        twin.features = {
            name: dataclasses.replace(feature, input=kind)
            for name, feature in twin.features.items()
        }
        twin.step(rng, twin.draw(rng))
    twin.check_variables()


@each_combiner
@each_input
def test_quantization(kind: Input, combiner: str, rng: np.random.Generator) -> None:
    # Buckets of 1/4 between -1 and 1: the table's values are exact in 64ths, so that
    # each side finds the same bucket, on the border of two buckets too.
    quantization = te.QuantizationConfig(9, -1.0, 1.0)
    twin = one_table(kind, True, combiner=combiner, quantization=quantization, dim=17)
    twin.evaluate(twin.draw(rng))
    if combiner == "sum":  # Its gradients see the plain values: the rule is SGD's.
        twin.step(rng, twin.draw(rng))
        twin.check_variables()


def test_quantization_with_uneven_buckets() -> None:
    values = np.float32([[-3.0, -1.3, -1.2], [-0.1, 0.0, 0.7], [1.3, 1.4, 9.0]])
    table = te.TableConfig(
        3,
        3,
        initializer=lambda shape, dtype: values,
        combiner="sum",
        quantization_config=te.QuantizationConfig(num_buckets=5, lower=-1.3, upper=1.4),
    )
    embedding = te.TPUEmbedding(te.FeatureConfig(table), None)
    embedding.enqueue(tf.constant([0, 1, 2]), training=False)
    expected = [[-1.3, -1.3, -1.3], [0.05, 0.05, 0.725], [1.4, 1.4, 1.4]]
    np.testing.assert_allclose(
        embedding.dequeue(), expected, rtol=0, atol=cases.tolerance(3, 1.4)
    )


@pytest.mark.parametrize(
    ("rows", "declared", "expected"),
    [
        (6, (None,), (6,)),
        (6, (None, 2), (3, 2)),
        (6, (2, None, 1), (2, 3, 1)),
        (6, (6, 2), (6, 2)),
        (2, (4, 1), (4, 1)),
        (3, (2, 3, 2), (2, 3, 2)),
    ],
    ids=str,
)
def test_output_shape_of_ragged_input(
    rows: int, declared: Any, expected: Any, rng: np.random.Generator
) -> None:
    kind = Input("ragged", "ragged", (max(rows, 3), 3), output_shape=declared)
    twin = one_table(kind, combiner="sum")
    ids = kind.draw(rng, 11)[:rows]
    names = twin.features
    twin.evaluate(Batch([dict.fromkeys(names, ids)], [dict.fromkeys(names)]))
    twin.embedding.enqueue(dict.fromkeys(twin.features, ids), training=False)
    assert twin.embedding.dequeue()["int32"].shape == (*expected, 4)


@pytest.mark.parametrize("name", ["ragged", "sparse2", "dense2"])
def test_weights_with_a_layout_of_their_own(
    name: str, rng: np.random.Generator
) -> None:
    twin = one_table(cases.INPUT_BY_NAME[name], combiner="sum")
    batch = twin.draw(rng)
    for feature, value in batch.values[0].items():
        weights = cases.positive_weights(rng, value)
        batch.weights[0][feature] = tf.nest.map_structure(
            tf.identity, weights, expand_composites=True
        )
    twin.evaluate(batch)
    wrong = {
        "ragged": tf.ragged.constant([[1.0], [], [2.0]]),
        "sparse2": tf.SparseTensor([[1, 1]], [2.0], [6, 4]),
        "dense2": tf.ones([6, 2]),
    }[name]
    batch.weights[0] = dict.fromkeys(twin.features, wrong)
    with pytest.raises((tf.errors.InvalidArgumentError, ValueError), match="weights"):
        twin.embedding.enqueue(batch.values[0], batch.weights[0])
    twin.step(rng, twin.draw(rng))
    twin.check_variables()


@pytest.mark.parametrize("dtype", [tf.float64, tf.float16, tf.bfloat16])
def test_weights_of_other_float_types(dtype: tf.DType) -> None:
    twin = one_table(Input("dense", "dense", (2, 2)), combiner="sum")
    ids = tf.constant([[1, 2], [3, 3]])
    weights = tf.constant([[0.5, 2], [-1, 4]], dtype)
    twin.evaluate(
        Batch(
            [dict.fromkeys(twin.features, ids)],
            [dict.fromkeys(twin.features, tf.cast(weights, tf.float32))],
        )
    )
    twin.embedding.enqueue(
        dict.fromkeys(twin.features, ids),
        dict.fromkeys(twin.features, weights),
        training=False,
    )
    table = cases.named_values(11, 4)
    expected = [0.5 * table[1] + 2 * table[2], 3 * table[3]]
    np.testing.assert_array_equal(twin.embedding.dequeue()["int32"], expected)


Pair = collections.namedtuple("Pair", ["left", "right"])


def test_activations_have_the_structure_of_the_features() -> None:
    table = te.TableConfig(11, 2, initializer=te.RowIdInitializer(), combiner="sum")
    feature = te.FeatureConfig(table)
    config = {
        "b": [feature, (feature,)],
        "a": Pair(left=feature, right={"z": feature, "y": feature}),
    }
    embedding = te.TPUEmbedding(config, None)
    ids = {
        "a": Pair(
            left=tf.constant([1]),
            right={"y": tf.constant([[2, 2]]), "z": tf.ragged.constant([[3]])},
        ),
        "b": [tf.sparse.from_dense([[4, 0, 1]]), (tf.constant([6]),)],
    }
    embedding.enqueue(ids, training=False)
    activations = embedding.dequeue()
    tf.nest.assert_same_structure(config, activations)
    named = tf.nest.map_structure(lambda a: float(a[0, 0]), activations)
    assert named == {
        "b": [5.0, (6.0,)],
        "a": Pair(left=1.0, right={"z": 3.0, "y": 4.0}),
    }
    assert list(named) == ["b", "a"]
