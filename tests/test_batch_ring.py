"""The ring of batches behind the queues of SparseCores and of the portable engine."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import tensorflow as tf

from tpu_embedding.engines.batch_ring import BatchRing, pack, unpack

NUMBER = tf.TensorSpec([], tf.int64)


@pytest.fixture(params=["eager", "graph"])
def wrap(request: pytest.FixtureRequest) -> Callable[[Any], Any]:
    return (lambda call: call) if request.param == "eager" else tf.function


def test_tensors_of_any_kind_pass(wrap: Any) -> None:
    tensors = [tf.constant([1, 2], tf.int64), tf.zeros([0, 4])]
    specs = [tf.TensorSpec([None], tf.int64), tf.TensorSpec([None, 4])]
    for tensor, result in zip(
        tensors, wrap(lambda: unpack(pack(tensors), specs))(), strict=True
    ):
        np.testing.assert_array_equal(tensor, result)
        assert tensor.dtype == result.dtype


def test_batches_leave_in_order_and_none_is_kept(wrap: Any) -> None:
    ring = BatchRing()
    put = wrap(lambda number: ring.put(pack([number]), training=True) and None)
    take = wrap(lambda: unpack(ring.take()[1], [NUMBER])[0])
    settle = wrap(lambda: ring.settle() and None)
    for first in range(0, 200, 50):
        for number in range(first, first + 50):
            put(tf.constant(number, tf.int64))
        for number in range(first, first + 50):
            assert take() == number
            settle()
    size = tf.raw_ops.LookupTableSizeV2(table_handle=ring.handles[0])
    assert size == 1  # The counts.


def test_a_batch_that_must_stay_stays(wrap: Any) -> None:
    ring = BatchRing()
    ring.put(pack([tf.constant(7, tf.int64)]), training=True)

    def check(batch: tf.Tensor) -> list[Any]:
        number = unpack(batch, [NUMBER])[0]
        return [tf.debugging.assert_less(number, tf.constant(7, tf.int64))]

    for _ in range(2):  # Nor does the error keep the mutex.
        with pytest.raises(tf.errors.InvalidArgumentError) as raised:
            wrap(lambda: ring.take(check)[1])()
        with pytest.raises(tf.errors.FailedPreconditionError, match="not dequeued"):
            wrap(ring.owed)()
    assert unpack(ring.take()[1], [NUMBER])[0] == 7
    assert unpack(ring.owed(), [NUMBER])[0] == 7
    del raised


def test_put_takes_the_mutex_after_its_batch_is_made() -> None:
    """A check of the batch that fails in a branch cancels what waits for a mutex.

    TensorFlow would raise that CancelledError instead of the error of the check.
    """
    ring = BatchRing()

    @tf.function
    def put(number: tf.Tensor) -> None:
        ring.put(tf.identity(pack([number]), name="made"), training=True)

    graph = put.get_concrete_function(NUMBER).graph
    (lock,) = (op for op in graph.get_operations() if op.type == "MutexLock")
    assert graph.get_operation_by_name("made") in lock.control_inputs


def test_threads_share_a_ring(wrap: Any) -> None:
    """Two threads put, one takes: nothing is lost, and each thread's order stays."""
    ring = BatchRing()
    put = wrap(lambda number: ring.put(pack([number]), training=True) and None)
    take = wrap(lambda: unpack(ring.take()[1], [NUMBER])[0])
    settle = wrap(lambda: ring.settle() and None)
    room = threading.Semaphore(60)
    seen: list[int] = []

    def put_all(start: int) -> None:
        for number in range(start, start + 100):
            room.acquire()
            put(tf.constant(number, tf.int64))

    threads = [threading.Thread(target=put_all, args=[n]) for n in (0, 1000)]
    for thread in threads:
        thread.start()
    while len(seen) < 200:
        try:
            seen.append(int(take()))
        except tf.errors.FailedPreconditionError:
            continue
        settle()
        room.release()
    for thread in threads:
        thread.join(timeout=60)
        assert not thread.is_alive()
    assert [n for n in seen if n < 1000] == list(range(100))
    assert [n for n in seen if n >= 1000] == list(range(1000, 1100))
