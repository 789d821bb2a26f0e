"""Training steps: every optimizer x combiner x kind of input, on every engine."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import optimizer_cases
import pytest
import tensorflow as tf
from conformance import cases
from conformance.twin import Feature, Table, Twin
from reliability.bad_calls import any_size

import tpu_embedding as te

RATE = 0.25
# Widths around those of vector registers, and those that kernels know.
DIMS = (1, 3, 4, 8, 17, 32, 64, 128)

# Every optimizer with every combiner; its variants, which know no combiner, take turns.
each_variant = pytest.mark.parametrize(
    ("case", "options", "combiner"),
    [
        (case, case.options[n % len(case.options)], cases.COMBINERS[n % 3])
        for case in optimizer_cases.OPTIMIZERS
        for n in range(max(3, len(case.options)))
    ],
    ids=lambda value: getattr(value, "name", None) or str(value),
)


def all_inputs(combiner: str, optimizer: Any, **arguments: Any) -> Twin:
    """A table for each kind of input, looked up with weights and without.

    As every kind has a table of its own, a failure names it.
    """
    tables, features = {}, {}
    for number, kind in enumerate(cases.INPUTS):
        tables[kind.name] = Table(dim=DIMS[number % len(DIMS)], combiner=combiner)
        features[kind.name] = Feature(kind.name, kind)
        features[f"{kind.name}_weighted"] = Feature(kind.name, kind, weighted=True)
    return Twin(tables, features, optimizer, **arguments)


@each_variant
def test_rule(case: Any, options: Any, combiner: str, rng: np.random.Generator) -> None:
    optimizer = case.cls(learning_rate=RATE, **options)
    twin = all_inputs(combiner, optimizer)
    # None for the weighted half of the features: their rows are touched all the same.
    # Two steps, as the second one starts from slots of all values.
    twin.run(rng, 2, without=[name for name in twin.features if "weighted" in name])


# These options do not depend on the rule: each rule takes three of them in turn.
@pytest.mark.parametrize(
    ("case", "common"),
    [
        (case, common)
        for number, case in enumerate(optimizer_cases.OPTIMIZERS)
        for common in optimizer_cases.COMMON_OPTIONS[1 + number % 3 :: 3]
    ],
    ids=lambda value: getattr(value, "name", None) or str(value),
)
def test_clipping_and_decay(
    case: Any, common: dict[str, Any], rng: np.random.Generator
) -> None:
    # These options depend on no combiner and no kind of input: one of each suffices.
    optimizer = case.cls(learning_rate=RATE, **common, **case.options[-1])
    kind = cases.INPUT_BY_NAME["ragged"]
    twin = Twin(
        {"table": Table(dim=17, combiner="sum")},
        {"plain": Feature("table", kind), "weighted": Feature("table", kind, True)},
        optimizer,
    )
    twin.run(rng, 3, without=["weighted"])


def two_features(optimizer: Any, combiner: str = "sqrtn", **arguments: Any) -> Twin:
    """One table shared by two features of different kinds."""
    return Twin(
        {"table": Table(combiner=combiner)},
        {
            "dense": Feature("table", cases.INPUT_BY_NAME["dense2"], weighted=True),
            "ragged": Feature("table", cases.INPUT_BY_NAME["ragged"]),
        },
        optimizer,
        **arguments,
    )


@pytest.mark.parametrize("case", optimizer_cases.OPTIMIZERS, ids=lambda case: case.name)
def test_gradients_that_are_all_none(case: Any, rng: np.random.Generator) -> None:
    optimizer = case.cls(learning_rate=RATE, weight_decay_factor=0.25)
    twin = two_features(optimizer)
    before = cases.named_values(11, 4)
    twin.step(rng, twin.draw(rng), without=["dense", "ragged"])
    after = twin.embedding.embedding_tables[twin.configs["table"]].numpy()
    touched = sorted(twin._named["table"])
    assert (after[touched] != before[touched]).mean() > 0.9
    twin.run(rng, 2)


@pytest.mark.parametrize("function", [lambda step: step, tf.function])
@pytest.mark.parametrize("multiply", [False, True])
def test_rate_of_no_argument(
    multiply: bool, function: Any, rng: np.random.Generator
) -> None:
    rate = tf.Variable(RATE)
    optimizer = te.FTRL(
        lambda: rate,
        multiply_linear_by_learning_rate=multiply,
        weight_decay_factor=0.5,
        multiply_weight_decay_factor_by_learning_rate=True,
    )
    twin = two_features(optimizer, function=function)
    for value in (0.25, 0.5, 0.125):
        rate.assign(value)
        twin.step(rng, twin.draw(rng))
    if multiply:  # Only then is nothing divided by it.
        rate.assign(0)
        twin.step(rng, twin.draw(rng))
    twin.check_variables()


@pytest.mark.parametrize("function", [lambda step: step, tf.function])
def test_rate_of_the_number_of_updates(function: Any, rng: np.random.Generator) -> None:
    steps = []

    def schedule(step: Any) -> Any:
        steps.append(step)
        return 0.5 / (1 + tf.cast(step, tf.float32))

    twin = two_features(te.Adagrad(schedule), function=function)
    for _ in range(3):
        twin.step(rng, twin.draw(rng))
    twin.check_variables()
    twin.evaluate(twin.draw(rng))
    twin.run(rng, 1)
    assert len(steps) >= 5  # The reference's four and at least one trace.


def test_rate_of_a_keras_schedule(rng: np.random.Generator) -> None:
    schedule = tf.keras.optimizers.schedules.ExponentialDecay(0.5, 1, 0.5)
    twin = two_features(te.SGD(schedule))
    twin.run(rng, 3)


def test_rate_is_evaluated_once_per_update(rng: np.random.Generator) -> None:
    calls = []

    def rate() -> float:
        calls.append(None)
        return RATE

    optimizer = te.SGD(rate)
    embedding = te.TPUEmbedding(
        [te.FeatureConfig(te.TableConfig(5, 2, name=name)) for name in "abc"], optimizer
    )
    for step in range(3):
        embedding.enqueue([tf.constant([1])] * 3)
        embedding.dequeue()
        assert len(calls) == step
        embedding.apply_gradients([tf.ones([1, 2])] * 3)
        assert len(calls) == step + 1


def test_a_table_keeps_its_own_optimizer(rng: np.random.Generator) -> None:
    tables = {
        case.name: Table(optimizer=case.cls(learning_rate=RATE / (1 + number)))
        for number, case in enumerate(optimizer_cases.OPTIMIZERS)
    }
    tables["another_sgd"] = Table(optimizer=te.SGD(0.5, weight_decay_factor=0.25))
    tables["default"] = Table()
    features = {
        f"{kind}_{table}": Feature(table, cases.INPUT_BY_NAME[kind])
        for table in tables
        for kind in ("dense2", "ragged_sequence")
    }
    twin = Twin(tables, features, te.Adagrad(0.125))
    twin.run(rng, 3)


@pytest.mark.parametrize(
    "optimizer", [te.Adagrad(RATE), te.RowwiseAdagrad(RATE), te.ProximalAdagrad(RATE)]
)
def test_accumulator_of_zero_makes_no_step(optimizer: Any) -> None:
    table = te.TableConfig(3, 2, initializer=te.RowIdInitializer(), combiner="sum")
    embedding = te.TPUEmbedding(te.FeatureConfig(table), optimizer)
    embedding.build()
    accumulators = embedding.variables[table]["accumulators"]
    accumulators.assign(tf.zeros_like(accumulators))
    embedding.enqueue(tf.constant([0, 1, 2]))
    embedding.dequeue()
    embedding.apply_gradients(tf.constant([[0, 0], [0, 0], [2, 2]], tf.float32))
    np.testing.assert_array_equal(
        embedding.embedding_tables[table], [[0, 0], [1, 1], [2 - RATE] * 2]
    )


def test_ftrl_from_an_accumulator_of_zero(rng: np.random.Generator) -> None:
    optimizer = te.FTRL(
        RATE, initial_accumulator_value=0.0, allow_zero_accumulator=True
    )
    twin = two_features(optimizer)
    twin.step(rng, twin.draw(rng), without=["dense", "ragged"])  # It stays 0.
    twin.run(rng, 2)


def traced_for_any_size(step: Callable[..., Any]) -> Callable[..., Any]:
    """As a tf.function in which all sizes of all inputs are unknown."""
    function = tf.function(step)

    def call(*arguments: Any) -> Any:
        specs = tf.nest.map_structure(
            lambda value: None if value is None else any_size(value), arguments
        )
        return function.get_concrete_function(*specs)(*arguments)

    return call


@pytest.mark.parametrize("kind", cases.INPUTS, ids=lambda kind: kind.name)
def test_inside_a_function(kind: Any, rng: np.random.Generator) -> None:
    # Adam has two slots and a rule that shows the order of steps. The combiner plays
    # no part in tracing: each kind takes the next one.
    combiner = cases.COMBINERS[cases.INPUTS.index(kind) % 3]
    twin = Twin(
        {"table": Table(combiner=combiner)},
        {"plain": Feature("table", kind), "weighted": Feature("table", kind, True)},
        te.Adam(RATE),
        function=traced_for_any_size,
    )
    twin.run(rng, 2)


@pytest.mark.parametrize("cls", [te.SGD, te.Adagrad, te.Adam])  # 0, 1 and 2 slots.
def test_inside_a_loop(cls: type[Any], rng: np.random.Generator) -> None:
    """A tf.range loop over steps, against the same steps one by one."""

    def train(embedding: te.TPUEmbedding, ids: tf.Tensor) -> tf.Tensor:
        losses = tf.TensorArray(tf.float32, ids.shape[0])
        for step in tf.range(ids.shape[0]):
            embedding.enqueue({"dense": ids[step], "ragged": ragged})
            with tf.GradientTape() as tape:
                activations = embedding.dequeue()
                tape.watch(activations)
                loss = tf.add_n(
                    [tf.reduce_sum(a * a) for a in tf.nest.flatten(activations)]
                )
            embedding.apply_gradients(tape.gradient(loss, activations))
            losses = losses.write(step, loss)
        return losses.stack()

    ids = tf.constant(rng.integers(0, 11, (4, 6, 3)))
    ragged = tf.ragged.constant([[1, 2], [], [3, 3, 3]], row_splits_dtype=tf.int64)
    results = []
    for function in (lambda step: step, tf.function):
        twin = two_features(cls(learning_rate=RATE / 8))
        losses = function(train)(twin.embedding, ids)
        variables = twin.embedding.variables[twin.configs["table"]]
        results.append([losses, *variables.values()])
    for eager, looped in zip(*results, strict=True):
        # The same ops in the same order, but a graph may fold them in another way: a
        # few roundings each of the largest value met, also where values cancel.
        bound = 32 * cases.EPSILON * np.max(np.abs(eager))
        np.testing.assert_allclose(eager, looped, rtol=0, atol=bound)
