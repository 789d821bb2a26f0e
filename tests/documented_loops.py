"""Training and evaluation loops of the shape that TensorFlow documents.

The shape: a tf.function over a distributed data set loops with tf.range, enqueues
each batch outside of `strategy.run`, and dequeues inside it. The data set is made
with `experimental_fetch_to_device=False`, so that ids stay on the host. (TensorFlow
2.3 called that option `experimental_prefetch_to_device`.)
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import tensorflow as tf

import tpu_embedding as te

# A batch of two replicas can be cut for four SparseCores each.
V, D, BATCH, STEPS = 12, 4, 24, 3
stock = tf.tpu.experimental.embedding


def feature_config() -> dict[str, Any]:
    """Two features that share the table "films", and one of the table "users"."""
    rows = te.RowIdInitializer()
    films = stock.TableConfig(V, D, rows, combiner="sum", name="films")
    users = stock.TableConfig(V, D, rows, combiner="mean", name="users")
    return {
        "bought": stock.FeatureConfig(films),
        "seen": stock.FeatureConfig(films),
        "user": stock.FeatureConfig(users),
    }


def dataset(context: tf.distribute.InputContext) -> tf.data.Dataset:
    """Batches of one replica: ids by feature, and a number to be predicted."""
    row = tf.range(STEPS * BATCH) % V
    ids = {"bought": row, "seen": (5 * row) % V, "user": row}
    samples = tf.data.Dataset.from_tensor_slices((ids, tf.cast(row, tf.float32)))
    batch_size = context.get_per_replica_batch_size(BATCH)
    return samples.repeat().batch(batch_size, drop_remainder=True)


def predict(activations: Any) -> tf.Tensor:
    """The dense model: the sum of all activations of a sample."""
    return tf.add_n([tf.reduce_sum(a, -1) for a in tf.nest.flatten(activations)])


def loops(embedding: te.TPUEmbedding, strategy: tf.distribute.Strategy) -> list[Any]:
    """Trains and evaluates; the sum of all predictions, and all variables."""
    with strategy.scope():
        predictions = tf.Variable(0.0, aggregation=tf.VariableAggregation.SUM)

    def train_replica(wanted: tf.Tensor) -> None:
        with tf.GradientTape() as tape:
            looked_up = embedding.dequeue()
            tape.watch(looked_up)
            squares = (predict(looked_up) - wanted) ** 2
            loss = tf.reduce_sum(squares) / 1000
        embedding.apply_gradients(tape.gradient(loss, looked_up))

    def evaluate_replica(_: tf.Tensor) -> None:
        predictions.assign_add(tf.reduce_sum(predict(embedding.dequeue())))

    @tf.function
    def train(batches: Any, steps: Any) -> None:
        for _ in tf.range(steps):
            ids, wanted = next(batches)
            embedding.enqueue(ids, training=True)
            strategy.run(train_replica, args=(wanted,))

    @tf.function
    def evaluate(batches: Any, steps: Any) -> None:
        for _ in tf.range(steps):
            ids, wanted = next(batches)
            embedding.enqueue(ids, training=False)
            strategy.run(evaluate_replica, args=(wanted,))

    return _run(embedding, strategy, train, evaluate, predictions)


def loops_of_version_2(
    embedding: te.TPUEmbeddingV2, strategy: tf.distribute.Strategy
) -> list[Any]:
    """The loops of TPUEmbeddingV2, whose lookups hand the batch on; as `loops`."""
    with strategy.scope():
        predictions = tf.Variable(0.0, aggregation=tf.VariableAggregation.SUM)

    def train_replica(ids: Any, wanted: tf.Tensor) -> None:
        with tf.GradientTape() as tape:
            looked_up, preserved = embedding(ids)
            tape.watch(looked_up)
            squares = (predict(looked_up) - wanted) ** 2
            loss = tf.reduce_sum(squares) / 1000
        gradients = tape.gradient(loss, looked_up)
        embedding.apply_gradients(gradients, preserved)

    def evaluate_replica(ids: Any, _: tf.Tensor) -> None:
        looked_up, _preserved = embedding(ids)
        predictions.assign_add(tf.reduce_sum(predict(looked_up)))

    @tf.function
    def train(batches: Any, steps: Any) -> None:
        for _ in tf.range(steps):
            strategy.run(train_replica, args=next(batches))

    @tf.function
    def evaluate(batches: Any, steps: Any) -> None:
        for _ in tf.range(steps):
            strategy.run(evaluate_replica, args=next(batches))

    def flush_and_evaluate(batches: Any, steps: Any) -> None:
        # A lookup does not tell whether gradients will follow.
        embedding.flush()
        evaluate(batches, steps)

    return _run(embedding, strategy, train, flush_and_evaluate, predictions)


def _run(
    embedding: te.TPUEmbedding | te.TPUEmbeddingV2,
    strategy: tf.distribute.Strategy,
    train: Any,
    evaluate: Any,
    predictions: tf.Variable,
) -> list[Any]:
    on_host = tf.distribute.InputOptions(experimental_fetch_to_device=False)
    batches = iter(strategy.distribute_datasets_from_function(dataset, on_host))
    train(batches, STEPS)
    evaluate(batches, STEPS)
    tables = embedding.core.checkpoint_rows().values()
    variables = [rows.numpy() for table in tables for rows in table.values()]
    return [predictions.numpy(), *variables]


def assert_same(results: Sequence[Sequence[np.ndarray]]) -> None:
    """All runs have the numbers of the first, and these are not the initial ones."""
    # Sums of at most 2 * BATCH gradients, in another order, over STEPS updates of
    # values up to V: 48 * 3 roundings each of V * 2**-24, and 3 * 72 terms in total.
    for other in results[1:]:
        for expected, actual in zip(results[0], other, strict=True):
            np.testing.assert_allclose(actual, expected, rtol=144 * 2**-23, atol=2e-5)
    assert not np.array_equal(results[0][1][:, 0], np.arange(V))
