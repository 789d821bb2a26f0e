"""Ours: a tf.function that is called with a batch of ragged features."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import tensorflow as tf

import tpu_embedding as te
from benchmarks import feed
from benchmarks.peers import tpu_embedding
from benchmarks.scenarios import Scenario
from benchmarks.timing import timed
from tpu_embedding.ops import library

RULE = "as ours, the features are ragged arguments of the function"


def prepare(
    scenario: Scenario,
    optimizer: str,
    form: Callable[[Any], Any] = lambda features: features,
) -> dict[str, Callable[[], float]]:
    """Makes the tables; `form` converts each batch beforehand."""
    library.load()  # Without it the portable engine would be measured.
    embedding = te.TPUEmbedding(
        tpu_embedding.features(scenario), tpu_embedding.OPTIMIZERS[optimizer]
    )
    embedding.build()
    gradients = feed.gradients(scenario)
    batches = itertools.cycle(
        form([tf.RaggedTensor.from_tensor(tf.constant(ids)) for ids in batch])
        for batch in scenario.batches(4)
    )

    @tf.function
    def step(features: Any) -> None:
        embedding.enqueue(features)
        embedding.dequeue()
        embedding.apply_gradients(gradients)

    @tf.function
    def lookup(features: Any) -> list[tf.Tensor]:
        embedding.enqueue(features, training=False)
        return embedding.dequeue()

    return {
        "step": timed(lambda: step(next(batches))),
        "lookup": timed(lambda: lookup(next(batches))),
    }
