"""Deltas of trained embeddings: what served models have after them is the trainer's."""

from __future__ import annotations

import os
import pathlib
import subprocess
import sys
import unittest.mock as mock
from typing import Any

import numpy as np
import pytest
import tensorflow as tf
from serving.exported import ragged

import tpu_embedding as te
from tpu_embedding.engines import ParameterServerEngine, ShardedEngine
from tpu_embedding.serving import delta_files, delta_writer, following
from tpu_embedding.serving.delta_files import read_header

V = {"films": 60, "users": 9}
D = 6


@pytest.fixture(name="small", autouse=True)
def small_rings(monkeypatch: pytest.MonkeyPatch) -> None:
    """So that rows are spare and used again many times within a test."""
    monkeypatch.setattr(following, "SMALL_TABLE", 16)


class Trained:
    """An embedding of two tables that trains on random batches.

    Attributes:
      embedding: A TPUEmbedding.
    """

    def __init__(
        self, rng: np.random.Generator, optimizer: Any = None, **options: Any
    ) -> None:
        self._rng = rng
        films = te.TableConfig(V["films"], D, name="films")
        users = te.TableConfig(V["users"], D, name="users", invalid_ids="drop")
        self._features = {
            "film": te.FeatureConfig(films),
            "seen": te.FeatureConfig(films),
            "user": te.FeatureConfig(users),
        }
        self.embedding = te.TPUEmbedding(
            self._features, optimizer or te.Adagrad(0.1), **options
        )

    def batch(self) -> tuple[dict[str, Any], dict[str, set[int]]]:
        """A batch, and the rows that it touches."""
        film = self._rng.integers(V["films"], size=3)
        seen = [self._rng.integers(V["films"], size=n) for n in (2, 0, 1)]
        user = self._rng.integers(-1, V["users"], size=3)
        features = {
            "film": tf.constant(film),
            "seen": ragged([row.tolist() for row in seen]),
            "user": tf.constant(user),
        }
        touched = {
            "films": {*film.tolist(), *np.concatenate(seen).tolist()},
            "users": {int(row) for row in user if row >= 0},
        }
        return features, touched

    def step(self) -> dict[str, set[int]]:
        """Trains on a batch; the rows that changed."""
        features, touched = self.batch()
        self.embedding.enqueue(features)
        gradients = {
            name: tf.constant(self._rng.normal(size=a.shape), tf.float32)
            for name, a in self.embedding.dequeue().items()
        }
        self.embedding.apply_gradients(gradients)
        return touched

    def export(self, path: pathlib.Path, **options: Any) -> None:
        te.serving.export(self.embedding, path, signatures=["dense"], **options)


def served(model: Any) -> dict[str, np.ndarray]:
    """All rows of both tables; "seen" has those of "film"."""
    longest = tf.range(V["films"], dtype=tf.int64)
    answers = model.signatures["dense"](
        film=longest, seen=longest, user=longest % V["users"]
    )
    return {name: answer.numpy() for name, answer in answers.items()}


def assert_follows(
    model: Any, trained: Trained, folder: pathlib.Path, storage: str
) -> None:
    """The model serves what a new export would."""
    if storage == "float32":
        tables = trained.embedding.embedding_tables
        wanted = {config.name: tables[config].numpy() for config in tables}
        found = served(model)
        np.testing.assert_array_equal(found["film"], wanted["films"])
        users = found["user"][: V["users"]]
        np.testing.assert_array_equal(users, wanted["users"])
        return
    trained.export(folder, storage=storage)
    wanted = served(tf.saved_model.load(str(folder)))
    for name, values in served(model).items():
        np.testing.assert_array_equal(values, wanted[name])


@pytest.mark.parametrize("storage", ["float32", "bfloat16", "int8"])
def test_tables_of_bfloat16(
    storage: str, rng: np.random.Generator, tmp_path: pathlib.Path
) -> None:
    films = te.TableConfig(50, 5, name="films", dtype="bfloat16")
    embedding = te.TPUEmbedding({"film": te.FeatureConfig(films)}, te.Adagrad(0.1))
    te.serving.export(embedding, tmp_path / "base", storage=storage, deltas=True)
    writer = te.serving.DeltaWriter(embedding, tmp_path / "base", "all")
    assert writer.export_delta(tmp_path / "1.delta") == {"films": 0}
    embedding.enqueue({"film": tf.constant([7, 3, 7])})
    activations = embedding.dequeue()["film"]
    gradients = rng.normal(size=activations.shape).astype(np.float32)
    embedding.apply_gradients({"film": tf.constant(gradients)})
    assert writer.export_delta(tmp_path / "2.delta") == {"films": 2}
    te.serving.export(embedding, tmp_path / "after", storage=storage)
    followed: Any = tf.saved_model.load(str(tmp_path / "base"))
    for number in (1, 2):
        te.serving.apply_delta(followed, tmp_path / f"{number}.delta")
    exported: Any = tf.saved_model.load(str(tmp_path / "after"))
    ids = tf.range(50, dtype=tf.int64)
    found, wanted = (m.signatures["dense"](film=ids) for m in (followed, exported))
    np.testing.assert_array_equal(found["film"], wanted["film"])


class Consumer:
    """A writer, and a model that follows it."""

    def __init__(
        self, trained: Trained, folder: pathlib.Path, storage: str, name: str
    ) -> None:
        self._folder, self.storage, self.name = folder, storage, name
        self.base = folder / f"{name}-base"
        trained.export(self.base, storage=storage, deltas=1.0)
        self.writer = te.serving.DeltaWriter(trained.embedding, self.base, name)
        self.model: Any = tf.saved_model.load(str(self.base))
        self._number = 0

    def follow(self) -> dict[str, int]:
        """Writes and applies a delta; the number of its rows by table."""
        self._number += 1
        path = self._folder / f"{self.name}-{self._number}.delta"
        counts = self.writer.export_delta(path)
        assert te.serving.apply_delta(self.model, path) == self.writer.sequence
        header = read_header(path)
        assert [c for c, _ in header.counts] == list(counts.values())
        return counts


def test_a_delta_has_the_rows_that_changed(
    rng: np.random.Generator, tmp_path: pathlib.Path
) -> None:
    trained = Trained(rng)
    consumer = Consumer(trained, tmp_path, "float32", "all")
    assert consumer.follow() == {"films": 0, "users": 0}
    for steps in (1, 2, 0):
        touched: dict[str, set[int]] = {"films": set(), "users": set()}
        for _ in range(steps):
            for name, rows in trained.step().items():
                touched[name] |= rows
        features, _ = trained.batch()
        trained.embedding.enqueue(features, training=False)
        trained.embedding.dequeue()  # Looked up is not changed.
        counts = consumer.follow()
        assert counts == {name: len(rows) for name, rows in touched.items()}
        assert_follows(consumer.model, trained, tmp_path / f"e{steps}", "float32")


def test_the_first_delta_has_what_was_trained_since_the_export(
    rng: np.random.Generator, tmp_path: pathlib.Path
) -> None:
    trained = Trained(rng)
    for storage in ("float32", "int8"):
        base = tmp_path / storage
        trained.export(base, storage=storage, deltas=True)
        touched = trained.step()
        writer = te.serving.DeltaWriter(trained.embedding, base, storage)
        path = tmp_path / f"{storage}.delta"
        counts = writer.export_delta(path)
        assert counts == {name: len(rows) for name, rows in touched.items()}
        model = tf.saved_model.load(str(base))
        te.serving.apply_delta(model, path)
        assert_follows(model, trained, tmp_path / f"{storage}-after", storage)


def test_an_optimizer_that_updates_all_rows_changes_all(
    rng: np.random.Generator, tmp_path: pathlib.Path
) -> None:
    trained = Trained(rng, te.Adam(0.1, lazy_adam=False))
    consumer = Consumer(trained, tmp_path, "float32", "all")
    trained.step()
    assert consumer.follow() == V
    assert_follows(consumer.model, trained, tmp_path / "export", "float32")


OPTIMIZERS = (te.SGD(0.1), te.Adagrad(0.1), te.Adam(0.1), te.FTRL(0.1))


def random_history(seed: int, folder: pathlib.Path, actions: int) -> None:
    """Steps, deltas for three consumers, saves, and restores of all kinds."""
    rng = np.random.default_rng(seed)
    trained = Trained(
        rng,
        OPTIMIZERS[seed % len(OPTIMIZERS)],
        pipeline_execution_with_tensor_core=bool(seed % 2),
    )
    storages = ("float32", "int8", "int4") if seed % 3 else ("bfloat16", "float16")
    consumers = [Consumer(trained, folder, s, s) for s in storages]
    both = tf.train.Checkpoint(
        embedding=trained.embedding, **{c.name: c.writer for c in consumers}
    )
    own = tf.train.Checkpoint(embedding=trained.embedding)
    saved: list[tuple[str, str]] = []
    for number in range(actions):
        action = rng.choice(["step", "step", "step", "follow", "save", "restore"])
        if action == "step":
            trained.step()
        elif action == "follow":
            consumer = consumers[rng.integers(len(consumers))]
            consumer.follow()
            assert_follows(
                consumer.model, trained, folder / f"export{number}", consumer.storage
            )
        elif action == "save":
            way = ("both", "own", "tables")[rng.integers(3)]
            path = str(folder / f"save{number}")
            if way == "tables":
                te.checkpoint.save(trained.embedding, path)
            else:
                (both if way == "both" else own).write(path)
            saved.append((way, path))
        elif saved:
            way, path = saved[rng.integers(len(saved))]
            trained.embedding.reset()
            if way == "tables":
                te.checkpoint.restore(trained.embedding, path)
            else:
                (both if way == "both" else own).read(path)
    for consumer in consumers:
        consumer.follow()
        place = folder / f"last-{consumer.name}"
        assert_follows(consumer.model, trained, place, consumer.storage)


@pytest.mark.parametrize("seed", range(3))
def test_random_histories(seed: int, tmp_path: pathlib.Path) -> None:
    random_history(seed, tmp_path, actions=30)


@pytest.mark.second_tier
def test_many_random_histories(tmp_path: pathlib.Path) -> None:
    for seed in range(int(os.environ.get("TPU_EMBEDDING_TEST_HISTORIES", "10"))):
        (tmp_path / f"{seed}").mkdir()
        random_history(100 + seed, tmp_path / f"{seed}", actions=60)


def test_a_resumed_trainer_goes_on_from_its_marks(
    rng: np.random.Generator, tmp_path: pathlib.Path
) -> None:
    trained = Trained(rng)
    consumer = Consumer(trained, tmp_path, "float32", "all")
    trained.step()
    consumer.follow()
    touched = trained.step()
    checkpoint = tf.train.Checkpoint(
        embedding=trained.embedding, deltas=consumer.writer
    )
    path = checkpoint.write(str(tmp_path / "checkpoint"))
    again = Trained(rng)
    writer = te.serving.DeltaWriter(again.embedding, consumer.base, "all")
    both = tf.train.Checkpoint(embedding=again.embedding, deltas=writer)
    both.read(path).assert_consumed()
    assert writer.sequence == 1
    assert writer.run != consumer.writer.run
    counts = writer.export_delta(tmp_path / "2.delta")
    assert counts == {name: len(rows) for name, rows in touched.items()}
    assert te.serving.apply_delta(consumer.model, tmp_path / "2.delta") == 2
    assert_follows(consumer.model, again, tmp_path / "export", "float32")
    # The run that was taken up again is foreign now, and can say so.
    trained.step()
    consumer.writer.export_delta(tmp_path / "other2.delta")
    consumer.writer.export_delta(tmp_path / "other3.delta")
    for name, message in (("other2", "Delta 2 is repeated"), ("other3", "is foreign")):
        with pytest.raises(tf.errors.InvalidArgumentError, match=message):
            te.serving.apply_delta(consumer.model, tmp_path / f"{name}.delta")
    consumer.writer.resume(consumer.model.signatures["delta_state"]())
    assert consumer.follow() == V
    assert_follows(consumer.model, trained, tmp_path / "export", "float32")
    consumer.writer.resume(consumer.model.signatures["delta_state"]())
    assert consumer.follow() == {"films": 0, "users": 0}


@pytest.mark.parametrize("way", ["tf.train.Checkpoint", "te.checkpoint"])
def test_after_a_restore_without_the_writer_the_next_delta_has_all_rows(
    way: str, rng: np.random.Generator, tmp_path: pathlib.Path
) -> None:
    trained = Trained(rng)
    consumer = Consumer(trained, tmp_path, "float32", "all")
    path = str(tmp_path / "checkpoint")
    checkpoint = tf.train.Checkpoint(embedding=trained.embedding)
    checkpoint.write(path)
    trained.step()
    consumer.follow()
    if way == "te.checkpoint":
        te.checkpoint.restore(trained.embedding, path)
    else:
        checkpoint.read(path)
    assert consumer.follow() == V
    assert_follows(consumer.model, trained, tmp_path / "export", "float32")


def test_a_delta_that_failed_is_in_the_next_one(
    rng: np.random.Generator, tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    trained = Trained(rng)
    base = tmp_path / "base"
    trained.export(base, storage="int8", deltas=0.1)  # 16 rows at a time.
    writer = te.serving.DeltaWriter(trained.embedding, base, "all")
    touched = trained.step()
    (tmp_path / "taken").write_bytes(b"")
    with pytest.raises(ValueError, match=r"exists\. Give each delta"):
        writer.export_delta(tmp_path / "taken")
    films = next(iter(trained.embedding.embedding_tables.values()))
    row = min(touched["films"])
    before = films.numpy()
    films.scatter_nd_update([[row]], [[np.nan] * D])
    with pytest.raises(tf.errors.InvalidArgumentError) as raised:
        writer.export_delta(tmp_path / "1.delta")
    assert f"Table films: row {row} holds nan, which int8 cannot" in str(raised.value)
    assert [p.name for p in tmp_path.iterdir() if "1.delta" in p.name] == []
    films.assign(before)
    for name, rows in trained.step().items():
        touched[name] |= rows
    counts = writer.export_delta(tmp_path / "1.delta")
    assert counts == {name: len(rows) for name, rows in touched.items()}
    assert writer.sequence == 1
    writer.mark_all_rows()
    with pytest.raises(ValueError, match="60 rows of table films changed since delta "):
        writer.export_delta(tmp_path / "2.delta")


def test_telemetry_and_consumers_see_the_same_update(
    rng: np.random.Generator, tmp_path: pathlib.Path
) -> None:
    trained = Trained(rng)
    consumers = [Consumer(trained, tmp_path, "float32", f"c{k}") for k in range(2)]
    telemetry = te.Telemetry(trained.embedding, every=1)
    touched = trained.step()
    expected = {name: len(rows) for name, rows in touched.items()}
    figures = telemetry.read()
    assert {n: figures[n]["distinct_ids"].value for n in expected} == expected
    assert [c.follow() for c in consumers] == [expected, expected]
    consumers[0].writer.stop()
    trained.step()
    assert sum(consumers[1].follow().values()) > 0
    with pytest.raises(RuntimeError, match="This DeltaWriter was stopped"):
        consumers[0].writer.export_delta(tmp_path / "stopped")
    again = te.serving.DeltaWriter(trained.embedding, consumers[0].base, "c0")
    assert again.sequence == 0


def test_replicas_of_a_machine_write_one_delta(
    rng: np.random.Generator, tmp_path: pathlib.Path
) -> None:
    strategy = tf.distribute.MirroredStrategy(["CPU:0", "CPU:1"])
    with strategy.scope():
        trained = Trained(rng)
    consumer = Consumer(trained, tmp_path, "float32", "all")
    batches = [trained.batch() for _ in range(2)]
    touched = {name: batches[0][1][name] | batches[1][1][name] for name in V}

    @tf.function
    def step() -> None:
        def train() -> None:
            trained.embedding.apply_gradients(trained.embedding.dequeue())

        strategy.run(train)

    values = [
        strategy.experimental_distribute_values_from_function(
            lambda c, name=name: batches[c.replica_id_in_sync_group][0][name]
        )
        for name in batches[0][0]
    ]
    trained.embedding.enqueue(dict(zip(batches[0][0], values, strict=True)))
    step()
    counts = consumer.follow()
    assert counts == {name: len(rows) for name, rows in touched.items()}
    assert_follows(consumer.model, trained, tmp_path / "export", "float32")


def test_what_a_writer_refuses(
    rng: np.random.Generator, tmp_path: pathlib.Path
) -> None:
    trained = Trained(rng)
    consumer = Consumer(trained, tmp_path, "float32", "all")
    trained.export(tmp_path / "plain")
    for embedding, base, name, error, message in (
        (3, consumer.base, "x", TypeError, "`embedding` must be a TPUEmbedding"),
        (trained.embedding, consumer.base, "", TypeError, "`consumer` must be a name"),
        (trained.embedding, consumer.base, "all", ValueError, "has a DeltaWriter for"),
        (trained.embedding, tmp_path / "plain", "x", ValueError, "takes no deltas"),
    ):
        with pytest.raises(error, match=message):
            te.serving.DeltaWriter(embedding, base, name)
    films = te.TableConfig(8, 2, name="films")
    other = te.TPUEmbedding({"film": te.FeatureConfig(films)}, te.SGD(0.1))
    with pytest.raises(ValueError, match=r"and the embedding has \[\('films', 8, 2\)"):
        te.serving.DeltaWriter(other, consumer.base, "x")
    te.serving.export(other, tmp_path / "other", deltas=True)
    state = tf.saved_model.load(str(tmp_path / "other")).signatures["delta_state"]()
    with pytest.raises(ValueError, match="The model serves the export"):
        consumer.writer.resume(state)
    trained.step()
    consumer.follow()
    delta = str(tmp_path / "all-1.delta")
    new = str(tmp_path / "new")
    te.serving.applying.apply_to_export(str(consumer.base), [delta], new)
    with pytest.raises(ValueError, match="Deltas were applied to"):
        te.serving.DeltaWriter(trained.embedding, new, "x")
    checkpoint = tf.train.Checkpoint(deltas=consumer.writer)
    path = checkpoint.write(str(tmp_path / "marks"))
    elsewhere = te.serving.DeltaWriter(other, tmp_path / "other", "x")
    with pytest.raises(ValueError, match="The checkpoint has marks for the export"):
        tf.train.Checkpoint(deltas=elsewhere).restore(path)

    @tf.function
    def in_graph() -> None:
        consumer.writer.export_delta(tmp_path / "graph.delta")

    with pytest.raises(RuntimeError, match=r"outside of tf\.function"):
        in_graph()


def test_engines_without_tracking_say_so(tmp_path: pathlib.Path) -> None:
    plain = te.TableConfig(8, 2, name="films")
    custom = te.TableConfig(
        8, 2, name="films", combiner=te.CustomCombiner(lambda n, rows: rows[0], 2)
    )
    growing = te.TableConfig(te.GrowingVocabulary(8), 2, name="films")
    te.serving.export(
        {plain: tf.zeros([8, 2])},
        tmp_path / "base",
        feature_config={"film": te.FeatureConfig(plain)},
        deltas=True,
    )
    for embedding, message in (
        (
            te.TPUEmbeddingV2({"film": te.FeatureConfig(custom)}, te.SGD(0.1)),
            "portable engine does not track",
        ),
        (
            te.TPUEmbedding({"film": te.FeatureConfig(growing)}, te.SGD(0.1)),
            "Deltas have no rows of growing tables: films",
        ),
        (
            te.keras.TPUEmbedding(
                {"film": te.FeatureConfig(plain)}, None, trainable_tables=True
            ),
            "use a layer without `trainable_tables=True`",
        ),
    ):
        with pytest.raises(NotImplementedError, match=message):
            te.serving.DeltaWriter(embedding, tmp_path / "base", "all")


def test_tables_of_other_machines_say_so() -> None:
    for engine in (ShardedEngine, ParameterServerEngine):
        elsewhere = mock.Mock(spec=engine, _transport=object())
        elsewhere.name = engine.name
        with pytest.raises(NotImplementedError, match=f"The {engine.name} engine does"):
            engine.changes(elsewhere, "all")


@pytest.mark.filterwarnings("ignore:__array__ impl:DeprecationWarning")
def test_the_keras_layer(rng: np.random.Generator, tmp_path: pathlib.Path) -> None:
    import keras

    films = te.TableConfig(20, 4, name="films")
    layer = te.keras.TPUEmbedding({"film": te.FeatureConfig(films)}, te.SGD(0.5))
    inputs = {"film": keras.Input([], dtype="int64", name="film")}
    outputs = keras.layers.Dense(1)(layer(inputs)["film"])
    model = keras.Model(inputs, outputs)
    model.compile("sgd", "mse")
    te.serving.export(layer, tmp_path / "base", deltas=1.0)
    writer = te.serving.DeltaWriter(layer, tmp_path / "base", "all")
    film = np.array([1, 5, 5, 7])
    model.fit({"film": film}, np.ones([4, 1]), verbose=0)
    assert writer.export_delta(tmp_path / "1.delta") == {"films": 3}
    model.save_weights(tmp_path / "some.weights.h5")
    model.load_weights(tmp_path / "some.weights.h5")
    assert writer.export_delta(tmp_path / "2.delta") == {"films": 20}
    served = tf.saved_model.load(str(tmp_path / "base"))
    for number in (1, 2):
        te.serving.apply_delta(served, tmp_path / f"{number}.delta")
    ids = tf.range(20, dtype=tf.int64)
    np.testing.assert_array_equal(
        served.signatures["dense"](film=ids)["film"], layer({"film": ids})["film"]
    )


KILLED = """
import os, signal, sys
import tensorflow as tf
import tpu_embedding as te
from tpu_embedding.serving import delta_files
films = te.TableConfig(60, 6, name="films")
embedding = te.TPUEmbedding({"film": te.FeatureConfig(films)}, te.SGD(0.5))
te.serving.export(embedding, sys.argv[1], deltas=1.0)
writer = te.serving.DeltaWriter(embedding, sys.argv[1], "all")
writer.mark_all_rows()
checksum, calls = delta_files.checksum, []
def killed(content):
    calls.append(content)
    if len(calls) == int(sys.argv[3]):
        os.kill(os.getpid(), signal.SIGKILL)
    return checksum(content)
delta_files.checksum = killed
delta_files.BLOCK_BYTES = 64
writer.export_delta(sys.argv[2])
"""


@pytest.mark.second_tier
@pytest.mark.parametrize("calls", [1, 5, 40])
def test_a_killed_writer_leaves_no_delta(calls: int, tmp_path: pathlib.Path) -> None:
    places = [str(tmp_path / "base"), str(tmp_path / "1.delta"), str(calls)]
    ended = subprocess.run(
        [sys.executable, "-P", "-c", KILLED, *places],
        env={**os.environ, "PYTHONPATH": str(pathlib.Path(te.__file__).parents[1])},
        check=False,
    )
    assert ended.returncode == -9
    assert not (tmp_path / "1.delta").exists()
    films = te.TableConfig(60, 6, name="films")
    embedding = te.TPUEmbedding({"film": te.FeatureConfig(films)}, te.SGD(0.5))
    writer = te.serving.DeltaWriter(embedding, places[0], "all")
    writer.export_delta(places[1])  # Over what was left of the other one.
    model = tf.saved_model.load(places[0])
    assert te.serving.apply_delta(model, places[1]) == 1
    assert sorted(p.name for p in tmp_path.iterdir()) == ["1.delta", "base"]


def test_blocks_are_bounded(
    rng: np.random.Generator, tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(delta_files, "BLOCK_BYTES", 100)
    monkeypatch.setattr(delta_writer, "_COMPARED_BYTES", 100)
    trained = Trained(rng)
    consumer = Consumer(trained, tmp_path, "float32", "all")
    consumer.writer.mark_all_rows()
    assert consumer.follow() == V
    sizes = [len(b) for b in te.serving.delta_blocks(tmp_path / "all-1.delta")]
    assert len(sizes) == 2 + 20 + 3
    assert max(sizes[1:]) <= 48 + 100
    assert_follows(consumer.model, trained, tmp_path / "export", "float32")
