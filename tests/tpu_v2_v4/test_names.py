"""Names pair enqueue, dequeue and apply_gradients; what is missing is said.

Runs on the software TPU, which treats names as a TPU's compiler does.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import tensorflow as tf
from replica_values import this_replica

import tpu_embedding as te
from tpu_embedding.testing import SoftwareTPUStrategy

IDS = tf.constant([1, 2])
PATIENCE = 1.0  # Of tests that wait in vain.
LATE = tf.errors.DeadlineExceededError
ORDER = tf.errors.FailedPreconditionError


def make(patience: float = 20.0) -> tuple[te.TPUEmbedding, SoftwareTPUStrategy]:
    strategy = SoftwareTPUStrategy("v4", 2, meeting_timeout=patience)
    with strategy.scope():
        films = te.TableConfig(4, 2, te.RowIdInitializer(), name="films")
        embedding = te.TPUEmbedding(te.FeatureConfig(films), te.SGD(0.25))
        embedding.build(2)
    return embedding, strategy


def run(strategy: SoftwareTPUStrategy, function: Callable[[Any], Any]) -> Any:
    """The inputs of enqueue must be arguments."""
    return strategy.run(function, args=(IDS,))


def table(embedding: te.TPUEmbedding) -> list[float]:
    rows = embedding.core.checkpoint_rows()["films"]["parameters"]
    return rows.numpy()[:, 0].tolist()


def test_the_mode_is_found_from_the_name() -> None:
    """Whatever enqueue was told."""
    embedding, strategy = make()

    def train(ids: Any) -> Any:
        embedding.enqueue(ids, training=False, name="train")
        trained = embedding.dequeue(name="train")
        embedding.apply_gradients(tf.ones_like(trained), name="train")
        return trained

    def evaluate(ids: Any) -> Any:
        embedding.enqueue(ids, training=True, name="evaluate")
        return embedding.dequeue(name="evaluate")

    def unnamed(ids: Any) -> Any:
        embedding.enqueue(ids, training=False)
        return embedding.dequeue()

    programs = (train, evaluate, unnamed, train, evaluate)
    # A step takes 0.25 from each row for each of two replicas.
    for program, steps in zip(programs, (0, 1, 1, 1, 2), strict=True):
        for own in run(strategy, program).values:
            expected = [1 - 0.5 * steps, 2 - 0.5 * steps]
            assert own[:, 0].numpy().tolist() == expected
    assert table(embedding) == [0, 0, 1, 3]


def test_batches_of_one_program_leave_as_they_came() -> None:
    embedding, strategy = make()

    @tf.function
    def step(first: Any, second: Any) -> Any:
        def program(first: Any, second: Any) -> Any:
            embedding.enqueue(first, training=False)
            embedding.enqueue(second, training=False)
            return embedding.dequeue(), embedding.dequeue()

        return strategy.run(program, args=(first, second))

    for _ in range(20):  # In any order they would race.
        earlier, later = step(tf.constant([0, 1]), tf.constant([2, 3]))
        assert earlier.values[0][:, 0].numpy().tolist() == [0, 1]
        assert later.values[1][:, 0].numpy().tolist() == [2, 3]


def test_two_training_pairs() -> None:
    embedding, strategy = make()

    def program(ids: Any) -> None:
        for name in "ab":
            embedding.enqueue(ids, name=name)
            embedding.apply_gradients(embedding.dequeue(name=name), name=name)

    run(strategy, program)
    # Twice minus a quarter of twice itself.
    assert table(embedding) == [0, 0.25, 0.5, 3]


def test_a_missing_partner_of_a_name() -> None:
    embedding, strategy = make(PATIENCE)

    def other_name(ids: Any) -> None:
        embedding.enqueue(ids, name="a")
        embedding.apply_gradients(embedding.dequeue(name="a"), name="b")

    with pytest.raises(ORDER, match=r"No step owes gradients: .* has that name\."):
        run(strategy, other_name)

    def none_owed(ids: Any) -> None:
        embedding.enqueue(ids, name="a")
        embedding.dequeue(name="a")
        embedding.dequeue(name="b")

    with pytest.raises(LATE, match=r"No batch is enqueued for cores 0, 1"):
        run(strategy, none_owed)
    assert table(embedding) == [0, 1, 2, 3]


def test_every_wait_says_which_side_is_missing() -> None:
    """Through the public class: what would stop a TPU for ever ends, one by one."""
    embedding, strategy = make(PATIENCE)
    devices = strategy.extended.worker_devices

    def dequeue() -> Any:
        return embedding.dequeue()

    with pytest.raises(LATE, match=r"for cores 0, 1\..* Waited for 1 second"):
        strategy.run(dequeue)
    embedding.enqueue(IDS, device=devices[1])
    with pytest.raises(LATE, match="enqueued for core 0, only for core 1"):
        strategy.run(dequeue)
    embedding.enqueue(IDS, device=devices[0])

    def apply() -> None:
        embedding.apply_gradients(tf.ones([2, 2]))

    def refuse_gradients() -> None:
        with pytest.raises(ORDER, match=r"No step owes .* is for training only if"):
            strategy.run(apply)

    refuse_gradients()  # It was not dequeued.

    def absent() -> Any:
        return embedding.dequeue() if this_replica() else tf.zeros([2, 2])

    with pytest.raises(ORDER, match=r"Missing: Replica 0 .*must run the same ops"):
        strategy.run(absent)
    strategy.run(dequeue)
    strategy.run(apply)
    refuse_gradients()  # They come once for each dequeue.
    embedding.enqueue(IDS, training=False)
    strategy.run(dequeue)
    refuse_gradients()
    for _ in range(2):
        embedding.enqueue(IDS)
    strategy.run(dequeue)
    with pytest.raises(LATE, match=r"The gradients of step 2, .* have not been sent"):
        strategy.run(dequeue)

    @tf.function
    def fill(number: tf.Tensor) -> None:
        for _ in tf.range(number):
            embedding.enqueue(IDS)

    fill(tf.constant(63))
    with pytest.raises(LATE, match=r"queue of core [01] is full: it holds 64 batch"):
        fill(tf.constant(1))
    with pytest.raises(NotImplementedError, match=r"empties the queues.*restore\."):
        embedding.reset()
