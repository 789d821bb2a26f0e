"""Steps that are refused: nothing of them is applied, and the next step trains."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import tensorflow as tf
from reliability import refusals

import tpu_embedding as te

V, D, R = 8, 2, 2
REFUSALS = (tf.errors.InvalidArgumentError, ValueError)


@pytest.fixture(params=["host", "portable"], autouse=True)
def engine(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.setenv("TPU_EMBEDDING_ENGINE", request.param)
    return request.param


def table(dtype: str = "float32") -> te.TableConfig:
    return te.TableConfig(
        V, D, te.RowIdInitializer(), combiner="sum", name="films", dtype=dtype
    )


def column(embedding: Any) -> list[float]:
    (films,) = embedding.embedding_tables.values()
    return tf.cast(films, tf.float32).numpy()[:, 0].tolist()


def is_replica(number: int) -> bool:
    context = tf.distribute.get_replica_context()
    return int(tf.get_static_value(context.replica_id_in_sync_group)) == number


def refused(kind: str, replica: int) -> tuple[Any, Any, bool]:
    """The ids and gradient of one replica, and whether the user's own code fails."""
    bad = is_replica(replica)
    ids = tf.constant([99 if bad and kind == "id" else 1])
    gradient = tf.fill([1, D], np.nan if bad and kind == "nan" else 1.0)
    return {"film": ids}, {"film": gradient}, bad and kind == "assertion"


def v2_step(embedding: te.TPUEmbeddingV2, kind: str, replica: int) -> None:
    ids, gradients, fails = refused(kind, replica)
    _, preserved = embedding(ids)
    with tf.control_dependencies([tf.debugging.Assert(not fails, ["broken"])]):
        embedding.apply_gradients(
            tf.nest.map_structure(tf.identity, gradients), preserved
        )


def queue_step(embedding: te.TPUEmbedding, kind: str, replica: int) -> None:
    ids, gradients, fails = refused(kind, replica)
    embedding.enqueue(ids)
    embedding.dequeue()
    with tf.control_dependencies([tf.debugging.Assert(not fails, ["broken"])]):
        embedding.apply_gradients(tf.nest.map_structure(tf.identity, gradients))


CLASSES: dict[str, tuple[Any, Callable[..., None]]] = {
    "V2": (te.TPUEmbeddingV2, v2_step),
    "queue": (te.TPUEmbedding, queue_step),
}


@pytest.mark.parametrize("graph", [False, True])
@pytest.mark.parametrize("pipelined", [False, True])
@pytest.mark.parametrize("name", CLASSES)
def test_the_next_step_trains(
    name: str, pipelined: bool, graph: bool, engine: str
) -> None:
    if engine == "portable" and graph:
        return  # Slow to trace; its rules are the same functions.
    strategy = tf.distribute.MirroredStrategy([f"CPU:{r}" for r in range(R)])
    made, step = CLASSES[name]
    with strategy.scope():
        embedding = made(
            {"film": te.FeatureConfig(table())},
            te.SGD(1.0),
            pipelined,
            check_numerics=True,
        )
        embedding.build()

    def run(kind: str, replica: int = 0) -> None:
        def call() -> None:
            strategy.run(step, (embedding, kind, replica))

        (tf.function(call, autograph=False) if graph else call)()

    kinds = ("id", "nan", "assertion")
    run("good")
    for kind in kinds:
        with pytest.raises(REFUSALS):
            run(kind, replica=1)
        run("good")
    embedding.flush()
    good = 1 + len(kinds)
    assert column(embedding)[1] == 1 - R * good, "each good step once, no other"


@pytest.mark.parametrize("name", CLASSES)
def test_a_loop_inside_of_run_is_refused(name: str) -> None:
    strategy = tf.distribute.MirroredStrategy([f"CPU:{r}" for r in range(R)])
    made, step = CLASSES[name]
    with strategy.scope():
        embedding = made({"film": te.FeatureConfig(table())}, te.SGD(1.0))
        embedding.build()

    def steps() -> None:
        for _ in range(2):
            step(embedding, "good", 0)

    for run in (steps, tf.function(steps, autograph=False)):
        with pytest.raises(tf.errors.FailedPreconditionError, match=r"strategy\.run"):
            strategy.run(run)
        assert column(embedding)[1] == 1


def test_pipelined_updates_are_rounded_by_their_own_number() -> None:
    found = []
    for pipelined in (False, True):
        embedding = te.TPUEmbeddingV2(
            {"film": te.FeatureConfig(table("bfloat16"))}, te.SGD(0.013), pipelined
        )
        for step in range(6):
            _, preserved = embedding({"film": tf.range(V)})
            embedding.apply_gradients({"film": tf.ones([V, D])}, preserved)
            if step == 3:
                embedding.flush()
        embedding.flush()
        assert int(embedding.checkpoint_variables()["_updates"]) == 6
        found.append(column(embedding))
    assert found[0] == found[1]


@pytest.mark.parametrize("pipelined", [False, True])
def test_reset_takes_a_forgotten_update_out_of_the_count(pipelined: bool) -> None:
    embedding = te.TPUEmbedding(
        {"film": te.FeatureConfig(table("bfloat16"))}, te.SGD(1.0), pipelined
    )
    embedding.enqueue({"film": tf.constant([1])})
    embedding.dequeue()
    embedding.apply_gradients({"film": tf.ones([1, D])})
    embedding.reset()
    assert int(embedding.checkpoint_variables()["_updates"]) == (not pipelined)
    assert column(embedding)[1] == (1 if pipelined else 0)


@pytest.mark.parametrize("function", [lambda call: call, tf.function])
def test_a_refused_evaluation_leaves_the_pending_update(
    function: Callable[[Any], Any],
) -> None:
    embedding = te.TPUEmbedding({"film": te.FeatureConfig(table())}, te.SGD(1.0), True)
    embedding.build()
    (films,) = embedding.embedding_tables.values()
    embedding.enqueue({"film": tf.constant([1])})
    embedding.dequeue()
    embedding.apply_gradients({"film": tf.ones([1, D])})
    evaluate = function(lambda ids: embedding.enqueue({"film": ids}, training=False))
    with pytest.raises(tf.errors.InvalidArgumentError):
        evaluate(tf.constant([99]))
    assert films.numpy()[1, 0] == 1
    evaluate(tf.constant([2]))
    assert films.numpy()[1, 0] == 0


def test_random_steps(seed: int, engine: str) -> None:
    """A few of the steps of `make fuzz-refusals`."""
    assert refusals.run(50 if engine == "portable" else 250, seed, (engine,))
