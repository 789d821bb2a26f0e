"""Saves an embedding and restores one, a slice of rows at a time."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Collection, Mapping, Sequence
from typing import Any

from absl import logging

from tpu_embedding.checkpoint import errors, formats
from tpu_embedding.checkpoint.arguments import (
    check_layouts,
    check_rename,
    check_tables,
)
from tpu_embedding.checkpoint.checkpoint_view import (
    LogicalCheckpoint,
    LogicalTable,
    without_slots,
)
from tpu_embedding.checkpoint.progress import NoProgress, Progress
from tpu_embedding.checkpoint.trackable import TrackableTables
from tpu_embedding.checkpoint.writing import WriteOptions, write_tensorflow
from tpu_embedding.layout.plan import UPDATES
from tpu_embedding.layout.stacking import TableLayout
from tpu_embedding.layout.table_arrays import PARAMETERS, MutableRows, Rows
from tpu_embedding.optimizers.checks import check_flag

DEFAULT_ROOT = "embedding"
_SILENT = NoProgress()


def save(
    embedding: TrackableTables,
    path: str | os.PathLike[str],
    *,
    root: str = DEFAULT_ROOT,
    slots: bool = True,
    layouts: Sequence[TableLayout] | None = None,
    progress: Progress = _SILENT,
) -> str:
    """Writes the tables and slots as a TensorFlow checkpoint.

    It is what `tf.train.Checkpoint(embedding=embedding).write(path)` writes, but
    never holds more than a few slices of a table beside the tables themselves.

    Args:
      embedding: Is built first if it is not yet.
      path: The prefix of the new checkpoint.
      root: What the object is called in it; "model/embedding" for an attribute.
      slots: False saves the tables alone.
      layouts: The place of each table on SparseCores, e.g. what `read_layouts` finds
        in another checkpoint: the tables are stacked and cut so, with the record that
        tf.tpu.experimental.embedding.TPUEmbeddingV2 restores by. None: plain.
      progress: Told of the bytes written.

    Returns:
      The path.

    Raises:
      TypeError: If `embedding` is none, or another argument of the wrong type.
      tf.errors.AlreadyExistsError: If a checkpoint is there.
      ValueError: If `layouts` are of other tables, shapes or mixed slots.
    """
    _require_tables(embedding)
    check_flag("slots", slots)
    check_layouts(layouts)
    tables = {
        name: LogicalTable(
            name,
            arrays[PARAMETERS],
            {array: rows for array, rows in arrays.items() if array != PARAMETERS},
        )
        for name, arrays in embedding.checkpoint_rows().items()
    }
    updates = embedding.checkpoint_updates() if slots else None
    options = WriteOptions(
        root=root,
        layouts=layouts,
        updates=None if updates is None else int(updates.numpy()),
    )
    return write_tensorflow(
        os.fspath(path), tables if slots else without_slots(tables), options, progress
    )


def restore(
    embedding: TrackableTables,
    path: str | os.PathLike[str],
    *,
    root: str | None = None,
    tables: Collection[str] | None = None,
    rename: Mapping[str, str] | None = None,
    resize: bool = False,
    slots: bool = True,
    progress: Progress = _SILENT,
) -> LogicalCheckpoint:
    """Reads tables and slots from a checkpoint of any kind that `read` takes.

    Everything is checked before anything changes: names, shapes, and the checksums
    of all values that will be read. Slots that the checkpoint lacks start at their
    initial value, with one warning.

    Args:
      embedding: Is built first if it is not yet.
      path: As for `read`.
      root: As for `read`.
      tables: Names of the embedding's tables to restore; None for all of them.
      rename: For tables that have another name in the checkpoint: that name, by
        the embedding's.
      resize: Take tables with another vocabulary: the rows that both have are
        restored with their slots, further rows of the embedding stay as they are.
      slots: False takes the tables alone; the slots start at their initial value.
      progress: Told of the bytes read, first to check, then to assign.

    Returns:
      What was found at `path`.

    Raises:
      KeyError: If the checkpoint lacks a table.
      ValueError: If a table has another shape; the text names both. If `tables` or
        `rename` has names that the embedding lacks.
      TypeError: If a stored value is of no floating point dtype, `embedding` is no
        embedding, or another argument is of the wrong type.
      tf.errors.NotFoundError: If no checkpoint is there.
      tf.errors.DataLossError: If a file is truncated or damaged.
    """
    _require_tables(embedding)
    check_tables(tables)
    check_rename(rename)
    check_flag("resize", resize)
    check_flag("slots", slots)
    live = embedding.checkpoint_rows()
    names = _names(live, tables, rename or {})
    source = formats.read(path, root=root, tables=list(names.values()))
    job = _match(source, {name: live[name] for name in names}, names, slots=slots)
    job.check(source.path, resize=resize)
    progress.start("Checking", job.nbytes)
    for copy in job.copies:
        copy.source.verify()
        progress.advance(copy.source.nbytes)
    updates = embedding.checkpoint_updates()
    counted = updates is not None and tables is None
    lacking = [*job.lacking, *([UPDATES] if counted and source.updates is None else [])]
    if slots and lacking:
        logging.warning(
            "%s lacks %s, which start at their initial values.",
            source.path,
            ", ".join(lacking),
        )
    progress.start("Restoring", job.nbytes)
    job.run(progress)
    embedding.load_checkpoint_rows()
    if counted:
        assert updates is not None
        updates.assign((source.updates or 0) if slots else 0)
    return source


def _require_tables(embedding: object) -> None:
    if not isinstance(embedding, TrackableTables):
        raise errors.not_an_embedding(embedding)


@dataclasses.dataclass(frozen=True)
class _Copy:
    table: str
    array: str
    source: Rows
    target: MutableRows

    def run(self, progress: Progress) -> None:
        common = min(self.source.shape[0], self.target.shape[0])
        dtype = self.target.dtype
        for start, stop in self.source.slices():
            if start < common:
                values = self.source.read(start, min(stop, common))
                self.target.write(start, values.astype(dtype, copy=False))
            progress.advance((stop - start) * self.source.row_bytes)


@dataclasses.dataclass(frozen=True)
class _Job:
    """What a restore will do.

    Attributes:
      copies: Parameters and slots that are there.
      resets: Slots that start at their initial value.
      lacking: Names of those among them that were looked for.
    """

    copies: list[_Copy]
    resets: list[MutableRows]
    lacking: list[str]

    @property
    def nbytes(self) -> int:
        return sum(copy.source.nbytes for copy in self.copies)

    def check(self, path: str, *, resize: bool) -> None:
        """Raises unless every copy fits."""
        heights: dict[str, int] = {}  # Of each stored table; it comes before its slots.
        for copy in self.copies:
            expected, actual = copy.target.shape, copy.source.shape
            same_rows = resize or expected[0] == actual[0]
            if copy.array == PARAMETERS:
                heights[copy.table] = actual[0]
                if not same_rows or expected[1] != actual[1]:
                    raise errors.table_shape(copy.table, expected, path, actual)
            elif actual != (heights[copy.table], expected[1]):
                expected = (heights[copy.table], expected[1])
                raise errors.array_shape(
                    copy.table, copy.array, expected, (path, actual)
                )

    def run(self, progress: Progress) -> None:
        for copy in self.copies:
            copy.run(progress)
        for target in self.resets:
            for start, stop in target.slices():
                target.write(start, target.initial_rows(stop - start))


def _names(
    live: Mapping[str, Any],
    tables: Collection[str] | None,
    rename: Mapping[str, str],
) -> dict[str, str]:
    """For each table to restore its name in the checkpoint."""
    chosen = list(live) if tables is None else list(tables)
    for argument, names in (("tables", chosen), ("rename", rename)):
        for name in names:
            if name not in live:
                raise errors.unknown_table(argument, name, live)
    return {name: rename.get(name, name) for name in chosen}


def _match(
    source: LogicalCheckpoint,
    live: Mapping[str, Mapping[str, MutableRows]],
    names: Mapping[str, str],
    *,
    slots: bool,
) -> _Job:
    missing = [name for name in names.values() if name not in source]
    if missing:
        raise errors.missing_tables(source.path, missing, source)
    job = _Job([], [], [])
    for table, arrays in live.items():
        stored = _arrays(source[names[table]], slots=slots)
        for name, target in arrays.items():
            if name in stored:
                job.copies.append(_Copy(table, name, stored[name], target))
            else:
                job.resets.append(target)
                job.lacking.append(f"{table}/{name}")
    return job


def _arrays(table: LogicalTable, *, slots: bool) -> Mapping[str, Rows]:
    return table.arrays if slots else {PARAMETERS: table.parameters}
