"""Ids outside of the table: dropped, taken modulo V, or refused, in every kind."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import tensorflow as tf
from conformance import cases
from conformance.twin import Batch, Feature, Table, Twin

import tpu_embedding as te

ROWS = 11
WRONG = {
    tf.int32: [-1, ROWS, -ROWS - 3, 2**31 - 1, -(2**31)],
    tf.int64: [-1, ROWS, 2**32 + 1, 2**40 + 5, -(2**63), 2**63 - 1],
}

each_input = pytest.mark.parametrize("kind", cases.INPUTS, ids=lambda kind: kind.name)


def spoiled(rng: np.random.Generator, value: Any) -> Any:
    """The same with about every third id, and all of the first sample, replaced."""
    ids = cases.values_of(value)
    wrong = rng.random(ids.shape) < 0.3
    wrong.flat[: cases.samples_of(value)[0].stop] = True
    wrong.flat[-1] = False
    ids[wrong] = rng.choice(WRONG[value.dtype], wrong.sum())
    return cases.with_values(value, ids)


def draw(rng: np.random.Generator, twin: Twin) -> Batch:
    batch = twin.draw(rng)
    for replica in batch.values:
        replica.update({name: spoiled(rng, value) for name, value in replica.items()})
    return batch


@pytest.mark.parametrize("rule", ["drop", "mod"])
@each_input
def test_rule(kind: cases.Input, rule: str, rng: np.random.Generator) -> None:
    # Ids are read before combiners are: each kind takes the next one.
    combiner = cases.COMBINERS[cases.INPUTS.index(kind) % 3]
    features = {
        "plain_int32": Feature("table", kind),
        "plain_int64": Feature("table", kind),
        "weighted_int32": Feature("table", kind, weighted=True),
        "weighted_int64": Feature("table", kind, weighted=True),
    }
    table = Table(rows=ROWS, combiner=combiner, invalid_ids=rule)
    twin = Twin({"table": table}, features, te.Adagrad(0.25))
    twin.evaluate(draw(rng, twin))
    twin.step(rng, draw(rng, twin))
    twin.step(rng, draw(rng, twin), without=["plain_int64"])
    twin.check_variables()


@each_input
def test_error_changes_nothing(kind: cases.Input, rng: np.random.Generator) -> None:
    twin = Twin(
        {"table": Table(rows=ROWS)},
        {"good": Feature("table", kind), "spoiled": Feature("table", kind)},
        te.Adagrad(0.25),
    )
    twin.run(rng, 1)
    batch = twin.draw(rng)
    # The last id is in no sequence's output: it is past the end, and still refused.
    value = batch.values[0]["spoiled"]
    ids = cases.values_of(value)
    ids.flat[-1] = ROWS
    batch.values[0]["spoiled"] = cases.with_values(value, ids)
    words = rf"(?s)spoiled.*table.*sample \d+ has id {ROWS}.*\[0, {ROWS}\)"
    for training in (True, False):
        with pytest.raises(tf.errors.InvalidArgumentError, match=words):
            twin.embedding.enqueue(batch.values[0], training=training)
    with pytest.raises(tf.errors.FailedPreconditionError, match="no batch"):
        twin.embedding.dequeue()
    twin.check_variables()
    twin.run(rng, 1)
