"""Files that were cut, changed or lost: an error that names the file, and no change."""

from __future__ import annotations

import io
import pathlib
import signal
import zipfile
from collections.abc import Callable, Mapping
from typing import Any

import h5py
import new_process
import numpy as np
import pytest
import tensorflow as tf
from checkpoint import models
from linux import small_files
from tensorflow.core.tpu.kernels import sparse_core_layout_pb2

import tpu_embedding as te
from tpu_embedding import checkpoint
from tpu_embedding.__main__ import main
from tpu_embedding.checkpoint import object_graph
from tpu_embedding.checkpoint.writing import SCRATCH

INDEX, DATA = "saved.index", "saved.data-00000-of-00002"


def cut(file: pathlib.Path) -> None:
    file.write_bytes(file.read_bytes()[:-3])


def empty(file: pathlib.Path) -> None:
    file.write_bytes(b"")


def point_elsewhere(file: pathlib.Path) -> None:
    """Makes the last 48 bytes of an index name a block that is not in the file."""
    content = bytearray(file.read_bytes())
    content[-44] ^= 64
    file.write_bytes(bytes(content))


def flip(at: float) -> Callable[[pathlib.Path], None]:
    """Changes one bit, at this share of the file."""

    def change(file: pathlib.Path) -> None:
        content = bytearray(file.read_bytes())
        content[int(at * (len(content) - 1))] ^= 4
        file.write_bytes(bytes(content))

    return change


DAMAGE: dict[str, Callable[[pathlib.Path], None]] = {
    "cut": cut,
    "empty": empty,
    "first byte": flip(0.0),
    "middle": flip(0.5),
    "last byte": flip(1.0),
    "lost": lambda file: file.unlink(),
    "pointer": point_elsewhere,
}


def check_restore(
    embedding: te.TPUEmbedding, path: Any, error: type[Exception], named: Any
) -> None:
    """The file that the error names is not restored, and nothing changes."""
    before = models.values(embedding)
    with pytest.raises(error) as raised:
        checkpoint.restore(embedding, path)
    assert str(named) in str(raised.value)
    models.assert_same(models.values(embedding), before)


@pytest.mark.usefixtures("engine")
@pytest.mark.parametrize("file", [INDEX, DATA])
@pytest.mark.parametrize("damage", DAMAGE)
def test_damaged_files(
    damage: str, file: str, rng: np.random.Generator, tmp_path: pathlib.Path
) -> None:
    embedding = models.make(te.Adagrad(0.1))
    models.scramble(embedding, rng)
    path = checkpoint.save(embedding, tmp_path / "saved")
    models.scramble(embedding, rng)
    DAMAGE[damage](tmp_path / file)
    lost = (damage, file) == ("lost", INDEX)
    error = tf.errors.NotFoundError if lost else tf.errors.DataLossError
    named = tmp_path / file if file == INDEX and not lost else path
    check_restore(embedding, path, error, named)


@pytest.mark.parametrize("name", ["tables.npz", "films.npy"])
@pytest.mark.parametrize("damage", ["cut", "empty", "first byte"])
def test_damaged_arrays(damage: str, name: str, tmp_path: pathlib.Path) -> None:
    embedding = models.make(te.SGD(0.1), {"films": (9, 2)})
    file = tmp_path / name
    if name.endswith("z"):
        np.savez(file, films=np.ones((9, 2)))
    else:
        np.save(file, np.ones((9, 2)))
    DAMAGE[damage](file)
    check_restore(embedding, file, tf.errors.DataLossError, file)


@pytest.mark.parametrize("damage", DAMAGE)
def test_damaged_arrays_that_were_converted(
    damage: str, rng: np.random.Generator, tmp_path: pathlib.Path
) -> None:
    """A `.npy` file has no checksum: `convert` writes one beside it."""
    embedding = models.make(te.Adagrad(0.1), {"films": (9, 2)})
    models.scramble(embedding, rng)
    path = checkpoint.save(embedding, tmp_path / "saved")
    before = models.values(embedding)
    folder = tmp_path / "arrays"
    arguments = ["convert", path, str(folder), "--to", "numpy"]
    assert main(["checkpoint", *arguments]) == 0
    checkpoint.restore(embedding, folder)
    models.assert_same(models.values(embedding), before)
    file = folder / "films.npy"
    DAMAGE[damage](file)
    check_restore(embedding, folder, tf.errors.DataLossError, file)
    if damage == "last byte":
        with pytest.raises(tf.errors.DataLossError, match="its checksum differs"):
            checkpoint.read(folder)["films"].parameters.numpy()
        with pytest.raises(tf.errors.DataLossError, match="its checksum differs"):
            checkpoint.read(file)["films"].parameters.numpy()
        (folder / "checksums.json").unlink()
        checkpoint.read(folder)["films"].parameters.numpy()


HEADER = b"{'descr': '<f4', 'fortran_order': False, 'shape': (9, 2), }"


@pytest.mark.parametrize(
    "header",
    [
        HEADER.replace(b"(9, 2)", b"(9, 2L"),  # TokenError in NumPy.
        HEADER.replace(b"9", b"9" * 25),
        HEADER.replace(b"}", b"\xff"),
        HEADER.replace(b"<f4", b"|O8"),
    ],
)
@pytest.mark.parametrize("command", ["restore", "inspect", "report"])
def test_damaged_headers_of_arrays(
    header: bytes,
    command: str,
    tmp_path: pathlib.Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    file = tmp_path / "films.npy"
    start = b"\x93NUMPY\x01\x00" + (118).to_bytes(2, "little")
    file.write_bytes(start + header.ljust(117) + b"\n" + bytes(72))
    if command == "restore":
        embedding = models.make(te.SGD(0.1), {"films": (9, 2)})
        with pytest.raises(tf.errors.DataLossError) as raised:
            checkpoint.restore(embedding, file)
        text = str(raised.value)
    else:
        arguments = {"inspect": ["checkpoint", "inspect"], "report": ["report"]}
        assert main([*arguments[command], str(file)]) == 2
        text = capsys.readouterr().err
    assert f"{file} is damaged" in text
    assert "allow_pickle" not in text


ONES = np.ones((9, 2), np.float32)
FILMS, SLOT = "layer/vars/films", "layer/vars/films%2Faccumulators"
COUNT = "layer/vars/_updates"
# The datasets of a file of Keras, and the error that they make.
CRAFTED: dict[str, tuple[dict[str, Any], type[Exception]]] = {
    "slot of strings": ({FILMS: ONES, SLOT: np.full((9, 2), b"x")}, TypeError),
    "strings": ({FILMS: np.full((9, 2), b"x")}, TypeError),
    "integers": ({FILMS: np.ones((9, 2), np.int64)}, TypeError),
    "bools": ({FILMS: ONES > 0}, TypeError),
    "complex": ({FILMS: ONES.astype(complex)}, TypeError),
    "structured": ({FILMS: np.zeros((9, 2), [("a", "f4")])}, TypeError),
    "empty": ({FILMS: ONES, SLOT: h5py.Empty("f4")}, tf.errors.DataLossError),
    "count": ({FILMS: ONES, COUNT: "abc"}, tf.errors.DataLossError),
    "NaN": ({FILMS: ONES, COUNT: np.float32("nan")}, tf.errors.DataLossError),
}


def assert_refused(
    file: str,
    error: type[Exception],
    capsys: pytest.CaptureFixture[str],
    sizes: Mapping[str, tuple[int, int]] | None = None,
) -> None:
    """No command reads a file; all of them name it."""
    embedding = models.make(te.Adagrad(0.1), sizes or {"films": (9, 2)})
    check_restore(embedding, file, error, file)
    commands = (["checkpoint", "inspect"], ["checkpoint", "convert"], ["report"])
    for command in commands:
        output = [file + "_converted"] if "convert" in command else []
        assert main([*command, file, *output]) == 2
        assert file in capsys.readouterr().err


@pytest.mark.parametrize("case", CRAFTED)
def test_crafted_files_of_keras(
    case: str, tmp_path: pathlib.Path, capsys: pytest.CaptureFixture[str]
) -> None:
    datasets, error = CRAFTED[case]
    path = tmp_path / "crafted.weights.h5"
    with h5py.File(path, "w") as file:
        for name, value in datasets.items():
            file[name] = value
    assert_refused(str(path), error, capsys)


def edit_archive(local: int, central: int, value: int) -> Callable[[bytearray], None]:
    """Changes a field of the only file of an archive: in its header and the list."""

    def change(content: bytearray) -> None:
        content[local] = content[content.rfind(b"PK\1\2") + central] = value

    return change


def invert(content: bytearray) -> None:
    content[60:70] = bytes(octet ^ 0x55 for octet in content[60:70])


def name_in_no_encoding(content: bytearray) -> None:
    entry = content.rfind(b"PK\1\2")
    content[entry + 9] = 8  # The name is UTF-8.
    content[entry + 46] = 0xFF


@pytest.mark.parametrize(
    "change",
    [
        invert,
        edit_archive(8, 10, 99),
        edit_archive(4, 6, 200),
        edit_archive(6, 8, 1),
        name_in_no_encoding,
    ],
    ids=["deflated", "method", "version", "encrypted", "name"],
)
def test_damaged_archives_of_keras(
    change: Callable[[bytearray], Any],
    tmp_path: pathlib.Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    path = tmp_path / "model.keras"
    weights = io.BytesIO()
    with h5py.File(weights, "w") as file:
        file[FILMS] = ONES
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("model.weights.h5", weights.getvalue())
    assert list(checkpoint.read(path)) == ["films"]
    content = bytearray(path.read_bytes())
    change(content)
    path.write_bytes(content)
    assert_refused(str(path), tf.errors.DataLossError, capsys)


LAYOUT: dict[str, Any] = {
    "num_sparse_cores": 4,
    "num_partitions": 2,
    "total_rows_per_sparse_core_shard": 5,
    "unsharded_shape": [20, 4],
    "unsharded_padded_shape": [20, 4],
}
STACKED = ["films", "users"]


def layout_record(**changes: Any) -> bytes:
    """A record of two tables in stacks of their own, with another place of the last."""
    record: Any = sparse_core_layout_pb2.SparseCoreTableLayouts()
    for table in STACKED:
        place = LAYOUT | (changes if table == STACKED[-1] else {})
        record.tables.add(table_name=table, stacked_table_name=table, **place)
    return record.SerializeToString()


# Tensors in the place of those of a whole checkpoint.
CRAFTED_BUNDLES: dict[str, dict[str, Any]] = {
    "empty graph": {object_graph.GRAPH_KEY: b""},
    "graph of a number": {object_graph.GRAPH_KEY: np.float32(1)},
    "two graphs": {object_graph.GRAPH_KEY: np.array([b"a", b"b"])},
    "count": {"updates": b"abc"},
    "two counts": {"updates": np.array([1, 2])},
    "NaN": {"updates": np.float32("nan")},
    "layouts of a number": {"layouts": np.float32(1)},
    "offset": {"layouts": layout_record(sparse_core_shard_row_offset=1000)},
    "no shape": {"layouts": layout_record(unsharded_shape=[])},
    "no padded shape": {"layouts": layout_record(unsharded_padded_shape=[])},
}


@pytest.mark.parametrize("case", CRAFTED_BUNDLES)
def test_crafted_files_of_tensorflow(
    case: str, tmp_path: pathlib.Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Their checksums are right."""
    names = [*STACKED, "_updates", "_sparse_core_table_layouts"]
    keys = dict(zip(names, [*STACKED, "updates", "layouts"], strict=True))
    tensors: dict[str, Any] = dict.fromkeys(STACKED, np.ones((20, 4), np.float32))
    graph = object_graph.make_graph("", keys, {})
    tensors |= {"updates": np.int64(3), "layouts": layout_record()}
    tensors |= {object_graph.GRAPH_KEY: graph}
    sizes = dict.fromkeys(STACKED, (20, 4))

    def save(name: str, stored: dict[str, Any]) -> str:
        prefix = str(tmp_path / name)
        tf.raw_ops.SaveV2(
            prefix=prefix,
            tensor_names=[*stored],
            shape_and_slices=[""] * len(stored),
            tensors=[tf.constant(value) for value in stored.values()],
        )
        return prefix

    checkpoint.restore(models.make(te.SGD(0.1), sizes), save("whole", tensors))
    prefix = save("crafted", tensors | CRAFTED_BUNDLES[case])
    assert_refused(prefix, tf.errors.DataLossError, capsys, sizes)


def test_objects_that_are_not_there() -> None:
    graph = object_graph.make_graph("embedding", {"films": "films"}, {})
    keys = {"films": [9, 2]}
    assert "embedding" in object_graph.read_objects("saved.index", graph, keys)
    for of_slot in (False, True):
        damaged: Any = object_graph._Graph.FromString(graph)
        if of_slot:
            damaged.nodes[1].slot_variables.add(slot_variable_node_id=7)
        else:
            damaged.nodes[1].children[0].node_id = 7
        with pytest.raises(tf.errors.DataLossError, match=r"saved\.index is damaged"):
            object_graph.read_objects("saved.index", damaged.SerializeToString(), keys)


def test_a_conversion_to_arrays_that_fails_leaves_nothing(
    tmp_path: pathlib.Path, capsys: pytest.CaptureFixture[str]
) -> None:
    embedding = models.make(te.SGD(0.1), {"films": (100_000, 2)})
    path = checkpoint.save(embedding, tmp_path / "saved")
    before = sorted(tmp_path.iterdir())
    convert = ["checkpoint", "convert", path, str(tmp_path / "arrays"), "--to", "numpy"]
    with small_files(500_000):
        assert main(convert) == 2
    assert str(tmp_path / "arrays") in capsys.readouterr().err
    assert sorted(tmp_path.iterdir()) == before


@pytest.fixture
def saved(tmp_path: pathlib.Path) -> str:
    source = models.make(te.SGD(0.1), {"films": (9, 2)})
    return checkpoint.save(source, tmp_path / "saved")


NUL, BELOW = "a NUL character", "cannot be saved as a file below"


@pytest.mark.parametrize(
    ("command", "text"),
    [
        ("checkpoint convert SAVED FOLDER/a\0b --to=tensorflow", NUL),
        ("checkpoint convert SAVED FOLDER/a\0b --to=numpy", NUL),
        ("checkpoint convert SAVED FOLDER/x --to=numpy --rename=films=a\0b", NUL),
        ("report SAVED --output FOLDER/r\0.html", NUL),
        *(
            (f"checkpoint convert SAVED FOLDER/x --to=numpy --rename=films={n}", BELOW)
            for n in ("../films", "FOLDER/films", "a//b", ".")
        ),
    ],
)
def test_names_that_no_file_can_have(
    command: str,
    text: str,
    saved: str,
    tmp_path: pathlib.Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    before = sorted(tmp_path.rglob("*"))
    words = [
        word.replace("SAVED", saved).replace("FOLDER", str(tmp_path))
        for word in command.split()
    ]
    assert main(words) == 2
    assert text in capsys.readouterr().err
    assert sorted(tmp_path.rglob("*")) == before


@pytest.mark.parametrize(
    "content",
    ["{", "[]", '{"films.npy": "one"}', '{"films.npy": 1e999}', "[" * 200_000],
    ids=["cut", "list", "text", "infinite", "deep"],
)
def test_damaged_checksums(content: str, tmp_path: pathlib.Path) -> None:
    np.save(tmp_path / "films.npy", np.ones((9, 2)))
    manifest = tmp_path / "checksums.json"
    manifest.write_text(content)
    with pytest.raises(tf.errors.DataLossError, match="cannot be parsed") as raised:
        checkpoint.read(tmp_path)
    assert str(manifest) in str(raised.value)


def test_arrays_of_an_interrupted_conversion_are_cleared(
    saved: str, tmp_path: pathlib.Path
) -> None:
    left = tmp_path / ("arrays" + SCRATCH)
    left.mkdir()
    np.save(left / "books.npy", np.ones((9, 2)))
    arrays = str(tmp_path / "arrays")
    assert main(["checkpoint", "convert", saved, arrays, "--to", "numpy"]) == 0
    assert list(checkpoint.read(tmp_path / "arrays")) == ["films"]
    assert not left.exists()


@pytest.mark.parametrize("large", [False, True])
def test_values_are_checked_when_they_are_read(
    large: bool, rng: np.random.Generator, tmp_path: pathlib.Path
) -> None:
    """Read alone, without `verify`, whether in one slice or in several."""
    sizes = {"films": (400_000 if large else 9, 16)}
    embedding = models.make(te.SGD(0.1), sizes)
    path = checkpoint.save(embedding, tmp_path / "saved")
    file = tmp_path / ("saved.data-00000-of-00003" if large else DATA)
    content = bytearray(file.read_bytes())
    content[5] ^= 4
    file.write_bytes(content)
    rows = checkpoint.read(path)["films"].parameters
    for read in (rows.numpy, lambda: rows.read(0, 3), lambda: rows.read(3, 5)):
        with pytest.raises(tf.errors.DataLossError, match="Checksum does not match"):
            read()


# Saves once, then again, and dies in the middle of that.
KILLED = """
import os, signal, sys
import tensorflow as tf
import tpu_embedding as te
from tpu_embedding import checkpoint
from tpu_embedding.__main__ import main
from tpu_embedding.checkpoint.writing import SCRATCH

class Killer:
    def start(self, task, total): pass
    def advance(self, count): os.kill(os.getpid(), signal.SIGKILL)

films = te.TableConfig(9, 2, te.RowIdInitializer(), name="films")
coded = te.TableConfig(9, 16, te.RowIdInitializer(), name="coded", dtype="int8")
config = {"film": te.FeatureConfig(films), "coded": te.FeatureConfig(coded)}
embedding = te.TPUEmbedding(config, te.Adagrad(0.1))
checkpoint.save(embedding, sys.argv[1] + "/first")
checkpoint.save(embedding, sys.argv[1] + "/second", progress=Killer())
"""


@pytest.mark.second_tier
def test_a_killed_save(tmp_path: pathlib.Path) -> None:
    done = new_process.run("-c", KILLED, tmp_path)
    assert done.returncode == -signal.SIGKILL
    embedding = models.make(te.Adagrad(0.1), {"films": (9, 2)})
    with pytest.raises(tf.errors.NotFoundError, match="There is no checkpoint at"):
        checkpoint.restore(embedding, tmp_path / "second")
    checkpoint.restore(embedding, tmp_path / "first")
    expected = np.repeat(np.arange(9.0), 2).reshape(9, 2)
    values = models.values(embedding)["films"]["parameters"]
    np.testing.assert_array_equal(values, expected)
    table = te.TableConfig(9, 16, name="coded", dtype="int8")
    coded = te.TPUEmbedding({"coded": te.FeatureConfig(table)}, te.Adagrad(0.1))
    checkpoint.restore(coded, tmp_path / "first")
    np.testing.assert_array_equal(coded.embedding_tables[table][:, 15], range(9))
    checkpoint.save(embedding, tmp_path / "second")  # What was left is no obstacle.
    assert not list(tmp_path.glob("*unfinished*"))
    checkpoint.read(tmp_path / "second").verify()


@pytest.mark.parametrize("kind", ["tensorflow", "numpy"])
def test_other_folders_are_left_alone(
    kind: str, saved: str, tmp_path: pathlib.Path
) -> None:
    mine = tmp_path / "second_parts" / "mine"
    mine.parent.mkdir()
    mine.touch()
    arguments = ["convert", saved, str(tmp_path / "second"), "--to", kind]
    assert main(["checkpoint", *arguments]) == 0
    assert mine.exists()
