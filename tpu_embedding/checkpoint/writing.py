"""Writes TensorFlow checkpoints out of slices, without a whole table in memory.

Their index comes last: until it is there, there is no checkpoint, and an interrupted
save leaves those that were there before as they are. Processes write into a folder
one after the other.
"""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Iterator, Mapping, Sequence

import tensorflow as tf

from tpu_embedding.checkpoint import errors
from tpu_embedding.checkpoint.checkpoint_view import LogicalTable, named_matrices
from tpu_embedding.checkpoint.locks import one_writer
from tpu_embedding.checkpoint.object_graph import GRAPH_KEY, make_graph, variable_key
from tpu_embedding.checkpoint.parts import Piece, merge, write_parts, write_values
from tpu_embedding.checkpoint.progress import Progress
from tpu_embedding.checkpoint.sparse_core_format import stack
from tpu_embedding.layout.plan import UPDATES
from tpu_embedding.layout.stacking import TableLayout
from tpu_embedding.layout.table_arrays import Rows

# A folder beside what is written, emptied first: no user may have one so called.
SCRATCH = ".tpu_embedding_unfinished"


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
    total = sum(rows.nbytes for rows in matrices.values())
    progress.start("Writing", total)
    small = {variable_key(root, name): value for name, value in values.items()}
    small[GRAPH_KEY] = tf.constant(make_graph(root, [*matrices, *values]))
    try:
        parts = write_parts(scratch, _pieces(root, matrices), total, progress)
        merge([*parts, write_values(f"{scratch}/values", small)], path)
    finally:
        if tf.io.gfile.exists(scratch):
            tf.io.gfile.rmtree(scratch)


def _pieces(root: str, matrices: Mapping[str, Rows]) -> Iterator[Piece]:
    for name, rows in matrices.items():
        for start, stop in rows.slices():
            values = rows.read(start, stop)
            yield Piece(variable_key(root, name), rows.shape, start, values)
