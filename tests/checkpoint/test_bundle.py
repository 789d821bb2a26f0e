"""Reads tensors of TensorFlow's files by ranges of rows."""

from __future__ import annotations

import pathlib

import numpy as np
import pytest
import tensorflow as tf

from tpu_embedding import checkpoint
from tpu_embedding.tables import rows as table_rows


def save(path: pathlib.Path, tensors: dict[tuple[str, str], np.ndarray]) -> str:
    """Writes tensors by (name, slice)."""
    tf.raw_ops.SaveV2(
        prefix=str(path),
        tensor_names=[name for name, _ in tensors],
        shape_and_slices=[slice_ for _, slice_ in tensors],
        tensors=list(tensors.values()),
    )
    return str(path)


def check(path: str, name: str, table: np.ndarray) -> None:
    """Reads a table whole, by slices and by other ranges."""
    rows = checkpoint.read(path)[name].parameters
    rows.verify()
    assert (rows.shape, rows.dtype) == (table.shape, table.dtype)
    np.testing.assert_array_equal(rows.numpy(), table)
    for start in range(0, len(table), 3):
        for stop in (start + 1, len(table)):
            np.testing.assert_array_equal(rows.read(start, stop), table[start:stop])
    slices = [rows.read(start, stop) for start, stop in rows.slices()]
    np.testing.assert_array_equal(np.concatenate(slices), table)


@pytest.mark.parametrize("dtype", ["float32", "float64", "float16", "bfloat16"])
def test_whole_tensors(
    dtype: str, rng: np.random.Generator, tmp_path: pathlib.Path
) -> None:
    numpy_dtype = tf.as_dtype(dtype).as_numpy_dtype
    tables = {
        name: rng.standard_normal((50, 3)).astype(numpy_dtype) for name in ("a", "b")
    }
    path = save(tmp_path / "x", {(name, ""): table for name, table in tables.items()})
    for name, table in tables.items():
        check(path, name, table)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
@pytest.mark.parametrize("sliced", [True, False])
def test_several_slices_of_16_bits(
    dtype: str,
    sliced: bool,
    rng: np.random.Generator,
    tmp_path: pathlib.Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """RestoreV2 cannot join slices of float16, nor read a part of one."""
    monkeypatch.setattr(table_rows, "SLICE_BYTES", 24)
    table = rng.standard_normal((9, 3)).astype(tf.as_dtype(dtype).as_numpy_dtype)
    specs = {"": table}
    if sliced:
        starts = {0: 4, 4: 4, 8: 1}
        specs = {f"9 3 {r},{n}:0,3": table[r : r + n] for r, n in starts.items()}
    path = save(tmp_path / "x", {("t", spec): value for spec, value in specs.items()})
    check(path, "t", table)


def test_slices_of_rows_and_columns(
    rng: np.random.Generator, tmp_path: pathlib.Path
) -> None:
    table = rng.standard_normal((9, 5)).astype(np.float32)
    cuts = {
        f"9 5 {r},{n}:{c},{m}": table[r : r + n, c : c + m]
        for r, n in ((0, 4), (4, 3), (7, 2))
        for c, m in ((0, 2), (2, 3))
    }
    path = save(tmp_path / "x", {("t", spec): value for spec, value in cuts.items()})
    check(path, "t", table)


@pytest.mark.parametrize("size", [4, 24, 100])
def test_slices_in_several_files(
    size: int,
    rng: np.random.Generator,
    tmp_path: pathlib.Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Whatever the size of the slices in memory, beside that in the files."""
    monkeypatch.setattr(table_rows, "SLICE_BYTES", size)
    table = rng.standard_normal((9, 3)).astype(np.float32)
    for name, first, last in (("p0", 0, 2), ("p1", 2, 7), ("p2", 7, 9)):
        spec = f"9 3 {first},{last - first}:0,3"
        save(tmp_path / name, {("t", spec): table[first:last]})
    path = str(tmp_path / "x")
    parts = [str(tmp_path / name) for name in ("p0", "p1", "p2")]
    tf.raw_ops.MergeV2Checkpoints(checkpoint_prefixes=parts, destination_prefix=path)
    check(path, "t", table)


def test_an_index_of_many_blocks(tmp_path: pathlib.Path) -> None:
    names = [f"object/table_{i:04}" for i in range(3000)]
    values = {
        (name, ""): np.full((2, 1), i, np.float32) for i, name in enumerate(names)
    }
    found = checkpoint.read(save(tmp_path / "x", values))
    assert list(found) == names
    assert found[names[1234]].parameters.numpy().tolist() == [[1234], [1234]]


def test_a_lost_part_of_the_index(tmp_path: pathlib.Path) -> None:
    """TensorFlow's reader skips a damaged block of a large index without an error."""
    path, names = str(tmp_path / "x"), [f"v{i:05}" for i in range(6000)]
    tf.raw_ops.SaveV2(
        prefix=path,
        tensor_names=names,
        shape_and_slices=[""] * len(names),
        tensors=[tf.zeros([1, 1])] * len(names),
    )
    file = tmp_path / "x.index"
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 4
    file.write_bytes(content)
    with pytest.raises(tf.errors.DataLossError, match=r"x.index is damaged"):
        checkpoint.read(path)


def test_integers_are_no_tables(tmp_path: pathlib.Path) -> None:
    path = save(tmp_path / "x", {("t", ""): np.zeros((2, 2), np.int32)})
    with pytest.raises(ValueError, match="There are no embedding tables in"):
        checkpoint.read(path)
