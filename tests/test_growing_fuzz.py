"""Random updates of growing tables with admission and eviction, beside a reference.

A static table holds the expected values: before an update, the rows that it creates
get their first values. So all bits must be equal.
"""

from __future__ import annotations

import copy
import dataclasses
import functools
import itertools
import os
import pathlib
import shutil
from collections.abc import Sequence
from concurrent import futures
from typing import Any

import numpy as np
import pytest
import tensorflow as tf
from growing_options import draw_options, vocabulary_of
from histories import RandomHistory, fuzz, read, write
from reference import growing
from replica_values import of_replicas, replicated, this_replica

import tpu_embedding as te

D = 3
POOL = np.array(
    [0, -1, 1, 2**63 - 1, -(2**63), *(1 << k for k in range(20, 62, 4)), *range(7, 20)]
)
UNKNOWN = ("zeros", "initializer", "shared_row", "shared_row")
SEED = 11
# Of the longer test: `make fuzz-growing` makes more.
STEPS = int(os.environ.get("TPU_EMBEDDING_GROWING_STEPS", "1600"))


def first_values(id_: int) -> np.ndarray:
    """What the row of an id starts as, uniform in [-1, 1)."""
    numbers = growing.uniforms(SEED, id_, D)
    return np.array([-1.0 + 2.0 * u for u in numbers], np.float32)


@dataclasses.dataclass
class Lookup:
    """A training lookup whose gradients have not come, here and in the reference."""

    reference: growing.Lookup
    looked_up: Any


class Twins(RandomHistory):
    """A growing table of the engine, and a static one with the rows of the reference.

    Rows of the static table: those of the growing one, one of zeros, one for the first
    values of each id, one for those of the shared row.
    """

    def __init__(self, rng: np.random.Generator, folder: pathlib.Path) -> None:
        super().__init__(rng)
        self.folder, self.strategy = folder, self.draw_strategy(rng)
        self.options = draw_options(rng, (2, 14), UNKNOWN)
        self.reference = growing.Vocabulary(self.options)
        optimizer = te.Adagrad(0.3, initial_accumulator_value=0.25)
        combiner = str(rng.choice(["sum", "mean", "sqrtn"]))
        initializer = tf.keras.initializers.RandomUniform(-1.0, 1.0)
        self.table = te.TableConfig(
            vocabulary_of(self.options, seed=SEED), D, initializer, combiner=combiner
        )
        self.zeros = self.options.max_rows
        start = np.zeros((self.zeros + 2 + len(POOL), D), np.float32)
        self.special: dict[int | str, int] = {"zeros": self.zeros}
        for i, id_ in enumerate([growing.SHARED_ID, *POOL.tolist()]):
            self.special[id_] = self.zeros + 1 + i
            start[self.zeros + 1 + i] = first_values(id_)
        static = te.TableConfig(
            len(start), D, lambda *_, **__: start, combiner=combiner
        )
        self._optimizer = optimizer
        self.growing = self.embed(self.table, pipelined=self.pipelined)
        self.static = self.embed(static)
        self.rows = self.static.core.tables()["table_0"].rows
        self.lookups: list[Lookup] = []

    def __str__(self) -> str:
        return f"{type(self).__name__} of {self.options}"

    pipelined = False

    @staticmethod
    def draw_strategy(rng: np.random.Generator) -> tf.distribute.Strategy:
        return tf.distribute.get_strategy()

    def embed(
        self, table: te.TableConfig, *, pipelined: bool = False
    ) -> te.TPUEmbedding:
        features = [te.FeatureConfig(table), te.FeatureConfig(table)]
        with self.strategy.scope():
            return te.TPUEmbedding(features, self._optimizer, pipelined)

    def draw(self) -> tuple[list[int], list[Any]]:
        """Ids of a dense and a ragged feature, of which some occur more often."""
        share = self.rng.integers(2, len(POOL))
        ids = self.rng.choice(POOL[:share], int(self.rng.integers(2, 9)))
        batch = self.inputs(ids)
        return ids.tolist(), batch

    @staticmethod
    def inputs(ids: Sequence[int]) -> list[Any]:
        """One dense id, and all others as two samples."""
        values = tf.constant(np.array(ids[1:], np.int64))
        splits = [0, len(ids) // 2, len(ids) - 1]
        ragged = tf.RaggedTensor.from_row_splits(values, splits)
        return [tf.constant(np.array(ids[:1], np.int64)), ragged]

    def look_up(self, training: str = "") -> None:
        ids, batch = self.draw()
        found, looked_up = self.growing.core.look_up(batch, training=bool(training))
        reference = self.reference.look_up(
            ids, training=bool(training), awaited=self.awaited()
        )
        assert self.reads(found, reference), reference
        if training:
            self.lookups.append(Lookup(reference, looked_up))

    def awaited(self) -> list[growing.Lookup]:
        return [lookup.reference for lookup in self.lookups]

    def reads(self, found: Sequence[Any], reference: growing.Lookup) -> bool:
        """Whether these activations are those of a lookup of the reference."""
        return all(map(np.array_equal, found, self.expected(reference)))

    def expected(self, reference: growing.Lookup) -> Sequence[Any]:
        """The activations of a lookup of the reference."""
        rows = self.inputs(self.rows_to_read(reference))
        return self.static.core.look_up(rows, training=False)[0]

    def rows_to_read(self, lookup: growing.Lookup) -> list[int]:
        """The rows of the static table that have what a lookup reads."""
        rows = []
        for id_ in lookup.ids:
            row = self.reference.read(lookup, id_)
            if not isinstance(row, int):
                names = {"first": id_, "shared": growing.SHARED_ID, "zeros": "zeros"}
                row = self.special[names[row]]
            rows.append(row)
        return rows

    def pop(self) -> Lookup:
        return self.lookups.pop(self.rng.integers(len(self.lookups)))

    def update(self) -> None:
        lookup = self.pop()
        gradients = [
            tf.constant(self.rng.normal(size=(n, D)), tf.float32) for n in (1, 2)
        ]
        if self.is_full([lookup.reference], self.awaited()):
            with pytest.raises(tf.errors.InvalidArgumentError, match="is full"):
                self.submit(lookup.looked_up, gradients)
            self.counts["refused"] += 1
            return
        self.submit(lookup.looked_up, gradients)
        (rows,) = self.begin([lookup.reference], self.awaited())
        _, looked_up = self.static.core.look_up(self.inputs(rows))
        self.static.core.update(looked_up, gradients)
        self.end()

    def submit(self, looked_up: Any, gradients: Sequence[tf.Tensor]) -> None:
        self.growing.core.update(looked_up, gradients)

    def is_full(
        self, lookups: Sequence[growing.Lookup], awaited: Sequence[growing.Lookup]
    ) -> bool:
        """Whether there is no room for the update of these lookups."""
        try:
            copy.deepcopy(self.reference).update(lookups, awaited)
        except growing.FullError:
            return True
        return False

    def begin(
        self, lookups: Sequence[growing.Lookup], awaited: Sequence[growing.Lookup]
    ) -> list[list[int]]:
        """Begins an update of the reference; the rows that the static table trains."""
        update = self.reference.update(lookups, awaited)
        for row, id_ in update.created:
            self.rows["parameters"].write(row, first_values(id_)[np.newaxis])
            self.rows["accumulators"].write(row, np.full((1, D), 0.25, np.float32))
        for lookup in lookups:
            given = lookup.given.items()
            untrained = [i for i, how in given if how != "first"]
            known = [i for i in untrained if self.reference.row_of(i) is not None]
            self.counts["untrained rows"] += len(known)
            self.counts["mixed lookups"] += 0 < len(untrained) < len(given)
        return [[self.zeros if r is None else r for r in rows] for rows in update.rows]

    def end(self) -> None:
        """Drops what entries without a row have trained."""
        self.rows["parameters"].write(self.zeros, np.zeros((1, D), np.float32))

    def check(self) -> None:
        """The tables, slots, ids, hits and counts are equal."""
        live = sorted(self.reference.rows)
        for name, variable in self.growing.variables[self.table].items():
            own = variable.numpy()
            assert len(own) == self.reference.num_rows
            other = self.rows[name].numpy()
            assert np.array_equal(own[live], other[live]), name
        contents = self.growing.vocabularies[self.table]
        by_id = sorted(
            (r.id, n, r.hits, r.last) for n, r in self.reference.rows.items()
        )
        found = list(zip(*(a.tolist() for a in contents[:4]), strict=True))
        if self.options.eviction is None:
            by_id = [(i, n, 0, 0) for i, n, _, _ in by_id]
        assert found == by_id
        assert contents[4:] == tuple(
            self.reference.counts[n]
            for n in ("unknown", "admitted", "refused", "evicted")
        )
        self.counts["evicted"] = contents.evicted

    def resume(self) -> None:
        """Goes on with another embedding, from a checkpoint of this one."""
        path = str(self.folder / "resumed" / "saved")
        write(self.rng, self.growing, path)
        self.table = dataclasses.replace(self.table)
        self.growing = self.embed(self.table, pipelined=self.pipelined)
        read(self.rng, self.growing, path)
        self.serve(path)
        shutil.rmtree(self.folder / "resumed")
        self.lookups.clear()
        self.check()

    def serve(self, path: str) -> None:
        """Compares what TensorFlow's ops look up in a checkpoint."""
        features = [te.FeatureConfig(dataclasses.replace(self.table))] * 2
        serving = te.TPUEmbeddingForServing(features, None)
        tf.train.Checkpoint(embedding=serving).read(path).expect_partial()
        batch = self.inputs([*POOL, 123])
        expected, _ = self.growing.core.look_up(batch, training=False)
        for found, own in zip(serving(batch), expected, strict=True):
            np.testing.assert_allclose(found, own, rtol=1e-6, atol=1e-6)
        (table,) = serving.embedding_tables.values()
        rows = self.growing.core.growing()["table_0"].read()["parameters"]
        assert np.array_equal(table[: len(rows)], rows)

    def evict(self) -> None:
        awaited = [i for lookup in self.awaited() for i in lookup.ids]
        assert self.growing.evict(self.table) == self.reference.evict(awaited)

    def chances(self) -> dict[str, float]:
        waits = len(self.lookups)
        return {
            "look_up training": 9.0 if waits < 3 else 0.0,
            "look_up": 3.0,
            "update": 7.0 if waits else 0.0,
            "pop": 1.0 if waits else 0.0,  # Its gradients never come.
            "resume": 1.0,
            "evict": 0.0 if self.options.eviction is None else 1.0,
            "check": 4.0,
        }


class ThreadedTwins(Twins):
    """The same with lookups at one time, and with evaluations beside updates."""

    def __init__(self, rng: np.random.Generator, folder: pathlib.Path) -> None:
        super().__init__(rng, folder)
        self.beside: list[tuple[list[int], Sequence[Any], Sequence[Any]]] = []

    def look_up(self, training: str = "") -> None:
        """Several lookups; their numbers are those of some order."""
        self.growing.core.create_engine()
        share = 0.8 if training else 0.0
        drawn = [(*self.draw(), self.rng.random() < share) for _ in range(3)]
        with futures.ThreadPoolExecutor(3) as pool:
            found = [
                pool.submit(self.growing.core.look_up, batch, training=trains)
                for _, batch, trains in drawn
            ]
        results = [future.result() for future in found]
        for order in itertools.permutations(range(3)):
            awaited = self.awaited()
            references = {}
            for k in order:
                ids, _, trains = drawn[k]
                references[k] = self.reference.look_up(
                    ids, training=trains, awaited=awaited
                )
                awaited += [references[k]] * trains
            if all(self.reads(results[k][0], references[k]) for k in order):
                break
        else:
            raise AssertionError(drawn)
        self.counts["other orders"] += order != (0, 1, 2)
        for k in order:
            if drawn[k][2]:
                self.lookups.append(Lookup(references[k], results[k][1]))

    def submit(self, looked_up: Any, gradients: Sequence[tf.Tensor]) -> None:
        drawn = [self.draw() for _ in range(2)]
        references = [self.reference.look_up(ids, training=False) for ids, _ in drawn]
        before = [self.expected(reference) for reference in references]
        with futures.ThreadPoolExecutor(3) as pool:
            found = [
                pool.submit(self.growing.core.look_up, batch, training=False)
                for _, batch in drawn
            ]
            update = pool.submit(self.growing.core.update, looked_up, gradients)
        for reference, values, future in zip(references, before, found, strict=True):
            self.beside.append((reference.ids, values, future.result()[0]))
        update.result()

    def update(self) -> None:
        """Each evaluation beside it sees the table before or after it."""
        super().update()
        for ids, before, found in self.beside:
            reference = self.reference.look_up(ids, training=False)
            is_before = all(map(np.array_equal, found, before))
            assert is_before or self.reads(found, reference), ids
        self.beside.clear()


class QueuedTwins(Twins):
    """The same through the queue, of several replicas, and with a pending update."""

    def __init__(self, rng: np.random.Generator, folder: pathlib.Path) -> None:
        self.pipelined = rng.random() < 0.6
        super().__init__(rng, folder)
        self.replicas = self.strategy.num_replicas_in_sync
        self.pending: tuple[list[growing.Lookup], list[Any]] | None = None

    @staticmethod
    def draw_strategy(rng: np.random.Generator) -> tf.distribute.Strategy:
        return replicated(int(rng.integers(1, 4)))

    def enqueue(
        self, embedding: te.TPUEmbedding, ids: list[list[int]], *, training: bool
    ) -> None:
        inputs = [self.inputs(own) for own in ids]
        batch = [of_replicas(self.strategy, own) for own in zip(*inputs, strict=True)]
        embedding.enqueue(batch, training=training)

    def in_replicas(self, call: Any) -> list[list[np.ndarray]]:
        """What `call(replica)` returns in each replica, by output."""
        found = self.strategy.run(lambda: call(this_replica())) or []
        return [
            [value.numpy() for value in self.strategy.experimental_local_results(own)]
            for own in found
        ]

    def dequeue(self, embedding: te.TPUEmbedding) -> list[list[np.ndarray]]:
        return self.in_replicas(lambda _: embedding.dequeue())

    def expect(
        self, ids: list[list[int]], *, training: bool
    ) -> tuple[list[list[np.ndarray]], list[growing.Lookup]]:
        """The activations of a lookup in each replica, and that of the reference."""
        lookups: list[growing.Lookup] = []
        before = [] if self.pending is None else self.pending[0]
        for own in ids:
            awaited = [*before, *lookups]
            lookups.append(
                self.reference.look_up(own, training=training, awaited=awaited)
            )
        rows = [self.rows_to_read(lookup) for lookup in lookups]
        self.enqueue(self.static, rows, training=False)
        return self.dequeue(self.static), lookups

    def apply(self, awaited: Sequence[growing.Lookup] = ()) -> None:
        """Applies the pending update to the reference and the static table."""
        if self.pending is None:
            return
        (lookups, gradients), self.pending = self.pending, None
        rows = self.begin(lookups, awaited)
        self.enqueue(self.static, rows, training=True)
        self.in_replicas(lambda r: _train(self.static, gradients[r]))
        self.end()

    def flush(self) -> None:
        self.growing.flush()
        self.apply()

    def train(self) -> None:
        ids = [self.draw()[0] for _ in range(self.replicas)]
        new = [growing.Lookup(own, {}) for own in ids]
        if self.pending is not None and self.is_full(self.pending[0], new):
            if self.replicas == 1:
                self.enqueue(self.growing, ids, training=True)
                with pytest.raises(tf.errors.InvalidArgumentError, match="flush"):
                    self.dequeue(self.growing)
                self.growing.flush()
                self.counts["refused lookups"] += 1
                self.apply()
                self.train_on(ids, enqueued=True)
                return
            self.flush()
        self.train_on(ids, enqueued=False)

    def train_on(self, ids: list[list[int]], *, enqueued: bool) -> None:
        expected, lookups = self.expect(ids, training=True)
        if not enqueued:
            self.enqueue(self.growing, ids, training=True)
        for own, other in zip(self.dequeue(self.growing), expected, strict=True):
            assert all(map(np.array_equal, own, other)), lookups
        self.apply(lookups)
        gradients = [
            [tf.constant(self.rng.normal(size=(n, D)), tf.float32) for n in (1, 2)]
            for _ in ids
        ]

        def submit() -> None:
            self.in_replicas(lambda r: self.growing.apply_gradients(gradients[r]))

        if self.is_full(lookups, ()):
            with pytest.raises(tf.errors.InvalidArgumentError, match="is full"):
                submit()
            self.counts["refused"] += 1
            if self.replicas == 1:
                self.growing.reset()
            return
        submit()
        self.pending = lookups, gradients
        if not self.pipelined:
            self.apply()

    def serve(self, path: str) -> None:
        if self.replicas == 1:  # Others look up in strategy.run alone.
            super().serve(path)

    def chances(self) -> dict[str, float]:
        rare = {
            "resume": 1.0,
            "reset": 1.0,
            "evict": 1.0,
            "evaluate": 2.0,
            "check": 2.0,
        }
        return {"train": 20.0, **rare}

    def resume(self) -> None:
        self.flush()
        super().resume()

    def reset(self) -> None:
        self.growing.reset()
        self.pending = None

    def evict(self) -> None:
        self.flush()
        if self.options.eviction is not None:
            super().evict()

    def evaluate(self) -> None:  # It flushes.
        ids = [self.draw()[0] for _ in range(self.replicas)]
        self.enqueue(self.growing, ids, training=False)
        self.apply()
        expected, _ = self.expect(ids, training=False)
        for own, other in zip(self.dequeue(self.growing), expected, strict=True):
            assert all(map(np.array_equal, own, other)), ids

    def check(self) -> None:
        self.flush()
        super().check()


def _train(embedding: te.TPUEmbedding, gradients: Sequence[Any]) -> None:
    embedding.dequeue()
    embedding.apply_gradients(gradients)


@pytest.mark.parametrize(
    ("make", "steps"),
    [
        (Twins, 200),
        pytest.param(Twins, STEPS, marks=pytest.mark.third_tier),
        (ThreadedTwins, 200),
        pytest.param(ThreadedTwins, STEPS // 2, marks=pytest.mark.third_tier),
        (QueuedTwins, 400),
        pytest.param(QueuedTwins, STEPS // 3, marks=pytest.mark.third_tier),
    ],
)
def test_growing_tables_are_as_in_the_reference(
    make: type[Twins], steps: int, seed: int, tmp_path: pathlib.Path
) -> None:
    table = functools.partial(make, folder=tmp_path)
    counts = fuzz(table, -(-steps // 40), 40, seed)
    if steps > 600:  # Of few histories none may evict.
        assert counts["evicted"] > steps / 100
        assert counts["refused"] > 0
        assert counts["untrained rows"] > steps / 1000
        assert counts["mixed lookups"] > steps / 1000
    if make is QueuedTwins and steps > 10_000:  # One in about 2,000 steps.
        assert counts["refused lookups"] > 0
    print(f"{make.__name__}: {steps} steps, 0 differences; {dict(counts)}")
