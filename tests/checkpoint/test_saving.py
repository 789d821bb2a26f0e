"""What save and restore promise, and what restore refuses."""

from __future__ import annotations

import copy
import logging
import pathlib
from typing import Any

import numpy as np
import pytest
import tensorflow as tf
from checkpoint import models

import tpu_embedding as te
from tpu_embedding import checkpoint


@pytest.fixture(autouse=True)
def each_engine(engine: str) -> str:
    return engine


@pytest.fixture
def saved(
    rng: np.random.Generator, tmp_path: pathlib.Path
) -> tuple[str, models.Values]:
    """A checkpoint of Adagrad, and what is in it."""
    embedding = models.make(te.Adagrad(0.1))
    models.scramble(embedding, rng)
    path = checkpoint.save(embedding, tmp_path / "saved")
    return path, models.values(embedding)


Saved = tuple[str, models.Values]


def test_read(saved: Saved) -> None:
    path, values = saved
    tables = checkpoint.read(path)
    assert (tables.path, tables.format, tables.updates) == (path, "TensorFlow", None)
    for name, table in tables.items():
        assert list(table.slots) == ["accumulators"]
        for array, rows in table.arrays.items():
            np.testing.assert_array_equal(rows.numpy(), values[name][array])
            np.testing.assert_array_equal(rows.read(2, 5), values[name][array][2:5])
    assert tables.keys() == values.keys()


def test_tensorflow_saves_an_embedding_that_is_not_built_yet(
    tmp_path: pathlib.Path,
) -> None:
    embedding = models.make(te.Adagrad(0.1))
    path = tf.train.Checkpoint(embedding=embedding).write(str(tmp_path / "new"))
    saved, values = checkpoint.read(path), models.values(embedding)
    for name, table in saved.items():
        for array, rows in table.arrays.items():
            np.testing.assert_array_equal(rows.numpy(), values[name][array])
    assert saved.keys() == values.keys()


def test_missing_slots_start_anew_with_one_warning(
    saved: Saved, caplog: pytest.LogCaptureFixture
) -> None:
    path, values = saved
    embedding = models.make(te.Adam(0.1))
    models.train(embedding)
    with caplog.at_level(logging.WARNING):
        checkpoint.restore(embedding, path)
    (record,) = caplog.records
    assert record.getMessage() == (
        f"{path} lacks films/momenta, films/velocities, users/momenta, "
        "users/velocities, which start at their initial values."
    )
    for table, arrays in models.values(embedding).items():
        np.testing.assert_array_equal(arrays["parameters"], values[table]["parameters"])
        assert not arrays["momenta"].any()
        assert not arrays["velocities"].any()


def test_tables_alone(
    saved: Saved, tmp_path: pathlib.Path, caplog: pytest.LogCaptureFixture
) -> None:
    path, values = saved
    embedding = models.make(te.Adagrad(0.1))
    models.train(embedding)
    with caplog.at_level(logging.WARNING):
        checkpoint.restore(embedding, path, slots=False)
    assert not caplog.records
    for table, arrays in models.values(embedding).items():
        np.testing.assert_array_equal(arrays["parameters"], values[table]["parameters"])
        assert (arrays["accumulators"] == np.float32(0.1)).all()
    alone = checkpoint.save(embedding, tmp_path / "alone", slots=False)
    assert all(not table.slots for table in checkpoint.read(alone).values())
    assert not [n for n, _ in tf.train.list_variables(alone) if "accumulators" in n]


def test_the_count_of_updates(
    tmp_path: pathlib.Path, caplog: pytest.LogCaptureFixture
) -> None:
    schedule = tf.keras.optimizers.schedules.PolynomialDecay(0.5, 4)
    first, second = (models.make(te.Adagrad(schedule)) for _ in range(2))
    models.train(first, 3)
    path = checkpoint.save(first, tmp_path / "counted")
    assert checkpoint.restore(second, path).updates == 3
    for embedding in (first, second):
        models.train(embedding)
    models.assert_same(models.values(first), models.values(second))
    uncounted = checkpoint.save(models.make(te.Adagrad(0.1)), tmp_path / "uncounted")
    with caplog.at_level(logging.WARNING):
        checkpoint.restore(second, uncounted)
    assert "lacks _updates" in caplog.text
    assert int(second.core.checkpoint_variables()["_updates"]) == 0


@pytest.mark.parametrize("rows", [5, 20])
def test_resize(rows: int, saved: Saved) -> None:
    path, values = saved
    sizes = {**models.SIZES, "films": (rows, models.SIZES["films"][1])}
    embedding = models.make(te.Adagrad(0.1), sizes)
    before = models.values(embedding)
    with pytest.raises(ValueError, match=r"has shape \[.*, 3\], but in .* \[11, 3\]"):
        checkpoint.restore(embedding, path)
    models.assert_same(models.values(embedding), before)
    checkpoint.restore(embedding, path, resize=True)
    after, common = models.values(embedding), min(rows, 11)
    for name, array in after["films"].items():
        np.testing.assert_array_equal(array[:common], values["films"][name][:common])
        np.testing.assert_array_equal(array[common:], before["films"][name][common:])
    models.assert_same({"users": after["users"]}, {"users": values["users"]})


def test_rename_and_some_tables(saved: Saved) -> None:
    path, values = saved
    sizes = {"movies": models.SIZES["films"], "actors": (4, 2)}
    embedding = models.make(te.Adagrad(0.1), sizes)
    before = models.values(embedding)
    checkpoint.restore(embedding, path, tables=["movies"], rename={"movies": "films"})
    after = models.values(embedding)
    expected = {"movies": values["films"], "actors": before["actors"]}
    models.assert_same(after, expected)


REFUSED: dict[str, tuple[dict[str, Any], type[Exception], str]] = {
    "unknown table": ({"tables": ["x"]}, ValueError, "`tables` names the table 'x'"),
    "unknown rename": ({"rename": {"x": "y"}}, ValueError, "`rename` names the table"),
    "not there": (
        {"rename": {"films": "movies"}},
        KeyError,
        "has no table called movies. It has: films, users.",
    ),
    "dim": (
        {"rename": {"films": "users"}, "resize": True},
        ValueError,
        "A table with another dim cannot be restored",
    ),
    "root": ({"root": "model"}, ValueError, "Objects that hold tables: 'embedding'"),
    "one table": ({"tables": "films"}, TypeError, "`tables` must be a collection of s"),
    "pairs": ({"rename": [("films", "x")]}, TypeError, "`rename` must be a dict from"),
    "no name": ({"rename": {"films": 3}}, TypeError, "`rename` must be a dict from s"),
    "resize": ({"resize": "yes"}, TypeError, '`resize` must be a bool, "mean" or'),
    "slots": ({"slots": None}, TypeError, "`slots` must be a bool."),
}


@pytest.mark.parametrize("case", REFUSED)
def test_refusals_change_nothing(case: str, saved: Saved) -> None:
    arguments, error, words = REFUSED[case]
    embedding = models.make(te.Adagrad(0.1))
    before = models.values(embedding)
    with pytest.raises(error) as raised:
        checkpoint.restore(embedding, saved[0], **arguments)
    assert words in str(raised.value)
    models.assert_same(models.values(embedding), before)


def test_a_slot_of_another_shape(saved: Saved) -> None:
    embedding = models.make(te.RowwiseAdagrad(0.1))
    before = models.values(embedding)
    with pytest.raises(ValueError, match=r"accumulators has shape \[11, 1\], but"):
        checkpoint.restore(embedding, saved[0])
    models.assert_same(models.values(embedding), before)
    checkpoint.restore(embedding, saved[0], slots=False)


def test_the_object_in_a_larger_checkpoint(
    rng: np.random.Generator, tmp_path: pathlib.Path
) -> None:
    model = tf.keras.Sequential([tf.keras.layers.Dense(3, use_bias=False)])
    model.build((None, 5))
    first, other, second = (models.make(te.SGD(0.1)) for _ in range(3))
    for embedding in (first, other):
        models.scramble(embedding, rng)
    holder = tf.train.Checkpoint(first=first, second=other)
    path = tf.train.Checkpoint(model=model, holder=holder).save(tmp_path / "all")
    with pytest.raises(ValueError, match=r"Several objects .*'holder/first'"):
        checkpoint.restore(second, path)
    checkpoint.restore(second, path, root="holder/first")
    models.assert_same(models.values(second), models.values(first))
    alone = tf.train.Checkpoint(model=model, mine=first).save(tmp_path / "one")
    for place in (alone, tmp_path):
        restored = models.make(te.SGD(0.1))
        checkpoint.restore(restored, place)
        models.assert_same(models.values(restored), models.values(first))


def test_names_with_slashes_and_dots(
    rng: np.random.Generator, tmp_path: pathlib.Path
) -> None:
    names = ("a", "a/b", "c.d", "e.S/f", "a/parameters", "g/parameters")
    sizes = dict.fromkeys(names, (4, 2))
    source, target = (models.make(te.Adagrad(0.1), sizes) for _ in range(2))
    models.scramble(source, rng)
    saved = checkpoint.save(source, tmp_path / "saved")
    written = tf.train.Checkpoint(embedding=source).write(tmp_path / "written")
    keys = [{name for name, _ in tf.train.list_variables(p)} for p in (saved, written)]
    assert keys[0] == keys[1]
    for path in (saved, written):
        models.scramble(target, rng)
        checkpoint.restore(target, path)
        models.assert_same(models.values(target), models.values(source))


def test_saving_over_a_checkpoint(saved: Saved) -> None:
    with pytest.raises(tf.errors.AlreadyExistsError, match="Save to another path"):
        checkpoint.save(models.make(te.SGD(0.1)), saved[0])


def test_other_objects_are_refused(saved: Saved, tmp_path: pathlib.Path) -> None:
    config = te.FeatureConfig(te.TableConfig(9, 2, name="films"))
    serving: Any = te.TPUEmbeddingForServing(config, None)
    with pytest.raises(TypeError, match="take a TPUEmbedding or a TPUEmbeddingV2"):
        checkpoint.restore(serving, saved[0])
    with pytest.raises(TypeError, match="take a TPUEmbedding or a TPUEmbeddingV2"):
        checkpoint.save(serving, tmp_path / "x")


@pytest.mark.parametrize("bad", [{"slots": "no"}, {"layouts": 3}, {"layouts": ["x"]}])
def test_save_refuses_arguments_of_other_types(
    bad: dict[str, Any], tmp_path: pathlib.Path
) -> None:
    with pytest.raises(TypeError, match=r"`(slots|layouts)` must be a "):
        checkpoint.save(models.make(te.SGD(0.1)), tmp_path / "x", **bad)
    assert not list(tmp_path.iterdir())


def test_a_path_without_a_name(tmp_path: pathlib.Path) -> None:
    with pytest.raises(ValueError, match="must not be empty or end with a slash"):
        checkpoint.save(models.make(te.SGD(0.1)), f"{tmp_path}/")
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("cls", [te.TPUEmbedding, te.TPUEmbeddingV2, te.TPUEmbeddingV0])
def test_a_deep_copy_is_refused_with_the_way_out(cls: Any) -> None:
    embedding = cls(te.FeatureConfig(te.TableConfig(4, 2)), te.SGD(0.1))
    with pytest.raises(TypeError, match=rf"^A {cls.__name__} cannot be deep-copied"):
        copy.deepcopy({"embedding": embedding})
