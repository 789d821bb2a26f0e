"""Steps that are refused: nothing of them is applied, and the next step trains."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import tensorflow as tf
from reliability import refusals
from replica_values import mirrored, of_replicas, this_replica
from steps import evaluate_on, train_on

import tpu_embedding as te

V, D, R = 8, 2, 2


pytestmark = pytest.mark.usefixtures("engine")


def table(dtype: str = "float32") -> te.TableConfig:
    return te.TableConfig(
        V, D, te.RowIdInitializer(), combiner="sum", name="films", dtype=dtype
    )


def column(embedding: Any) -> list[float]:
    (films,) = embedding.embedding_tables.values()
    return tf.cast(films, tf.float32).numpy()[:, 0].tolist()


@pytest.mark.parametrize("engine", ["host"], indirect=True)
@pytest.mark.parametrize("made", [te.TPUEmbedding, te.TPUEmbeddingV2])
def test_a_loop_inside_of_run_is_refused(made: Any) -> None:
    strategy = mirrored(R)
    with strategy.scope():
        embedding = made({"film": te.FeatureConfig(table())}, te.SGD(1.0))
        embedding.build()

    def steps() -> None:
        for _ in range(2):
            train_on(embedding, {"film": tf.constant([1])})

    for run in (steps, tf.function(steps, autograph=False)):
        with pytest.raises(tf.errors.FailedPreconditionError, match=r"strategy\.run"):
            strategy.run(run)
        assert column(embedding)[1] == 1


@pytest.mark.parametrize("engine", ["host"], indirect=True)
def test_pipelined_updates_are_rounded_by_their_own_number() -> None:
    found = []
    for pipelined in (False, True):
        embedding = te.TPUEmbeddingV2(
            {"film": te.FeatureConfig(table("bfloat16"))}, te.SGD(0.013), pipelined
        )
        for step in range(6):
            train_on(embedding, {"film": tf.range(V)}, {"film": tf.ones([V, D])})
            if step == 3:
                embedding.flush()
        embedding.flush()
        assert int(embedding.core.checkpoint_variables()["_updates"]) == 6
        found.append(column(embedding))
    assert found[0] == found[1]


@pytest.mark.parametrize("engine", ["host"], indirect=True)
@pytest.mark.parametrize("pipelined", [False, True])
def test_reset_takes_a_forgotten_update_out_of_the_count(pipelined: bool) -> None:
    embedding = te.TPUEmbedding(
        {"film": te.FeatureConfig(table("bfloat16"))}, te.SGD(1.0), pipelined
    )
    train_on(embedding, {"film": tf.constant([1])}, {"film": tf.ones([1, D])})
    embedding.reset()
    assert int(embedding.core.checkpoint_variables()["_updates"]) == (not pipelined)
    assert column(embedding)[1] == (1 if pipelined else 0)


@pytest.mark.parametrize("engine", ["host"], indirect=True)
@pytest.mark.parametrize("function", [lambda call: call, tf.function])
def test_a_refused_evaluation_leaves_the_pending_update(
    function: Callable[[Any], Any],
) -> None:
    embedding = te.TPUEmbedding({"film": te.FeatureConfig(table())}, te.SGD(1.0), True)
    embedding.build()
    (films,) = embedding.embedding_tables.values()
    train_on(embedding, {"film": tf.constant([1])}, {"film": tf.ones([1, D])})
    evaluate = function(lambda ids: embedding.enqueue({"film": ids}, training=False))
    with pytest.raises(tf.errors.InvalidArgumentError):
        evaluate(tf.constant([99]))
    assert films.numpy()[1, 0] == 1
    evaluate(tf.constant([2]))
    assert films.numpy()[1, 0] == 0


def split(strategy: tf.distribute.Strategy, *parts: Any) -> Any:
    return of_replicas(strategy, parts)


def replicas(pipelined: bool = False) -> tuple[tf.distribute.Strategy, Any]:
    strategy = mirrored(R)
    with strategy.scope():
        embedding = te.TPUEmbedding(
            {"film": te.FeatureConfig(table())}, te.SGD(1.0), pipelined
        )
        embedding.build()
    return strategy, embedding


def train_queued(strategy: tf.distribute.Strategy, embedding: Any) -> list[list[float]]:
    """The activations of one queued step in all replicas; each gradient is 1."""

    def step() -> tf.Tensor:
        films = embedding.dequeue()["film"]
        embedding.apply_gradients({"film": tf.ones_like(films)})
        return films

    found = strategy.experimental_local_results(strategy.run(step))
    return [films.numpy()[:, 0].tolist() for films in found]


def test_a_batch_of_another_static_shape_stays_in_the_queue() -> None:
    embedding = te.TPUEmbedding({"film": te.FeatureConfig(table())}, te.SGD(1.0))
    embedding.build()

    @tf.function(autograph=False)
    def step() -> tf.Tensor:
        embedding.enqueue({"film": tf.constant([1, 2])})
        return embedding.dequeue()["film"]

    embedding.enqueue({"film": tf.constant([3, 4, 5])})
    with pytest.raises(tf.errors.InvalidArgumentError, match="traced for"):
        step()
    with pytest.raises(tf.errors.FailedPreconditionError, match="not dequeued"):
        embedding.apply_gradients({"film": tf.ones([3, D])})
    for ids in ([3, 4, 5], [1, 2]):
        films = embedding.dequeue()["film"]
        assert films.numpy()[:, 0].tolist() == ids
        embedding.apply_gradients({"film": tf.ones_like(films)})


@pytest.mark.parametrize("engine", ["host"], indirect=True)
def test_batches_of_devices_are_paired_in_order() -> None:
    strategy, embedding = replicas()
    devices = strategy.extended.worker_devices

    @tf.function(autograph=False)
    def enqueue(ids: tf.Tensor, replica: int) -> None:
        embedding.enqueue({"film": ids}, device=devices[replica])

    def fail() -> None:
        embedding.enqueue({"film": tf.constant([99 if this_replica() == 1 else 7])})

    # In any order, ahead, outside of the scope and in it, after a run that failed.
    for call in (fail, tf.function(fail, autograph=False)):
        with pytest.raises(tf.errors.InvalidArgumentError):
            strategy.run(call)
        for step, replica in ((1, 1), (2, 1), (1, 0), (2, 0)):
            enqueue(tf.constant([2 * step + replica]), replica)
            with pytest.raises(tf.errors.InvalidArgumentError):
                enqueue(tf.constant([99]), 1 - replica)
        with strategy.scope():
            for replica in (1, 0):
                enqueue(tf.constant([replica]), replica)
        before = column(embedding)
        for ids in ([2, 3], [4, 5], [0, 1]):
            assert train_queued(strategy, embedding) == [[before[i]] for i in ids]
    with pytest.raises(tf.errors.FailedPreconditionError, match="no batch"):
        train_queued(strategy, embedding)


@pytest.mark.parametrize("engine", ["host"], indirect=True)
def test_values_of_replicas_are_refused_beside_a_device() -> None:
    strategy, embedding = replicas()
    device = strategy.extended.worker_devices[1]
    ids, both = tf.constant([1]), split(strategy, tf.constant([1]), tf.constant([2]))
    weights = split(strategy, tf.constant([1.0]), tf.constant([2.0]))
    with pytest.raises(ValueError, match=r"feature film has one value for each"):
        embedding.enqueue({"film": both}, device=device)
    with pytest.raises(ValueError, match=r"weights of feature film has one value"):
        embedding.enqueue({"film": ids}, {"film": weights}, device=device)


@pytest.mark.parametrize("engine", ["host"], indirect=True)
@pytest.mark.parametrize("graph", [False, True])
def test_a_refused_evaluation_step_leaves_the_pending_update(graph: bool) -> None:
    strategy, embedding = replicas(pipelined=True)
    (films,) = embedding.embedding_tables.values()

    def evaluate(ids: tf.Tensor) -> tf.Tensor:
        return evaluate_on(embedding, {"film": ids})["film"]

    def run(*ids: int) -> Any:
        parts = split(strategy, *(tf.constant([i]) for i in ids))
        return strategy.experimental_local_results(strategy.run(call, (parts,)))

    call = tf.function(evaluate, autograph=False) if graph else evaluate
    embedding.enqueue({"film": tf.constant([1])})
    train_queued(strategy, embedding)
    for ids in ((1, 99), (99, 1)):
        with pytest.raises(tf.errors.InvalidArgumentError):
            run(*ids)
        assert films.numpy()[1, 0] == 1
    assert [found.numpy()[0, 0] for found in run(1, 1)] == [-1.0, -1.0]


@pytest.mark.parametrize("engine", ["host"], indirect=True)
def test_a_forgotten_apply_gradients_is_refused() -> None:
    strategy, embedding = replicas()
    for _ in range(2):
        embedding.enqueue({"film": tf.constant([1])})
    strategy.run(embedding.dequeue)
    for _ in range(2):
        with pytest.raises(tf.errors.FailedPreconditionError, match="still owes"):
            strategy.run(embedding.dequeue)
    strategy.run(lambda: embedding.apply_gradients({"film": tf.ones([1, D])}))
    assert train_queued(strategy, embedding) == [[-1.0], [-1.0]]
    assert column(embedding)[1] == 1 - 2 * R


@pytest.mark.parametrize("pipelined", [False, True])
@pytest.mark.parametrize("replicas", [1, 3])
@pytest.mark.parametrize("graph", [False, True])
@pytest.mark.parametrize("name", refusals.CLASSES)
@pytest.mark.parametrize("engine", ["host"], indirect=True)
def test_random_steps(
    seed: int, name: str, graph: bool, replicas: int, pipelined: bool
) -> None:
    """A few of the steps of `make fuzz-refusals`, on the host engine."""
    chosen = {"name": name, "graph": graph, "pipelined": pipelined}
    found = refusals.run(12, seed, "host", replicas=replicas, **chosen)
    assert found.total() == 12


@pytest.mark.parametrize("graph", [False, True])
@pytest.mark.parametrize("name", refusals.CLASSES)
@pytest.mark.parametrize("engine", ["portable"], indirect=True)
def test_random_steps_of_the_portable_engine(seed: int, name: str, graph: bool) -> None:
    assert refusals.run(10, seed, "portable", name=name, graph=graph).total() == 10


@pytest.mark.parametrize("tpu", [name for name in refusals.EPISODES if "_" in name])
def test_random_steps_of_tpus(seed: int, tpu: str) -> None:
    """The same on software TPUs."""
    assert refusals.run(50, seed, tpu).total() == 50
