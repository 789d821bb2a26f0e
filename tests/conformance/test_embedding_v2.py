"""TPUEmbeddingV2 against the NumPy reference, with the same twin.

What surrounds a rule is TPUEmbedding's own code, whose suites vary it further.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import optimizer_cases
import pytest
import tensorflow as tf
from conformance import cases
from conformance.twin import Feature, Table, Twin
from replica_values import mirrored

import tpu_embedding as te

RATE = 0.25
KINDS = ("dense3", "sparse2", "ragged", "ragged_positions", "sparse_sequence")


class Stepwise:
    """TPUEmbeddingV2 with the calls of TPUEmbedding."""

    def __init__(self, feature_config: Any, optimizer: Any, **arguments: Any) -> None:
        self._embedding = te.TPUEmbeddingV2(feature_config, optimizer, **arguments)
        self._embedding.build()
        self._batch: Any = None
        self._preserved: Any = None

    def enqueue(self, values: Any, weights: Any, training: bool = True) -> None:
        self._batch = self._embedding.enqueue(values, weights)

    def dequeue(self) -> Any:
        activations, self._preserved = self._embedding.dequeue(self._batch)
        return activations

    def apply_gradients(self, gradients: Any) -> None:
        self._embedding.apply_gradients(gradients, self._preserved)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._embedding, name)


def make_twin(optimizer: Any, kinds: Any, combiner: str, **arguments: Any) -> Twin:
    """Two tables of one kind, which are stacked, and a third; each input twice."""
    dims = {"one": 3, "two": 3, "three": 8}
    tables, features = {}, {}
    for number, kind in enumerate(kinds):
        table = list(dims)[number % 3]
        tables[table] = Table(dim=dims[table], combiner=combiner)
        features[kind] = Feature(table, cases.INPUT_BY_NAME[kind])
        features[f"{kind}_weighted"] = Feature(table, cases.INPUT_BY_NAME[kind], True)
    return Twin(tables, features, optimizer, make=Stepwise, inside=True, **arguments)


def test_every_kind_of_input(rng: np.random.Generator) -> None:
    twin = make_twin(te.Adagrad(RATE), cases.INPUT_BY_NAME, "mean")
    assert len(twin.embedding.stacked_tables) == 2
    twin.run(rng, 2, without=[name for name in twin.features if "weighted" in name])


@pytest.mark.parametrize("case", optimizer_cases.OPTIMIZERS, ids=lambda case: case.name)
def test_every_rule(case: Any, rng: np.random.Generator) -> None:
    number = optimizer_cases.OPTIMIZERS.index(case)
    common = optimizer_cases.COMMON_OPTIONS
    options = {**common[number % len(common)], **case.options[-1]}
    optimizer = case.cls(learning_rate=RATE, **options)
    combiner = cases.COMBINERS[number % 3]
    make_twin(optimizer, KINDS, combiner).run(rng, 2, without=["ragged", "dense3"])


def test_in_a_function(rng: np.random.Generator) -> None:
    optimizer = te.Adam(lambda: tf.constant(RATE))
    twin = make_twin(optimizer, KINDS[1:3], "mean", function=tf.function)
    twin.run(rng, 2)


@pytest.mark.parametrize("engine", ["host"], indirect=True)
@pytest.mark.parametrize("function", [None, tf.function], ids=["eager", "function"])
def test_replicas(function: Any, rng: np.random.Generator) -> None:
    strategy = mirrored(2)
    # A callable of the number of updates: counted once for all replicas.
    rate = tf.keras.optimizers.schedules.PiecewiseConstantDecay([0], [RATE, RATE])
    arguments = {"function": function} if function else {}
    make_twin(te.SGD(rate), KINDS[1:2], "sqrtn", strategy=strategy, **arguments).run(
        rng, 2
    )


@pytest.mark.parametrize("engine", ["host"], indirect=True)
def test_pipelining(rng: np.random.Generator) -> None:
    make_twin(
        te.Adagrad(RATE), KINDS[:3], "sum", pipeline_execution_with_tensor_core=True
    ).run(rng, 4)


@pytest.mark.parametrize("rule", ["drop", "mod"])
def test_invalid_ids(rule: str, rng: np.random.Generator) -> None:
    kind = cases.INPUT_BY_NAME["ragged"]
    twin = Twin(
        {"table": Table(combiner="sqrtn", invalid_ids=rule)},
        {"plain": Feature("table", kind), "weighted": Feature("table", kind, True)},
        te.SGD(RATE),
        make=Stepwise,
        inside=True,
    )
    batch = twin.draw(rng)
    for name, value in batch.values[0].items():
        ids = cases.values_of(value)
        ids[::3] += 11 * (1 if name == "plain" else -2)
        batch.values[0][name] = cases.with_values(value, ids)
    twin.step(rng, batch)
    twin.check_variables()
