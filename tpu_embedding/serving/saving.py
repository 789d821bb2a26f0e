"""Writes a SavedModel without holding a converted table in memory.

TensorFlow saves the model and the variables that have a value. The converted tables
have none: they are written in slices, as the files of a checkpoint, and merged with
TensorFlow's files. Everything is written in a folder within the new one;
`saved_model.pb`, which marks a complete model, comes last.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import tensorflow as tf
from tensorflow.python.saved_model import fingerprinting_utils
from tensorflow.python.trackable.trackable_utils import escape_local_name

from tpu_embedding.checkpoint.object_graph import variable_key
from tpu_embedding.checkpoint.writing import (
    NoProgress,
    Piece,
    merge,
    one_writer,
    part_bytes,
    write_parts,
)
from tpu_embedding.lookup.combine import TableReader
from tpu_embedding.serving.conversion import Conversion, ConvertedTable, Source
from tpu_embedding.serving.report import TableReport, unchanged

_SCRATCH = ".tpu_embedding_unfinished"
_COMPLETE = "saved_model.pb"
# Files that a killed export may have left, beside its scratch folder.
_INCOMPLETE = {_SCRATCH, "assets", "fingerprint.pb", "variables"}
_PIECES = 4  # of a part: one of them is made while those of a part are held.


def require_empty(path: str | os.PathLike[str]) -> None:
    """Refuses a folder with files that would be lost.

    Files that a killed export left do not count.

    Raises:
      ValueError: If the path is empty, or is neither new nor an empty folder.
    """
    if not os.fspath(path):
        raise ValueError(
            f"`path` must name a new or an empty folder. Received: {path!r}."
        )
    if not tf.io.gfile.exists(path):
        return
    left = set(_entries(path)) if tf.io.gfile.isdir(path) else {""}
    if left and not (_SCRATCH in left and left <= _INCOMPLETE):
        raise ValueError(
            f"{path} exists and is not an empty folder. Give export a new path."
        )


def save(
    path: str | os.PathLike[str],
    tables: Sequence[tuple[Source, TableReader]],
    model: Any,
    functions: Mapping[str, Any],
) -> list[TableReport]:
    """Writes the SavedModel, into a folder that `require_empty` accepted.

    Args:
      path: The folder.
      tables: Each table, and the form in which it is saved.
      model: The model of the user, or None.
      functions: By name of the signature.

    Returns:
      The form and errors of each table.

    Raises:
      tf.errors.InvalidArgumentError: If a value cannot be stored.
    """
    conversions = {
        source.name: (table, Conversion(source, table))
        for source, table in tables
        if isinstance(table, ConvertedTable)
    }
    with _scratch(os.fspath(path)) as scratch:
        saved = f"{scratch}/model"
        readers = {source.name: table for source, table in tables}
        module = _Module(readers, model, functions)
        tf.saved_model.save(module, saved, signatures=dict(functions))
        if conversions:
            _add_tables(scratch, saved, conversions)
        _publish(saved, os.fspath(path))
    return [
        conversions[source.name][1].report()
        if source.name in conversions
        else unchanged(source.name, source.shape)
        for source, _ in tables
    ]


def _add_tables(
    scratch: str,
    model: str,
    conversions: Mapping[str, tuple[ConvertedTable, Conversion]],
) -> None:
    """Merges the tables into the variables of a saved model."""
    total = sum(conversion.nbytes for _, conversion in conversions.values())

    def pieces() -> Iterator[Piece]:
        for name, (table, conversion) in conversions.items():
            place = f"tables/{escape_local_name(name)}"
            keys = {part: variable_key(place, part) for part in table.parts}
            yield from conversion.pieces(keys, part_bytes(total) // _PIECES)

    others, parts = f"{scratch}/others", f"{scratch}/parts"
    tf.io.gfile.rename(f"{model}/variables", others)
    tf.io.gfile.makedirs(parts)
    written = write_parts(parts, pieces(), total, NoProgress())
    tf.io.gfile.makedirs(f"{model}/variables")
    merge([f"{others}/variables", *written], f"{model}/variables/variables")
    fingerprinting_utils.write_fingerprint(model)  # It names the variables' index.


@contextlib.contextmanager
def _scratch(path: str) -> Iterator[str]:
    """A new folder within `path`, gone afterwards; so is `path` after an error."""
    scratch = f"{path}/{_SCRATCH}"
    with one_writer(path):
        require_empty(path)  # Another process may have been first.
        existed = tf.io.gfile.exists(path)
        if existed:
            _clear(path)
        tf.io.gfile.makedirs(scratch)
        try:
            yield scratch
        except BaseException:
            tf.io.gfile.rmtree(scratch if existed else path)
            raise
        tf.io.gfile.rmtree(scratch)


def _clear(path: str) -> None:
    """Removes the files of a killed export."""
    for name in _INCOMPLETE.intersection(_entries(path)):
        left = f"{path}/{name}"
        (tf.io.gfile.rmtree if tf.io.gfile.isdir(left) else tf.io.gfile.remove)(left)


def _publish(model: str, path: str) -> None:
    for name in sorted(_entries(model), key=lambda name: name == _COMPLETE):
        tf.io.gfile.rename(f"{model}/{name}", f"{path}/{name}")


def _entries(path: str | os.PathLike[str]) -> list[str]:
    return [name.rstrip("/") for name in tf.io.gfile.listdir(path)]


class _Module(tf.Module):
    """The tables by name, and everything else that the functions read.

    The model itself may hold more, such as slots. It is saved only if its graph has
    resources other than variables, because hash tables keep their files in the object.
    """

    def __init__(
        self,
        tables: Mapping[str, TableReader],
        model: Any,
        functions: Mapping[str, Any],
    ) -> None:
        super().__init__()
        self.tables = dict(tables)
        graphs = [function.graph for function in functions.values()]
        read = [v for graph in graphs for v in graph.variables]
        # Those of tables have their names by the tables.
        own = {id(v) for table in tables.values() for v in _variables(table)}
        self.variables_read = [v for v in read if id(v) not in own]
        handles = {id(variable.handle) for variable in read}
        captured = [tensor for graph in graphs for tensor, _ in graph.captures]
        if any(t.dtype == tf.resource and id(t) not in handles for t in captured):
            self.model = model


def _variables(table: Any) -> Sequence[tf.Variable]:
    return table.variables
