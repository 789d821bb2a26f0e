"""Reading TensorFlow's files in place, against TensorFlow's own reader."""

from __future__ import annotations

import pathlib

import numpy as np
import pytest
import tensorflow as tf
from tensorflow.core.protobuf import tensor_bundle_pb2

from tpu_embedding import checkpoint
from tpu_embedding.checkpoint import bundle, index_file
from tpu_embedding.checkpoint.bundle import Bundle


def save(path: pathlib.Path, tensors: dict[tuple[str, str], np.ndarray]) -> str:
    """Writes tensors by (name, slice)."""
    tf.raw_ops.SaveV2(
        prefix=str(path),
        tensor_names=[name for name, _ in tensors],
        shape_and_slices=[slice_ for _, slice_ in tensors],
        tensors=list(tensors.values()),
    )
    return str(path)


@pytest.mark.parametrize("dtype", ["float32", "float64", "float16", "bfloat16"])
def test_whole_tensors(
    dtype: str, rng: np.random.Generator, tmp_path: pathlib.Path
) -> None:
    numpy_dtype = tf.as_dtype(dtype).as_numpy_dtype
    tables = {
        name: rng.standard_normal((50, 3)).astype(numpy_dtype) for name in ("a", "b")
    }
    path = save(tmp_path / "x", {(name, ""): table for name, table in tables.items()})
    found = Bundle(path)
    for name, table in tables.items():
        rows = found.rows(name)
        rows.verify()
        assert (rows.shape, rows.dtype) == (table.shape, table.dtype)
        np.testing.assert_array_equal(rows.read(7, 31), table[7:31])
        np.testing.assert_array_equal(rows.numpy(), table)


# The keys of slices are ordered codes of their numbers: around the ends of each
# length, of one byte to five.
@pytest.mark.parametrize(
    "start", [0, 1, 63, 64, 8191, 8192, 2**20 - 1, 2**20, 2**27 - 1, 2**27, 2**34]
)
def test_slices_with_large_numbers(start: int, tmp_path: pathlib.Path) -> None:
    stop = start + 2
    slice_ = f"{stop} 1 {start},2:-"
    path = save(tmp_path / "x", {("t", slice_): np.array([[1.0], [2.0]], np.float32)})
    rows = Bundle(path).rows("t")
    rows.verify()
    np.testing.assert_array_equal(rows.read(start, stop), [[1.0], [2.0]])


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
    rows = Bundle(path).rows("t")
    rows.verify()
    np.testing.assert_array_equal(rows.numpy(), table)
    for start in range(9):
        np.testing.assert_array_equal(rows.read(start, 9), table[start:])


def test_an_index_of_many_blocks(tmp_path: pathlib.Path) -> None:
    names = [f"object/table_{i:04}" for i in range(3000)]
    values = {
        (name, ""): np.full((2, 1), i, np.float32) for i, name in enumerate(names)
    }
    found = Bundle(save(tmp_path / "x", values))
    assert list(found.entries) == names
    assert found.rows(names[1234]).numpy().tolist() == [[1234], [1234]]


def test_a_big_endian_checkpoint(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = save(tmp_path / "x", {("t", ""): np.zeros((2, 2), np.float32)})
    entries = index_file.read_index(path + ".index")
    header = tensor_bundle_pb2.BundleHeaderProto.FromString(entries[b""])
    header.endianness = tensor_bundle_pb2.BundleHeaderProto.BIG
    changed = {**entries, b"": header.SerializeToString()}
    monkeypatch.setattr(bundle, "read_index", lambda path: changed)
    with pytest.raises(NotImplementedError, match="on a big-endian machine"):
        Bundle(path)


def test_integers_are_no_tables(tmp_path: pathlib.Path) -> None:
    path = save(tmp_path / "x", {("t", ""): np.zeros((2, 2), np.int32)})
    with pytest.raises(ValueError, match="No embedding tables are found in"):
        checkpoint.read(path)
