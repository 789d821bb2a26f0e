"""tf.nn.embedding_lookup_sparse, and a Keras 3 optimizer for the tables."""

from __future__ import annotations

from collections.abc import Callable

import keras
import tensorflow as tf

from benchmarks import feed
from benchmarks.scenarios import Scenario
from benchmarks.timing import timed

RULE = "keras.optimizers on IndexedSlices"

_OPTIMIZERS = {
    "sgd": lambda: keras.optimizers.SGD(0.01),
    "adagrad": lambda: keras.optimizers.Adagrad(0.01),
    "adam": lambda: keras.optimizers.Adam(0.01),
    "ftrl": lambda: keras.optimizers.Ftrl(0.01),
}


def prepare(scenario: Scenario, optimizer: str) -> dict[str, Callable[[], float]]:
    """Makes the tables and traces the steps."""
    if optimizer not in _OPTIMIZERS:
        raise NotImplementedError(f"Keras has no {optimizer}.")
    tables = [
        keras.Variable(
            tf.random.truncated_normal([rows, scenario.dim], stddev=scenario.dim**-0.5)
        )
        for rows in scenario.rows
    ]
    rule = _OPTIMIZERS[optimizer]()
    rule.build(tables)
    given = feed.gradients(scenario)
    next_batch = feed.sparse(scenario.batches(4))

    @tf.function
    def lookup() -> list[tf.Tensor]:
        return [
            tf.nn.embedding_lookup_sparse(table.value, ids, None, combiner="sum")
            for table, ids in zip(tables, next_batch(), strict=True)
        ]

    @tf.function
    def step() -> None:
        with tf.GradientTape() as tape:
            activations = lookup()
        values = [table.value for table in tables]
        rule.apply(tape.gradient(activations, values, given), tables)

    return {"step": timed(step), "lookup": timed(lookup)}
