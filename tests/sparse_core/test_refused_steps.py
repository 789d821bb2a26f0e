"""A refused step of a pipelined embedding changes nothing and can be repeated."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import tensorflow as tf
from reliability import refusals
from replica_values import of_replicas
from software_tpu.calls import strategy_of

import tpu_embedding as te

NAN = float("nan")


class Steps:
    """An embedding of two stacks, and one program that trains or fails."""

    def __init__(self, replicas: int, **arguments: Any) -> None:
        self.strategy = strategy_of("v6e", replicas)
        features = {
            name: te.FeatureConfig(
                te.TableConfig(8, dim, initializer=tf.zeros_initializer(), name=name),
                output_shape=[2],
            )
            for name, dim in [("a", 2), ("b", 12)]
        }
        arguments.setdefault("optimizer", te.SGD(1.0))
        with self.strategy.scope():
            self.embedding = te.TPUEmbeddingV2(
                features,
                pipeline_execution_with_tensor_core=True,
                check_numerics=True,
                **arguments,
            )
        self.replicas = replicas
        self.embedding.build()

    def run(
        self, gradient: Any, *, ids: Any = 1, good: Any = True, after: Any = True
    ) -> None:
        """One step, in which each argument is of all replicas or of the last one."""
        self.strategy.run(
            self._step, [self._last(v) for v in (ids, gradient, good, after)]
        )

    def _last(self, value: Any) -> Any:
        first, last = value if isinstance(value, tuple) else (value, value)
        values = [first] * (self.replicas - 1) + [last]
        return of_replicas(self.strategy, list(map(tf.constant, values)))

    def _step(self, ids: Any, gradient: Any, good: Any, after: Any) -> None:
        _, preserved = self.embedding(
            {"a": tf.stack([ids, 0]), "b": tf.constant([2, 3])}
        )
        tf.debugging.assert_equal(good, True, "The user's own.")
        # The gradients do not depend on the lookup.
        gradients = {"a": tf.fill([2, 2], gradient), "b": tf.fill([2, 12], gradient)}
        self.embedding.apply_gradients(gradients, preserved)
        tf.debugging.assert_equal(after, True, "The user's own.")

    def values(self) -> list[float]:
        """A row of each stack, after what is pending was applied."""
        tables = {k.name: v for k, v in self.embedding.embedding_tables.items()}
        found = [float(tables["a"][1, 1]), float(tables["b"][3, 11])]
        return [value / self.replicas for value in found]


REFUSED: dict[str, dict[str, Any]] = {
    "nan": {"gradient": (100.0, NAN)},
    "id": {"gradient": 100.0, "ids": (1, 8)},
    "assertion": {"gradient": 100.0, "good": (True, False)},
}


@pytest.mark.parametrize("replicas", [1, 2])
@pytest.mark.parametrize("reason", REFUSED)
def test_a_refused_step_changes_nothing(replicas: int, reason: str) -> None:
    steps = Steps(replicas)
    for _ in range(3):
        steps.embedding.reset()
        before = steps.values()
        steps.run(1.0)
        for _ in range(2):
            with pytest.raises(tf.errors.InvalidArgumentError):
                steps.run(**REFUSED[reason])
        steps.run(10.0)
        np.testing.assert_array_equal(steps.values(), np.add(before, -11.0))


def test_an_assertion_after_the_update_fails_when_the_update_is_whole() -> None:
    steps = Steps(2)
    for step in range(4):
        with pytest.raises(tf.errors.InvalidArgumentError):
            steps.run(1.0, after=(True, False))
        assert steps.values() == [-(step + 1.0)] * 2


def test_reset_takes_the_discarded_update_out_of_the_count() -> None:
    def rate(step: Any) -> Any:
        return tf.cast(step + 1, tf.float32)

    steps = Steps(2, optimizer=te.SGD(rate))

    def updates() -> int:
        counter = steps.embedding.core.checkpoint_updates()
        assert counter is not None
        return int(counter.numpy())

    steps.run(1.0)
    steps.run(1.0)
    steps.embedding.reset()
    assert updates() == 1
    steps.embedding.reset()
    assert updates() == 1
    steps.run(1.0)
    assert (steps.values(), updates()) == ([-3.0, -3.0], 2)


def test_reset_discards_the_queue() -> None:
    """Batches that wait, and the one whose gradients are owed."""
    table = te.TableConfig(8, 2, initializer=tf.ones_initializer(), name="a")
    features = {"a": te.FeatureConfig(table, output_shape=[2])}
    strategy = strategy_of("v6e", 1)
    with strategy.scope():
        embedding = te.TPUEmbedding(features, te.SGD(1.0))
    batch, gradients = {"a": tf.constant([1, 2])}, {"a": tf.ones([2, 2])}

    def apply() -> None:
        embedding.apply_gradients(gradients)

    embedding.enqueue(batch)
    embedding.enqueue(batch)
    strategy.run(embedding.dequeue)
    embedding.reset()
    with pytest.raises(tf.errors.FailedPreconditionError, match="no batch is enqueued"):
        strategy.run(embedding.dequeue)
    with pytest.raises(tf.errors.FailedPreconditionError, match="apply_gradients: "):
        strategy.run(apply)
    embedding.enqueue(batch)
    strategy.run(embedding.dequeue)
    strategy.run(apply)
    expected = np.ones([8, 2])
    expected[1:3] = 0
    np.testing.assert_array_equal(embedding.embedding_tables[table], expected)


@pytest.mark.parametrize("replicas", [1, 2])
@pytest.mark.parametrize("inside", [False, True])
def test_a_refused_evaluation_in_a_function_leaves_what_is_pending(
    inside: bool, replicas: int
) -> None:
    """Refused in the last replica."""
    table = te.TableConfig(8, 2, initializer=tf.zeros_initializer(), name="a")
    strategy = strategy_of("v6e", replicas)
    with strategy.scope():
        embedding = te.TPUEmbedding(
            te.FeatureConfig(table, output_shape=[2]), te.SGD(1.0), True
        )

    @tf.function
    def enqueue(ids: Any, training: bool) -> None:
        def call(own: Any) -> None:
            embedding.enqueue(own, training=training)

        if inside:
            strategy.run(call, [ids])
        else:
            call(ids)

    def train() -> None:
        embedding.apply_gradients(tf.ones_like(embedding.dequeue()))

    def each(last: list[int]) -> Any:
        values = [[1, 2]] * (replicas - 1) + [last]
        return of_replicas(strategy, list(map(tf.constant, values)))

    enqueue(each([1, 2]), True)
    strategy.run(train)
    assert embedding.core.engine is not None
    parts = embedding.core.engine.tables()["a"].variables()  # Without what is pending.
    for _ in range(40):  # In any order of its ops.
        with pytest.raises(tf.errors.InvalidArgumentError, match="has id 99"):
            enqueue(each([1, 99]), False)
        assert not any(np.any(part) for part in parts)
    expected = np.zeros([8, 2])
    expected[1:3] = -replicas
    np.testing.assert_array_equal(embedding.embedding_tables[table], expected)


def test_no_replica_takes_its_batch_unless_all_have_one() -> None:
    table = te.TableConfig(8, 1, initializer=te.RowIdInitializer(), name="a")
    strategy = strategy_of("v6e", 2)
    with strategy.scope():
        feature = te.FeatureConfig(table, output_shape=[2])
        embedding = te.TPUEmbedding(feature, te.SGD(1.0))
    devices = strategy.extended.worker_devices
    embedding.enqueue(tf.constant([3, 4]), training=False, device=devices[0])
    for _ in range(2):
        with pytest.raises(tf.errors.FailedPreconditionError, match="no batch is enq"):
            strategy.run(embedding.dequeue)
    embedding.enqueue(tf.constant([5, 6]), training=False, device=devices[1])
    found = strategy.experimental_local_results(strategy.run(embedding.dequeue))
    assert [rows[:, 0].numpy().tolist() for rows in found] == [[3, 4], [5, 6]]


@pytest.mark.parametrize("engine", ["sparse_core", "tpu_v2_v4"])
def test_random_steps(engine: str, seed: int) -> None:
    """A few of the steps of `make fuzz-refusals`."""
    assert refusals.run(25, seed, engine).total() == 25
