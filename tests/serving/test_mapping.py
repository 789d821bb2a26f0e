"""Exports whose tables are mapped from files: answers, memory, places, refusals."""

from __future__ import annotations

import pathlib
import shutil
import subprocess
import sys
from typing import Any

import numpy as np
import pytest
import tensorflow as tf
from serving import exported
from serving.exported import Trained, graph_of

import tpu_embedding as te
from tpu_embedding.__main__ import main
from tpu_embedding.serving.mapping import place
from tpu_embedding.serving.quantization import STORAGES


def answers(path: pathlib.Path) -> dict[str, np.ndarray]:
    model: Any = tf.saved_model.load(str(path))
    found = model.signatures["ragged"](**exported.requests()["ragged"])
    return {name: value.numpy() for name, value in found.items()}


@pytest.mark.parametrize("storage", STORAGES)
def test_answers_as_an_export_that_is_loaded(
    storage: str, trained: Trained, tmp_path: pathlib.Path
) -> None:
    reports = [
        exported.export(
            trained,
            tmp_path / str(mapped),
            storage=storage,
            signatures=["ragged"],
            mapped=mapped,
        )
        for mapped in (False, True)
    ]
    assert reports[0] == reports[1]
    wanted, found = answers(tmp_path / "False"), answers(tmp_path / "True")
    for name, values in wanted.items():
        np.testing.assert_array_equal(found[name], values)
    files = list((tmp_path / "True" / "mapped").iterdir())
    assert sum(f.stat().st_size for f in files) == reports[1].bytes_after
    graph = graph_of(tmp_path / "True").graph_def
    nodes = [*graph.node, *(n for f in graph.library.function for n in f.node_def)]
    assert sorted({node.op for node in nodes} - set(dir(tf.raw_ops))) == []


def test_ids_are_checked(trained: Trained, tmp_path: pathlib.Path) -> None:
    exported.export(trained, tmp_path / "model", mapped=True, signatures=["ragged"])
    model: Any = tf.saved_model.load(str(tmp_path / "model"))
    bad = dict(
        exported.requests()["ragged"], film_values=tf.constant([1, 2, 23], "int64")
    )
    with pytest.raises(tf.errors.InvalidArgumentError, match="films"):
        model.signatures["ragged"](**bad)


FIRST_CALL = """
import pathlib, sys
import tensorflow as tf
def peak():
    text = pathlib.Path("/proc/self/status").read_text()
    return int(text.split("VmHWM:")[1].split()[0]) / 1024
tf.saved_model.load(sys.argv[2]).signatures["dense"](film=tf.constant([1], tf.int64))
before = peak()
model = tf.saved_model.load(sys.argv[1])
found = model.signatures["dense"](film=tf.constant([5, 70000, 131071], tf.int64))
print(*found["film"].numpy()[:, 0].tolist(), peak() - before)
"""


def test_the_first_call_does_not_read_the_file(tmp_path: pathlib.Path) -> None:
    rows, dim = 1 << 17, 128  # 64 MiB.
    for name, size in (("large", rows), ("small", 8)):
        films = te.TableConfig(size, dim, name="films")
        values = tf.repeat(tf.range(size, dtype=tf.float32)[:, tf.newaxis], dim, 1)
        te.serving.export(
            {films: values},
            tmp_path / name,
            feature_config={"film": te.FeatureConfig(films)},
            signatures=["dense"],
            mapped=True,
        )
    ran = subprocess.run(
        [sys.executable, "-c", FIRST_CALL, tmp_path / "large", tmp_path / "small"],
        check=True,
        capture_output=True,
        text=True,
    )
    *found, grown = map(float, ran.stdout.split())
    assert found == [5, 70000, 131071]
    assert grown < 32  # Half of the file, in MiB.


def test_a_moved_export_is_told_its_place(
    trained: Trained, tmp_path: pathlib.Path, capsys: pytest.CaptureFixture[str]
) -> None:
    old, new = tmp_path / "old", tmp_path / "new"
    exported.export(trained, old, mapped=True, storage="int8", signatures=["ragged"])
    wanted = answers(old)
    shutil.copytree(old, new)
    shutil.rmtree(old)
    with pytest.raises(tf.errors.NotFoundError):
        answers(new)
    assert main(["place", str(new)]) == 0
    names = ["0.codes", "0.scale_offset", "1.codes", "1.scale_offset"]
    told = capsys.readouterr().out.splitlines()
    assert told == [str(new / "mapped" / name) for name in names]
    for name, values in answers(new).items():
        np.testing.assert_array_equal(wanted[name], values)
    shutil.move(new, old)  # Once more, by another way of naming it.
    place(old / ".." / "old")
    assert answers(old).keys() == wanted.keys()
    tf.saved_model.experimental.read_fingerprint(str(old))


def test_a_wrong_file_is_named_and_nothing_changes(
    trained: Trained, tmp_path: pathlib.Path
) -> None:
    path = tmp_path / "model"
    exported.export(trained, path, mapped=True, signatures=["ragged"])
    before = (path / "saved_model.pb").read_bytes()
    file = path / "mapped" / "1.table"
    content = file.read_bytes()
    file.write_bytes(content[:-1])
    with pytest.raises(
        tf.errors.DataLossError, match=r"1\.table has 111 bytes, and its"
    ):
        place(path)
    file.unlink()
    with pytest.raises(tf.errors.DataLossError, match=r"1\.table is missing"):
        place(path)
    assert (path / "saved_model.pb").read_bytes() == before


def test_what_is_refused(trained: Trained, tmp_path: pathlib.Path) -> None:
    for options, error, message in (
        ({"mapped": 1}, TypeError, "`mapped` must be a bool"),
        ({"mapped": True, "deltas": True}, ValueError, "`mapped` and `deltas` exclude"),
    ):
        with pytest.raises(error, match=message):
            exported.export(trained, tmp_path / "model", **options)
    with pytest.raises(ValueError, match="`mapped` needs a folder of this machine"):
        exported.export(trained, "gs://bucket/model", mapped=True)
    exported.export(trained, tmp_path / "loaded", signatures=["ragged"])
    with pytest.raises(ValueError, match="loaded maps no tables"):
        place(tmp_path / "loaded")
    assert [file.name for file in tmp_path.iterdir()] == ["loaded"]
