"""Deltas of trained embeddings: what served models have after them is the trainer's."""

from __future__ import annotations

import pathlib
from typing import Any

import forked
import numpy as np
import pytest
import tensorflow as tf
from reliability import following as histories
from reliability.following import (
    Consumer,
    D,
    Published,
    Trainer,
    V,
    require_same,
    served,
)
from replica_values import mirrored, of_replicas

import tpu_embedding as te
from tpu_embedding.serving import delta_files, delta_writer, following_tables


@pytest.fixture
def trainer(rng: np.random.Generator) -> Trainer:
    return Trainer(rng)


@pytest.fixture
def consumer(trainer: Trainer, tmp_path: pathlib.Path) -> Consumer:
    return Consumer(trainer, tmp_path, "float32", "all")


@pytest.mark.parametrize("storage", ["float32", "bfloat16", "int8"])
def test_tables_of_bfloat16(
    storage: str, rng: np.random.Generator, tmp_path: pathlib.Path
) -> None:
    films = te.TableConfig(50, 5, name="films", dtype="bfloat16")
    embedding = te.TPUEmbedding({"film": te.FeatureConfig(films)}, te.Adagrad(0.1))
    te.serving.export(
        embedding, tmp_path / "base", storage=storage, signatures=["dense"], deltas=True
    )
    writer = te.serving.DeltaWriter(embedding, tmp_path / "base", "all")
    assert writer.export_delta(tmp_path / "1.delta") == {"films": 0}
    embedding.enqueue({"film": tf.constant([7, 3, 7])})
    activations = embedding.dequeue()["film"]
    gradients = rng.normal(size=activations.shape).astype(np.float32)
    embedding.apply_gradients({"film": tf.constant(gradients)})
    assert writer.export_delta(tmp_path / "2.delta") == {"films": 2}
    te.serving.export(
        embedding, tmp_path / "after", storage=storage, signatures=["dense"]
    )
    followed: Any = tf.saved_model.load(str(tmp_path / "base"))
    for number in (1, 2):
        te.serving.apply_delta(followed, tmp_path / f"{number}.delta")
    exported: Any = tf.saved_model.load(str(tmp_path / "after"))
    ids = tf.range(50, dtype=tf.int64)
    found, wanted = (m.signatures["dense"](film=ids) for m in (followed, exported))
    np.testing.assert_array_equal(found["film"], wanted["film"])


def test_a_delta_has_the_rows_that_changed(
    trainer: Trainer, consumer: Consumer
) -> None:
    assert consumer.follow() == {"films": 0, "users": 0}
    for steps in (1, 2, 0):
        touched: dict[str, set[int]] = {"films": set(), "users": set()}
        for _ in range(steps):
            for name, rows in trainer.step().items():
                touched[name] |= rows
        features, _ = trainer.batch()
        trainer.embedding.enqueue(features, training=False)
        trainer.embedding.dequeue()  # Looked up is not changed.
        counts = consumer.follow()
        assert counts == {name: len(rows) for name, rows in touched.items()}


def test_the_first_delta_has_what_was_trained_since_the_export(
    trainer: Trainer, tmp_path: pathlib.Path
) -> None:
    for storage in ("float32", "int8"):
        base = tmp_path / storage
        te.serving.export(
            trainer.embedding, base, signatures=["dense"], storage=storage, deltas=True
        )
        touched = trainer.step()
        writer = te.serving.DeltaWriter(trainer.embedding, base, storage)
        path = tmp_path / f"{storage}.delta"
        counts = writer.export_delta(path)
        assert counts == {name: len(rows) for name, rows in touched.items()}
        model = tf.saved_model.load(str(base))
        te.serving.apply_delta(model, path)
        require_same(served(model), trainer.tables(storage))


def test_an_optimizer_that_updates_all_rows_changes_all(
    rng: np.random.Generator, tmp_path: pathlib.Path
) -> None:
    trainer = Trainer(rng, te.Adam(0.1, lazy_adam=False))
    consumer = Consumer(trainer, tmp_path, "float32", "all")
    trainer.step()
    assert consumer.follow() == V


@pytest.mark.parametrize("kind", [0, pytest.param(4, marks=pytest.mark.third_tier)])
def test_random_histories(kind: int, tmp_path: pathlib.Path) -> None:
    """Of TPUEmbedding and TPUEmbeddingV2."""
    history = histories.History(kind, tmp_path)
    for _ in range(3):
        history.run(40)
    refused = [n for what, n in history.counts.items() if what.startswith("refused")]
    assert history.counts["applied"] > 10
    assert sum(refused) > 5


@pytest.mark.third_tier
def test_many_random_histories(seed: int) -> None:
    """A few of those of `make fuzz-deltas`."""
    counts = histories.run(60, seed)
    assert counts["histories"] == 60
    assert {kind for kind in histories.BAD if f"refused: {kind}" in counts} == {
        *histories.BAD
    }


def test_a_resumed_trainer_goes_on_from_its_marks(
    trainer: Trainer,
    consumer: Consumer,
    rng: np.random.Generator,
    tmp_path: pathlib.Path,
) -> None:
    trainer.step()
    consumer.follow()
    touched = trainer.step()
    checkpoint = tf.train.Checkpoint(
        embedding=trainer.embedding, deltas=consumer.writer
    )
    path = checkpoint.write(str(tmp_path / "checkpoint"))
    again = Trainer(rng)
    writer = te.serving.DeltaWriter(again.embedding, consumer.base, "all")
    both = tf.train.Checkpoint(embedding=again.embedding, deltas=writer)
    both.read(path).assert_consumed()
    assert writer.sequence == 1
    assert writer.run != consumer.writer.run
    counts = writer.export_delta(tmp_path / "2.delta")
    assert counts == {name: len(rows) for name, rows in touched.items()}
    consumer.pending.append(Published(tmp_path / "2.delta", again.tables("float32")))
    consumer.apply()
    # The run that was taken up again is another run now, and can say so.
    trainer.step()
    consumer.writer.export_delta(tmp_path / "other2.delta")
    consumer.writer.export_delta(tmp_path / "other3.delta")
    for name, message in (("other2", "Delta 2 is repeated"), ("other3", "another run")):
        with pytest.raises(tf.errors.InvalidArgumentError, match=message):
            te.serving.apply_delta(consumer.model, tmp_path / f"{name}.delta")
    consumer.writer.resume(consumer.model.signatures["delta_state"]())
    assert consumer.follow() == V
    consumer.writer.resume(consumer.model.signatures["delta_state"]())
    assert consumer.follow() == {"films": 0, "users": 0}


@pytest.mark.parametrize("way", ["tf.train.Checkpoint", "te.checkpoint"])
def test_after_a_restore_without_the_writer_the_next_delta_has_all_rows(
    way: str, trainer: Trainer, consumer: Consumer, tmp_path: pathlib.Path
) -> None:
    path = str(tmp_path / "checkpoint")
    checkpoint = tf.train.Checkpoint(embedding=trainer.embedding)
    checkpoint.write(path)
    trainer.step()
    consumer.follow()
    if way == "te.checkpoint":
        te.checkpoint.restore(trainer.embedding, path)
    else:
        checkpoint.read(path)
    assert consumer.follow() == V


def test_a_delta_that_failed_is_in_the_next_one(
    trainer: Trainer, tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    base = tmp_path / "base"
    monkeypatch.setattr(following_tables, "SMALL_TABLE", 16)
    te.serving.export(
        trainer.embedding, base, storage="int8", signatures=["dense"], deltas=0.1
    )
    writer = te.serving.DeltaWriter(trainer.embedding, base, "all")
    touched = trainer.step()
    (tmp_path / "taken").write_bytes(b"")
    with pytest.raises(ValueError, match=r"exists\. Give each delta"):
        writer.export_delta(tmp_path / "taken")
    films = next(iter(trainer.embedding.embedding_tables.values()))
    row = min(touched["films"])
    before = films.numpy()
    films.scatter_nd_update([[row]], [[np.nan] * D])
    with pytest.raises(tf.errors.InvalidArgumentError) as raised:
        writer.export_delta(tmp_path / "1.delta")
    assert f"Table films: row {row} holds nan, which int8 cannot" in str(raised.value)
    assert [p.name for p in tmp_path.iterdir() if "1.delta" in p.name] == []
    films.assign(before)
    for name, rows in trainer.step().items():
        touched[name] |= rows
    counts = writer.export_delta(tmp_path / "1.delta")
    assert counts == {name: len(rows) for name, rows in touched.items()}
    assert writer.sequence == 1
    writer.mark_all_rows()
    with pytest.raises(ValueError, match="films: 60 rows changed since delta 1, but"):
        writer.export_delta(tmp_path / "2.delta")


def test_telemetry_and_consumers_see_the_same_update(
    trainer: Trainer, tmp_path: pathlib.Path
) -> None:
    consumers = [Consumer(trainer, tmp_path, "float32", f"c{k}") for k in range(2)]
    telemetry = te.Telemetry(trainer.embedding, every=1)
    touched = trainer.step()
    expected = {name: len(rows) for name, rows in touched.items()}
    figures = telemetry.read()
    assert {n: figures[n]["distinct_ids"].value for n in expected} == expected
    assert [c.follow() for c in consumers] == [expected, expected]
    consumers[0].writer.stop()
    trainer.step()
    assert sum(consumers[1].follow().values()) > 0
    with pytest.raises(RuntimeError, match="This DeltaWriter was stopped"):
        consumers[0].writer.export_delta(tmp_path / "stopped")
    again = te.serving.DeltaWriter(trainer.embedding, consumers[0].base, "c0")
    assert again.sequence == 0


def test_replicas_of_a_machine_write_one_delta(
    rng: np.random.Generator, tmp_path: pathlib.Path
) -> None:
    strategy = mirrored(2)
    with strategy.scope():
        trainer = Trainer(rng)
    consumer = Consumer(trainer, tmp_path, "float32", "all")
    batches = [trainer.batch() for _ in range(2)]
    touched = {name: batches[0][1][name] | batches[1][1][name] for name in V}

    @tf.function
    def step() -> None:
        def train() -> None:
            trainer.embedding.apply_gradients(trainer.embedding.dequeue())

        strategy.run(train)

    names = batches[0][0]
    trainer.embedding.enqueue(
        {name: of_replicas(strategy, [b[0][name] for b in batches]) for name in names}
    )
    step()
    counts = consumer.follow()
    assert counts == {name: len(rows) for name, rows in touched.items()}


def test_what_a_writer_refuses(
    trainer: Trainer, consumer: Consumer, tmp_path: pathlib.Path
) -> None:
    te.serving.export(trainer.embedding, tmp_path / "plain", signatures=["dense"])
    plain, base, own = tmp_path / "plain", consumer.base, trainer.embedding
    for embedding, folder, name, error, message in (
        (3, base, "x", TypeError, "`embedding` must be a TPUEmbedding"),
        (own, base, "", TypeError, "`consumer` must be a name"),
        (own, base, "all", ValueError, "has a DeltaWriter for"),
        (own, plain, "x", ValueError, "does not take deltas"),
        (own, tmp_path, "x", tf.errors.NotFoundError, "is not an export of"),
    ):
        with pytest.raises(error, match=message):
            te.serving.DeltaWriter(embedding, folder, name)
    films = te.TableConfig(8, 2, name="films")
    other = te.TPUEmbedding({"film": te.FeatureConfig(films)}, te.SGD(0.1))
    with pytest.raises(ValueError, match=r"has 'films' \(rows: 8, dim: 2\)\. Export"):
        te.serving.DeltaWriter(other, consumer.base, "x")
    te.serving.export(other, tmp_path / "other", signatures=["dense"], deltas=True)
    state = tf.saved_model.load(str(tmp_path / "other")).signatures["delta_state"]()
    with pytest.raises(ValueError, match="The model serves the export"):
        consumer.writer.resume(state)
    with pytest.raises(ValueError, match="`state` lacks base, run"):
        consumer.writer.resume({"sequence": 1})
    with pytest.raises(TypeError, match="`state` must be what delta_state returned"):
        consumer.writer.resume(None)  # pyright: ignore[reportArgumentType]
    trainer.step()
    consumer.follow()
    delta = str(tmp_path / "all-1.delta")
    new = str(tmp_path / "new")
    te.serving.delta_files.apply_to_export(str(consumer.base), [delta], new)
    with pytest.raises(ValueError, match="Deltas were applied to"):
        te.serving.DeltaWriter(trainer.embedding, new, "x")
    checkpoint = tf.train.Checkpoint(deltas=consumer.writer)
    path = checkpoint.write(str(tmp_path / "marks"))
    elsewhere = te.serving.DeltaWriter(other, tmp_path / "other", "x")
    with pytest.raises(ValueError, match="The checkpoint has marks for the export"):
        tf.train.Checkpoint(deltas=elsewhere).restore(path)

    @tf.function
    def in_graph() -> None:
        consumer.writer.export_delta(tmp_path / "graph.delta")

    with pytest.raises(RuntimeError, match=r"inside a tf\.function"):
        in_graph()


def test_engines_without_tracking_say_so(tmp_path: pathlib.Path) -> None:
    plain = te.TableConfig(8, 2, name="films")
    custom = te.TableConfig(
        8, 2, name="films", combiner=te.CustomCombiner(lambda n, rows: rows[0], 2)
    )
    te.serving.export(
        {plain: tf.zeros([8, 2])},
        tmp_path / "base",
        feature_config={"film": te.FeatureConfig(plain)},
        signatures=["dense"],
        deltas=True,
    )
    for embedding, message in (
        (
            te.TPUEmbeddingV2({"film": te.FeatureConfig(custom)}, te.SGD(0.1)),
            "portable engine does not track",
        ),
        (
            te.keras.TPUEmbedding(
                {"film": te.FeatureConfig(plain)}, None, trainable_tables=True
            ),
            "Use a layer without `trainable_tables=True`",
        ),
    ):
        with pytest.raises(NotImplementedError, match=message):
            te.serving.DeltaWriter(embedding, tmp_path / "base", "all")


def test_the_keras_layer(rng: np.random.Generator, tmp_path: pathlib.Path) -> None:
    import keras

    films = te.TableConfig(20, 4, name="films")
    layer = te.keras.TPUEmbedding({"film": te.FeatureConfig(films)}, te.SGD(0.5))
    inputs = {"film": keras.Input([], dtype="int64", name="film")}
    outputs = keras.layers.Dense(1)(layer(inputs)["film"])
    model = keras.Model(inputs, outputs)
    model.compile("sgd", "mse")
    te.serving.export(layer, tmp_path / "base", signatures=["dense"], deltas=1.0)
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
rows = te.GrowingVocabulary(60) if sys.argv[4] == "grows" else 60
films = te.TableConfig(rows, 6, name="films")
embedding = te.TPUEmbedding({"film": te.FeatureConfig(films)}, te.SGD(0.5))
embedding.enqueue({"film": tf.range(60)})
embedding.apply_gradients(embedding.dequeue())
te.serving.export(embedding, sys.argv[1], signatures=["dense"], deltas=1.0)
writer = te.serving.DeltaWriter(embedding, sys.argv[1], "all")
writer.mark_all_rows()
checksum, calls = delta_files.checksum, []
def end(*paths):
    os.kill(os.getpid(), signal.SIGKILL)
def killed(content):
    calls.append(content)
    return checksum(content) if len(calls) != int(sys.argv[3]) else end()
delta_files.checksum = killed
delta_files.BLOCK_BYTES = 64
if int(sys.argv[3]) == 0:
    tf.io.gfile.rename = end
writer.export_delta(sys.argv[2])
"""


@pytest.mark.third_tier
@pytest.mark.parametrize(
    ("calls", "kind"),
    [(1, "fixed"), (5, "fixed"), (40, "fixed"), (0, "fixed"), (9, "grows")],
)
def test_a_killed_writer_leaves_no_delta(
    calls: int, kind: str, tmp_path: pathlib.Path
) -> None:
    """Killed at the first block, later, and before the file gets its name."""
    places = [str(tmp_path / "base"), str(tmp_path / "1.delta")]
    ended = forked.run(["-c", KILLED, *places, str(calls), kind])
    assert ended.returncode == -9
    assert not (tmp_path / "1.delta").exists()
    rows: Any = te.GrowingVocabulary(60) if kind == "grows" else 60
    films = te.TableConfig(rows, 6, name="films")
    embedding = te.TPUEmbedding({"film": te.FeatureConfig(films)}, te.SGD(0.5))
    writer = te.serving.DeltaWriter(embedding, places[0], "all")
    # Over what was left of the other one. A table without ids loses those exported.
    assert writer.export_delta(places[1]) == {"films": 60}
    model: Any = tf.saved_model.load(places[0])
    assert te.serving.apply_delta(model, places[1]) == 1
    if kind == "grows":
        assert model.signatures["delta_state"]()["ids_0"].shape == [0]
    assert sorted(p.name for p in tmp_path.iterdir()) == ["1.delta", "base"]


def test_blocks_are_bounded(
    consumer: Consumer, tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(delta_files, "BLOCK_BYTES", 100)
    monkeypatch.setattr(delta_writer, "_COMPARED_BYTES", 100)
    consumer.writer.mark_all_rows()
    assert consumer.follow() == V
    sizes = [len(b) for b in te.serving.delta_blocks(tmp_path / "all-1.delta")]
    assert len(sizes) == 2 + 20 + 3
    assert max(sizes[1:]) <= 48 + 100
