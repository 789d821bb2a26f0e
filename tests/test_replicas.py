"""Several replicas in one process: one copy of each table, one update for all."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import tensorflow as tf
from replica_values import mirrored, of_replicas

import tpu_embedding as te

V, D, R = 8, 2, 3


@pytest.fixture
def strategy() -> tf.distribute.Strategy:
    return mirrored(R)


def make(
    strategy: tf.distribute.Strategy, rate: Any = 1.0, **options: Any
) -> te.TPUEmbedding:
    films = te.TableConfig(V, D, te.RowIdInitializer(), combiner="sum", name="films")
    with strategy.scope():
        return te.TPUEmbedding(
            {"film": te.FeatureConfig(films)}, te.SGD(rate), **options
        )


def distributed(strategy: tf.distribute.Strategy, ids: list[list[int]]) -> Any:
    return {"film": of_replicas(strategy, [tf.constant(own) for own in ids])}


def column(embedding: te.TPUEmbedding) -> list[float]:
    (table,) = embedding.embedding_tables.values()
    assert isinstance(table, tf.Variable)
    return table.numpy()[:, 0].tolist()


def train_step(embedding: te.TPUEmbedding) -> Any:
    activations = embedding.dequeue()
    embedding.apply_gradients({"film": tf.ones_like(activations["film"])})
    return activations["film"]


def traced_step(strategy: tf.distribute.Strategy, embedding: te.TPUEmbedding) -> Any:
    """One training step of all replicas, with its enqueue, as a tf.function."""

    @tf.function
    def step(features: Any) -> Any:
        embedding.enqueue(features)
        return strategy.run(lambda: train_step(embedding))

    return step


IDS = [[0, 1], [1, 2], [1, 3]]  # row 1 is in every replica
AFTER = [-1.0, -2.0, 1.0, 2.0, 4.0, 5.0, 6.0, 7.0]


@pytest.mark.parametrize("function", [lambda call: call, tf.function])
def test_gradients_of_all_replicas_are_one_update(
    strategy: tf.distribute.Strategy, function: Callable[[Any], Any]
) -> None:
    calls = []

    def rate() -> float:
        calls.append(1)
        return 1.0

    embedding = make(strategy, rate)
    embedding.build()

    @function
    def step(features: Any) -> Any:
        embedding.enqueue(features)
        return strategy.run(lambda: train_step(embedding))

    activations = step(distributed(strategy, IDS))
    found = [a.numpy()[:, 0].tolist() for a in activations.values]
    assert found == IDS  # every replica reads the one table
    assert column(embedding) == AFTER
    if function is not tf.function:
        assert len(calls) == 1  # by the replica that applies


def test_all_replicas_are_checked_before_any_is_queued(
    strategy: tf.distribute.Strategy,
) -> None:
    embedding = make(strategy)
    for _ in range(70):  # more often than the queue is long
        with pytest.raises(tf.errors.InvalidArgumentError, match="sample 0 has id -1"):
            embedding.enqueue(distributed(strategy, [[0, 1], [1, 2], [-1, 3]]))
    embedding.enqueue(distributed(strategy, IDS))
    strategy.run(lambda: train_step(embedding))
    assert column(embedding) == AFTER


def test_one_value_for_all_replicas(strategy: tf.distribute.Strategy) -> None:
    embedding = make(strategy)
    embedding.enqueue({"film": tf.constant([4])})
    strategy.run(lambda: train_step(embedding))
    assert column(embedding)[4] == 4 - R


def test_batch_size_is_global(strategy: tf.distribute.Strategy) -> None:
    with pytest.raises(ValueError, match="divisible by the number of replicas"):
        make(strategy, batch_size=4)
    embedding = make(strategy, batch_size=6)
    embedding.enqueue(distributed(strategy, IDS))
    with pytest.raises(ValueError, match="a batch of 1 where 2 was expected"):
        embedding.enqueue({"film": tf.constant([1])})


def test_calls_at_the_wrong_place(strategy: tf.distribute.Strategy) -> None:
    embedding = make(strategy)
    embedding.enqueue(distributed(strategy, IDS))
    with pytest.raises(RuntimeError, match="dequeue must run inside one of"):
        embedding.dequeue()
    other = tf.distribute.OneDeviceStrategy("CPU:0")
    with other.scope(), pytest.raises(RuntimeError, match="created under Mirrored"):
        embedding.enqueue({"film": tf.constant([1])})


def test_a_multi_worker_strategy_of_one_process_trains() -> None:
    strategy = tf.distribute.MultiWorkerMirroredStrategy()
    embedding = make(strategy)
    embedding.enqueue({"film": tf.constant([0, 1, 1, 2, 1, 3])})
    strategy.run(lambda: train_step(embedding))
    assert column(embedding) == AFTER


def test_replicas_with_batches_of_other_sizes_in_a_function(
    strategy: tf.distribute.Strategy,
) -> None:
    embedding = make(strategy)
    step = traced_step(strategy, embedding)
    ids = [[0, 1], [1, 2, 4], [1]]
    found = step(distributed(strategy, ids)).values
    assert [a.numpy()[:, 0].tolist() for a in found] == ids
    assert column(embedding) == [-1.0, -2.0, 1.0, 3.0, 3.0, 5.0, 6.0, 7.0]


def test_replicas_with_inputs_of_other_ranks_in_a_function(
    strategy: tf.distribute.Strategy,
) -> None:
    embedding = make(strategy)
    step = traced_step(strategy, embedding)
    ids = [tf.constant([0, 1]), tf.constant([[1], [2]]), tf.sparse.from_dense([[1, 3]])]
    found = step({"film": of_replicas(strategy, ids)}).values
    assert [a.numpy()[:, 0].tolist() for a in found] == [[0, 1], [1, 2], [4]]
    assert column(embedding) == AFTER


def test_the_device_of_one_replica_is_a_place_of_its_own() -> None:
    strategy = tf.distribute.OneDeviceStrategy("CPU:0")
    embedding = make(strategy)
    (device,) = strategy.extended.worker_devices
    for name in (device, "CPU:0"):
        embedding.enqueue({"film": tf.constant([3])}, device=name)
        assert strategy.run(lambda: train_step(embedding)).shape == (1, D)
    assert column(embedding)[3] == 1
    with pytest.raises(ValueError, match="must name a device of the strategy"):
        embedding.enqueue({"film": tf.constant([3])}, device="CPU:1")


@pytest.mark.parametrize("device", ["/device:CPU:", "CPU:"])
def test_each_device_of_the_strategy_stands_for_its_replica(
    strategy: tf.distribute.Strategy, device: str
) -> None:
    embedding = make(strategy)
    for replica, ids in enumerate(IDS):
        embedding.enqueue({"film": tf.constant(ids)}, device=f"{device}{replica}")
    found = strategy.run(lambda: train_step(embedding)).values
    assert [a.numpy()[:, 0].tolist() for a in found] == IDS
    assert column(embedding) == AFTER
    for wrong in (f"{device}{R}", "/device:TPU:0"):
        with pytest.raises(ValueError, match="must name a device of the strategy"):
            embedding.enqueue({"film": tf.constant([0])}, device=wrong)
