"""Tests of `SoftwareTPUStrategy.run`: replicas that meet, fail, wait and are ended."""

from __future__ import annotations

import functools
import threading
import time

import pytest
import tensorflow as tf
from replica_values import this_replica
from tensorflow.python.eager import cancellation

from tpu_embedding.testing import SoftwareTPUStrategy, library

# Long against what the ops need, short against a test's patience.
PROMPT_SECONDS = 20.0
NUM_DEVICES = (1, 2, 4)


@functools.cache
def strategy_of(num_devices: int) -> SoftwareTPUStrategy:
    return SoftwareTPUStrategy("v5p", num_devices)


def context() -> tf.distribute.ReplicaContext:
    return tf.distribute.get_replica_context()


def total(value) -> tf.Tensor:
    """A meeting: the sum over all replicas."""
    return context().all_reduce("SUM", value)


class Step:
    """Meets twice, with side effects before, between and after."""

    def __init__(self, strategy: SoftwareTPUStrategy):
        self.strategy = strategy
        with strategy.scope():
            self.counts = tf.Variable(
                0,
                synchronization=tf.VariableSynchronization.ON_READ,
                aggregation=tf.VariableAggregation.SUM,
            )

    def __call__(self, x: tf.Tensor) -> tf.Tensor:
        self.counts.assign_add(1)
        tf.print("before", this_replica())
        first = total(x + float(this_replica()))
        self.counts.assign_add(10)
        tf.print("between", this_replica())
        second = total(first)
        self.counts.assign_add(100)
        tf.print("after", this_replica())
        return second

    def count(self) -> int:
        return int(self.counts.read_value())

    def result(self, x: float) -> float:
        num = self.strategy.num_replicas_in_sync
        return num * (num * x + sum(range(num)))


@pytest.mark.parametrize("num_devices", NUM_DEVICES)
def test_replicas_meet_twice_a_step_eagerly(num_devices: int, capfd):
    strategy = strategy_of(num_devices)
    step = Step(strategy)
    for x in (1.0, 2.0):
        results = strategy.run(step, (tf.constant(x),))
        for value in strategy.experimental_local_results(results):
            assert value.numpy() == step.result(x)
    assert step.count() == 2 * num_devices * 111
    printed = sorted(capfd.readouterr().err.split("\n")[:-1])
    parts = ("after", "before", "between")
    assert printed == sorted(
        f"{part} {r}" for part in parts for r in range(num_devices) for _ in range(2)
    )


@pytest.mark.parametrize("num_devices", NUM_DEVICES)
def test_replicas_meet_twice_a_step_in_a_loop(num_devices: int, capfd):
    strategy = strategy_of(num_devices)
    step = Step(strategy)

    @tf.function
    def loop(x: tf.Tensor) -> tf.Tensor:
        for _ in tf.range(3):
            x = strategy.reduce("MEAN", strategy.run(step, (x,)), axis=None)
        return x

    expected = step.result(step.result(step.result(0.5)))
    assert loop(tf.constant(0.5)).numpy() == expected
    assert step.count() == 3 * num_devices * 111
    assert len(capfd.readouterr().err.split("\n")[:-1]) == 9 * num_devices


@pytest.mark.parametrize("num_devices", [2, 4])
def test_replicas_meet_inside_control_flow(num_devices: int):
    """In a loop and a branch, also of functions that are not inlined."""
    strategy = strategy_of(num_devices)

    @tf.function(autograph=False, experimental_attributes={"_noinline": True})
    def apart(x: tf.Tensor) -> tf.Tensor:
        return total(x)

    @tf.function(autograph=False, experimental_attributes={"_noinline": True})
    def apart_in_loop(x: tf.Tensor) -> tf.Tensor:
        return tf.while_loop(
            lambda i, _: i < 3, lambda i, y: (i + 1, total(y)), (0, x)
        )[1]

    def step(x: tf.Tensor) -> tf.Tensor:
        for _ in tf.range(3):
            x = total(x)
        x = total(x) if tf.reduce_sum(x) > 0.0 else -x
        return apart_in_loop(apart(apart(x)))

    results = strategy.run(step, (tf.constant([1.0, 2.0]),))
    for value in strategy.experimental_local_results(results):
        assert value.numpy().tolist() == [num_devices**9, 2 * num_devices**9]


def test_independent_meetings_are_not_mixed_up():
    """Their order may differ from replica to replica."""
    strategy = strategy_of(4)

    def step() -> list[tf.Tensor]:
        return [total(tf.constant(10.0**k)) for k in range(8)]

    for _ in range(3):
        for k, sums in enumerate(strategy.run(step)):
            for value in strategy.experimental_local_results(sums):
                assert value.numpy() == 4 * 10.0**k


def fails_in_one_replica(x: tf.Tensor) -> tf.Tensor:
    if this_replica() == 1:
        with tf.control_dependencies(
            [tf.debugging.assert_less(x, 0.0, message="the one that failed")]
        ):
            x = tf.identity(x)
    return total(x)


@pytest.mark.parametrize("num_devices", [2, 4])
def test_an_error_in_one_replica_releases_the_others_with_its_own(num_devices: int):
    strategy = strategy_of(num_devices)
    started = time.monotonic()
    with pytest.raises(tf.errors.InvalidArgumentError, match="the one that failed"):
        strategy.run(fails_in_one_replica, (tf.constant(1.0),))
    assert time.monotonic() - started < PROMPT_SECONDS
    # Nothing is left over: the next run works.
    results = strategy.run(total, (tf.constant(1.0),))
    assert strategy.experimental_local_results(results)[0].numpy() == num_devices


def test_an_error_at_a_meeting_reaches_all():
    strategy = strategy_of(2)

    def step() -> tf.Tensor:
        return total(tf.zeros(2 + this_replica()))

    with pytest.raises(
        tf.errors.InvalidArgumentError,
        match=r"of replica 1 is float\[3\], but that of replica 0 is float\[2\]",
    ):
        strategy.run(step)


def test_a_replica_that_ends_without_coming_is_named_at_once():
    strategy = strategy_of(2)

    def step(x: tf.Tensor) -> tf.Tensor:
        return total(x) if this_replica() == 0 else x

    started = time.monotonic()
    with pytest.raises(
        tf.errors.FailedPreconditionError,
        match=r"Replica 0 \(.*CPU:0\) reached TpuEmbeddingSoftwareTpuAllReduce .*"
        r"Missing: Replica 1 \(.*CPU:1\)",
    ):
        strategy.run(step, (tf.constant(1.0),))
    assert time.monotonic() - started < PROMPT_SECONDS


def waits_in_one_replica(queue: tf.queue.FIFOQueue, x: tf.Tensor) -> tf.Tensor:
    if this_replica() == 1:
        x += queue.dequeue()
    return total(x)


def test_a_timeout_names_the_missing_side():
    strategy = SoftwareTPUStrategy("v5p", 2, meeting_timeout=0.5)
    queue = tf.queue.FIFOQueue(1, [tf.float32], shapes=[()])
    step = functools.partial(waits_in_one_replica, queue)
    started = time.monotonic()
    with pytest.raises(
        tf.errors.DeadlineExceededError,
        match=r"Replica 1 \(.*CPU:1\) did not reach TpuEmbeddingSoftwareTpuAllReduce "
        r'".*" within 500ms. Replica 0 \(.*CPU:0\) arrived.*`meeting_timeout`',
    ):
        strategy.run(step, (tf.constant(1.0),))
    assert 0.5 <= time.monotonic() - started < PROMPT_SECONDS
    queue.enqueue(2.0)
    results = strategy.run(step, (tf.constant(1.0),))
    assert strategy.experimental_local_results(results)[0].numpy() == 4.0


def test_a_run_can_be_cancelled():
    strategy = strategy_of(2)
    queue = tf.queue.FIFOQueue(1, [tf.float32], shapes=[()])

    @tf.function
    def program(x: tf.Tensor):
        return strategy.run(functools.partial(waits_in_one_replica, queue), (x,))

    manager = cancellation.CancellationManager()
    function = manager.get_cancelable_function(
        program.get_concrete_function(tf.TensorSpec(()))
    )
    timer = threading.Timer(0.3, manager.start_cancel)
    timer.start()
    with pytest.raises(tf.errors.CancelledError):
        function(tf.constant(1.0))
    timer.join()


def test_an_all_reduce_outside_of_a_run_is_an_error():
    with pytest.raises(
        tf.errors.FailedPreconditionError,
        match=r"belongs in SoftwareTPUStrategy\.run",
    ):
        library.load().tpu_embedding_software_tpu_all_reduce(values=[tf.zeros(2)])
