"""Ours: TPUEmbedding, enqueue, dequeue and apply_gradients in one tf.function."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import tensorflow as tf

import tpu_embedding as te
from benchmarks import feed
from benchmarks.scenarios import Scenario
from benchmarks.timing import timed
from tpu_embedding.ops import library

RULE = "each touched row once, gradients summed first"

OPTIMIZERS = {
    "sgd": te.SGD(0.01),
    "adagrad": te.Adagrad(0.01),
    "adam": te.Adam(0.01),
    "ftrl": te.FTRL(0.01),
    "rowwise_adagrad": te.RowwiseAdagrad(0.01),
}


def features(
    scenario: Scenario, dtype: str = "float32", initializer: Any = None
) -> list[te.FeatureConfig]:
    """Makes a feature with a table of its own for each feature of the scenario."""
    options = {"initializer": initializer, "combiner": "sum", "dtype": dtype}
    return [
        te.FeatureConfig(te.TableConfig(rows, scenario.dim, **options))
        for rows in scenario.rows
    ]


def prepare(
    scenario: Scenario,
    optimizer: str,
    dtype: str = "float32",
    form: str | None = None,
    initializer: Any = None,
) -> dict[str, Callable[[], float]]:
    """Makes the tables, stored as `dtype`, and traces the steps.

    The batches have a form of `scenarios.FORMS`; by default they are dense if bags
    have one size, otherwise ragged.
    """
    library.load()  # Without it the portable engine would be measured.
    embedding = te.TPUEmbedding(
        features(scenario, dtype, initializer), OPTIMIZERS[optimizer]
    )
    embedding.build()
    gradients = feed.gradients(scenario)
    batches = scenario.batches(4, with_weights=True)
    next_batch = _feed(scenario, batches, form)

    @tf.function
    def step() -> None:
        embedding.enqueue(*next_batch())
        embedding.dequeue()
        embedding.apply_gradients(gradients)

    @tf.function
    def lookup() -> list[tf.Tensor]:
        embedding.enqueue(*next_batch(), training=False)
        return embedding.dequeue()

    return {"step": timed(step), "lookup": timed(lookup)}


def _feed(
    scenario: Scenario, batches: list[list[np.ndarray]], form: str | None
) -> Callable[[], Any]:
    """Feeds batches of a form, and the weights of ragged ones."""
    if form == "ragged" or (scenario.most_ids and form is None):
        return feed.ragged(batches, weighted=scenario.weighted)
    if form == "int64":
        batches = [[ids.astype(np.int64) for ids in batch] for batch in batches]
    next_batch = feed.sparse(batches) if form == "sparse" else feed.dense(batches)
    return lambda: (next_batch(),)
