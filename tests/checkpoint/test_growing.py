"""Growing tables in files: all formats, other budgets, static tables, chosen ids."""

from __future__ import annotations

import logging
import pathlib
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import tensorflow as tf
from steps import evaluate_on, train_on

import tpu_embedding as te
from tpu_embedding import checkpoint
from tpu_embedding.__main__ import main
from tpu_embedding.checkpoint.statistics import table_reports
from tpu_embedding.commands.files import TextProgress
from tpu_embedding.tables.codes import joined_values
from tpu_embedding.tables.growing import first_rows, first_values_read
from tpu_embedding.vocabulary import COUNTS

IDS = [7, -3, 2**62, 7, 5]


def _make(
    vocabulary: Any, optimizer: Any = None, **table: Any
) -> tuple[te.TPUEmbedding, te.TableConfig]:
    dim = 16 if table.get("dtype") == "int8" else 2
    config = te.TableConfig(vocabulary, dim, name="films", **table)
    users = te.TableConfig(6, 3, name="users")
    features = {"film": te.FeatureConfig(config), "user": te.FeatureConfig(users)}
    return te.TPUEmbedding(features, optimizer or te.Adagrad(0.5)), config


def _train(embedding: te.TPUEmbedding, batches: Sequence[Sequence[int]]) -> None:
    for ids in batches:
        train_on(embedding, {"film": tf.constant(ids, tf.int64), "user": tf.range(2)})


def _look_up(embedding: te.TPUEmbedding, ids: Sequence[int]) -> np.ndarray:
    batch = {"film": tf.constant(ids, tf.int64), "user": tf.range(2)}
    return evaluate_on(embedding, batch)["film"].numpy()


def _state(embedding: te.TPUEmbedding) -> dict[str, np.ndarray]:
    return embedding.core.growing()["films"].read()


def _assert_same(one: te.TPUEmbedding, other: te.TPUEmbedding) -> None:
    first, second = _state(one), _state(other)
    assert first.keys() == second.keys()
    for name, values in first.items():
        assert np.array_equal(values, second[name]), name


OPTIONS = [
    {"eviction": "lru", "unknown": "shared_row", "min_count": 2},
    {"eviction": "lfu", "min_rows": 1},
    {"unknown": "initializer"},
]


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "int8"])
@pytest.mark.parametrize("options", OPTIONS)
def test_saved_and_restored(
    options: dict[str, Any], dtype: str, tmp_path: pathlib.Path
) -> None:
    """Ours and TensorFlow's files have the same tensors, and training goes on."""

    def make() -> te.TPUEmbedding:
        return _make(te.GrowingVocabulary(5, **options), dtype=dtype)[0]

    embedding = make()
    _train(embedding, [IDS[:3], IDS, IDS[1:]])
    ours = te.checkpoint.save(embedding, tmp_path / "ours")
    theirs = tf.train.Checkpoint(embedding=embedding).write(str(tmp_path / "theirs"))
    names = [dict(tf.train.list_variables(path)) for path in (ours, theirs)]
    others = {"save_counter/.ATTRIBUTES/VARIABLE_VALUE"}
    assert names[0].keys() == names[1].keys() - others
    for path in (ours, theirs):
        for read in (
            lambda e, path=path: te.checkpoint.restore(e, path),
            lambda e, path=path: (
                tf.train.Checkpoint(embedding=e).read(path).assert_consumed()
            ),
        ):
            other = make()
            read(other)
            _assert_same(embedding, other)
            _train(other, [IDS])
            unbroken = make()
            _train(unbroken, [IDS[:3], IDS, IDS[1:], IDS])
            _assert_same(unbroken, other)


@pytest.mark.parametrize("eviction", [None, "lru"])
def test_counts_above_2_32(eviction: str | None, tmp_path: pathlib.Path) -> None:
    def make() -> te.TPUEmbedding:
        return _make(te.GrowingVocabulary(5, min_count=2, eviction=eviction))[0]

    embedding = make()
    _train(embedding, [IDS[:3], IDS])
    state = _state(embedding)
    state["state"][COUNTS] = [2**62, 2**33, 2**32, 2**40]
    growing = embedding.core.growing()["films"]
    growing.write(state)
    assert growing.contents()[4:] == (2**62, 2**33, 2**32, 2**40)
    ours = te.checkpoint.save(embedding, tmp_path / "ours")
    theirs = tf.train.Checkpoint(embedding=embedding).write(str(tmp_path / "theirs"))
    for path in (ours, theirs):
        restored = make()
        te.checkpoint.restore(restored, path)
        _assert_same(restored, embedding)
    restored = make()
    tf.train.Checkpoint(embedding=restored).read(theirs).assert_consumed()
    restored.build()
    _assert_same(restored, embedding)


def test_empty_tables(tmp_path: pathlib.Path) -> None:
    embedding, _ = _make(te.GrowingVocabulary(9, unknown="shared_row"))
    path = te.checkpoint.save(embedding, tmp_path / "saved")
    assert checkpoint.read(path)["films"].ids.size == 0
    other, table = _make(te.GrowingVocabulary(9, unknown="shared_row"))
    _train(other, [IDS])
    te.checkpoint.restore(other, path)
    assert other.vocabularies[table].ids.size == 0
    _train(other, [IDS])
    _train(embedding, [IDS])
    _assert_same(embedding, other)


@pytest.fixture
def trained() -> te.TPUEmbedding:
    vocabulary = te.GrowingVocabulary(9, eviction="lru", unknown="shared_row")
    embedding, _ = _make(vocabulary)
    _train(embedding, [IDS[:3], IDS, IDS[3:]])
    return embedding


def test_read(trained: te.TPUEmbedding, tmp_path: pathlib.Path) -> None:
    path = te.checkpoint.save(trained, tmp_path / "saved")
    tables = checkpoint.read(path)
    table = tables["films"]
    assert list(tables) == ["users", "films"]
    assert table.ids.tolist() == [-3, 5, 7, 2**62]
    assert table.parameters.shape == (5, 2)
    assert table.slots["accumulators"].shape == (5, 2)
    assert np.array_equal(
        table.parameters.read(0, 4), _look_up(trained, [-3, 5, 7, 2**62])
    )
    assert np.array_equal(table.parameters.read(4, 5), _look_up(trained, [99]))
    assert table.vocabulary["last_updates"].read().tolist() == [2, 3, 3, 2]
    assert tables["users"].ids.tolist() == [*range(6)]
    tables.verify()
    with pytest.raises(NotImplementedError, match="'films' is a growing table, whi"):
        te.checkpoint.save(trained, tmp_path / "stacked", layouts=[])


def test_a_save_notices_training(
    trained: te.TPUEmbedding, tmp_path: pathlib.Path
) -> None:
    class Trains:
        def start(self, task: str, total: int) -> None:
            del task, total

        def advance(self, count: int) -> None:
            batch = {"film": tf.constant([7], tf.int64), "user": tf.range(2)}
            train_on(trained, batch, {"film": tf.zeros([1, 2]), "user": None})

    with pytest.raises(tf.errors.AbortedError, match="changed while it was saved"):
        te.checkpoint.save(trained, tmp_path / "saved", progress=Trains())


@pytest.mark.parametrize("kind", ["numpy", "tensorflow"])
def test_converted(kind: str, trained: te.TPUEmbedding, tmp_path: pathlib.Path) -> None:
    path = te.checkpoint.save(trained, tmp_path / "saved")
    other_path = str(tmp_path / "converted")
    assert main(["checkpoint", "convert", "--to", kind, path, other_path]) == 0
    if kind == "numpy":
        ids = np.load(tmp_path / "converted/films/ids.npy")
        assert ids.tolist() == [-3, 5, 7, 2**62]
    other, _ = _make(te.GrowingVocabulary(9, eviction="lru", unknown="shared_row"))
    te.checkpoint.restore(other, other_path)
    _assert_same(trained, other)


def test_damaged_numpy_files(trained: te.TPUEmbedding, tmp_path: pathlib.Path) -> None:
    path = te.checkpoint.save(trained, tmp_path / "saved")
    folder = tmp_path / "arrays"
    main(["checkpoint", "convert", "--to", "numpy", path, str(folder)])
    np.save(folder / "films/ids.npy", np.array([-3, 5, 7, 8]))
    before = _state(trained)
    with pytest.raises(tf.errors.DataLossError, match=r"ids.npy is damaged"):
        te.checkpoint.restore(trained, folder)
    (folder / "films/ids.npy").unlink()
    with pytest.raises(tf.errors.DataLossError, match="it is missing"):
        te.checkpoint.restore(trained, folder)
    assert all(np.array_equal(before[n], v) for n, v in _state(trained).items())


def test_keras_files(tmp_path: pathlib.Path) -> None:
    table = te.TableConfig(te.GrowingVocabulary(9), 2, name="films")
    layer = te.keras.TPUEmbedding({"film": te.FeatureConfig(table)}, te.Adagrad(0.5))
    film = tf.keras.Input((), dtype="int64", name="film")
    model = tf.keras.Model({"film": film}, layer({"film": film})["film"])
    model.compile("sgd", "mse")
    model.fit({"film": tf.constant(IDS)}, tf.ones([5, 2]), verbose=0)
    for name in ("model.weights.h5", "model.keras"):
        path = str(tmp_path / name)
        (model.save if name.endswith(".keras") else model.save_weights)(path)
        assert checkpoint.read(path)["films"].ids.tolist() == [-3, 5, 7, 2**62]
    saved = te.checkpoint.save(model, tmp_path / "saved")
    found = layer.core.growing()["films"].read()
    model.fit({"film": tf.constant([8])}, tf.ones([1, 2]), verbose=0)
    for source in (saved, path):
        te.checkpoint.restore(model, source)
        for part, values in layer.core.growing()["films"].read().items():
            assert np.array_equal(values, found[part]), part


def test_arrays_of_others(tmp_path: pathlib.Path) -> None:
    """Ids in any order, and rows: all that a table needs."""
    values = np.float32([[1, 2], [3, 4], [5, 6]])
    path = tmp_path / "films.npz"
    np.savez(path, films=values, **{"films/ids": np.array([9, -2, 4])})
    embedding, table = _make(te.GrowingVocabulary(9, unknown="shared_row"))
    te.checkpoint.restore(embedding, path, tables=["films"])
    assert np.array_equal(_look_up(embedding, [9, -2, 4]), values)
    shared = _look_up(embedding, [100])
    spec = embedding.core.plan.tables[0]
    first = first_rows(spec, tf.constant([0x7465647261687365], tf.int64))
    assert np.array_equal(shared, first)
    _train(embedding, [[9, 5]])
    assert embedding.vocabularies[table].ids.tolist() == [-2, 4, 5, 9]
    before = _state(embedding)
    for ids, text in (
        ([9, 9, 4], "has an id twice"),
        ([9, 4], None),
        ([9], "has 1 ids, but 3 rows"),
    ):
        np.savez(path, films=values, **{"films/ids": np.array(ids)})
        if text is None:  # The last row is one that ids share.
            te.checkpoint.restore(embedding, path, tables=["films"])
            assert np.array_equal(_look_up(embedding, [9, 4, 5]), values)
            before = _state(embedding)
            continue
        with pytest.raises(ValueError, match=text):
            te.checkpoint.restore(embedding, path, tables=["films"])
    ids = {"films/ids": np.arange(3), "films/hits": np.arange(2)}
    np.savez(path, films=values, **ids)
    with pytest.raises(ValueError, match="but 2 numbers in 'hits'"):
        te.checkpoint.restore(embedding, path, tables=["films"])
    np.savez(path, films=np.ones([3, 5], np.float32), **{"films/ids": np.arange(3)})
    with pytest.raises(ValueError, match=r"shape \[3, 5\], but .* needs \[3, 2\]"):
        te.checkpoint.restore(embedding, path, tables=["films"])
    assert all(np.array_equal(before[n], v) for n, v in _state(embedding).items())


def test_another_budget(
    trained: te.TPUEmbedding, tmp_path: pathlib.Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = te.checkpoint.save(trained, tmp_path / "saved")
    options: dict[str, Any] = {"unknown": "shared_row"}
    smaller, table = _make(te.GrowingVocabulary(3, eviction="lru", **options))
    with caplog.at_level(logging.WARNING):
        te.checkpoint.restore(smaller, path)
    assert "Table films: 2 ids were evicted." in caplog.text
    assert smaller.vocabularies[table].ids.tolist() == [5, 7]
    assert smaller.vocabularies[table].evicted == 2
    assert np.array_equal(_look_up(smaller, [5, 7]), _look_up(trained, [5, 7]))
    rigid, table = _make(te.GrowingVocabulary(3, **options))
    _train(rigid, [[1]])
    before = _state(rigid), rigid.variables
    with pytest.raises(ValueError, match="max_rows=3, but the table that was saved"):
        te.checkpoint.restore(rigid, path)
    assert all(np.array_equal(before[0][n], v) for n, v in _state(rigid).items())
    with pytest.raises(ValueError, match="was saved with another value"):
        te.checkpoint.restore(_make(te.GrowingVocabulary(9))[0], path)


def test_static_and_growing(
    tmp_path: pathlib.Path, rng: np.random.Generator, caplog: pytest.LogCaptureFixture
) -> None:
    """Row r of a static table is that of id r; the other way ids are given."""
    static, table = _make(6)
    static.build()
    for array in static.variables[table].values():
        array.assign(rng.uniform(0.1, 1.0, array.shape))
    path = te.checkpoint.save(static, tmp_path / "static")
    for options in ({}, {"unknown": "shared_row", "eviction": "lru"}):
        growing, own = _make(te.GrowingVocabulary(8, **options))
        te.checkpoint.restore(growing, path)
        assert growing.vocabularies[own].ids.tolist() == [*range(6)]
        for embedding in (static, growing):
            _train(embedding, [[5, 0, 3]])
        ids = [*range(6)]
        assert np.array_equal(_look_up(growing, ids), _look_up(static, ids))
        _train(growing, [[77]])
        back = te.checkpoint.save(growing, tmp_path / f"growing{len(options)}")
        with pytest.raises(
            ValueError, match=r"grows in .* Pass `ids=\{'films': ...\}`"
        ):
            te.checkpoint.restore(static, back)
        other, fixed = _make(6)
        other.build()
        kept = other.variables[fixed]["accumulators"].numpy()
        with caplog.at_level(logging.WARNING):
            te.checkpoint.restore(other, back, ids={"films": [77, 8, 0]})
        assert "`ids` has 1 ids that are not in the checkpoint: 8." in caplog.text
        assert np.array_equal(_look_up(other, [0, 2]), _look_up(growing, [77, 0]))
        found = other.variables[fixed]["accumulators"].numpy()
        assert np.array_equal(found[[1, 3, 4, 5]], kept[[1, 3, 4, 5]])
        assert not np.array_equal(found[[0, 2]], kept[[0, 2]])
        _train(other, [[1, 2]])
        kept = other.variables[fixed]["accumulators"].numpy()
        te.checkpoint.restore(other, back, slots=False, ids={"films": [77, 8, 0]})
        found = other.variables[fixed]["accumulators"].numpy()
        assert (found[[0, 2]] == np.float32(0.1)).all()
        assert np.array_equal(found[[1, 3, 4, 5]], kept[[1, 3, 4, 5]])
        frozen = growing.freeze_vocabulary(own)
        other, fixed = _make(len(frozen.ids) + 1)
        te.checkpoint.restore(other, back, tables=["films"], ids={"films": frozen.ids})
        rows = frozen.rows_of(tf.constant([77, 3])).numpy().tolist()
        assert np.array_equal(_look_up(other, rows), _look_up(growing, [77, 3]))
        found = other.variables[fixed]["accumulators"].numpy()[:-1]
        assert np.array_equal(found, frozen.slots["accumulators"][:-1])
        te.checkpoint.restore(static, path)


def test_chosen_ids(
    trained: te.TPUEmbedding, tmp_path: pathlib.Path, caplog: pytest.LogCaptureFixture
) -> None:
    """A warm start: rows by id, and the others start anew."""
    path = te.checkpoint.save(trained, tmp_path / "saved")
    vocabulary = te.GrowingVocabulary(9, eviction="lru", unknown="shared_row", seed=3)
    other, table = _make(vocabulary, te.Adam(0.1))
    _train(other, [[1, 2]])
    with caplog.at_level(logging.WARNING):
        ids = [7, 1000, -3, 7, *range(2000, 2010)]
        te.checkpoint.restore(other, path, tables=["films"], ids={"films": ids})
    lacking = ", ".join(map(str, [1000, *range(2000, 2009)]))
    told = f"`ids` has 11 ids that are not in the checkpoint: {lacking}, ...."
    assert f"Table films: {told}" in caplog.text
    assert "Table films: `ids` has 1 ids that occur more than once: 7." in caplog.text
    assert f"Table films: 2 of 4 ids of {path} were left out." in caplog.text
    assert "lacks films/momenta, films/velocities" in caplog.text
    contents = other.vocabularies[table]
    assert contents.ids.tolist() == [-3, 7]
    assert contents.rows.tolist() == [2, 1]
    assert (
        contents.hits.tolist()
        == trained.vocabularies[trained.core.plan.tables[0].key].hits[[0, 2]].tolist()
    )
    assert np.array_equal(_look_up(other, [7, -3, 5]), _look_up(trained, [7, -3, 99]))
    assert not _state(other)["momenta"].any()
    fresh, _ = _make(vocabulary, te.Adam(0.1))
    _train(other, [[50]])
    _train(fresh, [[50]])
    assert np.array_equal(_look_up(other, [50]), _look_up(fresh, [50]))


@pytest.mark.parametrize(
    ("ids", "error", "text"),
    [
        ({"songs": [1]}, ValueError, "names the table 'songs', which is not restored"),
        ({"films": [[1]]}, ValueError, "must be a vector"),
        ({"films": [1.5]}, TypeError, "a dict from table names to int64"),
        ([1], TypeError, "a dict from table names to ids"),
        (
            {"users": [*range(7)]},
            ValueError,
            "has 7 ids for table 'users', which has 6",
        ),
    ],
)
def test_ids_that_are_refused(
    ids: Any,
    error: type[Exception],
    text: str,
    trained: te.TPUEmbedding,
    tmp_path: pathlib.Path,
) -> None:
    path = te.checkpoint.save(trained, tmp_path / "saved")
    before = _state(trained)
    with pytest.raises(error, match=text):
        te.checkpoint.restore(trained, path, ids=ids)
    assert all(np.array_equal(before[n], v) for n, v in _state(trained).items())


def test_inspect_and_report(
    trained: te.TPUEmbedding, tmp_path: pathlib.Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = te.checkpoint.save(trained, tmp_path / "saved")
    assert main(["checkpoint", "inspect", path]) == 0
    lines = [line.split() for line in capsys.readouterr().out.splitlines()]
    assert ["films", "ids", "4", "int64", "32"] in lines
    users, films = table_reports(checkpoint.read(path), TextProgress())
    assert (users.key, films.key) == ("row", "id")
    assert {row for row, _ in films.largest} == {-3, 5, 7, 2**62, None}
    page = tmp_path / "page.html"
    assert main(["report", "--output", str(page), path]) == 0
    assert f"{2**62}" in page.read_text()


def test_first_rows_have_the_bits_of_the_kernel(rng: np.random.Generator) -> None:
    ids = np.concatenate([rng.integers(-(2**63), 2**63 - 1, 2000), [0, -1]])
    keras_initializers = tf.keras.initializers
    for initializer in (
        None,
        "ones",
        keras_initializers.RandomUniform(-0.3, 0.7),
        keras_initializers.RandomNormal(0.1, 3.3),
        keras_initializers.TruncatedNormal(0.5, 0.3),
    ):
        for dtype, dim in (("float32", 3), ("bfloat16", 3), ("int8", 19)):
            vocabulary = te.GrowingVocabulary(9, unknown="initializer", seed=2**62 + 5)
            table = te.TableConfig(vocabulary, dim, initializer, dtype=dtype)
            embedding = te.TPUEmbedding(te.FeatureConfig(table), None)
            embedding.enqueue(tf.constant(ids), training=False)
            spec = embedding.core.plan.tables[0]
            expected = embedding.dequeue().numpy()
            for function in (first_values_read, tf.function(first_values_read)):
                found = function(spec, tf.constant(ids))
                assert np.array_equal(found, expected), (initializer, dtype)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("unknown", ["zeros", "shared_row"])
def test_int8_restores_from_and_into_other_dtypes_by_value(
    dtype: str, unknown: str, tmp_path: pathlib.Path
) -> None:
    def make(dtype: str) -> te.TPUEmbedding:
        vocabulary = te.GrowingVocabulary(9, unknown=unknown)
        table = te.TableConfig(vocabulary, 16, name="films", dtype=dtype)
        users = te.FeatureConfig(te.TableConfig(6, 3, name="users"))
        config = {"film": te.FeatureConfig(table), "user": users}
        return te.TPUEmbedding(config, te.Adagrad(0.5))

    coded, plain, into_plain, into_coded = map(make, ["int8", dtype, dtype, "int8"])
    for number, (source, target) in enumerate(
        ((coded, into_plain), (plain, into_coded))
    ):
        _train(source, [IDS, IDS[1:]])
        path = te.checkpoint.save(source, tmp_path / str(number))
        te.checkpoint.restore(target, path)
        for name in ("ids", "rows", "state", "accumulators"):
            assert np.array_equal(_state(target)[name], _state(source)[name]), name
    values = joined_values(_state(coded))["parameters"]
    found = _state(into_plain)["parameters"]
    assert np.array_equal(found, values.astype(found.dtype))
    values = _state(plain)["parameters"].astype(np.float32)
    half = _state(into_coded)["scale_offset"][:, :1].astype(np.float32) / 2
    found = joined_values(_state(into_coded))["parameters"]
    assert (np.abs(found - values) <= half * (1 + 1e-6)).all()


@pytest.mark.parametrize("saved", [True, False])
def test_tables_alone_of_another_dtype(
    saved: bool, trained: te.TPUEmbedding, tmp_path: pathlib.Path
) -> None:
    path = te.checkpoint.save(trained, tmp_path / "saved", slots=saved)
    vocabulary = te.GrowingVocabulary(9, eviction="lru", unknown="shared_row")
    other, table = _make(vocabulary, dtype="bfloat16")
    te.checkpoint.restore(other, path, slots=False)
    found, expected = _state(other), _state(trained)
    assert (found["accumulators"] == np.float32(0.1)).all()
    rounded = tf.cast(expected["parameters"], tf.bfloat16).numpy()
    assert np.array_equal(found["parameters"], rounded)
    for name in ("ids", "rows", "hits", "last_updates", "state"):
        assert np.array_equal(found[name], expected[name]), name
    _train(other, [[7, 99]])
    assert 99 in other.vocabularies[table].ids
