"""Exports whose tables are mapped from files: answers, memory, places, refusals."""

from __future__ import annotations

import json
import pathlib
import shutil
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import tensorflow as tf
from new_process import printed_by
from serving import exported
from serving.exported import Trained
from threads import run_in_threads

import tpu_embedding as te
from tpu_embedding.__main__ import main
from tpu_embedding.serving import mapping
from tpu_embedding.serving.mapping import place
from tpu_embedding.serving.quantization import STORAGES


def answers(path: pathlib.Path) -> dict[str, np.ndarray]:
    model: Any = tf.saved_model.load(str(path))
    found = model.signatures["ragged"](**exported.requests()["ragged"])
    return {name: value.numpy() for name, value in found.items()}


def export_films(path: pathlib.Path, values: tf.Tensor) -> te.TableConfig:
    films = te.TableConfig(*values.shape, name="films")
    te.serving.export(
        {films: values},
        path,
        feature_config={"film": te.FeatureConfig(films)},
        signatures=["dense"],
        mapped=True,
    )
    return films


def numbered(rows: int) -> tf.Tensor:
    """Rows of 128 columns, each with its number."""
    return tf.repeat(tf.range(rows, dtype=tf.float32)[:, tf.newaxis], 128, 1)


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
    files = list((tmp_path / "True" / "mapped").glob("[01].*"))
    assert sum(f.stat().st_size for f in files) == reports[1].bytes_after
    assert exported.ops_of(tmp_path / "True")


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
    export_films(tmp_path / "large", numbered(1 << 17))  # 64 MiB.
    export_films(tmp_path / "small", numbered(8))
    program = ("-c", FIRST_CALL, tmp_path / "large", tmp_path / "small")
    *found, grown = map(float, printed_by(*program).split())
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
        tf.errors.DataLossError, match=r"1\.table has 111 bytes, but its"
    ):
        place(path)
    file.unlink()
    with pytest.raises(tf.errors.DataLossError, match=r"1\.table is missing"):
        place(path)
    assert (path / "saved_model.pb").read_bytes() == before


@pytest.fixture(name="damaged")
def make_damaged(tmp_path: pathlib.Path) -> tuple[pathlib.Path, te.TableConfig]:
    """An export of 2.5 MiB, of whose file one bit in the second MiB is flipped."""
    films = export_films(tmp_path / "model", tf.ones([5 << 10, 128]))
    with open(tmp_path / "model" / "mapped" / "0.table", "r+b") as file:
        file.seek((1 << 20) + 12345)
        octet = file.read(1)[0]
        file.seek(-1, 1)
        file.write(bytes([octet ^ 4]))
    return tmp_path / "model", films


def _serve(path: pathlib.Path, table: te.TableConfig, **options: bool) -> Any:
    config = {"film": te.FeatureConfig(table)}
    return te.TPUEmbeddingForServing(config, None, mapped=path, **options)


def test_a_flipped_bit_is_named_and_nothing_changes(
    damaged: tuple[pathlib.Path, te.TableConfig], capsys: pytest.CaptureFixture[str]
) -> None:
    path, films = damaged
    before = (path / "saved_model.pb").read_bytes()
    message = r"0\.table is damaged: the checksum of MiB 1 .* `verify=False` reads"
    with pytest.raises(tf.errors.DataLossError, match=message):
        place(path)
    with pytest.raises(tf.errors.DataLossError, match=message):
        _serve(path, films)
    assert (path / "saved_model.pb").read_bytes() == before
    assert main(["place", str(path), "--no-verify"]) == 0
    assert capsys.readouterr().out.splitlines() == [str(path / "mapped" / "0.table")]
    found = _serve(path, films, verify=False)({"film": tf.constant([0, 5119])})
    np.testing.assert_array_equal(found["film"], np.ones([2, 128]))


def test_an_export_without_checksums_is_read(
    damaged: tuple[pathlib.Path, te.TableConfig],
) -> None:
    path, films = damaged
    described = path / "mapped" / "tables.json"
    (table,) = json.loads(described.read_text())
    assert [len(sums) for sums in table.pop("checksums").values()] == [3]
    described.write_text(json.dumps([table]))
    place(path)
    _serve(path, films)
    described.unlink()  # As at first.
    place(path)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda text: text[:-1], r"tables\.json is damaged"),
        (lambda text: text[: len(text) // 2], r"tables\.json is damaged"),
        (lambda _: "", r"tables\.json is damaged"),
        (lambda _: "[]", r"tables\.json has no table for the file 0\.table"),
        (lambda text: text.replace("sums", "sumz"), r"tables\.json is damaged"),
        (lambda text: text.replace('"table"', '"tuble"'), "lacks the checksums of pa"),
        (lambda text: text.replace("]}}", ", 7]}}"), "the checksum of MiB 3"),
        (lambda text: text.replace("]}}", ', "7"]}}'), "films is not an integer"),
        (lambda text: text.replace("{", "[", 1).replace("}}]", "}]]"), "is damaged"),
    ],
)
def test_a_description_that_was_cut_or_changed_is_refused(
    change: Callable[[str], str], message: str, tmp_path: pathlib.Path
) -> None:
    films = export_films(tmp_path, tf.ones([5 << 10, 128]))
    described = tmp_path / "mapped" / "tables.json"
    changed = change(described.read_text())
    assert changed != described.read_text()
    described.write_text(changed)
    with pytest.raises(tf.errors.DataLossError, match=message):
        place(tmp_path)
    with pytest.raises((tf.errors.DataLossError, ValueError)):
        _serve(tmp_path, films)


def test_the_checksum_is_crc_32c() -> None:
    assert mapping.crc32c(b"123456789") == 0xE3069283  # The check value of CRC-32C.
    assert mapping.crc32c(bytes(32)) == 0x8A9136AA  # RFC 3720, B.4.
    assert mapping.crc32c(b"") == 0


def test_what_is_refused(trained: Trained, tmp_path: pathlib.Path) -> None:
    for options, error, message in (
        ({"mapped": 1}, TypeError, "`mapped` must be a bool"),
        ({"mapped": True, "deltas": True}, ValueError, "`mapped` and `deltas` exclude"),
    ):
        with pytest.raises(error, match=message):
            exported.export(trained, tmp_path / "model", **options)
    with pytest.raises(ValueError, match="`mapped` needs a local folder"):
        exported.export(trained, "gs://bucket/model", mapped=True)
    exported.export(trained, tmp_path / "loaded", signatures=["ragged"])
    with pytest.raises(ValueError, match="loaded maps no tables"):
        place(tmp_path / "loaded")
    assert [file.name for file in tmp_path.iterdir()] == ["loaded"]


def in_our_program(trained: Trained, path: pathlib.Path) -> te.TPUEmbeddingForServing:
    config = {
        "film": te.FeatureConfig(trained.films),
        "more": [te.FeatureConfig(trained.films), te.FeatureConfig(trained.users)],
        "history": te.FeatureConfig(
            trained.films, max_sequence_length=exported.POSITIONS
        ),
    }
    return te.TPUEmbeddingForServing(config, None, mapped=path)


@pytest.mark.parametrize("storage", STORAGES)
def test_our_programs_read_the_same_files(
    storage: str, trained: Trained, tmp_path: pathlib.Path
) -> None:
    path = tmp_path / "model"
    exported.export(trained, path, storage=storage, signatures=["ragged"], mapped=True)
    wanted = answers(path)
    serving = in_our_program(trained, path)
    for look_up in (serving, tf.function(serving)):
        found = tf.nest.flatten(look_up(*exported.batch()))
        names = ("film", "history", "seen", "user")
        for name, values in zip(names, found, strict=True):
            np.testing.assert_array_equal(values, wanted[name])
    features, weights = exported.batch()
    features["film"] = tf.constant([[0], [exported.FILMS]], tf.int64)
    with pytest.raises(tf.errors.InvalidArgumentError, match="films"):
        serving(features, weights)


def test_our_programs_keep_nothing_resident(tmp_path: pathlib.Path) -> None:
    """Every row of 32 MiB is read, by three threads, in any order."""
    rows = 1 << 16
    films = export_films(tmp_path / "model", numbered(rows))
    serving = _serve(tmp_path / "model", films)
    wrong = [0] * 3

    def read(thread: int) -> None:
        order = np.random.default_rng(thread).permutation(rows)
        for ids in np.split(order, 128):
            found = serving({"film": tf.constant(ids)})["film"].numpy()
            wrong[thread] += int((found != ids[:, np.newaxis]).sum())

    run_in_threads(read, 3)
    assert wrong == [0] * 3
    # No page of the file belongs to this process, also not by a mapping.
    assert str(tmp_path) not in pathlib.Path("/proc/self/smaps").read_text()


def test_files_that_our_programs_refuse(
    trained: Trained, tmp_path: pathlib.Path
) -> None:
    path = tmp_path / "model"
    exported.export(trained, path, mapped=True, signatures=["ragged"])
    serving = in_our_program(trained, path)
    file = path / "mapped" / "1.table"
    content = file.read_bytes()
    file.write_bytes(content[:-1])
    with pytest.raises(tf.errors.DataLossError, match=r"1\.table has 111 bytes"):
        in_our_program(trained, path)
    with pytest.raises(tf.errors.DataLossError, match=r"1\.table has 111 bytes"):
        serving(*exported.batch())
    file.unlink()
    with pytest.raises(tf.errors.DataLossError, match=r"1\.table is missing"):
        in_our_program(trained, path)
    with pytest.raises(tf.errors.DataLossError, match=r"1\.table cannot be opened"):
        serving(*exported.batch())
    file.write_bytes(content)
    serving(*exported.batch())
    with open(file, "r+b") as opened:
        opened.truncate(9)
    with pytest.raises(tf.errors.DataLossError, match="became shorter"):
        serving(*exported.batch())
    file.write_bytes(content)
    described = path / "mapped" / "tables.json"
    described.write_text(described.read_text()[:-9])
    with pytest.raises(tf.errors.DataLossError, match=r"tables\.json is damaged"):
        in_our_program(trained, path)


def test_what_our_programs_refuse(trained: Trained, tmp_path: pathlib.Path) -> None:
    path = tmp_path / "model"
    exported.export(trained, path, mapped=True, signatures=["ragged"])
    serving = in_our_program(trained, path)
    for call in (
        lambda: serving.embedding_tables,
        lambda: tf.saved_model.save(serving, str(tmp_path / "again")),
        lambda: te.serving.export(serving, tmp_path / "again"),
    ):
        with pytest.raises(RuntimeError, match="has no variables and cannot be saved"):
            call()
    for table, message in (
        (te.TableConfig(23, 4, name="movies"), "lacks table movies. It has films, us"),
        (te.TableConfig(23, 5, name="films"), r"the shape \(23, 4\) in .*\(23, 5\) in"),
    ):
        with pytest.raises(ValueError, match=message):
            te.TPUEmbeddingForServing(te.FeatureConfig(table), None, mapped=path)
    exported.export(trained, tmp_path / "loaded", signatures=["ragged"])
    config = te.FeatureConfig(te.TableConfig(23, 4))
    with pytest.raises(ValueError, match="`verify=False` skips the check of the files"):
        te.TPUEmbeddingForServing(config, None, verify=False)
    wrong: Any = "no"
    with pytest.raises(TypeError, match="`verify` must be a bool"):
        te.TPUEmbeddingForServing(config, None, mapped=path, verify=wrong)
    with pytest.raises(ValueError, match="loaded maps no tables"):
        in_our_program(trained, tmp_path / "loaded")
    tags = te.TableConfig(te.GrowingVocabulary(9), 4, name="tags")
    growing = te.TPUEmbedding(te.FeatureConfig(tags), te.SGD(0.1))
    te.serving.export(growing, tmp_path / "growing", mapped=True)
    with pytest.raises(NotImplementedError, match="Table tags grows"):
        te.TPUEmbeddingForServing(
            te.FeatureConfig(tags), None, mapped=tmp_path / "growing"
        )
