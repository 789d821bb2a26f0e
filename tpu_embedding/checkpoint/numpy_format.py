"""Plain NumPy tables: a `.npy` file, an `.npz` file, a folder of `.npy` files.

In a folder `<table>.npy` is a table and `<table>/<slot>.npy` one of its slots; in an
`.npz` file the names of the arrays are `<table>` and `<table>/<slot>`.
"""

from __future__ import annotations

import dataclasses
import os
import pathlib
import shutil
import zipfile
from collections.abc import Callable, Collection, Iterator, Mapping
from typing import Any

import numpy as np
import tensorflow as tf

from tpu_embedding.checkpoint import errors
from tpu_embedding.checkpoint.array_rows import ArrayRows
from tpu_embedding.checkpoint.checkpoint_view import LogicalCheckpoint
from tpu_embedding.checkpoint.grouping import group_tables
from tpu_embedding.checkpoint.locks import one_writer
from tpu_embedding.checkpoint.progress import Progress
from tpu_embedding.checkpoint.writing import SCRATCH
from tpu_embedding.layout.table_arrays import Rows

_FILE, _ARCHIVE = ".npy", ".npz"
_MOST_FILES = 100_000  # Below a folder; in more no one keeps tables, as in "/".
_WIDEST = 8  # Bytes of a float64; TensorFlow has nothing for NumPy's longdouble.


def is_numpy(path: str) -> bool:
    """Whether a path is one of the three."""
    if os.path.isdir(path):
        # The folder of a training run may well have arrays of its own somewhere.
        if tf.train.latest_checkpoint(path):
            return False
        return any(_files(path))
    return path.endswith((_FILE, _ARCHIVE))


def read_numpy(
    path: str, root: str | None, tables: Collection[str]
) -> LogicalCheckpoint:
    """See `formats.read`."""
    if root is not None:
        raise errors.root_of_arrays(path, root)
    if not os.path.exists(path):
        raise errors.not_found(path)
    matrices: dict[str, Rows] = {}
    for name, where, load in _arrays(path):
        array = _loaded(where, load)
        if not isinstance(array, np.ndarray):  # Anything may lie in an archive.
            raise errors.corrupted(path, f"{name} is no array")
        if array.ndim == 2:
            if not _is_floating(array.dtype) or array.dtype.itemsize > _WIDEST:
                raise errors.stored_dtype(path, name, str(array.dtype))
            matrices[name] = _LoadedRows(array.shape, array.dtype, where, load)
    if not matrices:
        raise errors.no_tables(path)
    return LogicalCheckpoint(path, "NumPy", group_tables(matrices, tables))


def write_numpy(path: str, matrices: Mapping[str, Rows], progress: Progress) -> str:
    """Writes a folder of `.npy` files, which appears when all of them are there.

    bfloat16, which NumPy does not have, becomes float32.

    Args:
      path: The folder.
      matrices: By name, `<table>` or `<table>/<slot>`.
      progress: Told of each slice.

    Raises:
      tf.errors.AlreadyExistsError: If the folder is there.
      ValueError: If a name is no path of a file below the folder.
    """
    _refuse_names(path, matrices)
    with one_writer(path):
        if os.path.exists(path):
            raise errors.exists(path)
        _write(path, matrices, progress)
    return path


def _write(path: str, matrices: Mapping[str, Rows], progress: Progress) -> None:
    scratch = pathlib.Path(path + SCRATCH)
    shutil.rmtree(scratch, ignore_errors=True)  # Of an interrupted write.
    progress.start("Writing", sum(rows.nbytes for rows in matrices.values()))
    for name, rows in matrices.items():
        file = scratch / (name + _FILE)
        file.parent.mkdir(parents=True, exist_ok=True)
        dtype = rows.dtype if _is_floating(rows.dtype) else np.dtype(np.float32)
        with file.open("wb") as stream:
            np.lib.format.write_array_header_1_0(
                stream,
                {
                    "descr": np.lib.format.dtype_to_descr(dtype),
                    "fortran_order": False,
                    "shape": rows.shape,
                },
            )
            for start, stop in rows.slices():
                stream.write(rows.read(start, stop).astype(dtype).tobytes())
                progress.advance((stop - start) * rows.row_bytes)
    scratch.rename(path)


def _refuse_names(path: str, matrices: Mapping[str, Rows]) -> None:
    """Names come out of checkpoints of anyone: none may lead out of the folder."""
    for name in matrices:
        if not {"", ".", ".."}.isdisjoint(name.split("/")):
            raise errors.no_file_name(path, name)


@dataclasses.dataclass(frozen=True)
class _LoadedRows(ArrayRows):
    """An array that is opened for each read, so that none of it stays in memory."""

    path: str
    load: Callable[[], np.ndarray]

    def read(self, start: int, stop: int) -> np.ndarray:
        return np.array(_loaded(self.path, self.load)[start:stop])

    def verify(self) -> None:
        if _loaded(self.path, self.load).shape != self.array_shape:
            raise errors.corrupted(self.path, "its shape has changed")


def _arrays(path: str) -> Iterator[tuple[str, str, Callable[[], np.ndarray]]]:
    """(name, file, how to load it) of each array."""
    if os.path.isdir(path):
        folder = pathlib.Path(path)
        for file in sorted(_files(path)):
            name = file.relative_to(folder).with_suffix("").as_posix()
            yield (
                name,
                str(file),
                lambda file=file: np.load(file, mmap_mode="r", allow_pickle=False),
            )
    elif path.endswith(_FILE):
        yield (
            pathlib.Path(path).stem,
            path,
            lambda: np.load(path, mmap_mode="r", allow_pickle=False),
        )
    else:
        for name in _loaded(path, lambda: _archive(path, None)):
            yield name, path, lambda name=name: _archive(path, name)


def _files(path: str) -> Iterator[pathlib.Path]:
    """The files of arrays below a folder."""
    seen = 0
    for folder, _, names in os.walk(path):
        seen += 1 + len(names)
        if seen > _MOST_FILES:
            raise errors.large_folder(path, _MOST_FILES)
        yield from (pathlib.Path(folder, n) for n in names if n.endswith(_FILE))


def _archive(path: str, name: str | None) -> Any:
    """An array of an `.npz` file, or the names of all for None."""
    with open(path, "rb") as stream, np.load(stream, allow_pickle=False) as archive:
        return archive.files if name is None else archive[name]


def _loaded(path: str, load: Callable[[], Any]) -> Any:
    try:
        return load()
    except (ValueError, EOFError, OSError, zipfile.BadZipFile) as error:
        raise errors.corrupted(path, str(error)) from error


def _is_floating(dtype: np.dtype[Any]) -> bool:
    return np.issubdtype(dtype, np.floating)
