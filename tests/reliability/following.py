"""Random histories of a trainer, its deltas, and the models that follow it.

    make fuzz-deltas HISTORIES=1000

A history trains, saves, goes back to checkpoints with and without marks, starts the
trainer or a server again, and writes deltas for three consumers, which apply them at
once or later. After each delta the model serves what the trainer had when it wrote it,
in the form of the export. Between them come bad deltas: each is refused, and the model
serves what it served before.
"""

from __future__ import annotations

import collections
import copy
import pathlib
import struct
import tempfile
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np
import tensorflow as tf
from histories import RandomHistory, main
from steps import train_on

import tpu_embedding as te
from tpu_embedding.serving.delta_files import MAGIC, read_header
from tpu_embedding.serving.quantization import STORAGES, converter
from tpu_embedding.tables.growing import first_rows
from tpu_embedding.vocabulary import SHARED_ID

V = {"films": 60, "users": 9}
D = 6
# Ids of the table that grows; the hash table of served models has no place for two.
TAGS = np.array([-(2**63), -(2**63) + 1, 2**63 - 1, -7, 0, *range(100, 2000, 80)])
FULL: Any = {"unknown": "shared_row", "when_full": "shared_row"}
VOCABULARIES = (
    te.GrowingVocabulary(40),
    te.GrowingVocabulary(14, eviction="lru", min_rows=4, unknown="initializer"),
    te.GrowingVocabulary(16, eviction="lfu", min_rows=8, min_count=2, **FULL),
    te.GrowingVocabulary(16, eviction="age", max_age=3, **FULL),
)
HISTORIES_PER_TRAINER = 50
OPTIMIZERS = (te.SGD(0.1), te.Adagrad(0.1), te.Adam(0.1), te.FTRL(0.1))
Tables = dict[str, np.ndarray]
Touched = dict[str, set[int]]


class Trainer:
    """An embedding of two tables, or three, that trains on random batches."""

    def __init__(
        self,
        rng: np.random.Generator,
        optimizer: Any = None,
        kind: Any = te.TPUEmbedding,
        *,
        pipelined: bool = False,
        vocabulary: te.GrowingVocabulary | None = None,
    ) -> None:
        self._rng, self.vocabulary = rng, vocabulary
        films = te.TableConfig(V["films"], D, name="films")
        users = te.TableConfig(V["users"], D, name="users", invalid_ids="drop")
        features = {
            "film": te.FeatureConfig(films),
            "seen": te.FeatureConfig(films),
            "user": te.FeatureConfig(users),
        }
        if vocabulary is not None:
            initializer = tf.keras.initializers.RandomUniform(-1.0, 1.0)
            tags = te.TableConfig(vocabulary, D, initializer, name="tags")
            features["tag"] = te.FeatureConfig(tags)
        self.embedding = kind(features, optimizer or te.Adagrad(0.1), pipelined)

    def batch(self) -> tuple[dict[str, Any], Touched]:
        """A batch, and the rows that it touches."""
        film = self._rng.integers(V["films"], size=3)
        lengths = self._rng.integers(3, size=3)
        seen = self._rng.integers(V["films"], size=lengths.sum())
        user = self._rng.integers(-1, V["users"], size=3)
        features = {
            "film": tf.constant(film),
            "seen": tf.RaggedTensor.from_row_lengths(seen, lengths),
            "user": tf.constant(user),
        }
        touched = {
            "films": {*film.tolist(), *seen.tolist()},
            "users": {int(row) for row in user if row >= 0},
        }
        if self.vocabulary is not None:
            first = self._rng.integers(len(TAGS) - 8)
            tag = TAGS[self._rng.integers(first, first + 8, size=6)]
            features["tag"] = tf.constant(tag)
            touched["tags"] = {*tag.tolist()}
        return features, touched

    def step(self) -> Touched:
        """Trains on a batch; the rows that changed."""
        features, touched = self.batch()
        train_on(self.embedding, features, self._gradient)
        return touched

    def _gradient(self, activation: Any) -> tf.Tensor:
        return tf.constant(self._rng.normal(size=activation.shape), tf.float32)

    def tables(self, form: str) -> Tables:
        """Today's tables as a model of that form serves them."""
        self.embedding.core.flush()

        def stored(rows: np.ndarray) -> np.ndarray:
            converted = converter(form, D).convert(rows.astype(np.float32))
            return converted.values.astype(np.float32)

        found = {
            name: stored(table.rows["parameters"].numpy())
            for name, table in self.embedding.core.tables().items()
            if table.rows
        }
        for name, growing in self.embedding.core.growing().items():
            found[name] = self._unknown(stored)
            state = growing.read()
            own = np.isin(TAGS, state["ids"])
            places = np.searchsorted(state["ids"], TAGS[own])
            found[name][own] = stored(state["parameters"])[places]
        return found

    def _unknown(self, stored: Callable[[np.ndarray], np.ndarray]) -> np.ndarray:
        """What `TAGS` without rows look up."""
        assert self.vocabulary is not None
        if self.vocabulary.unknown == "zeros":
            return np.zeros([len(TAGS), D], np.float32)
        (spec,) = (t for t in self.embedding.core.plan.tables if t.name == "tags")
        state = self.state()
        if self.vocabulary.unknown == "initializer":
            return first_rows(spec, tf.constant(TAGS)).numpy()
        shared = state["parameters"][len(state["ids"]) :]
        if not len(shared):
            shared = first_rows(spec, tf.constant([SHARED_ID], tf.int64)).numpy()
        return np.repeat(stored(shared), len(TAGS), axis=0)

    def state(self) -> dict[str, np.ndarray]:
        """The table that grows."""
        return self.embedding.core.growing()["tags"].read()

    def tags(self) -> set[int]:
        """The ids that have rows now."""
        if self.vocabulary is None:
            return set()
        self.embedding.core.flush()
        return set(self.state()["ids"].tolist())


def served(model: Any) -> Tables:
    """All rows that a model serves."""
    longest = tf.range(V["films"], dtype=tf.int64)
    asked = {"film": longest, "seen": longest, "user": longest % V["users"]}
    signature = model.signatures["dense"]
    grows = "tag" in signature.structured_input_signature[1]
    if grows:
        asked["tag"] = tf.constant(np.resize(TAGS, V["films"]))
    found = signature(**asked)
    np.testing.assert_array_equal(found["film"], found["seen"])
    tables = {
        "films": found["film"].numpy(),
        "users": found["user"][: V["users"]].numpy(),
    }
    return tables | ({"tags": found["tag"][: len(TAGS)].numpy()} if grows else {})


def nothing() -> Touched:
    """No rows."""
    return {name: set() for name in [*V, "tags"]}


def everything() -> Touched:
    """All rows of static tables."""
    return {name: set(range(rows)) for name, rows in V.items()}


def require_same(found: Tables, wanted: Tables) -> None:
    """Checks that all rows are equal."""
    for name, rows in wanted.items():
        np.testing.assert_array_equal(found[name], rows)


class Published(NamedTuple):
    """A delta, and the tables when it was written."""

    path: pathlib.Path
    tables: Tables


class Consumer:
    """A writer, and a model that follows it.

    Attributes:
      touched: The rows by table that the next delta has; None where that is unknown.
        Of a growing table the ids that updates named.
      tags: The ids that the model will have after the last delta.
      more_tags: Ids that the writer may think the model has, too.
    """

    def __init__(
        self, trainer: Trainer, folder: pathlib.Path, form: str, name: str = ""
    ) -> None:
        self.name, self._form = name or form, form
        self._folder, self._trainer = folder, trainer
        self.base = folder / f"{self.name}-base"
        te.serving.export(
            trainer.embedding, self.base, signatures=["dense"], storage=form, deltas=1.0
        )
        self.model: Any = tf.saved_model.load(str(self.base))
        self._loaded = tf.train.Checkpoint(model=self.model)
        self._first = self._loaded.write(str(folder / f"{self.name}-loaded"))
        self._start, self._number = trainer.tables(form), 0
        self._start_tags = trainer.tags()
        self.begin()

    def begin(self) -> None:
        """A new writer, and a model without deltas."""
        self.applied: list[Published] = []
        self.pending: list[Published] = []
        self.touched: Touched | None = nothing()
        self.tags = set(self._start_tags)
        self.more_tags = self.tags | self._trainer.tags()
        self.restart_server()
        self.restart_writer()

    def restart_writer(self) -> None:
        """As a trainer that was started again has it."""
        self.writer = te.serving.DeltaWriter(
            self._trainer.embedding, self.base, self.name
        )

    def restart_server(self) -> None:
        """A model that was loaded again, and has all deltas before it."""
        self._loaded.read(self._first).assert_consumed()
        self.pending = self.applied + self.pending
        self.applied = []
        self.check()

    def resume(self) -> None:
        """Goes on from what the model has; deltas that it lacks are dropped."""
        self.writer.resume(self.model.signatures["delta_state"]())
        self.pending, self.touched = [], None

    def publish(self) -> dict[str, int]:
        """Writes a delta; the number of its rows by table."""
        self._number += 1
        path = self._folder / f"{self.name}-{self._number}.delta"
        tables = self._trainer.tables(self._form)
        counts = self.writer.export_delta(path)
        header = read_header(path)
        told = zip(header.base.tables, header.counts, strict=True)
        sums = {spec.name: sum(both) for spec, both in told if not spec.shared}
        assert sums == counts
        self._check_tags(counts.get("tags", 0))
        self.pending.append(Published(path, tables))
        return counts

    def _check_tags(self, count: int) -> None:
        """The delta has the ids that were trained, and those that are gone."""
        now = self._trainer.tags()
        touched = None if self.touched is None else self.touched.get("tags")
        if touched is not None:
            least = len(touched & now) + len(self.tags - now)
            most = len(touched & now) + len(self.more_tags - now)
            assert least <= count <= most, (least, count, most)
        self.tags, self.more_tags = now, set(now)

    def apply(self) -> None:
        """Applies the next delta."""
        number = te.serving.apply_delta(self.model, self.pending[0].path)
        self.applied.append(self.pending.pop(0))
        assert number == len(self.applied)
        self.check()

    def follow(self) -> dict[str, int]:
        """Writes and applies a delta; the number of its rows by table."""
        counts = self.publish()
        while self.pending:
            self.apply()
        return counts

    def check(self) -> None:
        """The model serves the tables of the delta applied last."""
        wanted = self.applied[-1].tables if self.applied else self._start
        require_same(served(self.model), wanted)
        state = self.model.signatures["delta_state"]()
        assert int(state["sequence"]) == len(self.applied)


class Saved(NamedTuple):
    """A checkpoint of te.checkpoint or of TensorFlow, with the writers or without."""

    by_te: bool
    has_marks: bool
    path: str
    written: list[int]
    touched: list[Touched | None]
    trainer: int


class History(RandomHistory):
    """A trainer, three consumers, and what happened to them."""

    def __init__(self, seed: int, folder: pathlib.Path) -> None:
        super().__init__(np.random.default_rng(seed))
        self._folder = folder
        pipelined = bool(self.rng.integers(2))
        vocabulary = VOCABULARIES[self.rng.integers(2 * pipelined, 4)]
        self._trainer = Trainer(
            self.rng,
            OPTIMIZERS[seed % len(OPTIMIZERS)],
            (te.TPUEmbedding, te.TPUEmbeddingV2)[seed // len(OPTIMIZERS) % 2],
            pipelined=pipelined,
            vocabulary=vocabulary,
        )
        self._embedding = self._trainer.embedding
        self._embedding.build()
        forms = self.rng.permutation(STORAGES)[:3]
        self._consumers = [Consumer(self._trainer, folder, str(f)) for f in forms]
        self._start = te.checkpoint.save(self._embedding, str(folder / "start"))

    def __str__(self) -> str:
        return f"{type(self._embedding).__name__} with {self._trainer.vocabulary}"

    def run(self, steps: int) -> None:
        """One history, from the exports on."""
        te.checkpoint.restore(self._embedding, self._start)
        for consumer in self._consumers:
            consumer.writer.stop()
            consumer.begin()
        self._saved: list[Saved] = []
        self._trainers = 0
        self.calls.clear()
        super().run(steps)
        self.counts["histories"] += 1

    def check(self) -> None:
        """All models are those of the trainer after all deltas."""
        for consumer in self._consumers:
            self._publish(consumer)
            while consumer.pending:
                self._apply(consumer)

    def chances(self) -> dict[str, float]:
        once = ("save", "restore", "restart_server", "restart_trainer", "evict")
        often = {"train": 3.0, "publish": 2.0, "apply": 2.0, "refuse": 2.0}
        return {**often, **dict.fromkeys(once, 1.0)}

    def _one(self) -> Consumer:
        return self._consumers[self.rng.integers(len(self._consumers))]

    def train(self) -> None:
        changed = self._trainer.step()
        for each in self._consumers:
            for name, rows in (each.touched or {}).items():
                rows.update(changed.get(name, ()))

    def publish(self) -> None:
        self._publish(self._one())

    def apply(self) -> None:
        consumer = self._one()
        if consumer.pending:
            self._apply(consumer)

    def restart_server(self) -> None:
        self._one().restart_server()

    def _publish(self, consumer: Consumer) -> None:
        counts = consumer.publish()
        if consumer.touched is not None:
            touched = consumer.touched
            expected = {name: len(touched[name]) for name in V}
            assert {n: counts[n] for n in V} == expected, (counts, expected)
        consumer.touched = nothing()

    def _apply(self, consumer: Consumer) -> None:
        consumer.apply()
        self.counts["applied"] += 1

    def evict(self) -> None:
        for spec in self._embedding.core.plan.tables:
            vocabulary = spec.config.vocabulary
            if vocabulary is not None and vocabulary.eviction is not None:
                self._embedding.evict(spec.key)

    def _checkpoint(self, how: Saved) -> tf.train.Checkpoint:
        objects = {c.name: c.writer for c in self._consumers if how.has_marks}
        if not how.by_te:
            objects["embedding"] = self._embedding
        return tf.train.Checkpoint(**objects)

    def save(self) -> None:
        saved = Saved(
            by_te=bool(self.rng.integers(2)),
            has_marks=bool(self.rng.integers(2)),
            path=str(self._folder / f"save{sum(self.counts.values())}"),
            written=[c.writer.sequence for c in self._consumers],
            touched=[copy.deepcopy(c.touched) for c in self._consumers],
            trainer=self._trainers,
        )
        for consumer in self._consumers:
            consumer.more_tags |= self._trainer.tags()
        if saved.by_te:
            te.checkpoint.save(self._embedding, f"{saved.path}-tables")
        self._checkpoint(saved).write(saved.path)
        self._saved.append(saved)

    def restore(self) -> None:
        if self._saved:
            self._restore(self._saved[self.rng.integers(len(self._saved))])

    def _restore(self, saved: Saved) -> None:
        if isinstance(self._embedding, te.TPUEmbedding):
            self._embedding.reset()
        if saved.by_te:
            te.checkpoint.restore(self._embedding, f"{saved.path}-tables")
        self._checkpoint(saved).read(saved.path).assert_consumed()
        if saved.has_marks and saved.trainer != self._trainers:
            self._resume()
            return
        for number, consumer in enumerate(self._consumers):
            before = consumer.writer.sequence == saved.written[number]
            consumer.touched = everything()
            if saved.has_marks and before:  # No delta was written since.
                consumer.touched = copy.deepcopy(saved.touched[number])
                if consumer.touched:
                    consumer.touched.pop("tags", None)

    def restart_trainer(self) -> None:
        """New writers, with or without a checkpoint, which ask the models."""
        for consumer in self._consumers:
            consumer.writer.stop()
            consumer.restart_writer()
        with_marks = [saved for saved in self._saved if saved.has_marks]
        if with_marks and self.rng.integers(2):
            self._restore(with_marks[-1])
        self._resume()

    def _resume(self) -> None:
        """Marks of earlier checkpoints are those of another trainer from here on."""
        self._trainers += 1
        for consumer in self._consumers:
            consumer.resume()

    def refuse(self) -> None:
        consumer = self._one()
        if not consumer.pending:
            self._publish(consumer)
        kind = str(self.rng.choice(list(BAD)))
        content = self._bad(kind, consumer)
        if content is None or content == consumer.pending[0].path.read_bytes():
            return
        path = self._folder / "bad"
        path.write_bytes(content)
        run = int(consumer.model.signatures["delta_state"]()["run"])
        try:
            te.serving.apply_delta(consumer.model, path)
        except (tf.errors.InvalidArgumentError, tf.errors.DataLossError) as error:
            text = error.message.lower()
            assert any(word in text for word in BAD[kind]), (kind, text)
        else:
            raise AssertionError(f"A delta that was {kind} was applied.")
        consumer.check()
        assert int(consumer.model.signatures["delta_state"]()["run"]) == run
        self.counts[f"refused: {kind}"] += 1

    def _bad(self, kind: str, consumer: Consumer) -> bytes | None:
        """A file that the consumer's model must refuse; None if there is none."""
        rng = self.rng
        content = consumer.pending[0].path.read_bytes()
        blocks = list(te.serving.delta_blocks(consumer.pending[0].path))
        one, two = rng.integers(1, len(blocks), size=2)  # The first one starts anew.
        if kind == "flipped":
            changed = bytearray(content)
            changed[rng.integers(len(changed))] ^= 1 << int(rng.integers(8))
            return bytes(changed)
        if kind == "truncated":
            return content[: rng.integers(len(content))]
        if kind == "reordered":
            blocks[one], blocks[two] = blocks[two], blocks[one]
            return _file(blocks)
        if kind == "without a block":
            return _file(blocks[:one] + blocks[one + 1 :])
        if kind == "with a block twice":
            return _file(blocks[: one + 1] + blocks[one:-1])
        if kind == "mixed":
            others = [
                block
                for each in consumer.pending[1:] + consumer.applied
                for block in te.serving.delta_blocks(each.path)
            ]
            if not others:
                return None
            blocks[one] = others[rng.integers(len(others))]
            return _file(blocks)
        if kind == "repeated":
            known = consumer.applied
        elif kind == "missing":
            known = consumer.pending[1:]
        else:
            others = [c for c in self._consumers if c is not consumer]
            known = [each for c in others for each in c.applied + c.pending]
        return known[rng.integers(len(known))].path.read_bytes() if known else None


_DAMAGE = ("damaged", "truncated", "is not a delta")
_ORDER = ("was sent, but block", "no delta has begun", "truncated")
BAD: dict[str, tuple[str, ...]] = {
    "flipped": _DAMAGE,
    "truncated": _DAMAGE,
    "reordered": _ORDER,
    "without a block": _ORDER,
    "with a block twice": _ORDER,
    "mixed": (*_ORDER, "is missing", "is repeated", "must ascend", "more rows of"),
    "repeated": ("is repeated",),
    "missing": ("is missing",),
    "foreign": ("belongs to another",),
}


def _file(blocks: Sequence[bytes]) -> bytes:
    return MAGIC + b"".join(struct.pack("<q", len(b)) + b for b in blocks)


def run(histories: int, seed: int, actions: int = 40) -> collections.Counter[str]:
    """Runs histories of deltas."""
    counts = collections.Counter[str]()
    while counts["histories"] < histories:
        with tempfile.TemporaryDirectory() as folder:
            history = History(seed, pathlib.Path(folder))
            for _ in range(min(HISTORIES_PER_TRAINER, histories - counts["histories"])):
                history.run(actions)
            counts += history.counts
        seed += 1
        print(f"{counts['histories']} histories", flush=True)
    return counts


if __name__ == "__main__":
    main(run, histories=1000)
