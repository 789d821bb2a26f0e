"""Files are data: nothing in them is run, and no name leads out of their folder."""

from __future__ import annotations

import ast
import json
import os
import pathlib
import pickle
import shutil
import zipfile
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf

import tpu_embedding as te
import tpu_embedding.keras
from tpu_embedding import checkpoint
from tpu_embedding.ops import library

PACKAGE = pathlib.Path(te.__file__).parent
SOURCES = sorted(PACKAGE.rglob("*.py"))
# What runs code out of data.
FORBIDDEN_MODULES = {"pickle", "cPickle", "dill", "cloudpickle", "marshal", "shelve"}
FORBIDDEN_CALLS = {"eval", "exec", "compile", "__import__"}


class Trap:
    """Unpickled, it leaves a file behind."""

    def __init__(self, mark: pathlib.Path) -> None:
        self.mark = mark

    def __reduce__(self) -> tuple:
        return os.mkdir, (str(self.mark),)


def calls_of(tree: ast.AST) -> list[tuple[str, ast.Call]]:
    """Every call with the name that it is made by, as `load` or `np.load`."""
    return [
        (ast.unparse(node.func), node)
        for node in ast.walk(tree)
        if isinstance(node, ast.Call)
    ]


@pytest.mark.parametrize("source", SOURCES, ids=lambda p: str(p.relative_to(PACKAGE)))
def test_no_module_runs_code_out_of_files(source: pathlib.Path) -> None:
    tree = ast.parse(source.read_text())
    imported = {
        alias.name.split(".")[0]
        for node in ast.walk(tree)
        if isinstance(node, ast.Import)
        for alias in node.names
    } | {
        (node.module or "").split(".")[0]
        for node in ast.walk(tree)
        if isinstance(node, ast.ImportFrom)
    }
    assert not imported & FORBIDDEN_MODULES
    for name, call in calls_of(tree):
        assert name not in FORBIDDEN_CALLS, f"line {call.lineno}"
        options = {k.arg: ast.unparse(k.value) for k in call.keywords}
        if name in ("np.load", "numpy.load"):
            assert options["allow_pickle"] == "False", f"line {call.lineno}"
        assert not name.endswith(("enable_unsafe_deserialization",))


def embedding() -> te.TPUEmbedding:
    films = te.TableConfig(9, 2, te.RowIdInitializer(), name="films")
    made = te.TPUEmbedding({"film": te.FeatureConfig(films)}, te.SGD(0.1))
    made.build()
    return made


@pytest.mark.parametrize("name", ["films.npy", "tables.npz"])
def test_pickled_arrays_are_refused(name: str, tmp_path: pathlib.Path) -> None:
    mark = tmp_path / "ran"
    array = np.array([[Trap(mark)]], object)
    file = tmp_path / name
    if name.endswith("z"):
        np.savez(file, films=array)
    else:
        np.save(file, array, allow_pickle=True)
    with pytest.raises((tf.errors.DataLossError, ValueError)) as raised:
        checkpoint.restore(embedding(), file)
    assert str(file) in str(raised.value)
    assert not mark.exists()
    pickle.loads(pickle.dumps(Trap(mark)))
    assert mark.exists()  # The trap does work.


def test_names_in_an_archive_stay_inside(tmp_path: pathlib.Path) -> None:
    """An .npz is a zip: its names are keys, and no file is written for them."""
    made = embedding()
    file = tmp_path / "tables.npz"
    np.savez(file, films=np.ones([9, 2]))
    with zipfile.ZipFile(file, "a") as archive:
        archive.writestr("../outside.npy", b"x")
    before = sorted(tmp_path.parent.rglob("outside*"))
    with pytest.raises((tf.errors.DataLossError, ValueError)):
        checkpoint.restore(made, file)
    assert sorted(tmp_path.parent.rglob("outside*")) == before


def test_custom_objects_need_safe_mode_off(tmp_path: pathlib.Path) -> None:
    """A lambda in a `.keras` file is code: Keras asks before it is loaded."""
    films = te.TableConfig(9, 2, te.RowIdInitializer(), name="films")
    inputs = keras.Input((), dtype="int64")
    activation = te.keras.TPUEmbedding(te.FeatureConfig(films), "sgd")(inputs)
    doubled = keras.layers.Lambda(lambda x: 2 * x, output_shape=(2,))(activation)
    path = tmp_path / "model.keras"
    keras.Model(inputs, doubled).save(path)
    with pytest.raises(ValueError, match=r"safe mode|unsafe"):
        keras.models.load_model(path)
    loaded: Any = keras.models.load_model(path, safe_mode=False)
    assert loaded(tf.constant([3])).numpy().tolist() == [[6.0, 6.0]]


def poison(config: object, place: str, trap: object) -> int:
    """Puts the trap wherever a configuration has a value of that name; how often."""
    if isinstance(config, list):
        return sum(poison(value, place, trap) for value in config)
    if not isinstance(config, dict):
        return 0
    found = [key for key in config if key == place]
    config.update(dict.fromkeys(found, trap))
    others = [value for key, value in config.items() if key != place]
    return len(found) + poison(others, place, trap)


@pytest.mark.parametrize("place", ["initializer", "learning_rate"])
def test_a_configuration_cannot_smuggle_code(
    place: str, tmp_path: pathlib.Path
) -> None:
    """A `__lambda__` written into the configuration of our layer is refused, too."""
    films = te.TableConfig(
        9, 2, keras.initializers.RandomUniform(seed=1), te.SGD(0.5), name="films"
    )
    inputs = keras.Input((), dtype="int64")
    model = keras.Model(
        inputs, te.keras.TPUEmbedding(te.FeatureConfig(films), "sgd")(inputs)
    )
    path, evil = tmp_path / "model.keras", tmp_path / "evil.keras"
    model.save(path)
    code = keras.src.utils.python_utils.func_dump(lambda *_, **__: os.mkdir("ran"))
    trap = {
        "class_name": "__lambda__",
        "config": {"code": code[0], "defaults": code[1], "closure": code[2]},
    }

    with zipfile.ZipFile(path) as source, zipfile.ZipFile(evil, "w") as target:
        for name in source.namelist():
            content = source.read(name)
            if name == "config.json":
                config = json.loads(content)
                assert poison(config, place, trap)
                content = json.dumps(config).encode()
            target.writestr(name, content)
    before = sorted(tmp_path.iterdir())
    with pytest.raises((ValueError, TypeError)):
        keras.models.load_model(evil)
    assert sorted(tmp_path.iterdir()) == before
    assert not pathlib.Path("ran").exists()


def test_only_the_library_beside_the_package_is_loaded(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No variable of the environment and no current folder chooses the file."""
    path = library.PATH
    assert path.parent == PACKAGE / "ops"
    shutil.copy(path, tmp_path / path.name)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("LD_LIBRARY_PATH", str(tmp_path))
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    loaded = []
    monkeypatch.setattr(tf, "load_op_library", lambda p: loaded.append(str(p)))
    library._attempt.__wrapped__()
    assert loaded == [str(path)]
