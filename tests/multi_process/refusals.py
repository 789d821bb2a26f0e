"""Fuzzes refused and abandoned steps, calls of one process and threads, in a job.

Every process draws the same random numbers, and has one replica of the reference.
"""

from __future__ import annotations

import contextlib
import functools
import os
import threading
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import numpy as np
import pytest
import tensorflow as tf
from histories import fuzz
from multi_process.calls import rank
from reliability.refusals import CLASSES, SAMPLES, STEPS_PER_EPISODE, Episode


def rows(embedding: Any) -> Any:
    """The table; it is read by calls of all processes."""
    return embedding.core.checkpoint_rows()["films"]["parameters"]


ALONE: dict[str, Callable[[Any], Any]] = {
    "flush": lambda embedding: embedding.flush(),
    "reset": lambda embedding: embedding.reset(),
    "read": lambda embedding: rows(embedding).numpy(),
    "enqueue": lambda embedding: embedding.enqueue(
        {"film": tf.zeros(SAMPLES, tf.int32)}
    ),
}
AHEAD = 3  # Batches that a thread enqueues ahead.
# Where an exception of the user's own ends a step: after which call of it.
POINTS = ("enqueue", "lookup", "update", "evaluation")


class OwnError(Exception):
    """What the user's program raises, eagerly."""


class JobEpisode(Episode):
    """One embedding of a job, in each of its processes."""

    # Errors of the user's own are in `abandon`.
    kinds = ("good", "good", "id", "nan", "shape")

    def __init__(
        self, rng: np.random.Generator, strategy: tf.distribute.Strategy
    ) -> None:
        self._of_job, self._rank = strategy, rank(strategy)
        super().__init__(
            rng,
            "host",
            name=str(rng.choice([*CLASSES])),
            replicas=strategy.num_replicas_in_sync,
            pipelined=bool(rng.integers(2)),
            graph=bool(rng.integers(2)),
        )
        self.user.embedding.core.create_engine()  # Before it no call meets another.
        self.abandoned = {
            point: self._traced(functools.partial(self._abandoned, point))
            for point in POINTS
        }

    def _make_strategy(self) -> tf.distribute.Strategy:
        return self._of_job

    def _replica(self) -> int:
        return self._rank

    def _own(self, values: np.ndarray) -> np.ndarray:
        return values[self._rank : self._rank + 1]

    def _refused(self, kind: str, bad: int) -> None:
        """All processes had looked up, and none has to reset."""
        traced = self.graph and kind == "shape"
        if self.name == "queue" and kind in ("nan", "shape") and not traced:
            self.reference.flush()

    def chances(self) -> dict[str, float]:
        """Calls as in one process, with a call alone, or from a thread."""
        steps = super().chances()
        tenth = sum(steps.values()) / 4
        ahead = tenth if self.name == "queue" else 0.0
        others = {"abandon": 3 * tenth, "call_alone": 3 * tenth - ahead}
        return {**steps, **others, "enqueue_ahead": ahead}

    def _abandoned(
        self, point: str, ids: tf.Tensor, gradients: tf.Tensor, fails: tf.Tensor
    ) -> tf.Tensor:
        """A step, or an evaluation, that may fail after one of its calls."""

        @contextlib.contextmanager
        def fail_here(before: Any = None) -> Iterator[None]:
            if tf.executing_eagerly():
                if fails:
                    raise OwnError
                yield
                return
            # TensorFlow orders only ops of the same resource.
            graph = tf.compat.v1.get_default_graph()
            before = graph.get_operations()[-1:] if before is None else before
            with tf.control_dependencies(before):
                check = tf.debugging.Assert(~fails, ["an error of the user's own"])
            with tf.control_dependencies([] if check is None else [check]):
                yield

        if point in ("enqueue", "evaluation"):
            training = point == "enqueue"
            found, looked_up = self.user.look_up(ids, training, fail_here)
            if not training:
                return found
        else:
            found, looked_up = self.user.look_up(ids)
        with fail_here([found]) if point == "lookup" else contextlib.nullcontext():
            self.user.update(tf.identity(gradients), looked_up)
        if point == "update":
            with fail_here():
                return tf.identity(found)
        return found

    def abandon(self) -> None:
        """Some processes leave a step, maybe call something alone, and all go on."""
        rng = self.rng
        point = str(rng.choice(POINTS if self.name == "queue" else POINTS[1:3]))
        left = rng.random(self.replicas) < 0.5
        left[rng.integers(self.replicas)] = True
        # Without pipelining flush does nothing.
        alone = str(rng.choice(["", "", "read", "flush" if self.pipelined else ""]))
        ids, gradients, update = self._draw()
        self.calls[-1] += f" after {point} in {left}, then {alone}"
        leaves = bool(left[self._rank])
        refusal = tf.errors.FailedPreconditionError
        expected: Any = refusal
        if leaves:
            expected = tf.errors.InvalidArgumentError if self.graph else OwnError
        step = functools.partial(
            self.abandoned[point], ids, gradients, tf.constant(leaves)
        )
        if point == "update" and not leaves:
            step()
        else:
            with pytest.raises(expected):
                step()
        if point == "update":
            self.reference.train(update)
        elif point == "evaluation" or (point == "lookup" and self.name == "queue"):
            self.reference.flush()  # It was due.
        met = point == "update" or left.all()
        if alone and (met or leaves):
            with contextlib.nullcontext() if met else pytest.raises(refusal):
                _ = ALONE[alone](self.user.embedding)
        if alone and met:
            self.reference.flush()
        ids, gradients, update = self._draw()
        (found,) = self.abandoned["update"](ids, gradients, tf.constant(False))
        np.testing.assert_array_equal(found, self.reference.table[ids.numpy()])
        self.reference.train(update)

    def _draw(self) -> tuple[Any, Any, np.ndarray]:
        """IDs and gradients of this process, and the update of all."""
        ids, gradients, update = self.draw()
        return tf.constant(ids[self._rank]), tf.constant(gradients[self._rank]), update

    def _check(self, found: tf.Tensor, ids: tf.Tensor) -> None:
        np.testing.assert_array_equal(found, self.reference.table[ids.numpy()])
        if self.name == "queue":
            self.reference.flush()  # A dequeue applies the pending update.

    def call_alone(self) -> None:
        """One process makes another call than the others; then all go on, or reset."""
        rng = self.rng
        when = str(rng.choice(["lookup", "update"]))
        meets = {
            # Without pipelining it does nothing.
            "flush": self.pipelined,
            # Only after a dequeue of the thread is it compared.
            "enqueue": self.name == "queue" and when == "update",
        }
        name = str(rng.choice([call for call in ALONE if meets.get(call, True)]))
        bad, discards = int(rng.integers(self.replicas)), bool(rng.integers(2))
        self.calls[-1] += f" {name} at the {when} in {bad}, discards: {discards}"
        ids, gradients, update = self._draw()
        embedding: Any = self.user.embedding

        def look_up() -> Any:
            if self.name == "queue":
                return embedding.dequeue()["film"], None
            return self.user.look_up(ids)

        def refused(call: Callable[[], Any]) -> bool:
            """Whether the step ends here, after all processes had an error."""
            alone = self._rank == bad
            refusal: Any = tf.errors.FailedPreconditionError
            with pytest.raises(refusal, match="called the embedding differently"):
                _ = ALONE[name](embedding) if alone else call()
            if discards:
                embedding.reset()
                self.reference.discard()
            return discards

        if self.name == "queue":
            embedding.enqueue({"film": ids})
        if when == "lookup" and refused(look_up):
            return
        activations, looked_up = look_up()
        self._check(activations, ids)
        if when == "update" and refused(lambda: self.user.update(gradients, looked_up)):
            return
        self.user.update(gradients, looked_up)
        self.reference.train(update)

    def enqueue_ahead(self) -> None:
        drawn = [self._draw() for _ in range(AHEAD)]
        enqueued = threading.Semaphore(0)

        def enqueue() -> None:
            for ids, _, _ in drawn:
                self.user.embedding.enqueue({"film": ids})
                enqueued.release()

        thread = threading.Thread(target=enqueue)
        thread.start()
        for ids, gradients, update in drawn:
            enqueued.acquire()
            activations = self.user.embedding.dequeue()["film"]
            self._check(activations, ids)
            self.user.update(gradients, None)
            self.reference.train(update)
        thread.join()


def run(strategy: tf.distribute.Strategy, steps: int, seed: int) -> int:
    """Fuzzes in one process of a job; returns the number of steps."""
    with mock.patch.dict(os.environ):
        episodes = -(-steps // STEPS_PER_EPISODE)
        make = functools.partial(JobEpisode, strategy=strategy)
        return fuzz(make, episodes, STEPS_PER_EPISODE, seed).total()
