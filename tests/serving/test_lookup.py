"""serving_embedding_lookup and TPUEmbeddingForServing: numbers and rules."""

from __future__ import annotations

import itertools
import pathlib
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import tensorflow as tf
from conformance import cases
from reference.embedding import Feature, ReferenceEmbedding, Table

import tpu_embedding as te

stock = tf.tpu.experimental.embedding
V, D, MOST = 13, 5, 4
VALUES = cases.named_values(V, D)
MODES: dict[str, Callable[[Any], Any]] = {"eager": lambda f: f, "graph": tf.function}


def films(**arguments: Any) -> te.TableConfig:
    return te.TableConfig(V, D, name="films", **arguments)


def features_of(table: te.TableConfig) -> dict[str, te.FeatureConfig]:
    return {
        case.name: te.FeatureConfig(
            table, case.max_sequence_length, output_shape=case.output_shape
        )
        for case in cases.INPUTS
    }


def expected(
    table: te.TableConfig, ids: dict[str, Any], weights: dict[str, Any]
) -> dict[str, np.ndarray]:
    """The reference's activations for inputs named as in `cases`."""
    config = cases.INPUT_BY_NAME
    reference = ReferenceEmbedding(
        {
            "films": Table(
                VALUES, combiner=table.combiner, invalid_ids=table.invalid_ids
            )
        },
        [
            Feature("films", config[n].max_sequence_length, config[n].output_shape)
            for n in ids
        ],
    )
    (activations,) = reference.lookup(
        [list(ids.values())], [[weights.get(name) for name in ids]]
    )
    return dict(zip(ids, activations, strict=True))


def assert_as_expected(actual: Any, expected: dict[str, np.ndarray]) -> None:
    bound = cases.tolerance(MOST, MOST * 2 * float(np.abs(VALUES).max()))
    assert set(actual) == set(expected)
    for name, activation in expected.items():
        cases.assert_close(actual[name], activation, bound, name)


@pytest.mark.parametrize(
    ("combiner", "weighted", "mode"),
    [
        *itertools.product(cases.COMBINERS, [False, True], ["eager"]),
        ("mean", False, "graph"),  # Each is slow to trace.
        ("sqrtn", True, "graph"),
    ],
)
def test_every_kind_of_input(
    combiner: str, weighted: bool, mode: str, rng: np.random.Generator
) -> None:
    table = films(combiner=combiner)
    ids = {case.name: case.draw(rng, V) for case in cases.INPUTS}
    weights = {name: cases.positive_weights(rng, ids[name]) for name in ids}
    given = weights if weighted else None

    @MODES[mode]
    def look_up() -> Any:
        return te.serving_embedding_lookup(
            ids, given, {table: tf.constant(VALUES)}, features_of(table)
        )

    assert_as_expected(look_up(), expected(table, ids, given or {}))


@pytest.mark.parametrize("policy", ["drop", "mod"])
@pytest.mark.parametrize("combiner", cases.COMBINERS)
def test_invalid_ids_that_are_allowed(
    combiner: str, policy: str, rng: np.random.Generator
) -> None:
    table = films(combiner=combiner, invalid_ids=policy)
    ids = {}
    for case in cases.INPUTS:
        value = case.draw(rng, V)
        values = cases.values_of(value)
        values.flat[::3] += rng.choice([-3 * V - 2, V, 2**40], values.flat[::3].shape)
        ids[case.name] = cases.with_values(value, values)
    weights = {name: cases.positive_weights(rng, ids[name]) for name in ids}
    for given in (None, weights):
        actual = te.serving_embedding_lookup(
            ids, given, {table: tf.constant(VALUES)}, features_of(table)
        )
        assert_as_expected(actual, expected(table, ids, given or {}))


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("case", cases.INPUTS, ids=lambda case: case.name)
def test_an_invalid_id_is_an_error(
    case: cases.Input, mode: str, rng: np.random.Generator
) -> None:
    value = case.draw(rng, V)
    values = cases.values_of(value)
    values.flat[-1] = 2**35
    table = films()

    @MODES[mode]
    def look_up() -> Any:
        return te.serving_embedding_lookup(
            {case.name: cases.with_values(value, values)},
            None,
            {table: tf.constant(VALUES)},
            features_of(table),
        )

    with pytest.raises(tf.errors.InvalidArgumentError) as raised:
        look_up()
    assert f"Feature {case.name}, table films: sample" in raised.value.message
    assert f"has id {2**35}, but ids must be in [0, 13)." in raised.value.message


def test_the_rule_for_ids_of_stock_tables() -> None:
    table = stock.TableConfig(V, D, combiner="sum", name="films")
    ids, tables = tf.constant([V + 1]), {table: tf.constant(VALUES)}
    feature = stock.FeatureConfig(table)
    with pytest.raises(tf.errors.InvalidArgumentError):
        te.serving_embedding_lookup(ids, None, tables, feature)
    for rule, row in (("mod", VALUES[1]), ("drop", np.zeros(D))):
        found = te.serving_embedding_lookup(
            ids, None, tables, feature, invalid_ids=rule
        )
        np.testing.assert_array_equal(found, [row])


@pytest.mark.parametrize("weighted", [False, True], ids=["plain", "weighted"])
def test_simulated_quantization_and_half_tables(weighted: bool) -> None:
    quantization = te.QuantizationConfig(9, -1.0, 1.0)
    table = films(quantization_config=quantization, combiner="sum")
    ids = tf.ragged.constant([[6, 7], [0]])
    weights = ids.with_values(tf.ones([3])) if weighted else None
    tables = {table: tf.cast(VALUES / 4, tf.float16)}
    found = te.serving_embedding_lookup(ids, weights, tables, te.FeatureConfig(table))
    levels = np.floor((np.clip(VALUES / 4, -1, 1) + 1) * 4 + 0.5) / 4 - 1
    np.testing.assert_array_equal(found, [levels[6] + levels[7], levels[0]])


@pytest.mark.parametrize("size", [0, 1, 10_000])
def test_sizes_of_batches(size: int) -> None:
    table = films(combiner="mean")
    dense = np.arange(size) % V
    ids = {
        "ragged": tf.RaggedTensor.from_row_lengths(dense, np.ones(size, int)),
        "dense1": tf.constant(dense),
        "sparse2": tf.SparseTensor(
            np.stack([np.arange(size)] * 2, axis=1), dense, [size, size]
        ),
    }
    found = te.serving_embedding_lookup(
        ids, None, {table: tf.constant(VALUES)}, features_of(table)
    )
    for activation in found.values():
        np.testing.assert_array_equal(activation, VALUES[dense])


@pytest.mark.parametrize("mode", MODES)
def test_another_batch_size_than_that_of_the_output_shape(mode: str) -> None:
    """Ragged rows fill an output shape of several axes."""
    table = films(combiner="sum")
    config = {
        "one": te.FeatureConfig(table, output_shape=[8]),
        "two": te.FeatureConfig(table, output_shape=[8, 2]),
        "sparse": te.FeatureConfig(table, output_shape=[8]),
    }
    sparse = tf.sparse.from_dense([[1, 2], [0, 3]])
    two = tf.constant([[[1], [2]], [[3], [4]], [[5], [6]]])
    ids = {"one": tf.constant([3, 5]), "two": two, "sparse": sparse}
    serving = te.TPUEmbeddingForServing(config, None)
    serving.embedding_tables[table].assign(VALUES)

    @MODES[mode]
    def look_up() -> Any:
        by_function = te.serving_embedding_lookup(
            ids, None, {table: tf.constant(VALUES)}, config
        )
        return by_function, serving(ids)

    for found in look_up():
        np.testing.assert_array_equal(found["one"], VALUES[[3, 5]])
        np.testing.assert_array_equal(found["two"], VALUES[[[1, 2], [3, 4], [5, 6]]])
        np.testing.assert_array_equal(
            found["sparse"], [VALUES[1] + VALUES[2], VALUES[3]]
        )
    for rows in (0, 3, 8, 20):
        ragged = tf.ragged.constant([[1]] * rows, tf.int64, ragged_rank=1)
        assert serving({"one": ragged})["one"].shape == (rows, D)
    with pytest.raises(ValueError, match=r"two.*\(8, 2\).*FeatureConfig.output_sha"):
        serving({"two": tf.ragged.constant([[1]] * 3)})
    wrong = {"two": tf.constant([[[1], [2], [3]]])}
    with pytest.raises(ValueError, match=r"two.*\(None, 2\)"):
        serving(wrong)


@pytest.mark.parametrize("combiner", cases.COMBINERS)
def test_samples_without_ids_are_zeros(combiner: str) -> None:
    table = films(combiner=combiner)
    ragged = tf.RaggedTensor.from_row_splits(tf.constant([], tf.int64), [0] * 5)
    for ids in (ragged, ragged.to_sparse(), tf.zeros([4, 0], tf.int64)):
        for weights in (None, tf.cast(ids, tf.float32)):
            found = te.serving_embedding_lookup(
                ids, weights, {table: tf.constant(VALUES)}, te.FeatureConfig(table)
            )
            np.testing.assert_array_equal(found, np.zeros([4, D]))


def test_some_of_the_features_in_any_structure() -> None:
    table, other = films(), te.TableConfig(3, 2, name="other")
    config = {"a": [te.FeatureConfig(table), te.FeatureConfig(other)], "b": 0}
    config["b"] = te.FeatureConfig(other)
    found = te.serving_embedding_lookup(
        {"a": [tf.constant([2])]}, None, {table: tf.constant(VALUES)}, config
    )
    np.testing.assert_array_equal(found["a"][0], VALUES[[2]])


def test_bad_arguments_are_named() -> None:
    table = films()
    config = {"film": te.FeatureConfig(table)}
    ids = {"film": tf.constant([1])}

    def refused(error: type[Exception], inputs: Any, weights: Any, tables: Any) -> str:
        with pytest.raises(error) as raised:
            te.serving_embedding_lookup(inputs, weights, tables, config)
        return str(raised.value)

    values = {table: tf.constant(VALUES)}
    assert refused(ValueError, {"x": ids["film"]}, None, values) == (
        "`inputs` has the features x, which `feature_config` lacks. It has film."
    )
    assert refused(ValueError, ids, None, {}) == (
        "`tables` lacks table films of feature film. Its keys must be the TableConfig "
        "objects of `feature_config` themselves."
    )
    for wrong in (tf.zeros([V, D + 1]), tf.zeros([V, D], tf.int32), VALUES):
        assert "must be a floating point variable or tensor of shape (13, 5)" in (
            refused(ValueError, ids, None, {table: wrong})
        )
    assert "structure of `weights`" in refused(TypeError, ids, [None], values)
    assert "int32, int64 or floating" in refused(
        TypeError, {"film": tf.constant([True])}, None, values
    )
    assert "tf.Tensor, tf.SparseTensor" in refused(
        ValueError, {"film": "word"}, None, values
    )


@pytest.mark.parametrize("ours", [True, False], ids=["ours", "stock"])
def test_restores_what_training_saved(ours: bool, tmp_path: pathlib.Path) -> None:
    kind: Any = te if ours else stock
    table = kind.TableConfig(V, D, name="films")
    config = {"film": kind.FeatureConfig(table)}
    trained = te.TPUEmbedding(config, kind.Adagrad(0.1))
    ids = {"film": tf.constant([3, 4])}
    trained.enqueue(ids)
    trained.apply_gradients({"film": trained.dequeue()["film"]})
    path = tf.train.Checkpoint(embedding=trained).save(tmp_path / "c")
    for optimizer in (None, kind.Adagrad(0.1)):
        serving = te.TPUEmbeddingForServing(config, optimizer)
        status = tf.train.Checkpoint(embedding=serving).restore(path)
        found = serving(ids)["film"]
        status.assert_existing_objects_matched()
        trained.enqueue(ids, training=False)
        np.testing.assert_array_equal(found, trained.dequeue()["film"])
        slots = {"accumulators"} if optimizer else set()
        assert set(serving.variables[table]) == {"parameters", *slots}
    np.testing.assert_array_equal(
        serving.variables[table]["accumulators"],
        trained.variables[table]["accumulators"],
    )
    assert set(serving.embedding_tables) == {table}


def test_gradients_reach_the_tables() -> None:
    table = films(combiner="sum")
    serving = te.TPUEmbeddingForServing(te.FeatureConfig(table), None)
    variable = serving.embedding_tables[table]
    with tf.GradientTape() as tape:
        tape.watch(variable)
        loss = tf.reduce_sum(serving(tf.ragged.constant([[1, 2], [2]])))
    gradient = tf.convert_to_tensor(tape.gradient(loss, variable))
    np.testing.assert_array_equal(gradient[:4, 0], [0, 1, 2, 0])


def test_is_not_for_tpus(monkeypatch: pytest.MonkeyPatch) -> None:
    strategy = tf.distribute.OneDeviceStrategy("CPU:0")
    config = te.FeatureConfig(films())
    with strategy.scope():
        te.TPUEmbeddingForServing(config, None)
        monkeypatch.setattr(strategy.extended, "tpu_hardware", "v4", raising=False)
        with pytest.raises(RuntimeError, match="cannot be created under a TPU strat"):
            te.TPUEmbeddingForServing(config, None)
    with pytest.raises(
        NotImplementedError, match=r"sparsecore_restore_info=\{'a': 1\}"
    ):
        te.TPUEmbeddingForServing(config, None, {"a": 1})
