"""How an export is written: in parts, complete last, from any engine, or not at all."""

from __future__ import annotations

import pathlib
from typing import Any

import numpy as np
import pytest
import tensorflow as tf
from software_tpu.calls import strategy_of
from tensorflow.python.saved_model.pywrap_saved_model import fingerprinting

import tpu_embedding as te
from tpu_embedding.checkpoint import writing
from tpu_embedding.serving import export

V, D = 40, 8
SCRATCH = ".tpu_embedding_unfinished"
FILES = {"assets", "fingerprint.pb", "saved_model.pb", "variables"}
# As files and checkpoints have to escape them.
STORAGES = {"a/b.c": "int8", "a": "float32", "variables_read": "float16"}
TABLES = [te.TableConfig(V, D, name=name) for name in STORAGES]
FEATURES = {f"f{i}": te.FeatureConfig(table) for i, table in enumerate(TABLES)}


def ask(path: pathlib.Path, ids: np.ndarray) -> dict[str, np.ndarray]:
    """The same ids for all features, in a session, as servers and C have them."""
    with tf.compat.v1.Session(graph=tf.Graph()) as session:
        loaded = tf.compat.v1.saved_model.load(session, ["serve"], str(path))
        served = loaded.signature_def["dense"]
        outputs = {name: info.name for name, info in served.outputs.items()}
        return session.run(outputs, {info.name: ids for info in served.inputs.values()})


def names(path: pathlib.Path) -> set[str]:
    return {file.name for file in path.iterdir()}


def test_tables_in_many_parts(
    rng: np.random.Generator, tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(writing, "_MIN_PART_BYTES", 400)
    values = rng.normal(size=[len(TABLES), V, D]).astype(np.float32)
    report = export(
        dict(zip(TABLES, map(tf.Variable, values), strict=True)),
        tmp_path,
        feature_config=FEATURES,
        signatures=["dense"],
        storage=dict(zip(TABLES, STORAGES.values(), strict=True)),
    )
    assert names(tmp_path) == FILES
    assert len(list((tmp_path / "variables").glob("variables.data-*"))) == 4
    answers = ask(tmp_path, np.arange(V))
    for name, table, told in zip(FEATURES, values, report.tables, strict=True):
        # As far off as was told, but for three roundings of terms below 8.
        error = np.abs(answers[name] - table).max()
        assert error == pytest.approx(told.max_error, abs=3 * 8 * 2.0**-24)
    made = fingerprinting.CreateFingerprintDef(str(tmp_path))
    found = tf.saved_model.experimental.read_fingerprint(str(tmp_path))
    assert found == tf.saved_model.experimental.Fingerprint.from_proto(made)


def test_what_fails_leaves_nothing(tmp_path: pathlib.Path) -> None:
    tables, new = dict.fromkeys(TABLES, tf.fill([V, D], np.nan)), tmp_path / "new"

    def refused(path: pathlib.Path) -> None:
        options: Any = {"feature_config": FEATURES, "signatures": ["dense"]}
        with pytest.raises(tf.errors.InvalidArgumentError, match="row 0 holds nan"):
            export(tables, path, storage="int8", **options)

    refused(new)
    assert not new.exists()
    refused(tmp_path)
    assert not names(tmp_path)


def test_is_complete_last_and_takes_over_what_was_killed(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / SCRATCH).mkdir()
    (tmp_path / SCRATCH / "old").touch()
    (tmp_path / "variables").mkdir()
    (tmp_path / "variables" / "old").touch()
    moved = []
    rename = tf.io.gfile.rename

    def remember(source: str, target: str) -> None:
        rename(source, target)
        moved.append(pathlib.Path(target))

    monkeypatch.setattr(tf.io.gfile, "rename", remember)
    embedding = te.TPUEmbedding(FEATURES, None)
    export(embedding, tmp_path, signatures=["dense"], storage="int4")
    assert moved[-1] == tmp_path / "saved_model.pb"
    assert names(tmp_path) == FILES
    assert "old" not in names(tmp_path / "variables")
    (tmp_path / SCRATCH).mkdir()  # Not what was killed: a model that is complete.
    with pytest.raises(ValueError, match="exists and is not an empty folder"):
        export(embedding, tmp_path, signatures=["dense"])


@pytest.mark.parametrize("generation", ["v4", "v6e"])
def test_tables_in_tpus(generation: str, tmp_path: pathlib.Path) -> None:
    films, users = (
        te.TableConfig(9, 4, te.RowIdInitializer(first), name=name)
        for name, first in (("films", 0), ("users", 100))
    )
    features = {
        "film": te.FeatureConfig(films, output_shape=[4], name="film"),
        "user": te.FeatureConfig(users, output_shape=[4], name="user"),
    }
    kind = {"v4": te.TPUEmbedding, "v6e": te.TPUEmbeddingV2}[generation]
    with strategy_of(generation, 2).scope():
        embedding: Any = kind(features, te.Adagrad(0.1))
    storage = {films: "float32", users: "int8"}
    export(embedding, tmp_path, signatures=["dense"], storage=storage)
    found = ask(tmp_path, np.array([8, 0, 5, 5]))
    np.testing.assert_array_equal(
        found["film"], np.repeat([[8.0], [0], [5], [5]], 4, 1)
    )
    np.testing.assert_array_equal(found["user"], found["film"] + 100)


def test_weights_are_checked_as_in_training(tmp_path: pathlib.Path) -> None:
    for check_numerics in (False, True):
        embedding = te.TPUEmbedding(FEATURES, None, check_numerics=check_numerics)
        path = tmp_path / str(check_numerics)
        export(embedding, path, signatures=["dense"], weighted=["f0"])
        served: Any = tf.saved_model.load(str(path)).signatures["dense"]
        ids = {name: tf.constant([1, 2], tf.int64) for name in FEATURES}
        weights = tf.constant([1.0, np.inf])
        if check_numerics:
            with pytest.raises(
                tf.errors.InvalidArgumentError,
                match=r"Feature f0: sample 1 has a weight that is not finite \(inf\)",
            ):
                served(**ids, f0_weights=weights)
        else:
            served(**ids, f0_weights=weights)
