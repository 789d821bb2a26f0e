"""Random histories of one embedding after another, beside the NumPy reference.

    make fuzz-histories HISTORIES=100

A history draws a class, an engine, a number of replicas and pipelining. It trains,
evaluates, flushes, resets, meets bad batches, saves, and restores what histories of
other classes and engines saved; some of it while batches are queued or gradients owed.
"""

from __future__ import annotations

import collections
import functools
import os
import pathlib
import tempfile
from collections.abc import Sequence
from typing import Any
from unittest import mock

import numpy as np
import pytest
import tensorflow as tf
from conformance import cases
from conformance.cases import Input
from conformance.twin import Batch, Feature, Table
from everywhere.twins import CPU_ENGINES, EverywhereTwin, strategy_of
from histories import RandomHistory, fuzz, main, read, write
from steps import train_on

import tpu_embedding as te
from tpu_embedding import distribution

ENGINES = ("host", "portable", "v2", "v3", "v4", "v5p", "v6e", "7x")
RATE = tf.keras.optimizers.schedules.InverseTimeDecay(0.5, 1, 0.5)
TABLES = {
    "a": Table(11, 3, "mean", te.Adam(RATE, epsilon=1e-2)),
    "b": Table(19, 3, "sqrtn", te.Adagrad(0.25)),
    "c": Table(7, 3, "sum", te.SGD(RATE)),
}
SEQUENCE = Input("sequence", "sparse", (4, 4), max_sequence_length=3)
FEATURES = {
    "one": Feature("c", Input("one", "dense", (4,))),
    "ragged": Feature("b", Input("ragged", "ragged", (4, 4)), weighted=True),
    "sequence": Feature("a", SEQUENCE, weighted=True),
    "several": Feature("a", Input("several", "dense", (4, 3))),
}
Saved = tuple[str, Any, str]  # A checkpoint, the reference's state, who saved it.


class History(RandomHistory):
    """One embedding and what happens to it."""

    def __init__(
        self,
        rng: np.random.Generator,
        saved: list[Saved],
        folder: str,
        engines: Sequence[str],
    ) -> None:
        super().__init__(rng)
        self._saved, self._folder = saved, folder
        self._engine = str(rng.choice(engines))
        self._queued, self._pipelined = bool(rng.integers(2)), bool(rng.integers(2))
        replicas = int(rng.integers(1, 4))
        if self._engine == "portable":
            self._pipelined, replicas = False, 1
        # The hardware of TPU v2 to v4 flushes when it reaches an evaluation batch, and
        # its programs have dequeue and apply_gradients together.
        self._is_hardware_queue = self._engine in ("v2", "v3", "v4")
        os.environ.pop(distribution.ENGINE_VARIABLE, None)
        if self._engine in CPU_ENGINES:
            os.environ[distribution.ENGINE_VARIABLE] = self._engine
        self._twin = EverywhereTwin(
            TABLES,
            FEATURES,
            strategy=strategy_of(self._engine, replicas),
            make=te.TPUEmbedding if self._queued else te.TPUEmbeddingV2,
            pipeline_execution_with_tensor_core=self._pipelined,
            check_numerics=True,
        )
        self._embedding, self._reference = self._twin.embedding, self._twin.reference

    def __str__(self) -> str:
        name = type(self._embedding).__name__
        pipelined = ", pipelined" if self._pipelined else ""
        return f"{name} on {self._engine}:{self._twin.replicas}{pipelined}"

    def chances(self) -> dict[str, float]:
        if not self.calls:  # The shapes of the first batch make the tables.
            return {"train": 1.0}
        calls = ["flush", "refuse", "save", "restore", "check"]
        if self._queued:
            calls.append("evaluate")
        if not self._is_hardware_queue:
            calls.append("reset")
        return {"train": 4.0, **dict.fromkeys(calls, 1.0)}

    def _call_between(self) -> None:
        """Makes a call while batches are queued or gradients are owed."""
        if not self._is_hardware_queue:
            self.call(str(self.rng.choice(["flush", "save", "restore", "check"])))

    def _split(self, batch: Batch) -> tuple[Any, Any]:
        return self._twin.distribute(batch.values), self._twin.distribute(batch.weights)

    def _enqueue(self, training: bool) -> Batch:
        batch = self._twin.draw(self.rng)
        if self._queued:
            self._embedding.enqueue(*self._split(batch), training=training)
        if not training and not self._is_hardware_queue:
            self._reference.flush()
        return batch

    def train(self) -> None:
        kinds = [True, *(bool(k) for k in self.rng.integers(2, size=2))]
        kinds = kinds[: self.rng.integers(1, 4)] if self._queued else [True]
        batches = [(self._enqueue(training), training) for training in kinds]
        if self._queued and self.calls[1:]:
            self._call_between()
        for batch, training in batches:
            (self._train if training else self._evaluate)(batch)

    def _train(self, batch: Batch) -> None:
        expected = self._reference.forward(*self._twin.reference_batch(batch))
        drawn = self._twin.draw_gradients(self.rng, self._twin.by_name(expected))
        gradients = self._twin.distribute(tf.nest.map_structure(tf.constant, drawn))
        inputs, run = (
            () if self._queued else self._split(batch),
            self._twin.strategy.run,
        )
        if self._is_hardware_queue or self.rng.integers(2):
            self._compare(run(self._step, (gradients, *inputs)), expected)
        else:
            found, preserved = run(self._look_up, inputs)
            self._compare(found, expected)
            self._call_between()
            run(self._embedding.apply_gradients, (gradients, *preserved))
        self._reference.backward([list(replica.values()) for replica in drawn])

    def _look_up(self, *inputs: Any) -> tuple[Any, list[Any]]:
        """The activations, and what apply_gradients takes beside gradients."""
        if self._queued:
            return self._embedding.dequeue(), []
        activations, preserved = self._embedding(*inputs)
        return activations, [preserved]

    def _step(self, gradients: Any, *inputs: Any) -> Any:
        activations, preserved = self._look_up(*inputs)
        self._embedding.apply_gradients(gradients, *preserved)
        return activations

    def evaluate(self) -> None:
        self._evaluate(self._enqueue(training=False))

    def _evaluate(self, batch: Batch) -> None:
        found = self._twin.strategy.run(self._embedding.dequeue)
        self._compare(found, self._reference.lookup(*self._twin.reference_batch(batch)))

    def flush(self) -> None:
        self._embedding.flush()
        self._reference.flush()

    def reset(self) -> None:
        self._enqueue(training=True)
        self._embedding.reset()
        self._reference.discard()

    def refuse(self) -> None:
        """A batch with an invalid id in one replica, which changes nothing."""
        batch = self._twin.draw(self.rng)
        replica = batch.values[self.rng.integers(self._twin.replicas)]
        replica["one"] = tf.constant([1, 2, 9, 0])
        values, weights = self._split(batch)
        call: Any = functools.partial(
            self._twin.strategy.run,
            lambda v, w: train_on(self._embedding, v, weights=w),
            (values, weights),
        )
        if self._queued:
            training = bool(self.rng.integers(2))
            call = functools.partial(self._embedding.enqueue, values, weights, training)
        with pytest.raises(tf.errors.InvalidArgumentError):
            call()

    def save(self) -> None:
        path = str(pathlib.Path(tempfile.mkdtemp(dir=self._folder)) / "saved")
        write(self.rng, self._embedding, path)
        self._saved.append((path, self._reference.state(), str(self)))

    def restore(self) -> None:
        if not self._saved:
            return
        path, state, who = self._saved[self.rng.integers(len(self._saved))]
        self.calls[-1] += f" [what was saved by {who}]"
        read(self.rng, self._embedding, path)
        self._reference.restore(state)

    def _compare(self, found: Any, expected: Any) -> None:
        for feature, name in enumerate(FEATURES):
            parts = self._twin.strategy.experimental_local_results(found[name])
            for replica, part in zip(expected, parts, strict=True):
                self._close(part, replica[feature], name)

    def check(self) -> None:
        tables, slots, updates = self._reference.state()
        for table, rows in self._embedding.core.checkpoint_rows().items():
            arrays = {"parameters": tables[table], **slots.get(table, {})}
            assert sorted(rows) == sorted(arrays)
            for name, values in arrays.items():
                self._close(rows[name].numpy(), values, f"{name} of {table}")
        assert int(self._embedding.core.checkpoint_updates().numpy()) == updates

    def _close(self, found: Any, expected: Any, what: str) -> None:
        # 16 roundings of a step, and 64 terms, of values up to 16.
        bound = cases.tolerance(64, 16.0, 1 + self._reference._num_updates)
        np.testing.assert_allclose(found, expected, rtol=1e-4, atol=bound, err_msg=what)


def run(
    histories: int, seed: int, engines: str = ",".join(ENGINES), calls: int = 13
) -> collections.Counter[str]:
    """Runs random histories that share their checkpoints."""
    saved: list[Saved] = []
    with (
        mock.patch.dict(os.environ),  # Each history names its engine there.
        tempfile.TemporaryDirectory() as folder,
    ):
        make = functools.partial(
            History, saved=saved, folder=folder, engines=engines.split(",")
        )
        return fuzz(make, histories, calls, seed)


if __name__ == "__main__":
    main(run, histories=100, engines=",".join(ENGINES))
