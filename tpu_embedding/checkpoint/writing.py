"""Writes TensorFlow checkpoints in slices, without a whole table in memory.

SaveV2 takes all its tensors at once, so it is called for one part at a time;
MergeV2Checkpoints then makes one checkpoint of the parts without copying them. The
index comes last: until it is there, there is no checkpoint, and an interrupted save
leaves earlier checkpoints as they are. Processes write into a folder one after the
other.
"""

from __future__ import annotations

import contextlib
import errno
import itertools
import json
import os
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple, Protocol

import numpy as np
import tensorflow as tf
from absl import logging

from tpu_embedding.checkpoint import errors
from tpu_embedding.checkpoint.checkpoint_view import LogicalTable
from tpu_embedding.checkpoint.hashings import hashing_arrays
from tpu_embedding.checkpoint.object_graph import GRAPH_KEY, make_graph, variable_key
from tpu_embedding.checkpoint.sparse_core_format import stack
from tpu_embedding.errors import check_path
from tpu_embedding.layout.partition import TableLayout
from tpu_embedding.layout.plan import UPDATES
from tpu_embedding.tables.rows import ProcessGroup, TableRows, by_checkpoint_name

try:
    import fcntl
except ImportError:  # Windows
    fcntl = None

# A folder beside the files being written, emptied first. Users must not use the name.
SCRATCH = ".tpu_embedding_unfinished"
_UNFINISHED = ".unfinished"  # The end of the name of a file that is being written.
_MIN_PART_BYTES = 16 << 20
_MAX_PARTS = 128  # The most files of a large checkpoint: one for each part.
_NO_LOCKS = (errno.ENOLCK, errno.ENOSYS, errno.ENOTSUP)  # some network file systems


class Progress(Protocol):
    """Receives the number of bytes that a long task has read or written."""

    def start(self, task: str, total: int) -> None:
        """Notes that a task of `total` bytes begins."""
        ...

    def advance(self, count: int) -> None:
        """Notes that `count` more bytes are done."""
        ...


class NoProgress:
    """Reports nothing."""

    def start(self, task: str, total: int) -> None:
        del task, total

    def advance(self, count: int) -> None:
        del count


@contextlib.contextmanager
def one_writer(path: str) -> Iterator[None]:
    """Waits until no other process writes into the folder of `path`.

    The system releases the lock when the process ends, however it ends. There is no
    lock for remote paths ("gs://..."), on file systems without locks and on Windows.

    Raises:
      ValueError: If no file can have that name.
    """
    check_path(path)
    if "://" in path or fcntl is None:
        yield
        return
    parent = os.path.dirname(os.path.abspath(path))
    with contextlib.suppress(FileExistsError):  # To open a file is the clearer error.
        os.makedirs(parent, exist_ok=True)
    folder = os.open(parent, os.O_RDONLY | os.O_DIRECTORY)
    try:
        try:
            fcntl.flock(folder, fcntl.LOCK_EX)
        except OSError as error:
            if error.errno not in _NO_LOCKS:
                raise
        yield
    finally:
        os.close(folder)


@contextlib.contextmanager
def completed(path: str, *, overwrite: bool = False) -> Iterator[str]:
    """Yields a place beside `path`, and renames what is there when the body ends.

    Callers hold `one_writer`. What a killed process left there is removed first, and
    what the body has written is removed if it fails.
    """
    place = path + _UNFINISHED
    _delete(place)
    try:
        yield place
        tf.io.gfile.rename(place, path, overwrite=overwrite)
    except BaseException:
        _delete(place)
        raise


def _delete(path: str) -> None:
    if tf.io.gfile.isdir(path):
        tf.io.gfile.rmtree(path)
    elif tf.io.gfile.exists(path):
        tf.io.gfile.remove(path)


class Piece(NamedTuple):
    """Some rows of a matrix, or numbers of a vector.

    Attributes:
      key: The key of the matrix or vector in the checkpoint.
      spec: The place of the rows; see `slice_spec`.
      values: The rows [n, C], or the numbers [n].
    """

    key: str
    spec: str
    values: np.ndarray


def part_bytes(total: int) -> int:
    """Returns the size in bytes of a part of a checkpoint of `total` bytes."""
    return max(_MIN_PART_BYTES, total // _MAX_PARTS)


def slice_spec(shape: tuple[int, ...], start: int, stop: int) -> str:
    """Returns the slice of rows as SaveV2 and RestoreV2 take it; "" for all rows.

    >>> slice_spec((9, 2), 3, 5), slice_spec((9, 2), 0, 9), slice_spec((9,), 3, 5)
    ('9 2 3,2:0,2', '', '9 3,2')
    """
    rows, *columns = shape
    if stop - start == rows:
        return ""
    every = "".join(f":0,{count}" for count in columns)
    return f"{' '.join(map(str, shape))} {start},{stop - start}{every}"


def write_tensorflow(
    path: str,
    tables: Mapping[str, LogicalTable],
    root: str,
    *,
    layouts: Sequence[TableLayout] | None,
    updates: int | None,
    progress: Progress,
    changed: Callable[[], str | None] | None = None,
) -> str:
    """Writes one object with tables and slots as a checkpoint.

    Args:
      path: The prefix of the new checkpoint.
      tables: The tables by name.
      root: Name of the object that holds the tables, e.g. "embedding".
      layouts: The place of each table on SparseCores; None writes whole tables.
      updates: Number of updates applied to the tables, or None to store none.
      progress: Receives the bytes written.
      changed: A function, needed if another thread may write to the tables. It returns
        what was updated since they were read, or None. It is called after all rows were
        written and read again. A job of several processes never calls it.

    Returns:
      `path`.

    Raises:
      tf.errors.AlreadyExistsError: If there is a checkpoint at `path`.
      tf.errors.AbortedError: If a table or the number of updates changed meanwhile;
        then there is no checkpoint.
      ValueError: If the path ends in a slash, or a table has no rows or columns.
      NotImplementedError: If `layouts` are given and a table grows.
    """
    if not os.path.basename(path):
        raise ValueError(
            "The path of a checkpoint is the prefix of its file names, so it must not "
            f"be empty or end with a slash. Received: {path!r}. Pass e.g. "
            "'folder/model'."
        )
    matrices, small = _by_key(tables, root, layouts, updates)
    total = sum(rows.nbytes for rows in matrices.values())
    group = process_group({name: table.arrays for name, table in tables.items()})
    seen = _Seen(changed) if changed and group is None else None
    pieces = _own_pieces(matrices, group)
    if seen is not None:
        pieces = seen.note(pieces)
    is_first = group is None or group.rank == 0
    with contextlib.ExitStack() as lock:
        scratch = path + SCRATCH
        with in_all_processes(group):
            if is_first:
                lock.enter_context(one_writer(path))
                _begin(path, scratch)
        progress.start("Writing", total)
        written = ""
        try:
            with in_all_processes(group) as rest:
                rest.append(pieces)  # Each item is an exchange with other processes.
                prefix = scratch if group is None else f"{scratch}/{group.rank}"
                written = "\n".join(write_parts(prefix, pieces, total, progress))
                if seen is not None:
                    seen.check(_own_pieces(matrices, group))
            everyone = [written.encode()]
            if group is not None:
                everyone = group.all_gather("checkpoint", written.encode())
            with in_all_processes(group):
                if is_first:
                    tf.raw_ops.SaveV2(
                        prefix=f"{scratch}/values",
                        tensor_names=list(small),
                        shape_and_slices=[""] * len(small),
                        tensors=list(small.values()),
                    )
                    parts = b"\n".join(everyone).decode().split("\n")
                    merge([*filter(None, parts), f"{scratch}/values"], path)
        finally:
            if is_first:
                _remove(scratch)
    return path


def _by_key(
    tables: Mapping[str, LogicalTable],
    root: str,
    layouts: Sequence[TableLayout] | None,
    updates: int | None,
) -> tuple[dict[str, TableRows], dict[str, Any]]:
    """Returns the matrices to write in slices, and other values, by checkpoint key.

    Arguments and errors are those of `write_tensorflow`.
    """
    growing = {name: table for name, table in tables.items() if table.vocabulary}
    static = {n: table.arrays for n, table in tables.items() if n not in growing}
    if layouts is None:
        stored = {n: tables[n].stored for n in static}
        named, values = by_checkpoint_name(stored), {}
    elif not growing:
        named, values = stack(static, layouts)
    else:
        raise NotImplementedError(
            f"The table {next(iter(growing))!r} is a growing table, which SparseCores "
            "do not support. Make it static with freeze_vocabulary, or leave `layouts` "
            "or `--to sparse-core` out."
        )
    for name, rows in named.items():
        if 0 in rows.shape:
            raise ValueError(
                f"{name} has shape {errors.shape_text(rows.shape)}. A table needs at "
                "least one row and one column: leave this one out of the conversion."
            )
    values |= hashing_arrays({name: table.hashing for name, table in tables.items()})
    if updates is not None:
        values[UPDATES] = tf.constant(updates, tf.int64)
    keys = {name: variable_key(root, name) for name in (*named, *values)}
    matrices = {keys[name]: rows for name, rows in named.items()}
    small: dict[str, Any] = {keys[name]: value for name, value in values.items()}
    parts = {
        name: {
            part: variable_key(root, name, part)
            for part in (*table.stored, *table.vocabulary)
        }
        for name, table in growing.items()
    }
    small[GRAPH_KEY] = tf.constant(make_graph(root, keys, parts))
    for name, table in growing.items():
        place, blocks = parts[name], {**table.stored}
        for part, vector in table.vocabulary.items():
            if vector.rows is None:
                small[place[part]] = vector.read()
            else:
                blocks[part] = vector.rows
        for part, rows in blocks.items():
            if rows.shape[0]:
                matrices[place[part]] = rows
            else:  # There is no slice of it.
                small[place[part]] = np.zeros(rows.file_shape, rows.dtype)
    return matrices, small


def _remove(scratch: str) -> None:
    """Removes the folder of unfinished files, without hiding an error of the save."""
    try:
        if tf.io.gfile.exists(scratch):
            tf.io.gfile.rmtree(scratch)
    except tf.errors.OpError as error:
        logging.warning(
            "%s was not removed; the next save under this name removes it. %s",
            scratch,
            error,
        )


def process_group(tables: Mapping[str, Mapping[str, TableRows]]) -> ProcessGroup | None:
    """Returns the processes that write these tables together."""
    return next(
        (rows.group for arrays in tables.values() for rows in arrays.values()), None
    )


@contextlib.contextmanager
def in_all_processes(group: ProcessGroup | None) -> Iterator[list[Iterable[Any]]]:
    """Fails in all processes of a group if the body fails in one.

    Yields:
      A list of iterators, to which the body appends. If it fails, they are exhausted,
      because their items are exchanges with the other processes.

    Raises:
      tf.errors.AbortedError: If the body fails in another process; it has that text.
    """
    rest: list[Iterable[Any]] = []
    if group is None:
        yield rest
        return
    try:
        yield rest
    except Exception as error:
        # If other processes are lost, they cannot be told.
        with contextlib.suppress(tf.errors.OpError):
            for iterator in rest:
                for _ in iterator:
                    pass
            text = f"{type(error).__name__}: {error}"
            group.all_gather("checkpoint", text.encode())
        raise
    for process, found in enumerate(group.all_gather("checkpoint", b"")):
        if found:
            raise tf.errors.AbortedError(
                None, None, f"Process {process}: {found.decode()}"
            )


def require_alike(group: ProcessGroup | None, arguments: Mapping[str, Any]) -> None:
    """Checks that all processes of a group passed the same arguments.

    Args:
      group: The processes, or None for this one alone.
      arguments: The arguments by name, in types that JSON can hold.

    Raises:
      ValueError: In all processes, if they differ; it names the first difference.
    """
    if group is None:
        return
    everyone = group.all_gather("checkpoint", json.dumps(arguments).encode())
    first = json.loads(everyone[0])
    for process, content in enumerate(everyone):
        for name, value in json.loads(content).items():
            if value != first[name]:
                raise ValueError(
                    f"`{name}` is {first[name]!r} in process 0, but {value!r} in "
                    f"process {process}. Pass the same arguments in all processes of "
                    "a job."
                )


def _begin(path: str, scratch: str) -> None:
    if tf.io.gfile.exists(path + ".index"):
        raise errors.exists(path)
    if tf.io.gfile.exists(scratch):  # An interrupted save may have left one.
        tf.io.gfile.rmtree(scratch)
    tf.io.gfile.makedirs(scratch)


def _own_pieces(
    matrices: Mapping[str, TableRows], group: ProcessGroup | None
) -> Iterator[Piece]:
    """Yields the slices that this process writes: every n-th of n processes."""
    rank, size = (0, 1) if group is None else (group.rank, group.size)
    number = 0
    for key, rows in matrices.items():
        for start, stop in rows.slices():
            values = rows.read_in(number % size, start, stop)
            if number % size == rank:
                shape = rows.file_shape
                spec = slice_spec(shape, start, stop)
                yield Piece(key, spec, values.reshape(-1, *shape[1:]))
            number += 1


class _Seen:
    """Checksums of what was read, which tell whether anything changed meanwhile.

    An update of the host engine holds the locks of all its tables until it is done, so
    a second reading that equals the first proves that all rows have their values of
    one moment: the one between the two readings.
    """

    def __init__(self, changed: Callable[[], str | None]) -> None:
        self._changed = changed
        self._sums: list[int] = []

    def note(self, pieces: Iterable[Piece]) -> Iterator[Piece]:
        """Yields the pieces, and keeps their checksums."""
        for piece in pieces:
            self._sums.append(_checksum(piece))
            yield piece

    def check(self, pieces: Iterable[Piece]) -> None:
        """Compares a second reading.

        Raises:
          tf.errors.AbortedError: If a piece differs, or anything was updated.
        """
        for piece, before in zip(pieces, self._sums, strict=True):
            if _checksum(piece) != before:
                raise errors.changed_while_saved(piece.key)
        if (what := self._changed()) is not None:
            raise errors.changed_while_saved(what)


def _checksum(piece: Piece) -> int:
    return zlib.crc32(np.ascontiguousarray(piece.values).view(np.uint8).data)


def write_parts(
    scratch: str, pieces: Iterable[Piece], total: int, progress: Progress
) -> list[str]:
    """Writes pieces as they come, several of them into a file.

    Args:
      scratch: A folder for the files.
      pieces: The rows to write; those of one part are held in memory.
      total: Size of all pieces in bytes.
      progress: Receives the bytes of each part.

    Returns:
      The prefixes of the parts, for `merge`.
    """
    prefixes: list[str] = []
    keys: list[str] = []
    specs: list[str] = []
    values: list[np.ndarray] = []
    size, limit = 0, part_bytes(total)
    for piece in itertools.chain(pieces, [None]):
        if values and (piece is None or size + piece.values.nbytes > limit):
            prefixes.append(f"{scratch}/{len(prefixes)}")
            tf.raw_ops.SaveV2(
                prefix=prefixes[-1],
                tensor_names=keys,
                shape_and_slices=specs,
                tensors=values,
            )
            progress.advance(size)
            keys, specs, values, size = [], [], [], 0
        if piece is not None:
            keys.append(piece.key)
            specs.append(piece.spec)
            values.append(piece.values)
            size += piece.values.nbytes
    return prefixes


def merge(parts: Sequence[str], path: str) -> None:
    """Makes one checkpoint of parts, and deletes the parts."""
    tf.raw_ops.MergeV2Checkpoints(
        checkpoint_prefixes=parts, destination_prefix=path, delete_old_dirs=True
    )
