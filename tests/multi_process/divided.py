"""Divided growing tables of a job, beside a NumPy reference of their parts."""

from __future__ import annotations

import copy
import dataclasses
import functools
import json
import os
import pathlib
import signal
import threading
import time
import tracemalloc
from collections.abc import Callable, Sequence
from typing import Any
from unittest import mock

import numpy as np
import tensorflow as tf
from growing_options import draw_options, vocabulary_of
from histories import RandomHistory
from linux import status
from multi_process.calls import failure, rank
from reference import growing
from steps import train_on

import tpu_embedding as te
from tpu_embedding.checkpoint import restoring, writing
from tpu_embedding.cluster_config import STATUS_VARIABLE
from tpu_embedding.layout.placement import IdDivision
from tpu_embedding.tables import rows as table_rows
from tpu_embedding.tables import vocabularies
from tpu_embedding.tables.reach import InJob
from tpu_embedding.vocabulary import PARTS_OF_CANDIDATES

BLOCK_BYTES = 4096
KILLED_IN = ("step", "save", "restore")
POOL = np.array([0, -1, 2**63 - 1, -(2**63), 1 << 40, *range(5, 40)])


def make(strategy: Any, vocabulary: te.GrowingVocabulary, **table: Any) -> Any:
    """Makes an embedding of one table, "films", whose rows start as ones."""
    films = te.TableConfig(
        vocabulary, 2, "ones", combiner="sum", name="films", placement="rows", **table
    )
    with strategy.scope():
        return te.TPUEmbedding({"film": te.FeatureConfig(films)}, te.SGD(0.5)), films


def step(embedding: Any, ids: Any, **arguments: Any) -> np.ndarray:
    """Trains with gradients of one; returns the activations."""
    features = {"film": tf.constant(ids, tf.int64)}
    return train_on(embedding, features, **arguments)["film"].numpy()


class Reference:
    """Models the parts of a table, of which each admits and evicts for itself.

    With `serve` they are on servers, where others are updated if one is full.
    """

    def __init__(
        self, options: growing.Options, parts: int, *, serve: bool = False
    ) -> None:
        def share(number: int) -> int:
            return -(-number // parts)

        part = dataclasses.replace(
            options,
            max_rows=share(options.max_rows),
            min_rows=share(options.min_rows),
            max_candidates=share(options.max_candidates),
        )
        self.parts = [growing.Vocabulary(part) for _ in range(parts)]
        self._serve = serve
        self.values: dict[tuple[int, int], float] = {}

    def update(self, batches: list[np.ndarray]) -> list[list[float]]:
        """Makes one step of all processes; returns what each reads.

        Raises:
          growing.FullError: If a part is full; of a job nothing has changed.
        """
        full: growing.FullError | None = None
        read: list[list[float]] = [[0.0] * len(batch) for batch in batches]
        after, values = copy.deepcopy(self.parts), {**self.values}
        for number, part in enumerate(after):
            lookups, places = [], []
            for batch in batches:
                own = IdDivision(len(after)).owner(batch) == number
                places.append(np.flatnonzero(own).tolist())
                lookups.append(part.look_up(batch[own].tolist(), training=True))
            for process, lookup in enumerate(lookups):
                for place, id_ in zip(places[process], lookup.ids, strict=True):
                    row = part.read(lookup, id_)
                    value = {"first": 1.0, "zeros": 0.0}.get(str(row))
                    read[process][place] = (
                        values[number, int(row)] if value is None else value
                    )
            try:
                update = part.update(lookups)
            except growing.FullError as error:
                if not self._serve:
                    raise
                full = error
                continue
            values |= {(number, row): 1.0 for row, _ in update.created}
            for rows in update.rows:
                for row in rows:
                    if row is not None:
                        values[number, row] -= 0.5
        self.parts, self.values = after, values
        if full is not None:
            raise full
        return read

    def check(self, embedding: Any, films: Any) -> None:
        """Compares ids, hits, times, counts and values."""
        found = embedding.vocabularies[films]
        rows = {
            row.id: (row.hits, row.last, self.values[number, k])
            for number, part in enumerate(self.parts)
            for k, row in part.rows.items()
        }
        values = embedding.embedding_tables[films].numpy()[:, 0]
        assert found.ids.tolist() == sorted(rows)
        evicts = self.parts[0].options.eviction is not None
        for id_, row, hits, last in zip(*found[:4], strict=True):
            expected = rows[int(id_)] if evicts else (0, 0, rows[int(id_)][2])
            assert (hits, last, values[row]) == expected, id_
        names = ("unknown", "admitted", "refused", "evicted")
        counts = [sum(part.counts[name] for part in self.parts) for name in names]
        assert [*found[4:]] == counts


class History(RandomHistory):
    """A divided growing table of a job or of servers, beside its reference."""

    def __init__(
        self, rng: np.random.Generator, strategy: Any, folder: str, servers: int
    ) -> None:
        super().__init__(rng)
        self.strategy, self.folder = strategy, folder
        self.processes, self.own = 1, 0
        if not servers:
            self.processes, self.own = strategy.num_replicas_in_sync, rank(strategy)
        self.options = draw_options(rng, (6, 60), ("zeros", "initializer"), kept=0.5)
        self.parts = servers or self.processes
        self.reference = Reference(self.options, self.parts, serve=servers > 0)
        self.make()

    def __str__(self) -> str:
        return f"{self.parts} parts of {self.options}"

    def chances(self) -> dict[str, float]:
        evict = 2.0 if self.options.eviction else 0.0
        return {"train": 20.0, "check": 3.0, "evict": evict, "restart": 2.0}

    def make(self) -> None:
        self.embedding, self.films = make(self.strategy, vocabulary_of(self.options))
        self.embedding.build()

    def train(self) -> None:
        sizes = self.rng.integers(0, 6, self.processes)
        batches = [self.rng.choice(POOL, size) for size in sizes]
        batch = batches[self.own]
        try:
            expected = self.reference.update(batches)[self.own]
        except growing.FullError:
            self.counts["full"] += 1
            kind, text = failure(functools.partial(step, self.embedding, batch))
            assert kind == "InvalidArgumentError", text
            assert f"Table films {'(part ' if self.parts > 1 else 'is full'}" in text
            self.embedding.reset()
        else:
            assert step(self.embedding, batch)[:, 0].tolist() == expected

    def check(self) -> None:
        self.reference.check(self.embedding, self.films)

    def evict(self) -> None:
        evicted = sum(part.evict() for part in self.reference.parts)
        assert self.embedding.evict(self.films) == evicted

    def restart(self) -> None:
        """Saves, and goes on with an embedding that restores."""
        tracked = self.rng.random() < 0.5
        path = f"{self.folder}/{self.parts}-{self.rng.random()}"
        if tracked:
            checkpoint = tf.train.Checkpoint(tables=self.embedding)
            path = checkpoint.write(f"{path}-{self.own}")
        else:
            te.checkpoint.save(self.embedding, path)
        self.make()
        if tracked:
            tf.train.Checkpoint(tables=self.embedding).read(path).assert_consumed()
        else:
            te.checkpoint.restore(self.embedding, path)


def fuzz(strategy: Any, seed: int, steps: int, folder: str, servers: int = 0) -> int:
    """Makes calls of which `steps` train; returns how many found the table full."""
    history = History(np.random.default_rng(seed), strategy, folder, servers)
    history.run(4 * steps // 3)
    return history.counts["full"]


def move(strategy: Any, source: str, target: str, *, alone: bool = False) -> Any:
    """Restores a table, trains one step, saves; returns its contents after both."""
    embedding, films = make(strategy, te.GrowingVocabulary(60, eviction="lru"))
    embedding.build()
    if source:
        te.checkpoint.restore(embedding, source)
    before = state_of(embedding, films)
    ids = [[3, 5, -9], [7, 3], [-(2**63)]]
    alone = alone or strategy.num_replicas_in_sync == 1
    step(embedding, [] if alone else ids[rank(strategy)])
    te.checkpoint.save(embedding, target)
    return before, state_of(embedding, films)


def small_blocks() -> Any:
    """Patches the size of the blocks by which tables are saved to `BLOCK_BYTES`."""
    return mock.patch.object(table_rows, "SLICE_BYTES", BLOCK_BYTES)


def save_in_blocks(strategy: Any, path: str, *, alone: bool = False) -> int:
    """Saves and restores 2,000 rows and 1,000 candidates in two parts.

    Returns the most bytes that the save read at once.
    """
    vocabulary = te.GrowingVocabulary(4000, min_count=2, eviction="lru")
    embedding, films = make(strategy, vocabulary)
    ids = np.random.default_rng(1).integers(-(2**63), 2**63 - 1, 3000)
    cut = slice(0 if alone else rank(strategy), None, strategy.num_replicas_in_sync)
    for some in (ids, ids[:2000], ids[:1000]):  # The values differ then.
        step(embedding, some[cut])
    most = [0]

    def noted(function: Any) -> Any:
        def call(*arguments: Any) -> Any:
            found = function(*arguments)
            most.append(sum(part.nbytes for part in found))
            return found

        return call

    with (
        small_blocks(),
        mock.patch.object(vocabularies, "read_rows", noted(vocabularies.read_rows)),
        mock.patch.object(InJob, "gather", noted(InJob.gather)),
    ):
        te.checkpoint.save(embedding, path)
    state = embedding.core.growing()["films"].read()
    waiting = np.count_nonzero(state["candidate_hits"])
    assert (len(state["ids"]), waiting) == (2000, 1000)
    saved = te.checkpoint.read(path)["films"]
    assert np.array_equal(saved.parameters.numpy(), state["parameters"])
    for name, vector in saved.vocabulary.items():
        assert np.array_equal(vector.read(), state[name]), name
    reading = mock.patch.object(restoring, "_read", wraps=restoring._read)
    with reading as read:
        te.checkpoint.restore(embedding, path)
    assert max(len(call.args[1]) for call in read.mock_calls) < 1200  # Of one part.
    for name, values in embedding.core.growing()["films"].read().items():
        if name not in ("state", *PARTS_OF_CANDIDATES):  # These are put in order.
            assert np.array_equal(values, state[name]), name
    return max(most)


def state_of(embedding: Any, films: Any) -> Any:
    """Returns by id its value, hits and last update; and the counts."""
    found = embedding.vocabularies[films]
    values = embedding.embedding_tables[films].numpy()[:, 0]
    of_ids = {
        int(id_): (float(values[row]), int(hits), int(last))
        for id_, row, hits, last in zip(*found[:4], strict=True)
    }
    return of_ids, found[4:]


def export_by_blocks(strategy: Any, path: str) -> float:
    """Exports 60,000 rows in blocks of 256 KiB.

    Returns the most that Python held at once, as a share of the table.
    """
    rows = 60_000
    films = te.TableConfig(
        te.GrowingVocabulary(rows), 64, "ones", name="films", placement="rows"
    )
    with strategy.scope():
        embedding = te.TPUEmbedding({"film": te.FeatureConfig(films)}, te.SGD(0.5))
    own = np.arange(5 * rows // 6)[rank(strategy) :: strategy.num_replicas_in_sync]
    step(embedding, own)
    tracemalloc.start()
    with (
        mock.patch.object(table_rows, "SLICE_BYTES", 1 << 18),
        mock.patch.object(writing, "_MIN_PART_BYTES", 1 << 20),
    ):
        report = te.serving.export(embedding, path, signatures=["dense"])
    _, most = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert report.tables[0].rows == 5 * rows // 6 + 1
    return most / report.tables[0].bytes_before


def global_batch(number: int) -> np.ndarray:
    """Draws the ids of all processes in a step, some new, some known."""
    rng = np.random.default_rng(number)
    return np.concatenate([rng.zipf(1.3, 60) % 1000, rng.integers(-(2**63), 0, 20)])


class Kill:
    """Kills this process in the second call of a kind, at a random moment of it.

    The kind is one of `KILLED_IN`, or "" for none; the seed draws the moment.
    """

    def __init__(self, kind: str, seed: int) -> None:
        self.kind, self._seconds = kind, -1.0
        self._share = np.random.default_rng(seed).random()

    def call(self, kind: str, function: Callable[[], Any]) -> None:
        """Calls a function; the first call of the kind measures how long they take."""
        begin = time.monotonic()
        if kind == self.kind and self._seconds >= 0:
            arguments = (os.getpid(), signal.SIGKILL)
            seconds = self._share * self._seconds
            threading.Timer(seconds, os.kill, arguments).start()
        function()
        if kind == self.kind:
            self._seconds = time.monotonic() - begin


def train_until_killed(
    strategy: Any, folder: str, expected: Sequence[Any], killed: str, seed: int
) -> Any:
    """Trains on from the last checkpoint, and saves after each second step.

    The table has the contents `expected` after each number of steps. The process that
    is killed depends on the seed. Returns the contents after the last step.
    """
    number, own = strategy.num_replicas_in_sync, rank(strategy)
    kill = Kill(killed if own == seed % number else "", seed)
    embedding, films = make(strategy, te.GrowingVocabulary(5000, eviction="lru"))
    embedding.build()
    done = max([0, *(int(path.stem) for path in pathlib.Path(folder).glob("*.index"))])
    with small_blocks():
        restore = functools.partial(
            te.checkpoint.restore, embedding, f"{folder}/{done}"
        )
        for _ in range(2 if done else 0):
            kill.call("restore", restore)
        assert state_of(embedding, films) == expected[done], done
        for k in range(done, len(expected) - 1):
            ids = global_batch(k)[own::number]
            kill.call("step", functools.partial(step, embedding, ids))
            path = f"{folder}/{k + 1}"
            if k % 2:
                save = functools.partial(te.checkpoint.save, embedding, path)
                kill.call("save", save)
    return state_of(embedding, films)


def write_statuses(
    strategy: Any, path: str, steps: int, seconds: float
) -> tuple[int, list[Any]]:
    """Trains two tables, and writes a status of the second one every few seconds.

    Returns the steps of the last status, and the contents of both tables.
    """
    number, own = strategy.num_replicas_in_sync, rank(strategy)
    vocabulary = te.GrowingVocabulary(5000, min_count=2, eviction="lru")
    tables = [make(strategy, vocabulary) for _ in range(2)]
    telemetry, written = te.Telemetry(tables[1][0], every=3), 0.0
    variables = {STATUS_VARIABLE: f"{path}-{own}"}
    for k in range(steps):
        for embedding, _ in tables:
            step(embedding, global_batch(k)[own::number])
        if time.monotonic() - written >= seconds:
            with mock.patch.dict(os.environ, variables):
                telemetry.status()
            written = time.monotonic()
    said = json.loads(pathlib.Path(f"{path}-{own}").read_text())
    return said["steps"], [state_of(*table) for table in tables]


def trajectory(steps: int) -> list[Any]:
    """Returns the contents of one process's table after each number of steps."""
    strategy = tf.distribute.get_strategy()
    embedding, films = make(strategy, te.GrowingVocabulary(5000, eviction="lru"))
    embedding.build()
    found = [state_of(embedding, films)]
    for k in range(steps):
        step(embedding, global_batch(k))
        found.append(state_of(embedding, films))
    return found


def fill(strategy: Any, rows: int, placement: str) -> tuple[int, list[int], list[int]]:
    """Fills tables of so many rows.

    Returns by how many bytes this process grew, and what `te.plan` says of the tables
    and of all that each process or server needs.
    """
    features = {
        name: te.FeatureConfig(
            te.TableConfig(
                te.GrowingVocabulary(rows, eviction="lru"),
                64,
                "ones",
                name=name,
                placement=placement,
            )
        )
        for name in ("films", "users")
    }
    with strategy.scope():
        embedding = te.TPUEmbedding(features, te.Adagrad(0.5))
    embedding.build()
    before = status("VmRSS")
    for block in np.array_split(np.arange(rows + rows // 10), 80):
        train_on(embedding, dict.fromkeys(features, tf.constant(block)))
    report = te.plan(
        features, te.Adagrad(0.5), batch_size=rows // 36, processes=[2], topologies=[]
    )
    kind = "synchronous" if strategy.num_replicas_in_sync > 1 else "parameter_servers"
    (place,) = [place for place in report.placements if place.kind == kind]
    grown = status("VmRSS") - before
    return grown, list(place.table_bytes), list(place.device_bytes)


def large_steps(
    strategy: Any, grows: bool, placement: str, dim: int, ids: int
) -> tuple[int, int]:
    """Returns the bytes by which three steps grew this process, and the plan's."""
    rows, samples = 200_000, 16_384
    vocabulary = te.GrowingVocabulary(2 * rows) if grows else rows
    films = te.TableConfig(vocabulary, dim, "ones", name="films", placement=placement)
    features = {"film": te.FeatureConfig(films)}
    with strategy.scope():
        embedding = te.TPUEmbedding(features, te.SGD(0.5))
    rng = np.random.default_rng(0)
    number, own = strategy.num_replicas_in_sync, rank(strategy)
    batches = rng.integers(0, rows, (4, samples * number, ids))
    for block in np.array_split(np.arange(rows)[own::number], 20):
        step(embedding, block)
    before = status("VmRSS")
    for batch in batches[1:]:
        step(embedding, batch[own::number])
    grown = status("VmHWM") - before
    sample = [{"film": batch} for batch in batches[:1]]
    report = te.plan(
        features, te.SGD(0.5), sample=sample, processes=[number], topologies=[]
    )
    (place,) = [place for place in report.placements if place.kind == "synchronous"]
    return grown, place.buffer_bytes


def refuse(strategy: Any, path: str) -> list[tuple[str, str]]:
    """Returns what a table of too few rows raises, after which it is unchanged."""
    embedding, films = make(strategy, te.GrowingVocabulary(3))
    step(embedding, [99])
    before = state_of(embedding, films)
    raised = failure(lambda: te.checkpoint.restore(embedding, path))
    assert state_of(embedding, films) == before
    shared = te.GrowingVocabulary(9, unknown="shared_row")
    options = te.DistributedOptions(placement="rows")
    config = te.FeatureConfig(te.TableConfig(shared, 2, name="films"))
    kinds: Any = {"distributed_options": options}

    def build() -> None:
        with strategy.scope():
            te.TPUEmbedding(config, te.SGD(0.5), **kinds).build()

    return [raised, failure(build)]


def pass_clocks(strategy: Any) -> Any:
    """Trains with another clock in each process; returns ids, times and an error."""
    vocabulary = te.GrowingVocabulary(60, eviction="age", max_age=5, clock=True)
    embedding, films = make(strategy, vocabulary)
    own = rank(strategy)
    for ids, clock in (([1], 10), ([2], 13), ([3], 16 - own)):
        step(embedding, ids, clock=clock - own)
    raised = failure(lambda: step(embedding, [4], clock=15))
    embedding.reset()
    found = embedding.vocabularies[films]
    return found.ids.tolist(), found.last_updates.tolist(), raised


def publish(strategy: Any, folder: str) -> Any:
    """Returns what a served model looks up, what is frozen, and what is counted."""
    embedding, films = make(strategy, te.GrowingVocabulary(60))
    telemetry = te.Telemetry(embedding, every=1)
    step(embedding, [[3, 5, -9], [7, 3]][rank(strategy)])
    te.serving.export(embedding, f"{folder}/model", signatures=["dense"])
    model: Any = tf.saved_model.load(f"{folder}/model")
    served = model.signatures["dense"](film=tf.constant([3, -9, 4], tf.int64))
    frozen = embedding.freeze_vocabulary(films)
    admitted = telemetry.read()["films"]["admitted_ids"].value
    return served["film"].numpy()[:, 0].tolist(), frozen.ids.tolist(), admitted
