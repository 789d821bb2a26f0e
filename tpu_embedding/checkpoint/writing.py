"""Writes TensorFlow checkpoints out of slices, without a whole table in memory.

SaveV2 wants all its tensors at once, so it is called for one part at a time;
MergeV2Checkpoints then makes one checkpoint of the parts without copying them. Its
index comes last: until it is there, there is no checkpoint, and an interrupted save
leaves those that were there before as they are. Processes write into a folder one
after the other.
"""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Iterator, Mapping, Sequence

import tensorflow as tf

from tpu_embedding.checkpoint import errors
from tpu_embedding.checkpoint.locks import one_writer
from tpu_embedding.checkpoint.logical import LogicalTable, named_matrices
from tpu_embedding.checkpoint.object_graph import GRAPH_KEY, make_graph, variable_key
from tpu_embedding.checkpoint.progress import Progress
from tpu_embedding.checkpoint.sparse_core_format import stack
from tpu_embedding.layout.rows import Rows
from tpu_embedding.layout.stacking import TableLayout
from tpu_embedding.layout.tables import UPDATES

# A folder beside what is written, emptied first: no user may have one so called.
SCRATCH = ".tpu_embedding_unfinished"
_MIN_PART_BYTES = 16 << 20
_MAX_PARTS = 128  # Of large checkpoints: each part becomes a file.


@dataclasses.dataclass(frozen=True)
class WriteOptions:
    """How tables are written.

    Attributes:
      root: What the object that holds them is called, e.g. "embedding".
      layouts: For SparseCores the place of each table; None writes them plain.
      updates: How many updates they have had, if that is known.
    """

    root: str
    layouts: Sequence[TableLayout] | None = None
    updates: int | None = None


@dataclasses.dataclass(frozen=True)
class _Slice:
    key: str
    rows: Rows
    start: int
    stop: int

    @property
    def size(self) -> int:
        return (self.stop - self.start) * self.rows.shape[1] * self.rows.dtype.itemsize

    @property
    def spec(self) -> str:
        """As SaveV2 wants it: the whole shape, then start and length of each axis."""
        rows, columns = self.rows.shape
        if (self.start, self.stop) == (0, rows):
            return ""
        return f"{rows} {columns} {self.start},{self.stop - self.start}:0,{columns}"


def write_tensorflow(
    path: str,
    tables: Mapping[str, LogicalTable],
    options: WriteOptions,
    progress: Progress,
) -> str:
    """Writes one object with tables and slots as a checkpoint.

    Args:
      path: The prefix of the new checkpoint.
      tables: By name.
      options: How.
      progress: Told of each part.

    Returns:
      `path`.

    Raises:
      tf.errors.AlreadyExistsError: If a checkpoint is there.
      ValueError: If the path ends in a slash, or a table has no rows or columns.
    """
    if not os.path.basename(path):
        raise errors.no_prefix(path)
    if options.layouts is None:
        matrices, values = named_matrices(tables), {}
    else:
        matrices, values = stack(tables, options.layouts)
    for name, rows in matrices.items():
        if 0 in rows.shape:
            raise errors.empty_matrix(name, rows.shape)
    if options.updates is not None:
        values[UPDATES] = tf.constant(options.updates, tf.int64)
    with one_writer(path):
        if tf.io.gfile.exists(path + ".index"):
            raise errors.exists(path)
        _write(path, matrices, _Others(options.root, values), progress)
    return path


@dataclasses.dataclass(frozen=True)
class _Others:
    """What is written beside the matrices; `root` as in WriteOptions."""

    root: str
    values: Mapping[str, tf.Tensor]


def _write(
    path: str, matrices: Mapping[str, Rows], others: _Others, progress: Progress
) -> None:
    scratch = path + SCRATCH  # Of an interrupted save there may be some.
    if tf.io.gfile.exists(scratch):
        tf.io.gfile.rmtree(scratch)
    tf.io.gfile.makedirs(scratch)
    root, values = others.root, others.values
    slices = list(_slices(root, matrices))
    progress.start("Writing", sum(piece.size for piece in slices))
    small = {variable_key(root, name): value for name, value in values.items()}
    small[GRAPH_KEY] = tf.constant(make_graph(root, [*matrices, *values]))
    try:
        parts = _write_parts(scratch, slices, progress)
        parts.append(f"{scratch}/values")
        tf.raw_ops.SaveV2(
            prefix=parts[-1],
            tensor_names=list(small),
            shape_and_slices=[""] * len(small),
            tensors=list(small.values()),
        )
        tf.raw_ops.MergeV2Checkpoints(
            checkpoint_prefixes=parts, destination_prefix=path, delete_old_dirs=True
        )
    finally:
        if tf.io.gfile.exists(scratch):
            tf.io.gfile.rmtree(scratch)


def _write_parts(
    scratch: str, slices: Sequence[_Slice], progress: Progress
) -> list[str]:
    """Writes each part; their prefixes."""
    prefixes = []
    for number, part in enumerate(_parts(slices)):
        prefixes.append(f"{scratch}/{number}")
        tf.raw_ops.SaveV2(
            prefix=prefixes[-1],
            tensor_names=[piece.key for piece in part],
            shape_and_slices=[piece.spec for piece in part],
            tensors=[piece.rows.read(piece.start, piece.stop) for piece in part],
        )
        progress.advance(sum(piece.size for piece in part))
    return prefixes


def _slices(root: str, matrices: Mapping[str, Rows]) -> Iterator[_Slice]:
    for name, rows in matrices.items():
        for start, stop in rows.slices():
            yield _Slice(variable_key(root, name), rows, start, stop)


def _parts(slices: Sequence[_Slice]) -> Iterator[list[_Slice]]:
    """Slices of about the same size together."""
    total = sum(piece.size for piece in slices)
    limit = max(_MIN_PART_BYTES, total // _MAX_PARTS)
    part: list[_Slice] = []
    for piece in slices:
        if part and sum(p.size for p in part) + piece.size > limit:
            yield part
            part = []
        part.append(piece)
    if part:
        yield part
