"""Ours beside ours: the same steps over tables that grow."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import tensorflow as tf

import tpu_embedding as te
from benchmarks import feed
from benchmarks.peers import tpu_embedding
from benchmarks.scenarios import Scenario
from benchmarks.timing import timed
from tpu_embedding.ops import library

RULE = "as ours, rows for the ids that occur; step_new: a tenth of them new"
_NEW = 10  # In step_new, one of this many ids is new.


def prepare(scenario: Scenario, optimizer: str) -> dict[str, Callable[[], float]]:
    """Makes the tables, which have room for twice the rows, and traces the steps."""
    library.load()
    embedding = te.TPUEmbedding(
        [_feature(rows, scenario.dim) for rows in scenario.rows],
        tpu_embedding.OPTIMIZERS[optimizer],
    )
    embedding.build()
    gradients = feed.gradients(scenario)
    batches = scenario.batches(4)
    next_batch = feed.dense([[x.astype(np.int64) for x in b] for b in batches])
    steps = tf.Variable(tf.zeros([], tf.int64))

    def train(features: Sequence[tf.Tensor]) -> None:
        embedding.enqueue(features)
        embedding.dequeue()
        embedding.apply_gradients(gradients)

    @tf.function
    def step() -> None:
        train(next_batch())

    @tf.function
    def step_new() -> None:
        number = tf.identity(steps.assign_add(1))
        train([_renew(ids, number) for ids in next_batch()])

    @tf.function
    def lookup() -> list[tf.Tensor]:
        embedding.enqueue(next_batch(), training=False)
        return embedding.dequeue()

    for _ in batches:
        step()  # After these steps no id of the batches is new.
    return {"step": timed(step), "lookup": timed(lookup), "step_new": timed(step_new)}


def _feature(rows: int, dim: int) -> te.FeatureConfig:
    vocabulary = te.GrowingVocabulary(2 * rows, eviction="lru")
    return te.FeatureConfig(te.TableConfig(vocabulary, dim, combiner="sum"))


def _renew(ids: tf.Tensor, number: tf.Tensor) -> tf.Tensor:
    """Gives one id of `_NEW` a number that no other step has."""
    places = tf.reshape(tf.range(tf.size(ids, tf.int64)), tf.shape(ids))
    return tf.where(places % _NEW == 0, ids + number * 2**32, ids)
