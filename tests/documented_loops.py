"""The loops of TensorFlow's own documentation of TPUEmbedding, but for the strategy.

They stand in the class's docstring: a training and an evaluation step over a
distributed data set with `experimental_fetch_to_device=False` (TensorFlow 2.3
called that option `experimental_prefetch_to_device`), and enqueue for each core.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import tensorflow as tf

import tpu_embedding as te

V, D, BATCH, STEPS = 12, 4, 6, 3
stock = tf.tpu.experimental.embedding


def feature_config() -> dict[str, Any]:
    one = stock.TableConfig(V, D, te.RowIdInitializer(), combiner="sum", name="one")
    two = stock.TableConfig(V, D, te.RowIdInitializer(), combiner="mean", name="two")
    return {
        "feature_one": stock.FeatureConfig(table=one),
        "feature_two": stock.FeatureConfig(table=one),
        "feature_three": stock.FeatureConfig(table=two),
    }


def dataset(context: tf.distribute.InputContext) -> tf.data.Dataset:
    size = context.get_per_replica_batch_size(BATCH)
    ids = tf.range(STEPS * BATCH) % V
    values = {"feature_one": ids, "feature_two": (5 * ids) % V, "feature_three": ids}
    data = tf.data.Dataset.from_tensor_slices((values, tf.cast(ids, tf.float32)))
    return data.repeat().batch(size, drop_remainder=True)


def loops(  # length: TensorFlow's two loops, whole, as they are printed.
    embedding: te.TPUEmbedding, strategy: tf.distribute.Strategy
) -> list[Any]:
    """Trains, evaluates; returns the losses and all variables."""
    dataset_iterator = iter(
        strategy.distribute_datasets_from_function(
            dataset_fn=dataset,
            options=tf.distribute.InputOptions(experimental_fetch_to_device=False),
        )
    )

    def model(activations: Any) -> tf.Tensor:
        return tf.add_n([tf.reduce_sum(a, -1) for a in tf.nest.flatten(activations)])

    @tf.function
    def training_step(dataset_iterator: Any, num_steps: Any) -> Any:
        def tpu_step(tpu_features: Any) -> Any:
            with tf.GradientTape() as tape:
                activations = embedding.dequeue()
                tape.watch(activations)
                model_output = model(activations)
                loss = tf.reduce_sum((model_output - tpu_features) ** 2) / 1000

            embedding_gradients = tape.gradient(loss, activations)
            embedding.apply_gradients(embedding_gradients)

        for _ in tf.range(num_steps):
            embedding_features, tpu_features = next(dataset_iterator)
            embedding.enqueue(embedding_features, training=True)
            strategy.run(tpu_step, args=(tpu_features,))

    @tf.function
    def evaluation_step(dataset_iterator: Any, num_steps: Any) -> Any:
        def tpu_step(tpu_features: Any) -> Any:
            activations = embedding.dequeue()
            total.assign_add(tf.reduce_sum(model(activations)))

        for _ in tf.range(num_steps):
            embedding_features, tpu_features = next(dataset_iterator)
            embedding.enqueue(embedding_features, training=False)
            strategy.run(tpu_step, args=(tpu_features,))

    with strategy.scope():
        total = tf.Variable(0.0, aggregation=tf.VariableAggregation.SUM)
    training_step(dataset_iterator, STEPS)
    evaluation_step(dataset_iterator, STEPS)
    tables = embedding.checkpoint_rows().values()
    return [total.numpy(), *(rows.numpy() for t in tables for rows in t.values())]


def assert_same(results: Sequence[Sequence[np.ndarray]]) -> None:
    """All runs have the numbers of the first, and these are not the initial ones."""
    # Sums of at most 2 * BATCH gradients, in another order, over STEPS updates of
    # values up to V: 12 * 3 roundings each of V * 2**-24, and 3 * 18 terms in total.
    for other in results[1:]:
        for expected, actual in zip(results[0], other, strict=True):
            np.testing.assert_allclose(actual, expected, rtol=36 * 2**-23, atol=2e-5)
    assert not np.array_equal(results[0][1][:, 0], np.arange(V))
