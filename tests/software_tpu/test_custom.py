"""Tests of the updates by a rule of the user's."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import tensorflow as tf
from replica_values import of_replicas
from software_tpu import calls, partitioned

D = 8
SYSTEM = partitioned.System(2, 2, num_samples=6, num_rows=24)
OP = "XlaSparseDenseMatmulGradWithCsrInput"
EPSILON = float(np.finfo(np.float32).eps)


def row(*shape: int) -> tf.TensorSpec:
    return tf.TensorSpec(shape, tf.float32)


@tf.function(input_signature=[row(1, D), row(1, D), row(1, D), row(1), row(), row()])
def rule(gradient, table, history, count, rate, power) -> tuple:
    """A slot as wide as the table, one per row, and two hyperparameters."""
    history = power * history + gradient
    return table - rate * history / (1.0 + count), history, count + 1.0


def update(
    computation: Any,
    entries: list[list[partitioned.Entry]],
    gradients: list[np.ndarray],
    tables: list[list[np.ndarray]],
) -> list[list[np.ndarray]]:
    """The tables by device, after the update."""
    strategy = calls.strategy_of("v6e", 2)
    inputs = [
        {**SYSTEM.csr(own), "activation_gradients": gradient}
        for own, gradient in zip(entries, gradients, strict=True)
    ]

    def program(inputs: dict[str, Any], tables: list[Any]) -> list[tf.Tensor]:
        function = computation.get_concrete_function()
        # An attribute that names a function does not bring it along.
        function.add_to_graph(tf.compat.v1.get_default_graph())
        return getattr(tf.raw_ops, OP)(
            **inputs,
            tables=tables,
            hyperparameters=[tf.constant(0.5), tf.constant(0.9)],
            custom_computation=function,
            table_name="t",
        )

    def distributed(values: list[Any], key: Any) -> Any:
        return of_replicas(strategy, [tf.constant(own[key]) for own in values])

    given = {name: distributed(inputs, name) for name in inputs[0]}
    of_tables = [distributed(tables, k) for k in range(len(tables[0]))]
    outputs = strategy.run(program, (given, of_tables))
    by_table = [strategy.experimental_local_results(output) for output in outputs]
    return [[value.numpy() for value in own] for own in zip(*by_table, strict=True)]


def values(rng: np.random.Generator) -> list[np.ndarray]:
    table = rng.normal(size=(SYSTEM.num_rows, D)).astype(np.float32)
    history = rng.normal(size=(SYSTEM.num_rows, D)).astype(np.float32)
    return [table, history, np.arange(SYSTEM.num_rows, dtype=np.float32)]


def test_a_rule_of_ones_own(rng: np.random.Generator):
    table, history, count = values(rng)
    entries = [partitioned.random_entries(SYSTEM, rng) for _ in range(2)]
    gradients = [rng.normal(size=(6, D)).astype(np.float32) for _ in range(2)]
    cut = [SYSTEM.cut(value) for value in (table, history, count)]
    parts = update(rule, entries, gradients, list(zip(*cut, strict=True)))
    sums = partitioned.gradient_rows(entries, gradients)
    assert 0 < len(sums) < SYSTEM.num_rows
    for id_, gradient in sums.items():
        history[id_] = 0.9 * history[id_] + gradient
        table[id_] -= 0.5 * history[id_] / (1.0 + count[id_])
        count[id_] += 1.0
    for k, expected in enumerate((table, history, count)):
        # Sums of up to 36 entries and a few roundings of the rule, of values near 1.
        np.testing.assert_allclose(
            SYSTEM.join([own[k] for own in parts]),
            expected,
            rtol=50 * EPSILON,
            atol=50 * EPSILON,
        )


@tf.function(input_signature=[row(1, D), row(1, D), row(1, D), row(), row()])
def forgets_its_slot(gradient, table, slot, rate, power) -> tf.Tensor:
    return table - rate * gradient


@tf.function(input_signature=[row(1, D), row(1, D), row(), row()])
def returns_another_shape(gradient, table, rate, power) -> tf.Tensor:
    return (table - rate * power * gradient)[0]


@tf.function(input_signature=[row(1, D), row(1, D), row(), row()])
def fails(gradient, table, rate, power) -> tf.Tensor:
    with tf.control_dependencies(
        [tf.debugging.Assert(False, ["an error of the rule"])]
    ):
        return table - gradient


@pytest.mark.parametrize(
    ("computation", "num_tables", "expected"),
    [
        (returns_another_shape, 1, r"returned .*shape: \[8\].* for a row .* \[1,8\]"),
        (forgets_its_slot, 2, "returned 1 tensors for 2 tables and slots"),
        (fails, 1, "an error of the rule"),
    ],
)
def test_what_a_rule_must_not_do(
    computation: Any, num_tables: int, expected: str, rng: np.random.Generator
):
    cut = [SYSTEM.cut(value) for value in values(rng)[:num_tables]]
    tables = list(zip(*cut, strict=True))
    gradients = [np.ones((6, D), np.float32)] * 2
    with pytest.raises(tf.errors.InvalidArgumentError, match=expected):
        update(computation, [[(0, 1, 1.0)], []], gradients, tables)


def test_a_slot_has_one_entry_per_row(rng: np.random.Generator):
    table, history, _ = (SYSTEM.cut(value) for value in values(rng))
    tables = [[table[0], history[0][:4]], [table[1], history[1][:4]]]
    gradients = [np.ones((6, D), np.float32)] * 2
    with pytest.raises(
        tf.errors.InvalidArgumentError,
        match=r"slot has the shape \[4,8\], but must have one entry for each of the 12",
    ):
        update(forgets_its_slot, [[], []], gradients, tables)
