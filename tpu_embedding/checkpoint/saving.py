"""Saves and restores an embedding, a slice of rows at a time; reads checkpoints.

A new kind of checkpoint is a module with a reader, and a row in `_FORMATS`.
"""

from __future__ import annotations

import dataclasses
import os
import zlib
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

import numpy as np
import tensorflow as tf
from absl import logging

from tpu_embedding.checkpoint.checkpoint_view import (
    LogicalCheckpoint,
    LogicalTable,
    Vector,
)
from tpu_embedding.checkpoint.hashings import check_hashings
from tpu_embedding.checkpoint.keras_format import is_keras, read_keras
from tpu_embedding.checkpoint.numpy_format import is_numpy, read_numpy
from tpu_embedding.checkpoint.restoring import Restore
from tpu_embedding.checkpoint.stored import SavesTables, core_of
from tpu_embedding.checkpoint.tensorflow_format import (
    read_first_layouts,
    read_tensorflow,
)
from tpu_embedding.checkpoint.writing import (
    NoProgress,
    Progress,
    in_all_processes,
    process_group,
    require_alike,
    write_tensorflow,
)
from tpu_embedding.engines.process_group import calling
from tpu_embedding.errors import argument_type, check_flag, type_name
from tpu_embedding.layout.partition import TableLayout
from tpu_embedding.layout.plan import UPDATES
from tpu_embedding.tables.rows import PARAMETERS
from tpu_embedding.tables.table import Table
from tpu_embedding.tables.vocabulary_parts import updates_begun

DEFAULT_ROOT = "embedding"
_SILENT = NoProgress()
_INDEX = ".index"
_Reader = Callable[[str, str | None, Collection[str]], LogicalCheckpoint]
# (whether a path is of this kind, its reader); any other path is TensorFlow's.
_FORMATS: tuple[tuple[Callable[[str], bool], _Reader], ...] = (
    (is_numpy, read_numpy),
    (is_keras, read_keras),
)


@calling("save")
def save(
    embedding: Any,
    path: str | os.PathLike[str],
    *,
    root: str = DEFAULT_ROOT,
    slots: bool = True,
    layouts: Sequence[TableLayout] | None = None,
    progress: Progress = _SILENT,
) -> str:
    """Writes the tables and slots as a TensorFlow checkpoint.

    The files are those of `tf.train.Checkpoint(embedding=embedding).write(path)`, but
    no more than a few slices of a table are held in memory beside the tables. The
    slices are read one after the other, then a second time: if another thread trained
    meanwhile on the host engine, an error is raised and no checkpoint is left. On other
    engines, and in several processes, do not train in another thread meanwhile. For a
    growing table, memory also holds 48 bytes for each id that this process has, and 24
    bytes for each that waits for a row.

    All processes of a job call it with the same path, in a file system that they share.
    Each writes its part of the one checkpoint.

    Args:
      embedding: A TPUEmbedding, TPUEmbeddingV2 or te.keras.TPUEmbedding, or a Keras
        model with one such layer; it is built if it is not built yet. Or a Keras model
        with te.keras.Embeddings: their tables have the names of the layers, and slots
        and number of updates are those of its optimizer.
      path: The prefix of the new checkpoint.
      root: Name of the object in the checkpoint; "model/embedding" for an attribute.
      slots: False saves the tables alone.
      layouts: The place of each table on SparseCores, e.g. the result of
        `read_layouts` for another checkpoint: the tables are stacked and cut in the
        same way, with the record that tf.tpu.experimental.embedding.TPUEmbeddingV2
        restores by. None saves whole tables.
      progress: Receives the number of bytes written.

    Returns:
      The path.

    Raises:
      TypeError: If `embedding` is not an embedding, or another argument has the wrong
        type.
      tf.errors.AlreadyExistsError: If there is a checkpoint at `path`.
      tf.errors.AbortedError: If a table or the number of updates changed while it was
        saved.
      ValueError: If `layouts` do not fit the tables, shapes and slots, or if the
        processes of a job pass different arguments.
      NotImplementedError: With `layouts`, if a table grows.
    """
    core = core_of(embedding)
    check_flag("slots", slots)
    if layouts is not None:
        expected = "a sequence of TableLayout, or None"
        _require(layouts, Sequence, "layouts", expected)
        for layout in layouts:
            if not isinstance(layout, TableLayout):
                raise argument_type("layouts", layouts, expected)
    counter = core.checkpoint_updates() if slots else None

    def updates_now() -> int | None:
        return None if counter is None else int(counter.numpy())

    # This number already counts the pending update, so only a later step changes it.
    updates = updates_now()
    core.refresh()
    stored = core.checkpoint_tables().items()
    tables = {name: _logical_table(table) for name, table in stored}
    live = core.growing()
    begun = {n: updates_begun(n, tables[n].vocabulary["state"].read()) for n in live}
    if not slots:
        tables = {n: dataclasses.replace(t, slots={}) for n, t in tables.items()}

    def changed() -> str | None:
        if updates_now() != updates:
            return "The number of updates"
        for name, ids in live.items():
            if ids.updates_begun() != begun[name]:
                return f"Table {name!r}"
        return None

    alike = {"path": os.fspath(path), "root": root, "slots": slots}
    require_alike(process_group({n: t.arrays for n, t in tables.items()}), alike)
    return write_tensorflow(
        os.fspath(path),
        tables,
        root,
        layouts=layouts,
        updates=updates,
        progress=progress,
        changed=changed,
    )


@calling("restore")
def restore(
    embedding: Any,
    path: str | os.PathLike[str],
    *,
    root: str | None = None,
    tables: Collection[str] | None = None,
    rename: Mapping[str, str] | None = None,
    resize: bool | str | Callable[..., Any] = False,
    slots: bool = True,
    ids: Mapping[str, Any] | None = None,
    progress: Progress = _SILENT,
) -> LogicalCheckpoint:
    """Reads tables and slots from a checkpoint of any kind that `read` accepts.

    Everything is checked before anything changes: names, shapes, and the checksums
    of all values that will be read. Slots that the checkpoint lacks start at their
    initial value, with one warning.

    A growing table takes all ids of the checkpoint with what is stored about them; if
    the table is static there, row r belongs to id r. If there are more ids than
    `max_rows`, its eviction decides which are left out, and the log says how many.
    During the restore, memory also holds all ids and the rows of one part of the table.

    Args:
      embedding: A TPUEmbedding, TPUEmbeddingV2 or te.keras.TPUEmbedding, which is built
        if it is not built yet; or a Keras model with one such layer, or with
        te.keras.Embeddings, which must be built. Its other layers are not restored.
      path: As for `read`.
      root: As for `read`.
      tables: Names of the embedding's tables to restore; None restores all tables.
      rename: The names in the checkpoint of tables that have another name there, by
        the name in the embedding.
      resize: Accept static tables with another vocabulary: the rows that both have are
        restored with their slots. With True further rows of the embedding keep their
        values. With "mean" they get the mean of the rows of the checkpoint, and with an
        initializer, a function of (shape, dtype=dtype), what it makes; their slots then
        start at their initial value.
      slots: False restores the tables alone; the slots start at their initial value.
      ids: The ids, int64 [n], by which rows are restored, by name of the table. A
        growing table takes these ids only, and the others start anew when they occur.
        For a static table they are the ids of its first n rows; rows whose id the
        checkpoint lacks keep their values and slots, and slots that it lacks start
        at their initial value where a row is restored.
      progress: Receives the number of bytes read, first to check, then to assign.

    Returns:
      The checkpoint at `path`.

    Raises:
      KeyError: If the checkpoint lacks a table.
      ValueError: If a table has another shape or Hashing (the text names both), if
        `tables`, `rename` or `ids` has names that the embedding lacks, if a table that
        grows in the checkpoint is static here and has no `ids`, if a growing table has
        too few rows and no eviction, if a model is not built, or if the processes of a
        job pass different arguments.
      TypeError: If a stored value is not floating point, `embedding` is not an
        embedding, or another argument has the wrong type.
      NotImplementedError: If a hashed table has `ids` or another number of rows.
      tf.errors.NotFoundError: If there is no checkpoint at `path`.
      tf.errors.DataLossError: If a file is truncated or damaged.
    """
    if not isinstance(embedding, SavesTables) and not getattr(embedding, "built", True):
        raise ValueError(
            f"The model {getattr(embedding, 'name', '')} is not built, and Keras 3 "
            "does not restore layers that are built later. Call the model on a batch "
            "first, or pass its layer with the tables."
        )
    core = core_of(embedding)
    _check_resize(resize)
    check_flag("slots", slots)
    live = core.checkpoint_tables()
    of_plan = [spec.name for spec in core.plan.tables]
    names = _names(of_plan, tables, {} if rename is None else rename)
    chosen = _chosen_ids(list(names), ids)
    hashed = [spec.name for spec in core.plan.tables if spec.hashing]
    for name in hashed:
        if name in chosen:
            raise NotImplementedError(
                f"`ids` names table {name!r}, which is hashed: ids share rows with "
                "other ids. Restore the whole table, without `ids`."
            )
    group = next((table.reach.group for table in live.values()), None)
    alike = {"path": os.fspath(path), "root": root, "tables": names}
    alike["resize"] = resize if isinstance(resize, (bool, str)) else type_name(resize)
    sums = {name: zlib.crc32(array.tobytes()) for name, array in chosen.items()}
    require_alike(group, alike | {"slots": slots, "ids": sums})
    updates = core.checkpoint_updates()
    counted = updates is not None and tables is None
    with in_all_processes(group):
        source = read(path, root=root, tables=list(names.values()))
        source = core.completed(source, names)
        check_hashings(source, core.plan.tables, names, resize=resize is not False)
        restoring = Restore.prepared(
            source,
            [(live[table], name) for table, name in names.items()],
            progress,
            slots=slots,
            resize=resize,
            ids=chosen,
        )
    lacking = list(restoring.lacking)
    if counted and core.resets_updates and source.updates is None:
        lacking.append(UPDATES)
    if slots and lacking:
        logging.warning(
            "%s lacks %s, which start at their initial values.",
            source.path,
            ", ".join(lacking),
        )
    restoring.run(core, progress, group)
    stored = source.updates if slots else None
    if counted and (core.resets_updates or stored is not None):
        assert updates is not None
        updates.assign(stored or 0)
    return source


def read(
    path: str | os.PathLike[str],
    *,
    root: str | None = None,
    tables: Collection[str] = (),
) -> LogicalCheckpoint:
    """Returns the tables of a checkpoint of any kind.

    It reads names and shapes at once, and values on request.

    Args:
      path: The prefix of a TensorFlow checkpoint, or its folder for the latest one;
        weights that Keras saved, `.weights.h5` or `.keras`, of this package's layer or
        of a keras-rs DistributedEmbedding; a `.npy` or `.npz` file, or a folder of
        `.npy` files.
      root: The object that holds the tables, e.g. "embedding" or "model/embedding".
        None finds the object, if there is only one.
      tables: Names known to be tables, which help to find the object.

    Returns:
      The tables by name.

    Raises:
      tf.errors.NotFoundError: If there is no checkpoint at `path`.
      tf.errors.DataLossError: If its index is damaged.
      ValueError: If it holds no tables, or several objects with tables.
    """
    place = os.fspath(path)
    for matches, reader in _FORMATS:
        if matches(place):
            return reader(place, root, tables)
    return read_tensorflow(_prefix(place), root, tables)


def read_layouts(path: str | os.PathLike[str]) -> list[TableLayout]:
    """Returns the layouts of the first object of a checkpoint that has a record.

    Args:
      path: The prefix of a TensorFlow checkpoint, or its folder for the latest one.

    Returns:
      The place of each table.

    Raises:
      tf.errors.NotFoundError: If there is no checkpoint at `path`.
      ValueError: If no object has a record of layouts.
    """
    place = os.fspath(path)
    if not any(matches(place) for matches, _ in _FORMATS):
        layouts = read_first_layouts(_prefix(place))
        if layouts is not None:
            return layouts
    raise ValueError(
        f"{place} has no SparseCore layout record: its tables are stored whole. A "
        "TPUEmbeddingV2 on SparseCores writes one with tf.train.Checkpoint."
    )


def _prefix(path: str) -> str:
    if tf.io.gfile.isdir(path):
        return tf.train.latest_checkpoint(path) or path
    if path.endswith(_INDEX) and tf.io.gfile.exists(path):
        return path.removesuffix(_INDEX)
    return path


def _logical_table(table: Table) -> LogicalTable:
    """Returns a table with its current values; reads the ids of a growing table."""
    arrays, known = table.ids.saved()
    slots = {**arrays}
    parameters = slots.pop(PARAMETERS)
    vectors = {name: Vector.of(rows) for name, rows in known.items()}
    return LogicalTable(table.spec.name, parameters, slots, vectors, table.spec.hashing)


def _check_resize(resize: Any) -> None:
    if not isinstance(resize, bool) and resize != "mean" and not callable(resize):
        raise argument_type("resize", resize, 'a bool, "mean" or an initializer')


def _require(value: object, kind: type, argument: str, expected: str) -> None:
    if not isinstance(value, kind) or (isinstance(value, str) and kind is not str):
        raise argument_type(argument, value, expected)


def _chosen_ids(
    tables: Collection[str], ids: Mapping[str, Any] | None
) -> dict[str, np.ndarray]:
    """Returns `ids` as int64 vectors.

    Raises:
      TypeError: If `ids` has the wrong type, or ids are not integers.
      ValueError: If ids are not a vector, or their table is not restored.
    """
    if ids is None:
        return {}
    _require(ids, Mapping, "ids", "a dict from table names to ids, or None")
    chosen = {}
    for name, value in ids.items():
        if name not in tables:
            raise ValueError(
                f"Argument `ids` names the table {name!r}, which is not restored. "
                f"Restored tables: {', '.join(tables)}."
            )
        array = np.asarray(value)
        if array.size and not np.issubdtype(array.dtype, np.signedinteger):
            raise argument_type(
                "ids", value, "a dict from table names to int64 vectors"
            )
        if array.ndim != 1:
            raise ValueError(
                f"`ids[{name!r}]` must be a vector. Received: shape {array.shape}."
            )
        chosen[name] = array.astype(np.int64)
    return chosen


def _names(
    live: Collection[str], tables: Collection[str] | None, rename: Mapping[str, str]
) -> dict[str, str]:
    """Returns the name in the checkpoint of each table to restore.

    Raises:
      TypeError: If `tables` or `rename` has the wrong type.
      ValueError: If the embedding lacks a table.
    """
    if tables is not None:
        _require(tables, Collection, "tables", "a collection of str, or None")
    expected = "a dict from str to str, or None"
    _require(rename, Mapping, "rename", expected)
    if not all(isinstance(name, str) for pair in rename.items() for name in pair):
        raise argument_type("rename", rename, expected)
    chosen = list(live) if tables is None else list(tables)
    for argument, names in (("tables", chosen), ("rename", rename)):
        for name in names:
            if name not in live:
                raise ValueError(
                    f"Argument `{argument}` names the table {name!r}, which the "
                    f"embedding does not have. Its tables: {', '.join(live)}."
                )
    return {name: rename.get(name, name) for name in chosen}
