"""NumPy tables: a `.npy` file, an `.npz` file, or a folder of `.npy` files.

In a folder `<table>.npy` is a table and `<table>/<slot>.npy` one of its slots; in an
`.npz` file the names of the arrays are `<table>` and `<table>/<slot>`. A growing table
also has `<table>/ids`, an integer for each row. A hashed one has `<table>/hashing`: the
numbers of rows and of hashes, the index of `combine` and the salt. A `.npy` file has no
checksum: `write_numpy` adds `checksums.json`, with the CRC-32 of each file.
"""

from __future__ import annotations

import functools
import io
import json
import os
import pathlib
import shutil
import zlib
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from tpu_embedding.checkpoint import errors
from tpu_embedding.checkpoint.checkpoint_view import (
    LogicalCheckpoint,
    Vector,
    group_tables,
    is_floating,
    vector_owner,
)
from tpu_embedding.checkpoint.writing import SCRATCH, Progress, one_writer
from tpu_embedding.errors import check_path
from tpu_embedding.tables.rows import SLICE_BYTES, TableRows

_FILE, _ARCHIVE, _CHECKSUMS = ".npy", ".npz", "checksums.json"
_MAX_FILES = 100_000  # A folder with more, such as "/", is not a folder of tables.


def is_numpy(path: str) -> bool:
    """Returns whether a path is a file or folder of NumPy arrays."""
    if os.path.isdir(path):
        # The folder of a training run may well have arrays of its own somewhere.
        if tf.train.latest_checkpoint(path):
            return False
        return any(_files(path))
    return path.endswith((_FILE, _ARCHIVE))


def read_numpy(
    path: str, root: str | None, tables: Collection[str]
) -> LogicalCheckpoint:
    """See `checkpoint.read`."""
    if root is not None:
        raise ValueError(
            f"{path} holds arrays, not objects, so `root` must be None. Received: "
            f"{root!r}."
        )
    if not os.path.exists(path):
        raise errors.not_found(path)
    matrices: dict[str, TableRows] = {}
    vectors: dict[str, Vector] = {}
    checksums = _checksums_of(path)
    for name, where, load in _arrays(path):
        checksum = checksums.pop(where, None)
        array = _loaded(where, load)
        if not isinstance(array, np.ndarray):  # Anything may lie in an archive.
            raise errors.corrupted(path, f"{name} is not an array")
        integers = np.issubdtype(array.dtype, np.signedinteger)
        if vector_owner(name) and array.ndim == 1 and integers:
            file = _File(where, load, checksum)
            vectors[name] = Vector(len(array), file.numbers)
            continue
        if checksum is not None and not (array.ndim == 2 and is_floating(array.dtype)):
            raise errors.corrupted(where, "its header has changed")
        if array.ndim == 2:
            matrices[name] = _LoadedRows(array, _File(where, load, checksum))
    if checksums:
        raise errors.corrupted(next(iter(checksums)), "it is missing")
    if not matrices:
        raise errors.no_tables(path)
    found = group_tables(path, matrices, tables, vectors)
    return LogicalCheckpoint(path, "NumPy", found)


def write_numpy(
    path: str,
    matrices: Mapping[str, TableRows],
    vectors: Mapping[str, Vector],
    progress: Progress,
) -> str:
    """Writes a folder of `.npy` files, which appears when all of them are complete.

    It writes bfloat16, which NumPy does not have, as float32.

    Args:
      path: The folder.
      matrices: The matrices by name, `<table>` or `<table>/<slot>`.
      vectors: The vectors by name: `<table>/ids` and others of growing tables,
        `<table>/hashing` of hashed ones.
      progress: Receives the bytes of each slice.

    Raises:
      tf.errors.AlreadyExistsError: If the folder exists.
      ValueError: If a name cannot be the path of a file below the folder.
      OSError: If a file cannot be written; then there is no folder.
    """
    for name in (*matrices, *vectors):
        check_path(name)  # Names in checkpoints must not lead out of the folder.
        if not {"", ".", ".."}.isdisjoint(name.split("/")):
            raise ValueError(
                f"Table or slot {name!r} cannot be saved as a file below {path}. "
                "Rename the table, e.g. with `--rename OLD=NEW`, so that no part of "
                "its name is '', '.' or '..'."
            )
    with one_writer(path):
        if os.path.exists(path):
            raise errors.exists(path)
        scratch = pathlib.Path(path + SCRATCH)
        shutil.rmtree(scratch, ignore_errors=True)  # Remains of an interrupted write.
        try:
            _write(scratch, matrices, vectors, progress)
            scratch.rename(path)
        except OSError as error:  # The error of a full disk names no file.
            where = error.filename or path
            raise OSError(error.errno, error.strerror, where) from error
        finally:
            shutil.rmtree(scratch, ignore_errors=True)
    return path


def _write(
    scratch: pathlib.Path,
    matrices: Mapping[str, TableRows],
    vectors: Mapping[str, Vector],
    progress: Progress,
) -> None:
    sizes = [part.nbytes for part in (*matrices.values(), *vectors.values())]
    progress.start("Writing", sum(sizes))
    checksums = {}

    def write(
        name: str, shape: Sequence[int], dtype: Any, parts: Iterable[np.ndarray]
    ) -> None:
        file = scratch / (name + _FILE)
        file.parent.mkdir(parents=True, exist_ok=True)
        header = io.BytesIO()
        descr = np.lib.format.dtype_to_descr(dtype)
        fields = {"descr": descr, "fortran_order": False, "shape": tuple(shape)}
        np.lib.format.write_array_header_1_0(header, fields)
        with file.open("wb") as stream:
            stream.write(header.getvalue())
            checksum = zlib.crc32(header.getvalue())
            for part in parts:
                values = part.astype(dtype).tobytes()
                stream.write(values)
                checksum = zlib.crc32(values, checksum)
                progress.advance(part.nbytes)
        checksums[name + _FILE] = checksum

    for name, rows in matrices.items():
        numpy_has_it = np.issubdtype(rows.dtype, np.floating)
        dtype = rows.dtype if numpy_has_it else np.dtype(np.float32)
        slices = (rows.read(start, stop) for start, stop in rows.slices())
        write(name, rows.shape, dtype, slices)
    for name, vector in vectors.items():
        write(name, [vector.length], np.dtype(np.int64), [vector.read()])
    (scratch / _CHECKSUMS).write_text(json.dumps(checksums, indent=2))


def _checksums_of(path: str) -> dict[str, int]:
    """Returns the stored CRC-32 of each file of a folder, or of one file, by path."""
    if os.path.isdir(path):
        return _checksums(pathlib.Path(path))
    file = pathlib.Path(path)
    for folder in file.parents[:2]:  # A slot is one folder below its table.
        stored = _checksums(folder)
        if str(file) in stored:
            return {path: stored[str(file)]}
    return {}


def _checksums(path: pathlib.Path) -> dict[str, int]:
    """Reads the CRC-32 of each file of a folder, by path."""
    manifest = path / _CHECKSUMS
    if not manifest.exists():
        return {}
    with errors.parsing(str(manifest)):
        stored = json.loads(manifest.read_text())
        return {str(path / name): int(crc) for name, crc in stored.items()}


class _File:
    """The file of an array, which is opened for each read."""

    def __init__(
        self, path: str, load: Callable[[], np.ndarray], checksum: int | None
    ) -> None:
        """Takes its path, a function that opens it, and its CRC-32 or None."""
        self.path, self._load, self._checksum = path, load, checksum

    def array(self) -> np.ndarray:
        """Returns the array; the first call reads the file and compares its CRC-32."""
        if self._checksum is not None:
            checksum = 0
            with open(self.path, "rb") as stream:
                while octets := stream.read(SLICE_BYTES):
                    checksum = zlib.crc32(octets, checksum)
            if checksum != self._checksum:
                raise errors.corrupted(self.path, "its checksum differs")
            self._checksum = None
        return _loaded(self.path, self._load)

    def numbers(self) -> np.ndarray:
        """Returns the array as int64, in memory."""
        return np.array(self.array(), np.int64)


class _LoadedRows(TableRows):
    """A matrix in a file that is opened for each read, and not kept in memory."""

    def __init__(self, array: np.ndarray, file: _File) -> None:
        super().__init__(array.shape, array.dtype)
        self._file = file

    def read(self, start: int, stop: int) -> np.ndarray:
        return np.array(self._file.array()[start:stop])

    def verify(self) -> None:
        if self._file.array().shape != self.shape:
            raise errors.corrupted(self._file.path, "its shape has changed")


def _arrays(path: str) -> Iterator[tuple[str, str, Callable[[], np.ndarray]]]:
    """Yields (name, file, how to load it) of each array."""
    if os.path.isdir(path):
        folder = pathlib.Path(path)
        for file in sorted(_files(path)):
            name = file.relative_to(folder).with_suffix("").as_posix()
            yield name, str(file), functools.partial(_mapped, str(file))
    elif path.endswith(_FILE):
        yield pathlib.Path(path).stem, path, functools.partial(_mapped, path)
    else:
        for name in _loaded(path, lambda: _archive(path, None)):
            yield name, path, lambda name=name: _archive(path, name)


def _files(path: str) -> Iterator[pathlib.Path]:
    """Yields the files of arrays below a folder."""
    seen = 0
    for folder, _, names in os.walk(path):
        seen += 1 + len(names)
        if seen > _MAX_FILES:
            raise ValueError(
                f"{path} has more than {_MAX_FILES:,} files and folders below it, so "
                "it is not a folder of tables. Pass the path of the checkpoint itself, "
                "or the folder of its .npy files."
            )
        yield from (pathlib.Path(folder, n) for n in names if n.endswith(_FILE))


def _mapped(path: str) -> Any:
    return np.load(path, mmap_mode="r", allow_pickle=False)


def _archive(path: str, name: str | None) -> Any:
    """Reads an array of an `.npz` file; for None returns the names of all arrays."""
    with open(path, "rb") as stream, np.load(stream, allow_pickle=False) as archive:
        return archive.files if name is None else archive[name]


def _loaded(path: str, load: Callable[[], Any]) -> Any:
    """Calls `load`; see `errors.parsing`."""
    with errors.parsing(path):
        try:
            return load()
        except ValueError as error:
            if "allow_pickle" not in str(error):
                raise
            # NumPy's message is not shown, as it suggests running code of the file.
            reason = "it holds Python objects, or lacks a NumPy header"
            raise errors.corrupted(path, reason) from error
