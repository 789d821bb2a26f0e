"""Exports of growing tables: the numbers of the trainer, by TensorFlow's ops alone."""

from __future__ import annotations

import pathlib
from typing import Any

import numpy as np
import pytest
import tensorflow as tf
from serving import exported
from steps import evaluate_on, train_on

import tpu_embedding as te
from tpu_embedding.hashing import unmixed_bits
from tpu_embedding.serving import saving
from tpu_embedding.serving.growing_tables import RowOfIds, is_used
from tpu_embedding.serving.mapping import place

LEAST = -(2**63)
# The hash table refuses the keys of these ids.
APART = unmixed_bits(tf.constant([LEAST, LEAST + 1], tf.int64)).numpy().tolist()
IDS = [7, APART[0], -3, APART[1], 2**63 - 1, 0]
ASKED = [[7, 9, APART[0]], [], [APART[1], 0], [LEAST, 2**63 - 1, -3, -3]]
UNKNOWNS = ["zeros", "initializer", "shared_row"]


def _embedding(unknown: str = "zeros", **table: Any) -> te.TPUEmbedding:
    """Has rows for `IDS` but those of the hash table's keys, or for all of them."""
    films = te.TableConfig(
        te.GrowingVocabulary(50, min_count=2, unknown=unknown),
        16 if table.get("dtype") == "int8" else 4,
        name="films",
        combiner="sum",
        **table,
    )
    users = te.TableConfig(5, 4, name="users")
    config = {"film": te.FeatureConfig(films), "user": te.FeatureConfig(users)}
    return te.TPUEmbedding(config, te.Adagrad(0.5))


def _train(embedding: te.TPUEmbedding, ids: Any) -> None:
    for _ in range(3):
        batch = {"film": tf.constant(ids, tf.int64), "user": tf.range(2)}
        train_on(embedding, batch, tf.cos)


def _asked() -> tf.RaggedTensor:
    return tf.ragged.constant(ASKED, tf.int64, row_splits_dtype=tf.int64)


def _expected(embedding: te.TPUEmbedding) -> np.ndarray:
    return evaluate_on(embedding, {"film": _asked(), "user": tf.range(4)})[
        "film"
    ].numpy()


def _served(path: pathlib.Path, signature: str = "ragged") -> np.ndarray:
    loaded = tf.saved_model.load(str(path)).signatures[signature]
    film, user = (
        _asked(),
        tf.RaggedTensor.from_row_lengths(
            tf.range(4, dtype=tf.int64), tf.ones([4], tf.int64)
        ),
    )
    return loaded(
        film_values=film.values,
        film_row_splits=film.row_splits,
        user_values=user.values,
        user_row_splits=user.row_splits,
    )["film"].numpy()


@pytest.mark.parametrize(
    ("dtype", "ids"), [("float32", IDS), ("bfloat16", [7, -3, 0]), ("int8", IDS[:4])]
)
@pytest.mark.parametrize("unknown", UNKNOWNS)
def test_serves_what_the_trainer_looks_up(
    unknown: str, dtype: str, ids: list[int], tmp_path: pathlib.Path
) -> None:
    embedding = _embedding(unknown, dtype=dtype)
    _train(embedding, ids)
    te.serving.export(embedding, tmp_path / "model", signatures=["ragged"])
    expected = _expected(embedding)
    assert np.array_equal(_served(tmp_path / "model"), expected)
    _train(embedding, [9])
    assert not np.array_equal(_expected(embedding), expected)
    assert np.array_equal(_served(tmp_path / "model"), expected)


def test_training_meanwhile_changes_no_export(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    embedding = _embedding()
    _train(embedding, IDS)
    expected = _expected(embedding)
    save = saving._save_module

    def train_and_save(*arguments: Any) -> None:
        _train(embedding, [9, 8, 7])
        save(*arguments)

    monkeypatch.setattr(saving, "_save_module", train_and_save)
    te.serving.export(embedding, tmp_path / "model", signatures=["ragged"])
    assert not np.array_equal(_expected(embedding), expected)
    assert np.array_equal(_served(tmp_path / "model"), expected)


@pytest.mark.parametrize("unknown", UNKNOWNS)
def test_no_row_yet(unknown: str, tmp_path: pathlib.Path) -> None:
    embedding = _embedding(unknown)
    te.serving.export(embedding, tmp_path / "model", signatures=["ragged"])
    assert np.array_equal(_served(tmp_path / "model"), _expected(embedding))


@pytest.mark.parametrize(
    ("storage", "mapped"),
    [("int8", False), ("int4", True), ("bfloat16", True), ("float16", False)],
)
@pytest.mark.parametrize("dtype", ["float32", "int8"])
def test_storages(
    storage: str, mapped: bool, dtype: str, tmp_path: pathlib.Path
) -> None:
    embedding = _embedding("shared_row", dtype=dtype)
    _train(embedding, IDS)
    path = tmp_path / "model"
    report = te.serving.export(
        embedding, path, signatures=["ragged"], storage=storage, mapped=mapped
    )
    (films,) = [table for table in report.tables if table.name == "films"]
    assert (films.storage, films.rows) == (storage, len(IDS) + 1)
    assert (films.max_error == 0) == (storage == dtype)  # Codes are copied.
    bounds = films.bound * 1.001 * np.array([3, 0, 2, 4])[:, np.newaxis]
    assert (np.abs(_served(path) - _expected(embedding)) <= bounds).all()
    if not mapped:
        return
    moved = path.rename(tmp_path / "moved")
    place(moved)
    assert (np.abs(_served(moved) - _expected(embedding)) <= bounds).all()


def test_uses_ops_of_tensorflow_only(tmp_path: pathlib.Path) -> None:
    embedding = _embedding("initializer")
    _train(embedding, IDS)
    te.serving.export(embedding, tmp_path / "model")
    assert "LookupTableFindV2" in exported.ops_of(tmp_path / "model")


def test_names_no_process(tmp_path: pathlib.Path) -> None:
    """As a job's trainer, whose tensors are on the devices of its process."""
    embedding = _embedding("shared_row")
    _train(embedding, IDS)
    path = tmp_path / "model"
    with tf.device("/job:localhost/replica:0/task:0/device:CPU:0"):
        te.serving.export(embedding, path, signatures=["ragged"])
    model = (path / "saved_model.pb").read_bytes()
    assert b"/job:" not in model
    assert b"/device:CPU:0" in model
    np.testing.assert_array_equal(_served(path), _expected(embedding))


def test_rows_of_many_ids(rng: np.random.Generator) -> None:
    """Also where ids were assigned before."""
    row_of = RowOfIds()
    for size in (100_000, 3, 0):
        ids = np.unique(rng.integers(LEAST, 2**63 - 1, size))
        row_of.assign(ids)
        assert np.array_equal(row_of(tf.constant(ids)), np.arange(len(ids)))
        others = np.setdiff1d(rng.integers(-10, 10, 20), ids)
        assert (row_of(tf.constant(others)).numpy() == -1).all()
        assert (row_of(tf.constant(APART, tf.int64)).numpy() == -1).all()


def test_ids_of_equal_low_bits_have_buckets_of_their_own() -> None:
    row_of = RowOfIds()
    for shift in (0, 22, 32, 50):
        row_of.assign(np.arange(1000) << shift)
        keys, _ = row_of.contents()
        used = keys.numpy()[is_used(keys.numpy())]
        low = np.unique(used % 1024)
        assert len(low) > 550  # Of random keys 640 are expected.
        assert np.array_equal(np.sort(row_of.ids()), np.arange(1000) << shift)


def _restored(
    path: str, unknown: str, optimizer: Any = None, **table: Any
) -> te.TPUEmbeddingForServing:
    vocabulary = te.GrowingVocabulary(9, unknown=unknown)
    films = te.TableConfig(vocabulary, 4, name="films", combiner="sum", **table)
    users = te.TableConfig(5, 4, name="users")
    config = {"film": te.FeatureConfig(films), "user": te.FeatureConfig(users)}
    serving = te.TPUEmbeddingForServing(config, optimizer)
    tf.train.Checkpoint(embedding=serving).read(path).expect_partial()
    return serving


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("unknown", UNKNOWNS)
def test_the_class_for_serving_restores_them(
    unknown: str, dtype: str, tmp_path: pathlib.Path
) -> None:
    """Also once it was used, in a function, with slots, in other models and files."""
    embedding = _embedding(unknown, dtype=dtype)
    paths, expected = [], []
    for ids in (IDS, [9], []):
        _train(embedding, ids or [1])
        path = str(tmp_path / f"saved{len(paths)}")
        paths.append(tf.train.Checkpoint(embedding=embedding).write(path))
        expected.append(_expected(embedding))
    serving = _restored(paths[0], unknown, te.Adagrad(0.5), dtype=dtype)

    @tf.function
    def look_up(film: tf.RaggedTensor) -> tf.Tensor:
        return serving({"film": film, "user": tf.range(4)})["film"]

    for path, numbers in zip(paths, expected, strict=True):
        tf.train.Checkpoint(embedding=serving).read(path).expect_partial()
        assert np.array_equal(look_up(_asked()), numbers)
    again = tf.train.Checkpoint(embedding=serving).write(str(tmp_path / "again"))
    assert np.array_equal(
        _restored(again, unknown, te.Adagrad(0.5), dtype=dtype)(
            {"film": _asked(), "user": tf.range(4)}
        )["film"],
        expected[-1],
    )
    te.serving.export(serving, tmp_path / "model", signatures=["ragged"])
    assert np.array_equal(_served(tmp_path / "model"), expected[-1])
    module = tf.Module()
    module.serving, module.look_up = serving, look_up
    tf.saved_model.save(module, str(tmp_path / "module"))
    loaded: Any = tf.saved_model.load(str(tmp_path / "module"))
    assert np.array_equal(loaded.look_up(_asked()), expected[-1])


def test_the_class_for_serving_without_a_checkpoint(tmp_path: pathlib.Path) -> None:
    for unknown in UNKNOWNS:
        path = str(tmp_path / unknown)
        embedding = _embedding(unknown)
        embedding.build()
        tf.train.Checkpoint(embedding=embedding).write(path)
        serving = _restored(path, unknown)
        found = serving({"film": _asked(), "user": tf.range(4)})["film"]
        assert np.array_equal(found, _expected(embedding))
        (table,) = (t for t in serving.embedding_tables if t.name == "films")
        assert serving.embedding_tables[table].shape.as_list() == [None, 4]
    _train(embedding, IDS)
    tf.train.Checkpoint(embedding=embedding).write(path)
    with pytest.raises(ValueError, match="was saved with another value"):
        _restored(path, "zeros").build()  # What was read before is restored now.
    with pytest.raises(NotImplementedError, match="'films': only TPUEmbedding, "):
        te.serving_embedding_lookup(
            {"film": tf.constant([1])},
            None,
            {},
            {
                "film": te.FeatureConfig(
                    te.TableConfig(te.GrowingVocabulary(9), 4, name="films")
                )
            },
        )


def test_sessions_and_several_models(tmp_path: pathlib.Path) -> None:
    """In a graph of TensorFlow 1, as its C API loads a model; each has its own ids."""
    asked = np.array([7, 8, *APART, LEAST], np.int64)
    expected, loaded = [], []
    for number, ids in enumerate(([7, APART[0]], [8, APART[1]])):
        embedding = _embedding()
        _train(embedding, ids)
        path = str(tmp_path / str(number))
        te.serving.export(embedding, path, signatures=["dense"])
        batch = {"film": tf.constant(asked), "user": tf.range(5)}
        expected.append(evaluate_on(embedding, batch)["film"].numpy())
        loaded.append(tf.saved_model.load(path))
    for number, model in enumerate(loaded):
        found = model.signatures["dense"](
            film=tf.constant(asked), user=tf.range(5, dtype=tf.int64)
        )
        assert np.array_equal(found["film"], expected[number])
    for number in range(2):
        with tf.Graph().as_default(), tf.compat.v1.Session() as session:
            path = str(tmp_path / str(number))
            model = tf.compat.v1.saved_model.load(session, ["serve"], path)
            signature = model.signature_def["dense"]
            feeds = {
                signature.inputs["film"].name: asked,
                signature.inputs["user"].name: np.arange(5),
            }
            found = session.run(signature.outputs["film"].name, feeds)
            assert np.array_equal(found, expected[number])
