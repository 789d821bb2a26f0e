"""The same numbers with several replicas, whose gradients make up one update.

The default strategy is that of all other tests here. Strategies x kinds of input are
covered in full; all other choices take turns, since replicas meet only after gains and
before the rule.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import optimizer_cases
import pytest
import tensorflow as tf
from conformance import cases
from conformance.conftest import STRATEGIES
from conformance.twin import Feature, Table, Twin

RATE = 0.25


pytestmark = pytest.mark.parametrize("engine", ["host"], indirect=True)


def two_features(
    kind: cases.Input, combiner: str, *arguments: Any, **more: Any
) -> Twin:
    return Twin(
        {"table": Table(combiner=combiner), "other": Table(dim=3)},
        {
            "plain": Feature("table", kind),
            "weighted": Feature("table", kind, weighted=True),
            "other": Feature("other", cases.INPUT_BY_NAME["dense2"]),
        },
        *arguments,
        **more,
    )


@pytest.mark.parametrize("kind", cases.INPUTS, ids=lambda kind: kind.name)
def test_kind_of_input(
    kind: cases.Input, strategy: tf.distribute.Strategy, rng: np.random.Generator
) -> None:
    turn = cases.INPUTS.index(kind)
    optimizer = optimizer_cases.OPTIMIZERS[turn % len(optimizer_cases.OPTIMIZERS)]
    twin = two_features(
        kind, cases.COMBINERS[turn % 3], optimizer.cls(learning_rate=RATE), strategy
    )
    twin.evaluate(twin.draw(rng))
    twin.run(rng, 2, without=["plain"])


@pytest.mark.parametrize("case", optimizer_cases.OPTIMIZERS, ids=lambda case: case.name)
def test_optimizer(case: Any, rng: np.random.Generator) -> None:
    turn = optimizer_cases.OPTIMIZERS.index(case)
    inside = turn // 3 % 2 == 1
    strategy = STRATEGIES[sorted(STRATEGIES)[turn % 3]]()
    twin = two_features(
        cases.INPUT_BY_NAME["ragged" if inside else "sparse2"],
        cases.COMBINERS[turn % 3],
        case.cls(learning_rate=RATE, clipvalue=0.5, **case.options[-1]),
        strategy,
        inside=inside,
    )
    twin.run(rng, 2, without=["weighted"])


@pytest.mark.parametrize(
    ("inside", "name"),
    [(False, "one_device"), (False, "mirrored2"), (True, "mirrored2")],
    ids=["one_device", "outside", "inside"],
)
def test_function(inside: bool, name: str, rng: np.random.Generator) -> None:
    # One of each kind, and no None: tracing for several replicas takes its time.
    twin = Twin(
        {"table": Table(combiner="sqrtn")},
        {
            name: Feature("table", cases.INPUT_BY_NAME[name], weighted=True)
            for name in ("dense2", "sparse_sequence", "ragged")
        },
        optimizer_cases.OPTIMIZERS[-1].cls(learning_rate=RATE),
        STRATEGIES[name](),
        function=lambda step: tf.function(step, reduce_retracing=True),
        inside=inside,
    )
    twin.run(rng, 2)
