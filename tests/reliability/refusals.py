"""Fuzzes steps that are refused, beside a reference that skips them.

    make fuzz-refusals STEPS=20000

Each episode draws an engine, a class, pipelining and a number of replicas, and then
trains random steps, some of which fail in one replica. With SGD, a rate of 1 and whole
numbers as gradients all values are exact: any update that is lost, doubled, mixed or
applied too early shows.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import os
import time
from collections.abc import Callable
from typing import Any
from unittest import mock

import numpy as np
import tensorflow as tf

import tpu_embedding as te
from tpu_embedding import distribution
from tpu_embedding.embedding_base import EmbeddingBase
from tpu_embedding.engines import EmbeddingOptions
from tpu_embedding.testing import SoftwareTPUStrategy

V, D, SAMPLES = 6, 2, 4  # SparseCores divide the samples by 4.
STEPS_PER_EPISODE = 25
KINDS = ("good", "good", "id", "nan", "assertion", "shape", "raise", "flush")
EVALUATIONS = ("evaluation", "bad evaluation")  # Of a queue.
REFUSALS = (tf.errors.InvalidArgumentError, ValueError, ArithmeticError)


@dataclasses.dataclass
class Reference:
    """The tables as they should be: complete steps, each applied once and in order."""

    pipelined: bool
    table: np.ndarray
    pending: np.ndarray | None = None

    def flush(self) -> None:
        if self.pending is not None:
            self.table = self.table - self.pending
        self.pending = None

    def train(self, update: np.ndarray) -> None:
        self.flush()
        self.pending = update
        if not self.pipelined:
            self.flush()


_nothing = contextlib.nullcontext


class Queue:
    """TPUEmbedding: a batch is queued and looked up, then owes its gradients."""

    def __init__(self, features: Any, pipelined: bool) -> None:
        self.embedding = te.TPUEmbedding(
            features, te.SGD(1.0), pipelined, check_numerics=True
        )
        self.embedding.build()

    def look_up(
        self, ids: tf.Tensor, training: bool = True, between: Any = _nothing
    ) -> tuple[tf.Tensor, Any]:
        self.embedding.enqueue({"film": ids}, training=training)
        with between():
            return self.embedding.dequeue()["film"], None

    def update(self, gradient: tf.Tensor, looked_up: Any) -> None:
        del looked_up
        self.embedding.apply_gradients({"film": gradient})


class V2:
    """TPUEmbeddingV2: the batch is in the user's hands."""

    def __init__(self, features: Any, pipelined: bool) -> None:
        self.embedding = te.TPUEmbeddingV2(
            features, te.SGD(1.0), pipelined, check_numerics=True
        )
        self.embedding.build()

    def look_up(self, ids: tf.Tensor) -> tuple[tf.Tensor, Any]:
        activations, preserved = self.embedding({"film": ids})
        return activations["film"], preserved

    def update(self, gradient: tf.Tensor, looked_up: Any) -> None:
        self.embedding.apply_gradients({"film": gradient}, looked_up)


class Calls:
    """The lookups and updates of a Keras layer."""

    def __init__(self, features: Any, pipelined: bool) -> None:
        options = EmbeddingOptions(pipelined=pipelined, check_numerics=True)
        self.embedding = EmbeddingBase(features, te.SGD(1.0), options)

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
class Episode:
    """One embedding, trained for some steps."""

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
        if self.replicas == 1:
            return tf.distribute.get_strategy()
        devices = [f"CPU:{r}" for r in range(self.replicas)]
        return tf.distribute.MirroredStrategy(devices)

    def _evaluate(self, ids: Any) -> tf.Tensor:
        return self.user.look_up(ids[self._replica()], training=False)[0]

    def _own(self, values: np.ndarray) -> np.ndarray:
        """The replicas of this process."""
        return values

    def _replica(self) -> int:
        context = tf.distribute.get_replica_context()
        return int(tf.get_static_value(context.replica_id_in_sync_group))

    def _traced(self, call: Callable[..., Any]) -> Callable[..., Any]:
        def run(*arguments: Any) -> Any:
            found = self.strategy.run(call, arguments)
            return self.strategy.experimental_local_results(found)

        return tf.function(run, autograph=False) if self.graph else run

    def _step(self, kind: str) -> Callable[..., tf.Tensor]:
        def step(ids: Any, gradients: Any, fails: Any, bad: int) -> tf.Tensor:
            replica = self._replica()
            if kind == "raise" and replica == bad:
                raise ArithmeticError
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

    def step(self, rng: np.random.Generator) -> None:
        """One random step, and what must hold after it."""
        kinds = self.kinds + (EVALUATIONS if self.name == "queue" else ())
        kind = str(rng.choice(kinds))
        bad = int(rng.integers(self.replicas))
        ids = rng.integers(0, V, [self.replicas, SAMPLES])
        gradients = rng.integers(1, 4, [self.replicas, SAMPLES, D]).astype(np.float32)
        fails = np.zeros(self.replicas, bool)
        update = np.zeros([V, D], np.float32)
        np.add.at(update, ids.ravel(), gradients.reshape(-1, D))
        expected = self._own(self.reference.table[ids])
        where = (self, kind, bad)
        if kind == "flush":
            self.user.embedding.flush()
            self.reference.flush()
            return
        if kind == "evaluation":
            self.reference.flush()
            expected = self._own(self.reference.table[ids])
            found = np.stack([p.numpy() for p in self.evaluation(tf.constant(ids))])
            np.testing.assert_array_equal(found, expected, err_msg=str(where))
            return
        if kind in ("id", "bad evaluation"):
            ids[bad, rng.integers(SAMPLES)] = V + 3
        elif kind == "nan":
            gradients[bad, 0, 0] = np.nan
        elif kind == "assertion":
            fails[bad] = True
        if kind == "bad evaluation":
            try:
                self.evaluation(tf.constant(ids))
            except REFUSALS:
                return
            raise AssertionError(f"{where} was not refused")
        call = self.steps[kind if kind in ("shape", "raise") else "values"]
        arguments = (tf.constant(ids), tf.constant(gradients), tf.constant(fails), bad)
        if kind == "good":
            found = np.stack([part.numpy() for part in call(*arguments)])
            np.testing.assert_array_equal(found, expected, err_msg=str(where))
            self.reference.train(update)
            return
        try:
            call(*arguments)
        except REFUSALS:
            self._refused(kind, bad)
        else:
            raise AssertionError(f"{where} was not refused")

    def _refused(self, kind: str, bad: int) -> None:
        """What a refused step leaves: nothing, but for lookups that were done."""
        traced = self.graph and kind in ("shape", "raise")
        looked_up = kind in ("nan", "assertion", "shape") and not traced
        if self.name == "queue" and looked_up and bad == self.replicas - 1:
            self.reference.flush()  # All replicas had looked up: the update was due.
            if self.replicas == 1:
                self.user.embedding.reset()  # It owes its gradients still.

    def finish(self) -> None:
        self.user.embedding.flush()
        self.reference.flush()
        rows = self.user.embedding.core.checkpoint_rows()["films"]["parameters"]
        table = rows.numpy()
        np.testing.assert_array_equal(table, self.reference.table, err_msg=str(self))


class SparseCoreEpisode(Episode):
    """TPUEmbeddingV2 on software SparseCores, whose programs have no Python between."""

    classes = ("V2",)
    kinds = ("good", "good", "id", "nan", "assertion", "flush")
    tpus = ("v5p", "v6e", "7x")

    def _make_strategy(self) -> tf.distribute.Strategy:
        return SoftwareTPUStrategy(self.tpu, self.replicas)

    def _split(self, values: Any) -> Any:
        return self.strategy.experimental_distribute_values_from_function(
            lambda context: tf.constant(
                np.asarray(values)[context.replica_id_in_sync_group]
            )
        )

    def _traced(self, call: Callable[..., Any]) -> Callable[..., Any]:
        return self._splitting(super()._traced(call))

    def _splitting(self, run: Callable[..., Any]) -> Callable[..., Any]:
        """Calls `run` with the values of each replica; `bad` is known from them."""
        return lambda *arguments: run(
            *[self._split(a) for a in arguments if not isinstance(a, int)]
        )

    def _step(self, kind: str) -> Callable[..., tf.Tensor]:
        del kind

        def step(ids: Any, gradients: Any, fails: Any) -> tf.Tensor:
            activations, looked_up = self.user.look_up(ids)
            tf.debugging.assert_equal(fails, False, "broken")
            self.user.update(gradients, looked_up)
            return activations

        return step


class HardwareEpisode(SparseCoreEpisode):
    """TPUEmbeddingV2 on a software TPU v4."""

    tpus = ("v2", "v4")


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
        del kind

        def step(gradients: Any, fails: Any) -> tf.Tensor:
            films = self.user.embedding.dequeue()["film"]
            tf.debugging.assert_equal(fails, False, "broken")
            self.user.update(gradients, None)
            return films

        return step

    def _evaluate(self) -> tf.Tensor:
        return self.user.embedding.dequeue()["film"]

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


def run(steps: int, seed: int, engines: tuple[str, ...] = ("host", "portable")) -> int:
    """Fuzzes; returns the number of episodes."""
    rng = np.random.default_rng(seed)
    episodes = 0
    with mock.patch.dict(os.environ):  # Each episode names its engine there.
        while steps > 0:
            engine = str(rng.choice(engines))
            kind = EPISODES[engine]
            episode = kind(
                engine=engine.removesuffix("_queue"),
                name=str(rng.choice(kind.classes)),
                replicas=1 if engine == "portable" else int(rng.integers(1, 4)),
                pipelined=bool(engine != "portable" and rng.integers(2)),
                graph=bool(rng.integers(2)),
                tpu=str(rng.choice(kind.tpus)),
            )
            for _ in range(STEPS_PER_EPISODE):
                episode.step(rng)
            episode.finish()
            steps -= STEPS_PER_EPISODE
            episodes += 1
    return episodes


def main() -> None:
    """Reads the arguments and fuzzes."""
    import conftest  # noqa: F401 - makes logical devices, before TensorFlow starts

    parser = argparse.ArgumentParser(description="Fuzzes refused steps.")
    parser.add_argument("--steps", type=int, default=20_000)
    parser.add_argument("--seed", type=int, default=int(time.time()))
    parser.add_argument("--engines", default=",".join(EPISODES))
    arguments = parser.parse_args()
    print(f"seed {arguments.seed}", flush=True)
    engines = tuple(arguments.engines.split(","))
    episodes = run(arguments.steps, arguments.seed, engines)
    print(f"{arguments.steps} steps in {episodes} episodes: 0 differences", flush=True)


if __name__ == "__main__":
    main()
