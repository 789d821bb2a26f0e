"""Pipelining: activations are exactly one update old, and nothing else changes."""

from __future__ import annotations

import functools
from typing import Any

import numpy as np
import optimizer_cases
import pytest
import tensorflow as tf
from conformance import cases
from conformance.test_training import two_features
from replica_values import mirrored

import tpu_embedding as te

RATE = 0.25
pytestmark = pytest.mark.parametrize("engine", ["host"], indirect=True)


pipelined = functools.partial(
    two_features, combiner="mean", pipeline_execution_with_tensor_core=True
)


@pytest.mark.parametrize("case", optimizer_cases.OPTIMIZERS, ids=lambda case: case.name)
def test_rule(case: Any, rng: np.random.Generator) -> None:
    twin = pipelined(case.cls(learning_rate=RATE, **case.options[-1]))
    for _ in range(3):
        twin.step(rng, twin.draw(rng))
    twin.evaluate(twin.draw(rng))  # Sees all updates.
    twin.step(rng, twin.draw(rng), without=["dense"])
    twin.run(rng, 2)


def test_strategy(strategy: tf.distribute.Strategy, rng: np.random.Generator) -> None:
    twin = pipelined(te.Adam(RATE), strategy=strategy)
    twin.run(rng, 3)
    twin.evaluate(twin.draw(rng))
    twin.run(rng, 2)


@pytest.mark.parametrize("replicas", [1, 2])
def test_function(replicas: int, rng: np.random.Generator) -> None:
    twin = pipelined(
        te.Adagrad(lambda step: 0.5 / (1 + tf.cast(step, tf.float32))),
        strategy=mirrored(replicas),
        function=lambda step: tf.function(step, reduce_retracing=True),
    )
    twin.run(rng, 4)


def test_several_batches_wait(rng: np.random.Generator) -> None:
    """Evaluation after training in one queue: it waits for the updates before it."""
    twin = pipelined(te.SGD(RATE))
    for _ in range(2):
        twin.step(rng, twin.draw(rng))
    training, evaluation = twin.draw(rng), twin.draw(rng)
    embedding = twin.embedding
    embedding.enqueue(training.values[0], training.weights[0], training=True)
    embedding.enqueue(evaluation.values[0], evaluation.weights[0], training=False)
    stale = embedding.dequeue()
    embedding.apply_gradients(tf.nest.map_structure(tf.zeros_like, stale))
    fresh = embedding.dequeue()
    twin.reference.flush()
    expected = twin.reference.lookup(*twin.reference_batch(evaluation))[0]
    for name, values in zip(twin.features, expected, strict=True):
        bound = cases.tolerance(16, 4.0, steps=3)
        cases.assert_close(fresh[name], values, bound, name)
