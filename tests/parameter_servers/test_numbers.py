"""Tables on servers have the same bits as tables of one process."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import numpy as np
import pytest
import tensorflow as tf
from parameter_servers.cluster import (
    FEATURES,
    JOB,
    MIXED,
    OPTIMIZERS,
    ROUNDED,
    ROWS,
    START,
    B,
    D,
    V,
    batch,
    features,
    gradients,
    make,
    require_same,
    schedule,
    step_of,
)
from steps import look_up, train_on

import tpu_embedding as te


def classes() -> Iterator[tuple[Any, dict[str, Any]]]:
    for pipelined in (False, True):
        yield te.TPUEmbedding, {"pipeline_execution_with_tensor_core": pipelined}
        yield te.TPUEmbeddingV2, {"pipeline_execution_with_tensor_core": pipelined}


def require_bits_of_one_process(kind: Any, configs: Any, **options: Any) -> None:
    one, served = make(kind, configs, te.Adagrad(0.1), **options)
    step, expected = tf.function(step_of(served)), step_of(one)
    assert schedule(step, range(3)) == [float(expected(k)) for k in range(3)]
    for k in (3, 4):  # From the coordinator: as a function, and eagerly.
        assert float(step(tf.constant(k))) == float(expected(k))
    assert float(step_of(served)(5)) == float(expected(5))
    one.flush()
    served.flush()
    require_same(one, served)


def test_one_worker_has_the_bits_of_one_process() -> None:
    for kind, options in classes():
        require_bits_of_one_process(kind, features(), **options)


@pytest.mark.second_tier
def test_tables_divided_by_rows_have_the_bits_of_one_process() -> None:
    for kind, options in classes():
        require_bits_of_one_process(kind, features(placements=MIXED), **options)
    quantized = te.QuantizationConfig(16, -1.0, 1.0)
    for dtype in ROUNDED:
        configs = features(dtype, MIXED, quantization_config=quantized)
        require_bits_of_one_process(te.TPUEmbedding, configs)


@pytest.mark.second_tier
def test_random_batches_have_the_bits_of_one_process() -> None:
    rng = np.random.default_rng(11)
    for round_ in range(8):
        policy = rng.choice(["drop", "mod"])
        tables = [
            te.TableConfig(
                int(rows),
                D,
                initializer=tf.constant_initializer(START[0][: int(rows)]),
                combiner=str(rng.choice(["sum", "mean", "sqrtn"])),
                dtype=str(rng.choice(["float32", *ROUNDED])),
                placement=str(rng.choice(["rows", "rows", "whole"])),
                invalid_ids=str(policy),
                optimizer=OPTIMIZERS[str(rng.choice(["SGD", "Adagrad", "FTRL"]))](),
                name=f"t{k}",
            )
            for k, rows in enumerate(rng.choice([1, 2, 3, V], 2))
        ]
        configs = {
            name: te.FeatureConfig(tables[k // 2], max_sequence_length=length)
            for k, (name, length) in enumerate(zip(FEATURES, (0, 0, 0, 3), strict=True))
        }
        kind = te.TPUEmbeddingV2 if round_ % 2 else te.TPUEmbedding
        if kind is te.TPUEmbeddingV2:
            configs = {name: te.FeatureConfig(c.table) for name, c in configs.items()}
        one, served = make(kind, configs, None)
        for _ in range(3):
            ids, weights = random_ids(rng)
            gradient = rng.standard_normal(D).astype(np.float32)
            without = rng.choice([*FEATURES, ""])
            for embedding in (one, served):
                push(embedding, ids, weights, gradient, str(without))
        require_same(one, served)


def random_ids(rng: np.random.Generator) -> tuple[dict[str, Any], dict[str, Any]]:
    """Ragged ids of any number of samples, some out of range, and weights."""
    ids, weights = {}, {}
    for name in FEATURES:
        lengths = rng.integers(0, 4, rng.choice([0, 1, B]))
        number = int(lengths.sum())
        values = rng.integers(-2, V + 2, number)
        ids[name] = tf.RaggedTensor.from_row_lengths(values, lengths)
        weights[name] = None
        if rng.random() < 0.5 and name != "d":
            weights[name] = ids[name].with_values(
                tf.constant(rng.random(number), tf.float32)
            )
    return ids, weights


def push(
    embedding: Any, ids: Any, weights: Any, gradient: np.ndarray, without: str
) -> None:
    """One step; the feature `without` has no gradient."""

    def of(activations: Mapping[str, tf.Tensor]) -> dict[str, Any]:
        return {
            name: None if name == without else tf.sin(3 * value) * gradient
            for name, value in activations.items()
        }

    activations, preserved = look_up(embedding, ids, weights)
    embedding.apply_gradients(of(activations), *preserved)


@pytest.mark.second_tier
def test_tables_without_an_optimizer_are_looked_up() -> None:
    one, served = make(te.TPUEmbedding, features(placements=MIXED), None)
    for embedding in (one, served):
        embedding.enqueue(batch(0), training=False)
    expected, found = one.dequeue(), served.dequeue()
    for name, value in expected.items():
        np.testing.assert_array_equal(found[name], value)


@pytest.mark.second_tier
def test_every_optimizer_and_dtype_has_the_bits_of_one_process() -> None:
    for optimizer, options in itertools.product(OPTIMIZERS.values(), ({}, ROWS)):
        one, served = make(te.TPUEmbedding, features(), optimizer(), **options)
        step, expected = tf.function(step_of(served)), tf.function(step_of(one))
        schedule(step, range(3))
        for k in range(3):
            expected(tf.constant(k))
        require_same(one, served)
    for dtype, name, options in itertools.product(
        ROUNDED, ("Adagrad", "Adam"), ({}, ROWS)
    ):
        one, served = make(
            te.TPUEmbedding, features(dtype), OPTIMIZERS[name](), **options
        )
        schedule(tf.function(step_of(served)), range(3))
        for k in range(3):
            step_of(one)(k)
        require_same(one, served)


@pytest.mark.parametrize("placement", ["rows", "whole"])
def test_bfloat16_on_the_wire_rounds_once(placement: str) -> None:
    """What travels is a row of a divided table, and an activation of a whole one."""
    options = te.DistributedOptions(placement, "bfloat16")
    table = te.TableConfig(
        V, D, initializer=tf.constant_initializer(START[0]), combiner="sum"
    )
    one, served = make(
        te.TPUEmbedding,
        te.FeatureConfig(table),
        te.SGD(1.0),
        distributed_options=options,
    )
    ids = tf.constant([[0, 1], [2, 2], [3, 0]])

    def rounded(value: Any) -> tf.Tensor:
        return tf.cast(tf.cast(value, tf.bfloat16), tf.float32)

    rows = tf.gather(START[0].astype(np.float32), ids)
    expected = tf.reduce_sum(rounded(rows) if placement == "rows" else rows, 1)
    if placement == "whole":
        expected = rounded(expected)
    gradient = tf.fill([3, D], np.float32(1 / 3))
    served.enqueue(ids)
    np.testing.assert_array_equal(served.dequeue(), expected)
    served.apply_gradients(gradient)
    train_on(one, ids, rounded(gradient))
    require_same(one, served)


@pytest.mark.second_tier
def test_workers_preprocess_in_their_data_sets() -> None:
    configs = features(placements=MIXED)
    del configs["d"]
    one, served = make(te.TPUEmbeddingV2, configs, te.Adagrad(0.1))

    def batches(embedding: Any) -> tf.data.Dataset:
        made = tf.data.Dataset.range(1)
        made = made.map(lambda k: {n: batch(tf.cast(k, tf.int32))[n] for n in configs})
        return made.map(embedding.preprocess_features)

    @tf.function
    def step(iterator: Any) -> None:
        activations, preserved = served(next(iterator))
        served.apply_gradients(gradients(activations), preserved)

    made = JOB.coordinator.create_per_worker_dataset(lambda: batches(served))
    JOB.coordinator.schedule(step, args=(iter(made),))
    JOB.coordinator.join()
    for features_ in batches(one):
        activations, preserved = one(features_)
        one.apply_gradients(gradients(activations), preserved)
    require_same(one, served)


@pytest.mark.second_tier
def test_the_keras_layer_trains_in_a_loop_of_ones_own() -> None:
    def make_layer() -> Any:
        layer = te.keras.TPUEmbedding(features(), te.Adagrad(0.1))
        layer.build({name: value.shape for name, value in batch(0).items()})
        return layer

    def step_with(layer: Any) -> Callable[[Any], tf.Tensor]:
        def step(number: Any) -> tf.Tensor:
            with tf.GradientTape() as tape:
                activations = layer(batch(number))
                loss = tf.add_n(
                    [tf.reduce_sum(tf.cos(3 * a)) for a in activations.values()]
                )
            tape.gradient(loss, layer.trainable_variables)
            return loss

        return step

    one = make_layer()
    with JOB.strategy.scope():
        served = make_layer()
    step, expected = tf.function(step_with(served)), tf.function(step_with(one))
    found = schedule(step, range(3))
    assert found == [float(expected(tf.constant(k))) for k in range(3)]
    pairs = zip(
        one.embedding_tables.values(), served.embedding_tables.values(), strict=True
    )
    for value, other in pairs:
        np.testing.assert_array_equal(other.numpy(), value.numpy())


def hashed(**options: Any) -> dict[str, te.FeatureConfig]:
    """The first and the last of three tables are hashed."""
    found = features(**options)
    hashings = {
        "t0": te.Hashing(20, hashes=2, salt=5),
        "t2": te.Hashing(20, hashes=3, combine="sum"),
    }
    for table in {id(c.table): c.table for c in found.values()}.values():
        if table.name in hashings:
            table.vocabulary_size = hashings[table.name]
            table.initializer = te.RowIdInitializer()
    return found


@pytest.mark.second_tier
def test_hashed_tables_have_the_bits_of_one_process() -> None:
    for kind, options in classes():
        require_bits_of_one_process(kind, hashed(placements=MIXED), **options)
