"""Fuzzes steps that are refused, beside a reference that skips them.

    make fuzz-refusals STEPS=20000

Each episode draws an engine, a class, pipelining and a number of replicas, and then
trains random steps, some of which fail in one replica. With SGD, rates and gradients
that are whole numbers all values are exact: any update that is lost, doubled, mixed,
counted wrongly or applied too early shows.
"""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import functools
import os
from collections.abc import Callable, Sequence
from typing import Any
from unittest import mock

import numpy as np
import pytest
import tensorflow as tf
from histories import RandomHistory, fuzz, main
from replica_values import of_replicas, replicated, this_replica

import tpu_embedding as te
from tpu_embedding import distribution
from tpu_embedding.embedding_base import EmbeddingBase
from tpu_embedding.engines import EmbeddingOptions
from tpu_embedding.testing import SoftwareTPUStrategy

V, D, SAMPLES = 6, 2, 4  # SparseCores divide the samples by 4.
STEPS_PER_EPISODE = 25
KINDS = ("good", "good", "id", "nan", "assertion", "shape", "raise")
REFUSALS = (tf.errors.InvalidArgumentError, ValueError, ArithmeticError)
# What the refusals say; those of ids name the sample, too.
MESSAGES = {
    "nan": r"the gradient of sample 0 is not finite \(nan\)",
    "assertion": "broken",
    "shape": "must have the shape of its activation",
    "raise": "on purpose",
}


def rate(updates: Any) -> tf.Tensor:
    """The rate of an update after so many others: 1, 2 or 3."""
    return 1.0 + tf.cast(updates % 3, tf.float32)


@dataclasses.dataclass
class Reference:
    """The tables as they should be: complete steps, each applied once and in order."""

    pipelined: bool
    table: np.ndarray
    pending: np.ndarray | None = None
    updates: int = 0

    def flush(self) -> None:
        if self.pending is not None:
            self.table = self.table - self.pending
        self.pending = None

    def discard(self) -> None:
        """Forgets the pending update, which counts no longer."""
        self.updates -= self.pending is not None
        self.pending = None

    def train(self, update: np.ndarray) -> None:
        self.flush()
        self.pending = float(rate(self.updates)) * update
        self.updates += 1
        if not self.pipelined:
            self.flush()


_nothing = contextlib.nullcontext


class V2:
    """TPUEmbeddingV2: the batch is in the user's hands."""

    make: Any = te.TPUEmbeddingV2

    def __init__(self, features: Any, pipelined: bool) -> None:
        self.embedding = self.make(
            features, te.SGD(rate), pipelined, check_numerics=True
        )
        self.embedding.build()

    def look_up(self, ids: tf.Tensor) -> tuple[tf.Tensor, Any]:
        activations, preserved = self.embedding({"film": ids})
        return activations["film"], preserved

    def update(self, gradient: tf.Tensor, looked_up: Any) -> None:
        self.embedding.apply_gradients({"film": gradient}, looked_up)


class Queue(V2):
    """TPUEmbedding: a batch is queued and looked up, then owes its gradients."""

    make = te.TPUEmbedding

    def look_up(
        self, ids: tf.Tensor, training: bool = True, between: Any = _nothing
    ) -> tuple[tf.Tensor, Any]:
        self.embedding.enqueue({"film": ids}, training=training)
        with between():
            return self.embedding.dequeue()["film"], None

    def update(self, gradient: tf.Tensor, looked_up: Any) -> None:
        self.embedding.apply_gradients({"film": gradient})


class Calls:
    """The lookups and updates of a Keras layer."""

    def __init__(self, features: Any, pipelined: bool) -> None:
        options = EmbeddingOptions(pipelined=pipelined, check_numerics=True)
        self.embedding = EmbeddingBase(features, te.SGD(rate), options)

    def look_up(self, ids: tf.Tensor) -> tuple[tf.Tensor, Any]:
        (activations,), looked_up = self.embedding.core.look_up([ids])
        return activations, looked_up

    def update(self, gradient: tf.Tensor, looked_up: Any) -> None:
        self.embedding.core.update(looked_up, [gradient])


CLASSES: dict[str, Callable[[Any, bool], Any]] = {
    "queue": Queue,
    "V2": V2,
    "calls": Calls,
}


@dataclasses.dataclass(eq=False)
class Episode(RandomHistory):
    """One embedding, trained for some steps."""

    rng: np.random.Generator = dataclasses.field(repr=False)
    engine: str
    name: str
    replicas: int
    pipelined: bool
    graph: bool
    tpu: str = ""

    classes = tuple(CLASSES)
    kinds = KINDS
    tpus = ("",)

    def __post_init__(self) -> None:
        super().__init__(self.rng)
        os.environ[distribution.ENGINE_VARIABLE] = self.engine
        self.strategy: Any = self._make_strategy()
        films = te.TableConfig(
            V, D, te.RowIdInitializer(), combiner="sum", name="films"
        )
        feature = te.FeatureConfig(films, output_shape=[SAMPLES])
        with self.strategy.scope():
            self.user = CLASSES[self.name]({"film": feature}, self.pipelined)
        start = np.repeat(np.arange(V, dtype=np.float32)[:, np.newaxis], D, axis=1)
        self.reference = Reference(self.pipelined, start)
        self.steps = {
            kind: self._traced(self._step(kind))
            for kind in ("values", "shape", "raise")
        }
        self.evaluation = self._traced(self._evaluate)

    def _make_strategy(self) -> tf.distribute.Strategy:
        return replicated(self.replicas)

    def _evaluate(self, ids: Any) -> tf.Tensor:
        return self.user.look_up(ids[self._replica()], training=False)[0]

    def _own(self, values: np.ndarray) -> np.ndarray:
        """The replicas of this process."""
        return values

    def _replica(self) -> int:
        return this_replica()

    def _traced(self, call: Callable[..., Any]) -> Callable[..., Any]:
        def run(*arguments: Any) -> Any:
            found = self.strategy.run(call, arguments)
            return self.strategy.experimental_local_results(found)

        return tf.function(run, autograph=False) if self.graph else run

    def _step(self, kind: str) -> Callable[..., tf.Tensor]:
        def step(ids: Any, gradients: Any, fails: Any, bad: int) -> tf.Tensor:
            replica = self._replica()
            if kind == "raise" and replica == bad:
                raise ArithmeticError("on purpose")
            activations, looked_up = self.user.look_up(ids[replica])
            gradient = gradients[replica]
            if kind == "shape" and replica == bad:
                gradient = gradient[:, :1]
            # After the lookup: whether a step that failed looked up is then known.
            with tf.control_dependencies([activations]):
                check = tf.debugging.Assert(~fails[replica], ["broken"])
            with tf.control_dependencies([] if check is None else [check]):
                self.user.update(tf.identity(gradient), looked_up)
            return activations

        return step

    def chances(self) -> dict[str, float]:
        kinds = collections.Counter(self.kinds)
        calls = {f"train {kind}": float(number) for kind, number in kinds.items()}
        if self.name == "queue":
            calls |= {"evaluate": 1.0, "evaluate_badly": 1.0}
        return {**calls, "flush": 1.0}

    def draw(self) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """IDs and gradients of each replica, and the update that they make."""
        ids = self.rng.integers(0, V, [self.replicas, SAMPLES])
        size = [self.replicas, SAMPLES, D]
        gradients = self.rng.integers(1, 4, size).astype(np.float32)
        update = np.zeros([V, D], np.float32)
        np.add.at(update, ids.ravel(), gradients.reshape(-1, D))
        return ids, gradients, update

    def _spoil(self, ids: np.ndarray, replica: int) -> str:
        """Puts a bad id into a batch, and returns what the refusal says."""
        sample = int(self.rng.integers(SAMPLES))
        ids[replica, sample] = V + 3
        return f"sample {sample} has id {V + 3},"

    def _refusal(self, message: str) -> Any:
        return pytest.raises(REFUSALS, match=message)

    def _compare(self, found: Any, expected: np.ndarray) -> None:
        found = [part.numpy() for part in found]
        np.testing.assert_array_equal(found, self._own(expected))

    def flush(self) -> None:
        self.user.embedding.flush()
        self.reference.flush()

    def evaluate(self) -> None:
        ids, _, _ = self.draw()
        self.reference.flush()
        self._compare(self.evaluation(tf.constant(ids)), self.reference.table[ids])

    def evaluate_badly(self) -> None:
        ids, _, _ = self.draw()
        message = self._spoil(ids, int(self.rng.integers(self.replicas)))
        with self._refusal(message):
            self.evaluation(tf.constant(ids))

    def train(self, kind: str) -> None:
        """A step, and what must hold after it."""
        ids, gradients, update = self.draw()
        expected = self.reference.table[ids]
        bad, fails = (
            int(self.rng.integers(self.replicas)),
            np.zeros(self.replicas, bool),
        )
        self.calls[-1] += f" in {bad}"
        message = self._spoil(ids, bad) if kind == "id" else MESSAGES.get(kind, "")
        if kind == "nan":
            gradients[bad, 0, 0] = np.nan
        elif kind == "assertion":
            fails[bad] = True
        step = self.steps[kind if kind in ("shape", "raise") else "values"]
        arguments = (tf.constant(ids), tf.constant(gradients), tf.constant(fails), bad)
        if kind == "good":
            self._compare(step(*arguments), expected)
            self.reference.train(update)
            return
        with self._refusal(message):
            step(*arguments)
        self._refused(kind, bad)

    def _refused(self, kind: str, bad: int) -> None:
        """What a refused step leaves: nothing, but for lookups that were done."""
        traced = self.graph and kind in ("shape", "raise")
        looked_up = kind in ("nan", "assertion", "shape") and not traced
        owes = self.name == "queue" and looked_up and bad == self.replicas - 1
        if owes:
            self.reference.flush()  # All replicas had looked up: the update was due.
        # One replica owes its gradients still; several go on with or without a reset.
        if (owes and self.replicas == 1) or self.rng.integers(2):
            self.user.embedding.reset()
            self.reference.discard()
            self.calls[-1] += ", reset"

    def check(self) -> None:
        self.flush()
        rows = self.user.embedding.core.checkpoint_rows()["films"]["parameters"]
        np.testing.assert_array_equal(rows.numpy(), self.reference.table)


class SparseCoreEpisode(Episode):
    """TPUEmbeddingV2 on software SparseCores, whose programs have no Python between."""

    classes = ("V2",)
    kinds = ("good", "good", "id", "nan", "assertion")
    tpus = ("v5p", "v6e", "7x")

    def _make_strategy(self) -> tf.distribute.Strategy:
        return SoftwareTPUStrategy(self.tpu, self.replicas)

    def _split(self, values: Any) -> Any:
        return of_replicas(self.strategy, list(map(tf.constant, np.asarray(values))))

    def _traced(self, call: Callable[..., Any]) -> Callable[..., Any]:
        return self._splitting(super()._traced(call))

    def _splitting(self, run: Callable[..., Any]) -> Callable[..., Any]:
        """Calls `run` with the values of each replica; `bad` is known from them."""
        return lambda *arguments: run(
            *[self._split(a) for a in arguments if not isinstance(a, int)]
        )

    def _step(self, kind: str) -> Callable[..., tf.Tensor]:

        def step(ids: Any, gradients: Any, fails: Any) -> tf.Tensor:
            activations, looked_up = self.user.look_up(ids)
            tf.debugging.assert_equal(fails, False, "broken")
            self.user.update(gradients, looked_up)
            return activations

        return step


class HardwareEpisode(SparseCoreEpisode):
    """TPUEmbeddingV2 on a software TPU v4."""

    tpus = ("v2", "v4")

    def _refused(self, kind: str, bad: int) -> None:
        """Nothing is left, and there is no reset."""


class HardwareQueueEpisode(SparseCoreEpisode):
    """TPUEmbedding on a software TPU v4."""

    classes = ("queue",)
    tpus = ("v2", "v4")

    def _traced(self, call: Callable[..., Any]) -> Callable[..., Any]:
        training = call != self._evaluate

        def run(ids: Any, *arguments: Any) -> Any:
            self.user.embedding.enqueue({"film": ids}, training=training)
            found = self.strategy.run(call, arguments)
            return self.strategy.experimental_local_results(found)

        return self._splitting(tf.function(run, autograph=False) if self.graph else run)

    def _step(self, kind: str) -> Callable[..., tf.Tensor]:

        def step(gradients: Any, fails: Any) -> tf.Tensor:
            films = self.user.embedding.dequeue()["film"]
            tf.debugging.assert_equal(fails, False, "broken")
            self.user.update(gradients, None)
            return films

        return step

    def _evaluate(self) -> tf.Tensor:
        return self.user.embedding.dequeue()["film"]

    def _refusal(self, message: str) -> Any:
        # In a graph the program that waits for the batch may fail first.
        cancelled = (tf.errors.CancelledError,) if self.graph else ()
        other = "|No batch is enqueued" if self.graph else ""
        return pytest.raises((*REFUSALS, *cancelled), match=message + other)

    def _refused(self, kind: str, bad: int) -> None:
        """Nothing is left: what the program received is dropped with it."""


class SparseCoreQueueEpisode(HardwareQueueEpisode):
    """TPUEmbedding on software SparseCores, where batches wait on the host."""

    tpus = ("v5p", "v6e", "7x")

    def _refused(self, kind: str, bad: int) -> None:
        if kind in ("nan", "assertion"):  # The batch owes its gradients still.
            self.user.embedding.flush()
            self.user.embedding.reset()
            self.reference.flush()


EPISODES: dict[str, type[Episode]] = {
    "host": Episode,
    "portable": Episode,
    "sparse_core": SparseCoreEpisode,
    "sparse_core_queue": SparseCoreQueueEpisode,
    "tpu_v2_v4": HardwareEpisode,
    "tpu_v2_v4_queue": HardwareQueueEpisode,
}


def draw(rng: np.random.Generator, engines: Sequence[str], **chosen: Any) -> Episode:
    """Draws what is not chosen."""
    engine = str(rng.choice(engines))
    kind = EPISODES[engine]
    drawn = {
        "name": str(rng.choice(kind.classes)),
        "replicas": 1 if engine == "portable" else int(rng.integers(1, 4)),
        "pipelined": bool(engine != "portable" and rng.integers(2)),
        "graph": bool(rng.integers(2)),
        "tpu": str(rng.choice(kind.tpus)),
    }
    return kind(rng, engine=engine.removesuffix("_queue"), **{**drawn, **chosen})


def run(
    steps: int, seed: int, engines: str = ",".join(EPISODES), **chosen: Any
) -> collections.Counter[str]:
    """Fuzzes refused steps."""
    with mock.patch.dict(os.environ):  # Each episode names its engine there.
        episodes = -(-steps // STEPS_PER_EPISODE)
        make = functools.partial(draw, engines=engines.split(","), **chosen)
        return fuzz(make, episodes, min(steps, STEPS_PER_EPISODE), seed)


if __name__ == "__main__":
    main(run, steps=20_000, engines=",".join(EPISODES))
