"""Random updates of growing tables with admission and eviction, against paper.

A static table has the numbers: before an update the rows that it creates get their
first values. So all bits must be equal.
"""

from __future__ import annotations

import dataclasses
import math
import pathlib
import shutil
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import tensorflow as tf
from reference import growing

import tpu_embedding as te

D = 3
POOL = np.array(
    [0, -1, 1, 2**63 - 1, -(2**63), *(1 << k for k in range(20, 62, 4)), *range(7, 20)]
)
SEED = 11


def first_values(id_: int) -> np.ndarray:
    """What the row of an id starts as, uniform in [-1, 1)."""
    numbers = growing.uniforms(SEED, id_, D)
    return np.array([-1.0 + 2.0 * u for u in numbers], np.float32)


def draw_options(rng: np.random.Generator) -> growing.Options:
    eviction = [None, "lru", "lfu", "age"][rng.integers(4)]
    max_rows = int(rng.integers(2, 14))
    unknown = str(rng.choice(["zeros", "initializer", "shared_row"]))
    shares = unknown == "shared_row" and rng.random() < 0.5
    return growing.Options(
        max_rows=max_rows,
        min_count=int(rng.choice([1, 1, 2, 4])),
        max_candidates=int(rng.integers(1, 8)),
        eviction=eviction,
        max_age=int(rng.integers(1, 6)),
        min_rows=int(rng.integers(0, max_rows)) if eviction else 0,
        unknown=unknown,
        when_full="shared_row" if shares else "error",
    )


def vocabulary_of(options: growing.Options) -> te.GrowingVocabulary:
    arguments = dataclasses.asdict(options)
    if options.eviction is None:
        arguments["min_rows"] = None
    if options.eviction != "age":
        arguments["max_age"] = None
    if options.min_count == 1:
        arguments["max_candidates"] = None
    return te.GrowingVocabulary(**arguments, seed=SEED)


@dataclasses.dataclass
class Lookup:
    """A training lookup whose gradients have not come.

    Attributes:
      ids: Of its entries, for both features.
      batch: The same as inputs.
      looked_up: What the engine gave for the update.
    """

    ids: list[int]
    batch: list[Any]
    looked_up: Any


class Twins:
    """A growing table of the engine, and a static one with the rows of the paper.

    Rows of the static table: those of the growing one, one of zeros, one for the first
    values of each id, one for those of the shared row.
    """

    def __init__(self, rng: np.random.Generator, folder: pathlib.Path) -> None:
        self.rng, self.folder = rng, folder
        self.options = draw_options(rng)
        self.paper = growing.Vocabulary(self.options)
        optimizer = te.Adagrad(0.3, initial_accumulator_value=0.25)
        combiner = str(rng.choice(["sum", "mean", "sqrtn"]))
        initializer = tf.keras.initializers.RandomUniform(-1.0, 1.0)
        self.table = te.TableConfig(
            vocabulary_of(self.options), D, initializer, combiner=combiner
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
        self.growing, self.static = self.embed(self.table), self.embed(static)
        self.rows = self.static.core.tables()["table_0"].rows
        self.lookups: list[Lookup] = []
        self.counts = {"refused": 0, "evicted": 0}

    def embed(self, table: te.TableConfig) -> te.TPUEmbedding:
        features = [te.FeatureConfig(table), te.FeatureConfig(table)]
        return te.TPUEmbedding(features, self._optimizer)

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

    def look_up(self, *, training: bool) -> None:
        ids, batch = self.draw()
        found, looked_up = self.growing.core.look_up(batch, training=training)
        rows = []
        for id_ in ids:
            row = self.paper.look_up(id_, training=training)
            if not isinstance(row, int):
                names = {"first": id_, "shared": growing.SHARED_ID, "zeros": "zeros"}
                row = self.special[names[row]]
            rows.append(row)
        expected, _ = self.static.core.look_up(self.inputs(rows), training=False)
        for own, other in zip(found, expected, strict=True):
            assert np.array_equal(own, other), (self.options, ids, rows)
        if training:
            self.lookups.append(Lookup(ids, batch, looked_up))

    def update(self, lookup: Lookup) -> None:
        awaited = [i for other in self.lookups for i in other.ids]
        gradients = [
            tf.constant(self.rng.normal(size=(n, D)), tf.float32) for n in (1, 2)
        ]
        try:
            update = self.paper.update(lookup.ids, awaited)
        except growing.FullError:
            with pytest.raises(tf.errors.InvalidArgumentError, match="is full"):
                self.growing.core.update(lookup.looked_up, gradients)
            self.counts["refused"] += 1
            return
        self.growing.core.update(lookup.looked_up, gradients)
        for row, id_ in update.created:
            self.rows["parameters"].write(row, first_values(id_)[np.newaxis])
            self.rows["accumulators"].write(row, np.full((1, D), 0.25, np.float32))
        rows = [update.rows[i] for i in lookup.ids]
        inputs = self.inputs([self.zeros if r is None else r for r in rows])
        _, looked_up = self.static.core.look_up(inputs)
        self.static.core.update(looked_up, gradients)
        self.rows["parameters"].write(self.zeros, np.zeros((1, D), np.float32))

    def check(self) -> None:
        """The tables, slots, ids, hits and counts are equal."""
        live = sorted(self.paper.rows)
        for name, variable in self.growing.variables[self.table].items():
            own = variable.numpy()
            assert len(own) == self.paper.num_rows
            other = self.rows[name].numpy()
            assert np.array_equal(own[live], other[live]), (self.options, name)
        contents = self.growing.vocabularies[self.table]
        by_id = sorted((r.id, n, r.hits, r.last) for n, r in self.paper.rows.items())
        found = list(zip(*(a.tolist() for a in contents[:4]), strict=True))
        if self.options.eviction is None:
            by_id = [(i, n, 0, 0) for i, n, _, _ in by_id]
        assert found == by_id, self.options
        assert contents[4:] == tuple(
            self.paper.counts[n] for n in ("unknown", "admitted", "refused", "evicted")
        )
        self.counts["evicted"] = contents.evicted

    def resume(self) -> None:
        """Goes on with another embedding, from a checkpoint of this one."""
        path = str(self.folder / "resumed" / "saved")
        if self.rng.random() < 0.5:
            te.checkpoint.save(self.growing, path, root="tables")
        else:
            tf.train.Checkpoint(tables=self.growing).write(path)
        self.table = dataclasses.replace(self.table)
        self.growing = self.embed(self.table)
        if self.rng.random() < 0.5:
            te.checkpoint.restore(self.growing, path)
        else:
            tf.train.Checkpoint(tables=self.growing).read(path).assert_consumed()
        self.serve(path)
        shutil.rmtree(self.folder / "resumed")
        self.lookups.clear()
        self.check()

    def serve(self, path: str) -> None:
        """Compares what TensorFlow's ops look up in a checkpoint."""
        features = [te.FeatureConfig(dataclasses.replace(self.table))] * 2
        serving = te.TPUEmbeddingForServing(features, None)
        tf.train.Checkpoint(tables=serving).read(path).expect_partial()
        batch = self.inputs([*POOL, 123])
        expected, _ = self.growing.core.look_up(batch, training=False)
        for found, own in zip(serving(batch), expected, strict=True):
            np.testing.assert_allclose(found, own, rtol=1e-6, atol=1e-6)
        (table,) = serving.embedding_tables.values()
        rows = self.growing.core.growing()["table_0"].read()["parameters"]
        assert np.array_equal(table[: len(rows)], rows)

    def step(self) -> None:
        if self.rng.random() < 0.05:
            self.resume()
        action = self.rng.random()
        if action < 0.45 and len(self.lookups) < 3:
            self.look_up(training=True)
        elif action < 0.6:
            self.look_up(training=False)
        elif self.lookups:
            number = int(self.rng.integers(len(self.lookups)))
            lookup = self.lookups.pop(number)
            if action < 0.95:  # Else its gradients never come.
                self.update(lookup)
        if self.rng.random() < 0.2:
            self.check()


def run(rng: np.random.Generator, folder: pathlib.Path, steps: int) -> dict[str, int]:
    """Makes so many steps, of which each table has 40; what happened."""
    total = {"refused": 0, "evicted": 0}
    for _ in range(math.ceil(steps / 40)):
        twins = Twins(rng, folder)
        for _ in range(40):
            twins.step()
        twins.check()
        for name, count in twins.counts.items():
            total[name] += count
    return total


@pytest.mark.parametrize(
    "steps", [400, pytest.param(20_000, marks=pytest.mark.second_tier)]
)
def test_growing_tables_are_as_on_paper(
    steps: int, rng: np.random.Generator, tmp_path: pathlib.Path
) -> None:
    counts = run(rng, tmp_path, steps)
    assert counts["refused"] > 0
    assert counts["evicted"] > steps / 100
