"""Tables that other libraries saved."""

from __future__ import annotations

import base64
import io
import json
import pathlib
import zipfile
from typing import Any

import h5py
import numpy as np
import pytest
import tensorflow as tf
from checkpoint import models

import tpu_embedding as te
from tpu_embedding import checkpoint

GOLDEN = pathlib.Path(__file__).parents[1] / "golden" / "checkpoints"
SIZES = {"films": (4, 2), "users": (3, 2)}


def unpack(name: str, folder: pathlib.Path) -> Any:
    """Unpacks a golden file; what is expected of it."""
    packed = base64.decodebytes((GOLDEN / f"{name}.zip.base64").read_bytes())
    with zipfile.ZipFile(io.BytesIO(packed)) as archive:
        archive.extractall(folder)
        return json.loads(archive.read("expected.json"))


TFRS = {
    "adagrad": (te.Adagrad, {"accumulator": "accumulators"}),
    "adam": (te.Adam, {"m": "momenta", "v": "velocities"}),
    "ftrl": (te.FTRL, {"accumulator": "accumulators", "linear": "linears"}),
}


@pytest.mark.parametrize("optimizer", TFRS)
def test_tensorflow_recommenders(optimizer: str, tmp_path: pathlib.Path) -> None:
    expected = unpack("tfrs-0.7.7", tmp_path)[optimizer]
    ours, slot_names = TFRS[optimizer]
    embedding = models.make(ours(0.1), SIZES)
    for root in (None, "model/layer_with_weights-0/_tpu_embedding"):
        models.scramble(embedding, np.random.default_rng(0))
        checkpoint.restore(embedding, tmp_path / optimizer, root=root)
        actual = models.values(embedding)
        for table, arrays in expected.items():
            assert len(arrays) == len(actual[table])
            for name, values in arrays.items():
                own = actual[table][slot_names.get(name, name)]
                np.testing.assert_array_equal(own, np.float32(values))
    assert checkpoint.read(tmp_path / optimizer).keys() == SIZES.keys()


@pytest.mark.parametrize("file", ["model.weights.h5", "model.keras"])
def test_keras_rs(file: str, tmp_path: pathlib.Path) -> None:
    expected = unpack("keras-rs-0.4.0", tmp_path)
    embedding = models.make(te.SGD(0.1), SIZES)
    for root in (None, "layers/distributed_embedding"):
        models.scramble(embedding, np.random.default_rng(0))
        found = checkpoint.restore(embedding, tmp_path / file, root=root)
        assert found.format == "Keras"
        actual = models.values(embedding)
        for table, arrays in expected.items():
            values = np.array(arrays["parameters"], np.float32)
            np.testing.assert_array_equal(actual[table]["parameters"], values)
            rows = checkpoint.read(tmp_path / file)[table].parameters
            np.testing.assert_array_equal(rows.read(1, 3), values[1:3])


def test_our_own_layer(rng: np.random.Generator, tmp_path: pathlib.Path) -> None:
    """Names as the Keras layer of this package gives them, quoted for HDF5."""
    source, target = (models.make(te.Adam(0.1)) for _ in range(2))
    models.scramble(source, rng)
    path = tmp_path / "model.weights.h5"
    with h5py.File(path, "w") as file:
        for table, arrays in models.values(source).items():
            for name, array in arrays.items():
                own = "" if name == "parameters" else f"%2F{name}"
                file[f"layers/tables/vars/{table}{own}"] = array
        file["layers/tables/vars/_updates"] = np.int64(7)
        file["layers/dense/vars/0"] = np.zeros((3, 2), np.float32)
    assert checkpoint.restore(target, path).updates == 7
    models.assert_same(models.values(target), models.values(source))


def test_damaged_keras_weights(tmp_path: pathlib.Path) -> None:
    unpack("keras-rs-0.4.0", tmp_path)
    for name in ("model.weights.h5", "model.keras"):
        file = tmp_path / name
        file.write_bytes(file.read_bytes()[:-9])
        with pytest.raises(tf.errors.DataLossError, match=name):
            checkpoint.read(file).verify()


def test_keras_weights_without_tables(tmp_path: pathlib.Path) -> None:
    path = tmp_path / "dense.weights.h5"
    with h5py.File(path, "w") as file:
        file["layers/dense/vars/0"] = np.zeros((3, 2), np.float32)
    with pytest.raises(ValueError, match="has no tables of tpu_embedding"):
        checkpoint.read(path)


@pytest.mark.parametrize("form", ["folder", "archive", "fortran"])
def test_numpy(form: str, rng: np.random.Generator, tmp_path: pathlib.Path) -> None:
    source, target = (models.make(te.Adam(0.1)) for _ in range(2))
    models.scramble(source, rng)
    arrays = {
        table if name == "parameters" else f"{table}/{name}": array
        for table, own in models.values(source).items()
        for name, array in own.items()
    }
    path = tmp_path / "tables.npz"
    if form == "archive":
        np.savez(path, **arrays)
    else:
        path = tmp_path / "tables"
        for name, array in arrays.items():
            (path / name).parent.mkdir(parents=True, exist_ok=True)
            to_save = np.asfortranarray(array) if form == "fortran" else array
            np.save(path / name, to_save)
    assert checkpoint.restore(target, path).format == "NumPy"
    models.assert_same(models.values(target), models.values(source))


def test_a_table_called_parameters(tmp_path: pathlib.Path) -> None:
    names = (
        "g/parameters",
        "g/parameters/accumulators",
        "h/parameters",
        "i",
        "i/linears",
    )
    np.savez(tmp_path / "tables.npz", **{name: np.zeros((3, 2)) for name in names})
    tables = checkpoint.read(tmp_path / "tables.npz")
    slots = {name: sorted(table.slots) for name, table in tables.items()}
    assert slots == {"g/parameters": ["accumulators"], "h": [], "i": ["linears"]}


def test_one_array_and_a_cast(tmp_path: pathlib.Path) -> None:
    values = np.arange(22.0).reshape(11, 2)  # float64
    np.save(tmp_path / "films.npy", values)
    np.save(tmp_path / "other.npy", values)
    for file, rename in (("films.npy", None), ("other.npy", {"films": "other"})):
        embedding = models.make(te.SGD(0.1), {"films": (11, 2)})
        checkpoint.restore(embedding, tmp_path / file, rename=rename)
        actual = models.values(embedding)["films"]["parameters"]
        assert actual.dtype == np.float32
        np.testing.assert_array_equal(actual, values)


def test_arrays_that_are_refused(tmp_path: pathlib.Path) -> None:
    file = tmp_path / "films.npy"
    np.save(file, np.zeros((3, 2), np.int64))
    with pytest.raises(TypeError, match=r"films in .*films.npy has dtype int64"):
        checkpoint.read(file)
    np.save(file, np.zeros(3))
    with pytest.raises(ValueError, match="There are no embedding tables"):
        checkpoint.read(file)
    np.save(file, np.zeros((3, 2)))
    with pytest.raises(ValueError, match="`root` must be None"):
        checkpoint.read(file, root="embedding")
    with pytest.raises(tf.errors.NotFoundError, match="There is no checkpoint"):
        checkpoint.read(tmp_path / "nothing.npy")


def test_a_folder_of_checkpoints_may_have_arrays(tmp_path: pathlib.Path) -> None:
    source = models.make(te.SGD(0.1), {"films": (11, 2)})
    source.build()
    tracked = tf.train.Checkpoint(embedding=source)
    tf.train.CheckpointManager(tracked, str(tmp_path), max_to_keep=1).save()
    np.save(tmp_path / "curve.npy", np.zeros((3, 2), np.float32))
    assert list(checkpoint.read(tmp_path)) == ["films"]


@pytest.mark.parametrize("form", ["Checkpoint", "Saver"])
def test_a_bare_variable(form: str, tmp_path: pathlib.Path) -> None:
    values = np.arange(22, dtype=np.float32).reshape(11, 2)
    if form == "Checkpoint":
        path = tf.train.Checkpoint(weights=tf.Variable(values)).save(tmp_path / "x")
    else:
        with tf.Graph().as_default(), tf.compat.v1.Session() as session:
            variable = tf.compat.v1.get_variable("weights", initializer=values)
            tf.compat.v1.get_variable("step", initializer=0)
            session.run(tf.compat.v1.global_variables_initializer())
            path = tf.compat.v1.train.Saver().save(session, str(tmp_path / "x"))
            del variable
    embedding = models.make(te.Adagrad(0.1), {"films": (11, 2)})
    checkpoint.restore(embedding, path, rename={"films": "weights"})
    actual = models.values(embedding)["films"]["parameters"]
    np.testing.assert_array_equal(actual, values)
