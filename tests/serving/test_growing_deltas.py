"""Deltas of growing tables: ids come and go in served models as in their trainer."""

from __future__ import annotations

import pathlib
from collections.abc import Mapping
from typing import Any

import numpy as np
import pytest
import tensorflow as tf
from serving.deltas import KILLED_AT, NOTHING, blocks_of, kill_apply, send, with_field
from serving.exported import ops_of
from steps import evaluate_on, train_on
from threads import repeated

import tpu_embedding as te
from tpu_embedding.__main__ import main
from tpu_embedding.hashing import unmixed_bits
from tpu_embedding.serving import delta_files, following_tables
from tpu_embedding.serving.delta_files import Base, DeltaRows, Header
from tpu_embedding.serving.growing_tables import ChangingRowOfIds

LEAST = -(2**63)
# The hash table has no place for the keys of these ids.
APART = unmixed_bits(tf.constant([LEAST, LEAST + 1], tf.int64)).numpy()
POOL = np.array([LEAST, *APART, -5, 0, 7, 2**40, 2**63 - 1, *range(20, 40)])
D = 5


def embed(vocabulary: te.GrowingVocabulary, **table: Any) -> te.TPUEmbedding:
    dim = 16 if table.get("dtype") == "int8" else D
    films = te.TableConfig(vocabulary, dim, name="films", **table)
    users = te.TableConfig(4, D, name="users")
    config = {"film": te.FeatureConfig(films), "user": te.FeatureConfig(users)}
    return te.TPUEmbedding(config, te.Adagrad(0.5))


def train(embedding: te.TPUEmbedding, ids: Any, rng: np.random.Generator) -> None:
    batch = {"film": tf.constant(ids, tf.int64), "user": tf.range(2)}
    draw = lambda a: tf.constant(rng.normal(size=a.shape), tf.float32)  # noqa: E731
    train_on(embedding, batch, draw)


def served(model: Any, ids: Any = POOL) -> np.ndarray:
    user = tf.zeros([len(ids)], tf.int64)
    answer = model.signatures["dense"](film=tf.constant(ids, tf.int64), user=user)
    return answer["film"].numpy()


def export_base(
    embedding: te.TPUEmbedding, folder: pathlib.Path, **options: Any
) -> None:
    """Exports what deltas follow, with the one signature that these tests call."""
    options = {"signatures": ["dense"], "deltas": True, **options}
    te.serving.export(embedding, folder / "base", **options)


def looked_up(embedding: te.TPUEmbedding) -> np.ndarray:
    batch = {"film": tf.constant(POOL), "user": tf.zeros([len(POOL)], tf.int64)}
    return evaluate_on(embedding, batch)["film"].numpy()


VOCABULARIES = {
    "zeros": te.GrowingVocabulary(50),
    "initializer": te.GrowingVocabulary(
        12, eviction="lru", min_rows=3, unknown="initializer"
    ),
    "shared_row": te.GrowingVocabulary(
        12, eviction="lfu", min_rows=6, min_count=2, unknown="shared_row"
    ),
}


@pytest.mark.parametrize(
    ("unknown", "storage", "dtype"),
    [
        ("zeros", "float32", "float32"),
        ("initializer", "float32", "bfloat16"),
        ("shared_row", "int8", "float32"),
        ("shared_row", "int8", "int8"),
        pytest.param("initializer", "int4", "float32", marks=pytest.mark.third_tier),
        pytest.param("shared_row", "float16", "float32", marks=pytest.mark.third_tier),
    ],
)
def test_serves_the_bits_of_a_new_export(
    unknown: str,
    storage: str,
    dtype: str,
    rng: np.random.Generator,
    tmp_path: pathlib.Path,
) -> None:
    embedding = embed(VOCABULARIES[unknown], dtype=dtype)
    films = next(t.key for t in embedding.core.plan.tables if t.config.vocabulary)
    train(embedding, POOL[:4], rng)
    export_base(embedding, tmp_path, storage=storage)
    model: Any = tf.saved_model.load(str(tmp_path / "base"))
    if storage in ("float32", dtype):
        np.testing.assert_array_equal(served(model), looked_up(embedding))
    train(embedding, POOL[2:8], rng)
    writer = te.serving.DeltaWriter(embedding, tmp_path / "base", "all")
    evicted = 0
    for number in range(1, 7):
        for _ in range(3):
            train(embedding, rng.choice(POOL[number : number + 10], 5), rng)
        if number % 2 and films.vocabulary.eviction:
            embedding.evict(films)
        path = tmp_path / f"{number}.delta"
        writer.export_delta(path)
        assert te.serving.apply_delta(model, path) == number
        header = delta_files.read_header(path)
        evicted += sum(deletions for _, deletions in header.counts)
        if storage in ("float32", dtype):
            np.testing.assert_array_equal(served(model), looked_up(embedding))
        if number % 3 == 0:
            again = tmp_path / f"again{number}"
            te.serving.export(embedding, again, signatures=["dense"], storage=storage)
            expected = served(tf.saved_model.load(str(again)))
            np.testing.assert_array_equal(served(model), expected)
    assert (evicted > 0) == bool(films.vocabulary.eviction)


def test_a_delta_has_what_changed(
    rng: np.random.Generator, tmp_path: pathlib.Path
) -> None:
    vocabulary = te.GrowingVocabulary(6, eviction="lru", min_rows=2)
    embedding = embed(vocabulary)
    export_base(embedding, tmp_path)
    writer = te.serving.DeltaWriter(embedding, tmp_path / "base", "all")

    def counts(number: int) -> Any:
        writer.export_delta(tmp_path / f"{number}")
        return delta_files.read_header(tmp_path / f"{number}").counts[0]

    assert counts(1) == (0, 0)
    train(embedding, [1, 2, 3, 2], rng)
    assert counts(2) == (3, 0)
    train(embedding, [3, 4], rng)
    films = embedding.core.plan.tables[0].key
    assert embedding.evict(films) == 2
    assert embedding.vocabularies[films].ids.tolist() == [3, 4]
    assert counts(3) == (2, 2)
    assert counts(4) == (0, 0)
    train(embedding, [8], rng)
    embedding.evict(films)  # 3 goes.
    train(embedding, [3], rng)  # It comes back, as a new id.
    assert counts(5) == (2, 0)
    train(embedding, [9], rng)
    train(embedding, [5], rng)
    embedding.evict(films)
    assert embedding.vocabularies[films].ids.tolist() == [5, 9]
    train(embedding, [10], rng)
    train(embedding, [11], rng)
    embedding.evict(films)  # 5 and 9 came and went between two deltas.
    assert counts(6) == (2, 3)


def test_a_checkpoint_has_the_marks(
    rng: np.random.Generator, tmp_path: pathlib.Path
) -> None:
    vocabulary = te.GrowingVocabulary(8, eviction="lru", min_rows=2)
    embedding = embed(vocabulary)
    train(embedding, [1, 2, 3], rng)
    export_base(embedding, tmp_path)
    model: Any = tf.saved_model.load(str(tmp_path / "base"))
    writer = te.serving.DeltaWriter(embedding, tmp_path / "base", "all")
    train(embedding, [3, 4], rng)
    embedding.evict(embedding.core.plan.tables[0].key)
    path = tf.train.Checkpoint(embedding=embedding, deltas=writer).write(
        str(tmp_path / "checkpoint")
    )
    expected = looked_up(embedding)
    again = embed(vocabulary)
    own = te.serving.DeltaWriter(again, tmp_path / "base", "all")
    tf.train.Checkpoint(embedding=again, deltas=own).read(path).assert_consumed()
    own.export_delta(tmp_path / "1.delta")
    te.serving.apply_delta(model, tmp_path / "1.delta")
    np.testing.assert_array_equal(served(model), expected)
    np.testing.assert_array_equal(served(model, [1, 2]), np.zeros([2, D]))
    # A table that takes the place of another one loses ids, too.
    other = embed(vocabulary)
    train(other, [7, 8], rng)
    te.checkpoint.restore(again, te.checkpoint.save(other, str(tmp_path / "other")))
    own.export_delta(tmp_path / "2.delta")
    te.serving.apply_delta(model, tmp_path / "2.delta")
    np.testing.assert_array_equal(served(model), looked_up(other))
    np.testing.assert_array_equal(served(model, [3, 4]), np.zeros([2, D]))


def test_a_table_that_outgrows_its_export(
    rng: np.random.Generator, tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(following_tables, "SMALL_TABLE", 4)
    embedding = embed(te.GrowingVocabulary(50))
    train(embedding, [1, 2], rng)
    export_base(embedding, tmp_path, deltas=1.0)
    writer = te.serving.DeltaWriter(embedding, tmp_path / "base", "all")
    train(embedding, range(8), rng)
    writer.export_delta(tmp_path / "1")
    train(embedding, [8], rng)
    with pytest.raises(ValueError, match="films: 9 ids exist since delta 1, but"):
        writer.export_delta(tmp_path / "2")
    assert writer.sequence == 1


def test_all_ops_are_stock(rng: np.random.Generator, tmp_path: pathlib.Path) -> None:
    embedding = embed(VOCABULARIES["initializer"])
    train(embedding, POOL[:4], rng)
    export_base(embedding, tmp_path)
    assert {"LookupTableRemoveV2", "LookupTableInsertV2"} < ops_of(tmp_path / "base")


class Publisher:
    """Deltas of a growing table without a trainer: rows that say whose they are."""

    def __init__(self, folder: pathlib.Path, max_rows: int) -> None:
        self._folder = folder
        films = te.TableConfig(te.GrowingVocabulary(max_rows), D, name="films")
        embedding = te.TPUEmbedding({"film": te.FeatureConfig(films)}, te.SGD(0.5))
        export_base(embedding, folder)
        self.model: Any = tf.saved_model.load(str(folder / "base"))
        state = self.model.signatures["delta_state"]()
        self.base = Base.from_json(state["description"].numpy())
        self.sequence, self.rows = 0, dict[int, np.ndarray]()

    def write(
        self, changed: Mapping[int, np.ndarray], deleted: Any = ()
    ) -> pathlib.Path:
        """Writes the next delta, two ids a block."""
        keys, gone = np.sort(np.array([*changed], np.int64)), np.sort([*deleted])
        path = self._folder / f"{self.sequence + 1}.delta"
        path.unlink(missing_ok=True)
        follows = self.base.id if self.sequence == 0 else 5
        counts = ((len(keys), len(gone)),)
        blocks = [
            DeltaRows(0, ids, NOTHING, [np.stack([changed[int(i)] for i in ids])])
            for ids in np.split(keys, range(2, len(keys), 2))
            if len(ids)
        ]
        blocks += [
            DeltaRows(0, NOTHING, ids, ())
            for ids in np.split(gone, range(2, len(gone), 2))
            if len(ids)
        ]
        header = Header(self.base, 5, follows, self.sequence + 1, counts)
        delta_files.write_delta(path, header, blocks)
        return path

    def publish(self, changed: Mapping[int, np.ndarray], deleted: Any = ()) -> None:
        te.serving.apply_delta(self.model, self.write(changed, deleted))
        self.sequence += 1
        self.rows |= changed
        for id_ in deleted:
            del self.rows[id_]

    def expected(self, ids: Any) -> np.ndarray:
        return np.stack([self.rows.get(int(i), np.zeros(D, np.float32)) for i in ids])

    def look_up(self, ids: Any) -> np.ndarray:
        found = self.model.signatures["dense"](film=tf.constant(ids, tf.int64))
        return found["film"].numpy()


def row_of(id_: int, version: int) -> np.ndarray:
    return np.full(D, (id_ % 1000) + 1000 * version, np.float32)


def change(
    publisher: Publisher, rng: np.random.Generator, pool: np.ndarray, version: int
) -> None:
    """Deletes some ids, changes others and adds some."""
    room = publisher.base.tables[0].rows
    known = np.array([*publisher.rows], np.int64)
    gone = rng.choice(known, rng.integers(len(known) + 1), replace=False)
    left = room - len(known) + len(gone)
    some = np.setdiff1d(rng.choice(pool, min(left, 8), replace=False), gone)
    changed = {int(i): row_of(int(i), version) for i in some}
    publisher.publish(changed, [int(i) for i in gone])


def test_ids_come_and_go(rng: np.random.Generator, tmp_path: pathlib.Path) -> None:
    """Also through a model that was saved with deltas applied."""
    publisher = Publisher(tmp_path, 12)
    for version in range(60):
        change(publisher, rng, POOL, version)
        found, wanted = publisher.look_up(POOL), publisher.expected(POOL)
        np.testing.assert_array_equal(found, wanted)
    deltas = [str(tmp_path / f"{n}.delta") for n in range(1, 61)]
    base, new = str(tmp_path / "base"), str(tmp_path / "new")
    assert main(["delta", "apply", base, *deltas, "--to", new]) == 0
    publisher.model = tf.saved_model.load(new)
    for version in range(60, 70):
        change(publisher, rng, POOL, version)
        found, wanted = publisher.look_up(POOL), publisher.expected(POOL)
        np.testing.assert_array_equal(found, wanted)


def test_the_ids_move_before_lookups_get_slow(rng: np.random.Generator) -> None:
    rows = ChangingRowOfIds(64, 16)
    rows.assign(np.arange(64))
    live = dict(zip(range(64), range(64), strict=True))
    moves, active = 0, 0

    ids = tf.TensorSpec([None], tf.int64)

    @tf.function(input_signature=[ids, tf.TensorSpec([None], tf.int32), ids])
    def step(new: tf.Tensor, places: tf.Tensor, gone: tf.Tensor) -> tf.Tensor:
        with tf.control_dependencies(rows.change(new, places, gone)):
            return rows.active.read_value()

    for number in range(120):
        gone = rng.choice([*live], rng.integers(17), replace=False).astype(np.int64)
        new = rng.integers(2**62, size=len(gone)) * rng.choice([-1, 1], len(gone))
        apart = APART[number % 2]
        new[:1] = apart if int(apart) not in live else new[:1]
        places = np.array([live.pop(int(i)) for i in gone], np.int32)
        live |= zip(new.tolist(), places.tolist(), strict=True)
        now = int(step(tf.constant(new), tf.constant(places), tf.constant(gone)))
        moves, active = moves + (now != active), now
        asked = np.array([*live, *gone], np.int64)
        wanted = [live.get(int(i), -1) for i in asked]
        assert rows(tf.constant(asked)).numpy().tolist() == wanted
        keys, _ = rows.tables[now].table.export()
        assert np.isin(keys, LEAST).mean() > 0.25  # Buckets that end a search.
    assert moves > 5


def test_a_row_is_that_of_its_id(
    rng: np.random.Generator, tmp_path: pathlib.Path
) -> None:
    """While ids come and go, a lookup sees a row of its own, or none."""
    publisher = Publisher(tmp_path, 12)
    ids, wrong, reads = POOL[3:], list[Any](), [0] * 3
    own = np.array([int(i) % 1000 for i in ids])

    def read(thread: int) -> None:
        found = publisher.look_up(ids)
        one_row = (found == found[:, :1]).all(axis=1)
        whose = (found[:, 0] % 1000 == own) | (found[:, 0] == 0)
        if not (one_row & whose).all():
            wrong.append(found)
        reads[thread] += 1

    with repeated(read, 3):
        for version in range(1, 151):
            change(publisher, rng, ids, version)
    assert not wrong
    assert min(reads) > 20


def test_delta_state_has_the_ids_of_its_sequence_number(tmp_path: pathlib.Path) -> None:
    """Also while a delta is committed: each has one id, its own number."""
    publisher = Publisher(tmp_path, 12)
    wrong, reads = list[Any](), 0

    def read(_: int) -> None:
        nonlocal reads
        state = publisher.model.signatures["delta_state"]()
        own = [int(state["sequence"])] if int(state["sequence"]) else []
        if state["ids_0"].numpy().tolist() != own:
            wrong.append((own, state["ids_0"]))
        reads += 1

    with repeated(read):
        for number in range(1, 151):
            gone = [number - 1] if number > 1 else []
            publisher.publish({number: row_of(number, 0)}, gone)
    assert not wrong
    assert reads > 20


@pytest.mark.third_tier
@pytest.mark.parametrize("point", KILLED_AT)
def test_a_killed_apply_leaves_no_export(point: str, tmp_path: pathlib.Path) -> None:
    publisher = Publisher(tmp_path, 12)
    publisher.publish({i: row_of(i, 0) for i in range(6)})
    places = [str(tmp_path / name) for name in ("base", "1.delta", "new")]
    kill_apply(point, *places)
    assert not (tmp_path / "new").exists()
    assert main(["delta", "apply", *places[:2], "--to", places[2]]) == 0
    publisher.publish({i: row_of(i, 1) for i in (4, 8)}, [0, 5])
    publisher.model = tf.saved_model.load(places[2])
    te.serving.apply_delta(publisher.model, tmp_path / "2.delta")
    found = publisher.look_up(range(9))
    np.testing.assert_array_equal(found, publisher.expected(range(9)))


def test_refuses_bad_deltas_with_nothing_changed(tmp_path: pathlib.Path) -> None:
    publisher = Publisher(tmp_path, 6)
    publisher.publish({i: row_of(i, 0) for i in range(6)})
    rows = {i: row_of(i, 1) for i in (2, 3, 4, 5)}
    good = blocks_of(publisher.write(rows, [0, 1]))
    cases = {
        "gives table films more than 6 ids": blocks_of(
            publisher.write({7: row_of(7, 1)})
        ),
        "or changes and deletes the same": blocks_of(publisher.write(rows, [2])),
        "changes 7 rows of table films": [with_field(good[0], 6, 7)],
        "changes -1 rows of table films": [with_field(good[0], 6, -1)],
        "invalid table index or number": [good[0], with_field(good[1], 2, -1)],
        "do not fit its 2 rows": [good[0], with_field(good[1], 2, 1)],
        "more rows of table films than its header announces": [
            with_field(good[0], 6, 1),
            *good[1:],
        ],
        "must ascend": [*good[:3], with_field(good[3], 3, 1)],
        "is truncated": [*good[:4], with_field(good[4], 0, 0)],
    }
    before = publisher.expected(range(9))
    for message, blocks in cases.items():
        with pytest.raises(tf.errors.InvalidArgumentError) as raised:
            send(publisher.model, blocks)
        assert message in raised.value.message
        np.testing.assert_array_equal(publisher.look_up(range(9)), before)
        state = publisher.model.signatures["delta_state"]()
        assert int(state["sequence"]) == 1
    publisher.publish(rows, [0, 1])
    found = publisher.look_up(range(9))
    np.testing.assert_array_equal(found, publisher.expected(range(9)))


def test_a_resumed_trainer_deletes_ids_that_only_the_model_has(
    tmp_path: pathlib.Path,
) -> None:
    def make() -> te.TPUEmbedding:
        films = te.TableConfig(te.GrowingVocabulary(10), D, name="films")
        return te.TPUEmbedding({"film": te.FeatureConfig(films)}, te.SGD(0.5))

    old, new = make(), make()
    base = tmp_path / "base"
    te.serving.export(old, base, signatures=["dense"], deltas=True)
    model: Any = tf.saved_model.load(str(base))
    writer = te.serving.DeltaWriter(old, base, "all")
    train_on(old, {"film": tf.constant([-(2**63), 5], tf.int64)})
    writer.export_delta(tmp_path / "1.delta")
    te.serving.apply_delta(model, tmp_path / "1.delta")
    state = model.signatures["delta_state"]()
    assert sorted(state["ids_0"].numpy().tolist()) == [-(2**63), 5]
    writer = te.serving.DeltaWriter(new, base, "all")
    numbers = {key: state[key] for key in ("base", "sequence", "run")}
    with pytest.raises(ValueError, match="lacks ids_0"):
        writer.resume(numbers)
    writer.resume(state)
    assert writer.export_delta(tmp_path / "2.delta") == {"films": 2}
    te.serving.apply_delta(model, tmp_path / "2.delta")
    assert model.signatures["delta_state"]()["ids_0"].shape == [0]


def test_ids_that_the_model_never_had_are_not_deleted(
    rng: np.random.Generator, tmp_path: pathlib.Path
) -> None:
    """An export of four rows takes four deletions at a time."""
    vocabulary = te.GrowingVocabulary(4, eviction="lru", min_rows=1)
    old = embed(vocabulary)
    train(old, [1, 2, 3, 4], rng)
    export_base(old, tmp_path)
    model: Any = tf.saved_model.load(str(tmp_path / "base"))
    te.serving.DeltaWriter(old, tmp_path / "base", "all").export_delta(tmp_path / "1")
    for resumes in (False, True):
        new = embed(vocabulary)
        train(new, [5, 6, 7, 8], rng)
        writer = te.serving.DeltaWriter(new, tmp_path / "base", "all")
        if resumes:
            te.serving.apply_delta(model, tmp_path / "1")
            writer.resume(model.signatures["delta_state"]())
        assert new.evict(new.core.plan.tables[0].key) == 3
        train(new, [9, 10, 11], rng)
        path = tmp_path / str(resumes)
        writer.export_delta(path)
        assert delta_files.read_header(path).counts[0] == (4, 4)
    te.serving.apply_delta(model, tmp_path / "True")
    ids = model.signatures["delta_state"]()["ids_0"].numpy()
    assert sorted(ids)[1:] == [9, 10, 11]
