"""Tests of custom combiners: functions of the vectors that a sample looks up."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import tensorflow as tf
from reference import optimizers as reference
from software_tpu import calls, partitioned

D, VALENCY, WEIGHTS = 8, 4, 4
SYSTEM = partitioned.System(2, 2, num_samples=6, num_rows=24)
PREFIX = "XlaSparseDenseMatmulCustomCombinerOnTc"
EPSILON = float(np.finfo(np.float32).eps)
# Of values near 1: sums of up to 50 terms, the rule and the combiner.
TOLERANCE = 150 * EPSILON

S = SYSTEM.num_samples
VALENCIES = tf.TensorSpec((S,), tf.int32)
VECTORS = tf.TensorSpec((S, VALENCY, D), tf.float32)
WEIGHT = tf.TensorSpec((S, WEIGHTS), tf.float32)
GRADIENT = tf.TensorSpec((S, D), tf.float32)


def counts(valency: tf.Tensor) -> tf.Tensor:
    return tf.maximum(tf.cast(valency, tf.float32), 1.0)[:, None]


@tf.function(input_signature=[VALENCIES, VECTORS, WEIGHT])
def combine(valency, vectors, weights) -> tf.Tensor:
    """Position k counts by weight k; divided by the valency."""
    return tf.linalg.matvec(vectors, weights, transpose_a=True) / counts(valency)


@tf.function(input_signature=[VALENCIES, VECTORS, WEIGHT, GRADIENT])
def table_vjp(valency, vectors, weights, gradient) -> tf.Tensor:
    scaled = gradient / counts(valency)
    return weights[:, :, None] * scaled[:, None, :]


@tf.function(input_signature=[VALENCIES, VECTORS, WEIGHT, GRADIENT])
def weights_vjp(valency, vectors, weights, gradient) -> tf.Tensor:
    return tf.linalg.matvec(vectors, gradient) / counts(valency)


def run(op: str, inputs: list[dict[str, Any]], functions: dict, **attributes) -> list:
    """The outputs by replica."""
    strategy = calls.strategy_of("v6e", 2)

    def program(inputs: dict[str, Any]) -> list[tf.Tensor]:
        concrete = {}
        for name, function in functions.items():
            concrete[name] = function.get_concrete_function()
            concrete[name].add_to_graph(tf.compat.v1.get_default_graph())
        shape = {"max_valency": VALENCY, "num_weights": WEIGHTS, "table_name": "t"}
        shape |= attributes
        outputs = getattr(tf.raw_ops, op)(**inputs, **concrete, **shape)
        return tf.nest.flatten(tuple(outputs))

    given = strategy.experimental_distribute_values_from_function(
        lambda context: tf.nest.map_structure(
            tf.constant, inputs[context.replica_id_in_sync_group]
        )
    )
    outputs = strategy.run(program, (given,))
    by_output = [strategy.experimental_local_results(output) for output in outputs]
    return [[value.numpy() for value in own] for own in zip(*by_output, strict=True)]


def look_up(
    entries: list[list[partitioned.Entry]], table: np.ndarray, weights: np.ndarray
) -> list[list[np.ndarray]]:
    return run(
        f"{PREFIX}WithCsrInput",
        [
            {
                **SYSTEM.csr(own, with_positions=True),
                "embedding_table": part,
                "weights": weights,
            }
            for own, part in zip(entries, SYSTEM.cut(table), strict=True)
        ],
        {"combiner_computation": combine},
        **calls.lookup_attributes(SYSTEM.num_samples),
    )


def data(rng: np.random.Generator) -> tuple:
    table = rng.normal(size=(SYSTEM.num_rows, D)).astype(np.float32)
    weights = rng.uniform(0.5, 1.5, size=WEIGHTS).astype(np.float32)
    entries = [
        partitioned.random_entries(SYSTEM, rng, per_sample=VALENCY) for _ in range(2)
    ]
    return table, weights, entries


def vectors_of(entries: list[partitioned.Entry], table: np.ndarray) -> list[list]:
    """For each sample the vectors in the order of its ids."""
    found: list[list] = [[] for _ in range(SYSTEM.num_samples)]
    for sample, id_, gain in entries:
        found[sample].append(gain * table[id_].astype(np.float64))
    return found


def test_lookup(rng: np.random.Generator):
    table, weights, entries = data(rng)
    outputs = look_up(entries, table, weights)
    for own, (activations, valencies, vectors) in zip(entries, outputs, strict=True):
        for sample, found in enumerate(vectors_of(own, table)):
            expected = np.zeros((VALENCY, D))
            expected[: len(found)] = np.reshape(found, (-1, D))
            assert valencies[sample] == len(found)
            np.testing.assert_allclose(vectors[sample], expected, rtol=EPSILON)
            np.testing.assert_allclose(
                activations[sample],
                weights @ expected / max(len(found), 1),
                atol=TOLERANCE,
            )


def paper_gradients(
    entries: list, gradients: list, table: np.ndarray, weights: np.ndarray
) -> tuple[dict[int, np.ndarray], np.ndarray]:
    rows: dict[int, np.ndarray] = {}
    of_weights = np.zeros(WEIGHTS)
    for own, gradient in zip(entries, gradients, strict=True):
        found = vectors_of(own, table)
        for sample, vectors in enumerate(found):
            for k, vector in enumerate(vectors):
                of_weights[k] += vector @ gradient[sample] / len(vectors)
        before = [0] * SYSTEM.num_samples
        for sample, id_, gain in own:
            scale = gain * weights[before[sample]] / len(found[sample])
            before[sample] += 1
            rows[id_] = rows.get(id_, 0.0) + scale * gradient[sample]
    return rows, of_weights


@tf.function(
    input_signature=[*[tf.TensorSpec((1, D), tf.float32)] * 3, tf.TensorSpec(())]
)
def adagrad(gradient, table, accumulator, rate) -> tuple:
    accumulator += gradient * gradient
    return table - rate * gradient / tf.sqrt(accumulator), accumulator


def update_inputs(
    op: str,
    entries: list,
    gradients: list,
    tables: tuple[np.ndarray, np.ndarray],
    weights: np.ndarray,
) -> list[dict[str, Any]]:
    inputs = []
    looked_up = look_up(entries, tables[0], weights)
    for replica, parts in enumerate(zip(*map(SYSTEM.cut, tables), strict=True)):
        _, valencies, vectors = looked_up[replica]
        own = {
            **SYSTEM.csr(entries[replica], with_positions=True),
            "weights": weights,
            "preserved_valencies": valencies,
            "preserved_vectors": vectors,
            "preserved_weights": weights,
            "activation_gradients": gradients[replica],
            "combiner_weights_learning_rate": np.float32(0.125),
        }
        if op == "custom":
            own |= {"tables": list(parts), "hyperparameters": [np.float32(0.25)]}
        else:
            own |= {"embedding_table": parts[0], "accumulator": parts[1]}
            own["learning_rate"] = np.float32(0.25)
        inputs.append(own)
    return inputs


@pytest.mark.parametrize("op", ["Adagrad", "custom"])
def test_update(op: str, rng: np.random.Generator):
    table, weights, entries = data(rng)
    gradients = [rng.normal(size=(6, D)).astype(np.float32) for _ in range(2)]
    slot = np.full_like(table, 0.1)
    inputs = update_inputs(op, entries, gradients, (table, slot), weights)
    functions = {
        "combiner_table_vjp_computation": table_vjp,
        "combiner_weights_vjp_computation": weights_vjp,
    }
    if op == "custom":
        functions["optimizer_custom_computation"] = adagrad
        outputs = run(f"{PREFIX}GradWithCsrInput", inputs, functions)
    else:
        outputs = run(f"{PREFIX}GradWith{op}AndCsrInput", inputs, functions)
    rows, of_weights = paper_gradients(entries, gradients, table, weights)
    expected = reference.apply("Adagrad", {}, table, {"accumulators": slot}, rows, 0.25)
    for k, value in enumerate((expected[0], expected[1]["accumulators"])):
        actual = SYSTEM.join([own[k] for own in outputs])
        np.testing.assert_allclose(actual, value, rtol=TOLERANCE, atol=TOLERANCE)
    for own in outputs:
        np.testing.assert_allclose(
            own[2], weights - 0.125 * of_weights, rtol=TOLERANCE, atol=8 * TOLERANCE
        )


def test_more_ids_than_the_valency_are_refused(rng: np.random.Generator):
    table, weights, _ = data(rng)
    entries = [[(0, k, 1.0) for k in range(VALENCY + 1)], []]
    with pytest.raises(
        tf.errors.InvalidArgumentError,
        match=r"position 4 is not in \[0, 4\), the combiner's max_valency",
    ):
        look_up(entries, table, weights)


@tf.function(input_signature=[VALENCIES, VECTORS])
def first(valency, vectors) -> tf.Tensor:
    return tf.where((valency > 0)[:, None], vectors[:, 0], -tf.ones([S, D]))


def test_a_combiner_without_weights_gets_none_and_sees_empty_samples(
    rng: np.random.Generator,
):
    table, _, entries = data(rng)
    entries[0] = [entry for entry in entries[0] if entry[0] != 1]
    outputs = run(
        f"{PREFIX}WithCsrInput",
        [
            {
                **SYSTEM.csr(own, with_positions=True),
                "embedding_table": part,
                "weights": np.zeros(0, np.float32),
            }
            for own, part in zip(entries, SYSTEM.cut(table), strict=True)
        ],
        {"combiner_computation": first},
        num_weights=0,
        **calls.lookup_attributes(SYSTEM.num_samples),
    )
    assert outputs[0][0][1].tolist() == [-1.0] * D
    for own, (activations, *_) in zip(entries, outputs, strict=True):
        for sample, found in enumerate(vectors_of(own, table)):
            expected = found[0] if found else -np.ones(D)
            np.testing.assert_allclose(activations[sample], expected, rtol=EPSILON)
