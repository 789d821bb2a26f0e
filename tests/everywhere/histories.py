"""Random histories of one embedding after another, beside the NumPy reference.

    make fuzz-histories HISTORIES=100

A history draws a class, an engine, a number of replicas and pipelining. It trains,
evaluates, flushes, resets, meets bad batches, saves, and restores what histories of
other classes and engines saved; some of it while batches are queued or gradients owed.
"""

from __future__ import annotations

import argparse
import copy
import os
import pathlib
import tempfile
import time
from collections.abc import Callable, Sequence
from typing import Any
from unittest import mock

import numpy as np
import tensorflow as tf
from conformance import cases
from conformance.cases import Input
from everywhere.twins import CPU_ENGINES, strategy_of
from reference.embedding import Feature, ReferenceEmbedding, Table

import tpu_embedding as te
from tpu_embedding import distribution

DIM, CALLS = 3, 12
ENGINES = ("host", "portable", "v2", "v3", "v4", "v5p", "v6e", "7x")
INPUTS = {
    "one": Input("one", "dense", (4,)),
    "ragged": Input("ragged", "ragged", (4, 4)),
    "sequence": Input("sequence", "sparse", (4, 4), max_sequence_length=3),
    "several": Input("several", "dense", (4, 3)),
}
TABLES = {"one": "c", "ragged": "b", "sequence": "a", "several": "a"}
WEIGHTED = ("ragged", "sequence")
ROWS = {"a": 11, "b": 19, "c": 7}
COMBINERS = {"a": "mean", "b": "sqrtn", "c": "sum"}
HYPER: dict[str, tuple[Any, dict[str, Any]]] = {
    "a": (te.Adam, {"epsilon": 1e-2}),
    "b": (te.Adagrad, {"learning_rate": 0.25}),
    "c": (te.SGD, {}),
}
Saved = tuple[str, Any, str]  # A checkpoint, the reference's state, who saved it.


def rate(updates: int) -> np.float32:
    """The learning rate of the tables that have no other."""
    return np.float32(0.5) / np.float32(1 + 0.5 * updates)


class Expected:
    """The reference, and a queue before it."""

    def __init__(self, pipelined: bool, flushes_in_order: bool) -> None:
        tables = {
            name: Table(
                cases.named_values(ROWS[name], DIM),
                optimizer.__name__,
                {"learning_rate": rate, **hyper},
                COMBINERS[name],
            )
            for name, (optimizer, hyper) in HYPER.items()
        }
        features = [
            Feature(TABLES[name], given.max_sequence_length)
            for name, given in INPUTS.items()
        ]
        self.reference = ReferenceEmbedding(tables, features, pipelined=pipelined)
        self.queue: list[tuple[Any, bool]] = []
        self.steps = 0
        # The hardware of TPU v2 to v4 flushes when it reaches an evaluation batch.
        self._flushes_in_order = flushes_in_order

    def enqueue(self, batch: Any, training: bool) -> None:
        self.queue.append((batch, training))
        if not training and not self._flushes_in_order:
            self.reference.flush()

    def dequeue(self) -> Any:
        batch, training = self.queue.pop(0)
        return (self.reference.forward if training else self.reference.lookup)(*batch)

    def update(self, gradients: Any) -> None:
        self.steps += 1
        self.reference.backward(gradients)

    def shapes(self, *batch: Any) -> Any:
        """Activations of the right shapes; changes nothing."""
        return copy.deepcopy(self.reference).lookup(*batch)


class History:
    """One embedding and what happens to it."""

    def __init__(
        self, rng: np.random.Generator, folder: str, engines: Sequence[str]
    ) -> None:
        self._rng, self._folder = rng, folder
        self._engine = str(rng.choice(engines))
        self._queued, self._pipelined = bool(rng.integers(2)), bool(rng.integers(2))
        self._replicas = int(rng.integers(1, 4))
        if self._engine == "portable":
            self._pipelined, self._replicas = False, 1
        self._is_hardware_queue = self._engine in ("v2", "v3", "v4")
        os.environ.pop(distribution.ENGINE_VARIABLE, None)
        if self._engine in CPU_ENGINES:
            os.environ[distribution.ENGINE_VARIABLE] = self._engine
        self._strategy: Any = strategy_of(self._engine, self._replicas)
        self._embedding = self._make()
        self._expected = Expected(self._pipelined, self._is_hardware_queue)
        self._calls: list[str] = []

    def __str__(self) -> str:
        name = type(self._embedding).__name__
        pipelined = ", pipelined" if self._pipelined else ""
        where = f"{name} on {self._engine}:{self._replicas}{pipelined}"
        return f"{where}: {', '.join(self._calls)}"

    def run(self, saved: list[Saved], count: int) -> None:
        """Makes `count` random calls, and compares everything after the last one."""
        calls: dict[str, Callable[[], None]] = {
            "train": self._train,
            "flush": self._flush,
            "refused": self._refused,
            "save": lambda: self._save(saved),
            "restore": lambda: self._restore(saved),
            "compare": self._compare_tables,
        }
        between = ["flush", "save", "restore", "compare"]
        if self._queued:
            calls["evaluate"] = self._evaluate
        if self._is_hardware_queue:
            between = []  # Its programs have dequeue and apply_gradients together.
        else:
            calls["reset"] = self._reset
        self._between = lambda: between and self._call(calls, self._rng.choice(between))
        names = list(calls)
        self._call(calls, "train")  # The shapes of the first batch make the tables.
        for _ in range(count):
            chance = [4.0 if name == "train" else 1.0 for name in names]
            self._call(calls, self._rng.choice(names, p=np.array(chance) / sum(chance)))
        self._call(calls, "compare")

    def _call(self, calls: dict[str, Callable[[], None]], name: str) -> None:
        self._calls.append(str(name))
        calls[name]()

    def _make(self) -> Any:
        def initializer(shape: Any, dtype: Any) -> tf.Tensor:
            return tf.cast(cases.named_values(*shape), dtype)

        schedule = tf.keras.optimizers.schedules.InverseTimeDecay(0.5, 1, 0.5)
        tables = {
            name: te.TableConfig(
                ROWS[name],
                DIM,
                initializer,
                optimizer(**{"learning_rate": schedule, **hyper}),
                COMBINERS[name],
                name,
            )
            for name, (optimizer, hyper) in HYPER.items()
        }
        features = {
            name: te.FeatureConfig(
                tables[TABLES[name]], max_sequence_length=given.max_sequence_length
            )
            for name, given in INPUTS.items()
        }
        make: Any = te.TPUEmbedding if self._queued else te.TPUEmbeddingV2
        with self._strategy.scope():
            return make(features, None, self._pipelined, check_numerics=True)

    def _draw(self) -> tuple[Any, Any]:
        """[replica][feature] values and weights."""
        values = [
            [
                given.draw(self._rng, ROWS[TABLES[name]], tf.int32)
                for name, given in INPUTS.items()
            ]
            for _ in range(self._replicas)
        ]
        weights = [
            [
                cases.positive_weights(self._rng, value) if name in WEIGHTED else None
                for name, value in zip(INPUTS, replica, strict=True)
            ]
            for replica in values
        ]
        return values, weights

    def _gradients(self, activations: Any) -> Any:
        signs = np.where(np.arange(DIM) % 2, -1, 1)
        return [
            [
                (signs * 2.0 ** self._rng.uniform(-4, 0, a.shape)).astype(np.float32)
                for a in replica
            ]
            for replica in activations
        ]

    def _split(self, parts: Any) -> Any:
        """A dict by feature of distributed values."""
        named = [
            {
                name: tf.constant(value) if isinstance(value, np.ndarray) else value
                for name, value in zip(INPUTS, replica, strict=True)
            }
            for replica in parts
        ]
        return self._strategy.experimental_distribute_values_from_function(
            lambda context: named[context.replica_id_in_sync_group]
        )

    def _run(self, function: Callable[..., Any], *arguments: Any) -> Any:
        return self._strategy.run(function, tuple(self._split(a) for a in arguments))

    def _train(self) -> None:
        if self._queued:
            self._train_queued()
            return
        batch = self._draw()
        self._expected.enqueue(batch, training=True)
        expected = self._expected.dequeue()
        gradients = self._gradients(expected)
        if self._is_hardware_queue or self._rng.integers(2):
            self._compare(self._run(self._step, *batch, gradients), expected)
            self._expected.update(gradients)
            return
        found, preserved = self._run(self._embedding.embedding_lookup, *batch)
        self._compare(found, expected)
        self._between()
        self._expected.update(gradients)
        self._strategy.run(
            self._embedding.apply_gradients, (self._split(gradients), preserved)
        )

    def _step(self, values: Any, weights: Any, gradients: Any) -> Any:
        """A step of TPUEmbeddingV2."""
        activations, preserved = self._embedding(values, weights)
        self._embedding.apply_gradients(gradients, preserved)
        return activations

    def _train_queued(self) -> None:
        kinds = [True, *(bool(k) for k in self._rng.integers(2, size=2))]
        kinds = kinds[: self._rng.integers(1, 4)]
        for training in kinds:
            self._enqueue(self._draw(), training)
        if self._calls[1:]:
            self._between()
        for training in kinds:
            expected = self._expected.dequeue()
            if not training:
                self._compare(self._run(self._embedding.dequeue), expected)
                continue
            gradients = self._gradients(expected)
            if self._is_hardware_queue or self._rng.integers(2):
                self._compare(self._run(self._dequeue_and_apply, gradients), expected)
                self._expected.update(gradients)
                continue
            self._compare(self._run(self._embedding.dequeue), expected)
            self._between()
            self._expected.update(gradients)
            self._run(self._embedding.apply_gradients, gradients)

    def _enqueue(self, batch: Any, training: bool) -> None:
        self._expected.enqueue(batch, training)
        values, weights = (self._split(part) for part in batch)
        self._embedding.enqueue(values, weights, training=training)

    def _dequeue_and_apply(self, gradients: Any) -> Any:
        activations = self._embedding.dequeue()
        self._embedding.apply_gradients(gradients)
        return activations

    def _evaluate(self) -> None:
        self._enqueue(self._draw(), training=False)
        expected = self._expected.dequeue()
        self._compare(self._run(self._embedding.dequeue), expected)

    def _flush(self) -> None:
        self._embedding.flush()
        self._expected.reference.flush()

    def _reset(self) -> None:
        if self._queued:
            self._enqueue(self._draw(), training=True)
        self._embedding.reset()
        self._expected.queue.clear()
        self._expected.reference.discard()

    def _refused(self) -> None:
        """A batch with an invalid id in one replica, which changes nothing."""
        values, weights = self._draw()
        shapes = self._expected.shapes(values, weights)
        replica = values[self._rng.integers(self._replicas)]
        replica[0] = tf.constant([1, 2, 9, 0])
        try:
            if self._queued:
                self._embedding.enqueue(
                    self._split(values),
                    self._split(weights),
                    bool(self._rng.integers(2)),
                )
            else:
                gradients = self._gradients(shapes)
                self._run(self._step, values, weights, gradients)
        except tf.errors.InvalidArgumentError:
            return
        raise AssertionError(f"{self}: a bad batch was not refused")

    def _save(self, saved: list[Saved]) -> None:
        path = str(pathlib.Path(tempfile.mkdtemp(dir=self._folder)) / "saved")
        if self._rng.integers(2):
            te.checkpoint.save(self._embedding, path)
        else:
            tf.train.Checkpoint(embedding=self._embedding).write(path)
        saved.append((path, self._expected.reference.state(), str(self)))

    def _restore(self, saved: list[Saved]) -> None:
        if not saved:
            return
        path, state, who = saved[self._rng.integers(len(saved))]
        self._calls.append(f"[what was saved by {who}]")
        if self._rng.integers(2):
            te.checkpoint.restore(self._embedding, path)
        else:
            status = tf.train.Checkpoint(embedding=self._embedding).read(path)
            status.assert_existing_objects_matched()
        self._expected.reference.restore(state)
        self._expected.steps = max(self._expected.steps, int(state[2]))

    def _compare(self, found: Any, expected: Any) -> None:
        for feature, name in enumerate(INPUTS):
            parts = self._strategy.experimental_local_results(found[name])
            for replica, part in enumerate(parts):
                self._close(part, expected[replica][feature], f"activation of {name}")

    def _compare_tables(self) -> None:
        tables, slots, updates = self._expected.reference.state()
        for table, rows in self._embedding.core.checkpoint_rows().items():
            arrays = {"parameters": tables[table], **slots.get(table, {})}
            assert sorted(rows) == sorted(arrays)
            for name, values in arrays.items():
                self._close(rows[name].numpy(), values, f"{name} of {table}")
        found = self._embedding.core.checkpoint_updates()
        assert int(found.numpy()) == updates, str(self)

    def _close(self, found: Any, expected: Any, what: str) -> None:
        # 16 roundings of a step, and 64 terms, of values up to 16.
        bound = cases.tolerance(64, 16.0, 1 + self._expected.steps)
        np.testing.assert_allclose(
            found, expected, rtol=1e-4, atol=bound, err_msg=f"{what}. {self}"
        )


def run(
    count: int, seed: int, engines: Sequence[str] = ENGINES, calls: int = CALLS
) -> None:
    """Runs histories that share their checkpoints."""
    saved: list[Saved] = []
    with (
        mock.patch.dict(os.environ),  # Each history names its engine there.
        tempfile.TemporaryDirectory() as folder,
    ):
        for number in range(count):
            rng = np.random.default_rng([seed, number])
            History(rng, folder, engines).run(saved, calls)


def main() -> None:
    """Reads the arguments and runs."""
    import conftest  # noqa: F401 - makes logical devices, before TensorFlow starts

    parser = argparse.ArgumentParser(description="Runs random histories.")
    parser.add_argument("--histories", type=int, default=100)
    parser.add_argument("--seed", type=int, default=int(time.time()))
    parser.add_argument("--engines", default=",".join(ENGINES))
    arguments = parser.parse_args()
    print(f"seed {arguments.seed}", flush=True)
    run(arguments.histories, arguments.seed, arguments.engines.split(","))
    print(f"{arguments.histories} histories: 0 differences", flush=True)


if __name__ == "__main__":
    main()
