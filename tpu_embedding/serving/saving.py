"""Writes a SavedModel without holding a converted table in memory.

TensorFlow saves the model and the variables that have a value. The converted tables
have none: they are written in slices, as the files of a checkpoint, and merged with
TensorFlow's files. Everything is written in a folder within the new one;
`saved_model.pb`, which marks a complete model, comes last.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import os
import tempfile
import types
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import tensorflow as tf
from tensorflow.core.protobuf import saved_model_pb2
from tensorflow.python.saved_model import fingerprinting_utils
from tensorflow.python.trackable.trackable_utils import escape_local_name

from tpu_embedding.checkpoint.object_graph import variable_key
from tpu_embedding.checkpoint.writing import (
    SCRATCH,
    NoProgress,
    Piece,
    in_all_processes,
    merge,
    one_writer,
    part_bytes,
    write_parts,
)
from tpu_embedding.serving.conversion import (
    Conversion,
    ConvertedTable,
    Source,
    TableReport,
    unchanged,
)
from tpu_embedding.serving.following import Follower
from tpu_embedding.serving.following_tables import FollowingTable, stored_place
from tpu_embedding.serving.growing_tables import RowOfIds, ServedGrowingTable
from tpu_embedding.serving.mapping import FOLDER, MappedPart, MappedTable, write_files
from tpu_embedding.tables.readers import TableReader

_COMPLETE = "saved_model.pb"
# Files that a killed export may have left, beside its scratch folder.
_INCOMPLETE = {SCRATCH, "assets", "fingerprint.pb", "variables", FOLDER}
_PIECES = 4  # Pieces of a part: memory holds those of one part, and one more.


def require_empty(path: str | os.PathLike[str]) -> None:
    """Refuses a folder with files that would be lost.

    Files that a killed export left behind are ignored.

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
    if left and not (SCRATCH in left and left <= _INCOMPLETE):
        raise ValueError(
            f"{path} already exists and is not an empty folder. Pass a new path to "
            "export."
        )


def save(
    path: str | os.PathLike[str],
    tables: Sequence[tuple[Source, TableReader]],
    model: Any,
    reads: Sequence[Callable[..., Any]],
    functions: Mapping[str, Any],
    follower: Follower | None = None,
) -> list[TableReport]:
    """Writes the SavedModel, into a folder that `require_empty` accepted.

    If several processes share the tables, only the first one writes.

    Args:
      path: The folder.
      tables: Each table, and the form in which it is saved.
      model: The model of the user, or None.
      reads: The functions of the user that read the inputs of signatures.
      functions: The traced functions by name of the signature.
      follower: The object that applies deltas to the tables, or None.

    Returns:
      The form and errors of each table.

    Raises:
      tf.errors.InvalidArgumentError: If a value cannot be stored.
    """
    conversions: dict[int, Any] = {}
    specs = follower.base.tables if follower else ()
    for number, (source, table) in enumerate(tables):
        holds = isinstance(table, (FollowingTable, ServedGrowingTable))
        stored = table.stored if holds else table
        place = f"tables/{escape_local_name(source.name)}{'/stored' if holds else ''}"
        if specs:
            place = stored_place(specs[number])
        if isinstance(stored, ConvertedTable):
            conversions[number] = (stored, Conversion(source, stored), place)
    group = tables[0][0].rows.group
    # If two tables have one name, the second one stays: the first is its shared row.
    readers = {source.name: table for source, table in tables}
    deltas = None if follower is None else follower.state
    parts = [part for form, *_ in conversions.values() for part in form.parts.values()]
    mapped = any(isinstance(part, MappedPart) for part in parts)
    described = [
        MappedTable(
            tables[number][0].name,
            *tables[number][0].shape,
            stored.storage,
            grows=tables[number][0].ids is not None,
        )
        for number, (stored, *_) in conversions.items()
    ]
    module = _Module(readers, [model, *reads], functions, deltas)
    with in_all_processes(group) as rest:
        pieces = _pieces(conversions)
        rest.append(pieces)  # Each item is an exchange with other processes.
        if group is None or group.rank == 0:
            with _scratch(os.fspath(path)) as scratch:
                saved = f"{scratch}/model"
                _save_module(module, saved, functions)
                if mapped:
                    write_files(saved, described, pieces)
                elif conversions:
                    _add_tables(scratch, saved, pieces, _total(conversions))
                _publish(saved, os.fspath(path))
        else:
            # To save some variables of a strategy, TensorFlow asks all processes.
            with tempfile.TemporaryDirectory() as scratch:
                _save_module(module, scratch, functions)
            for _ in pieces:
                pass
    return [
        conversions[number][1].report()
        if number in conversions
        else unchanged(source.name, source.shape)
        for number, (source, table) in enumerate(tables)
        if readers[source.name] is table
    ]


def _save_module(module: tf.Module, path: str, functions: Mapping[str, Any]) -> None:
    try:
        tf.saved_model.save(module, path, signatures=dict(functions))
    except AssertionError as error:
        if "untracked" not in str(error):
            raise
        raise ValueError(
            "The model, or the `read` of a Signature, uses a lookup table or a "
            "variable that export cannot find. Pass a tf.Module or a Keras model that "
            "has it as an attribute, or a function that refers to it directly."
        ) from error
    _name_no_process(path)


def _name_no_process(model: str) -> None:
    """Removes the processes of this job from the devices of a saved model."""
    file = f"{model}/{_COMPLETE}"
    saved = saved_model_pb2.SavedModel()
    with tf.io.gfile.GFile(file, "rb") as source:
        saved.ParseFromString(source.read())
    placed: list[Any] = []
    for graph in saved.meta_graphs:
        placed += graph.graph_def.node
        for function in graph.graph_def.library.function:
            placed += function.node_def
        placed += [node.resource for node in graph.object_graph_def.nodes]
    named = [node for node in placed if "/job:" in node.device]
    if not named:
        return
    for node in named:
        spec = tf.DeviceSpec.from_string(node.device)
        node.device = spec.replace(job=None, replica=None, task=None).to_string()
    with tf.io.gfile.GFile(file, "wb") as target:
        target.write(saved.SerializeToString(deterministic=True))
    fingerprinting_utils.write_fingerprint(model)


# By table number: the table's form, its Conversion and its object in the model.
_Conversions = Mapping[int, tuple[ConvertedTable, Conversion, str]]


def _total(conversions: _Conversions) -> int:
    return sum(conversion.nbytes for _, conversion, _ in conversions.values())


def _pieces(conversions: _Conversions) -> Iterator[Piece]:
    """Yields the rows of all tables as they are stored, a piece at a time."""
    size = part_bytes(_total(conversions)) // _PIECES
    for table, conversion, place in conversions.values():
        keys = {
            name: part.file
            if isinstance(part, MappedPart)
            else variable_key(place, name)
            for name, part in table.parts.items()
        }
        yield from conversion.pieces(keys, size)


def _add_tables(scratch: str, model: str, pieces: Iterator[Piece], total: int) -> None:
    """Merges the tables into the variables of a saved model."""
    others, parts = f"{scratch}/others", f"{scratch}/parts"
    tf.io.gfile.rename(f"{model}/variables", others)
    tf.io.gfile.makedirs(parts)
    written = write_parts(parts, pieces, total, NoProgress())
    tf.io.gfile.makedirs(f"{model}/variables")
    merge([f"{others}/variables", *written], f"{model}/variables/variables")
    fingerprinting_utils.write_fingerprint(model)  # It names the variables' index.


@contextlib.contextmanager
def _scratch(path: str) -> Iterator[str]:
    """Yields a folder in `path` and removes it; an error also removes a new `path`."""
    scratch = f"{path}/{SCRATCH}"
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

    Objects of the user's code may hold more, such as slots. They are saved only if a
    graph has resources other than variables, because the files of a hash table belong
    to its object.
    """

    def __init__(
        self,
        tables: Mapping[str, TableReader],
        users: Sequence[Any],
        functions: Mapping[str, Any],
        deltas: tf.Module | None,
    ) -> None:
        super().__init__()
        self.tables = dict(tables)
        self.deltas = deltas
        graphs = [function.graph for function in functions.values()]
        read = [v for graph in graphs for v in graph.variables]
        # The tables and deltas hold their variables themselves.
        modules: list[Any] = [*tables.values(), *([] if deltas is None else [deltas])]
        own = {id(v) for module in modules for v in module.variables}
        self.variables_read = [v for v in read if id(v) not in own]
        handles = {id(variable.handle) for variable in read}
        handles |= {
            id(part.table.resource_handle)
            for table in tables.values()
            if isinstance(table, tf.Module)
            for part in table.submodules
            if isinstance(part, RowOfIds)
        }
        captured = [tensor for graph in graphs for tensor, _ in graph.captures]
        if any(t.dtype == tf.resource and id(t) not in handles for t in captured):
            self.users = list(_trackables(users))


def _trackables(value: Any, seen: dict[int, Any] | None = None) -> Iterator[Any]:
    """Yields trackable objects in a value's containers, and those that functions use.

    TensorFlow would not save a tf.lookup table or a Keras layer in the closure or the
    globals of a function, because no object has it as an attribute.
    """
    seen = {} if seen is None else seen
    if id(value) in seen:
        return
    seen[id(value)] = value  # While the value is kept, its id is not reused.
    if isinstance(value, tf.__internal__.tracking.Trackable):
        yield value
    elif isinstance(value, types.MethodType):
        yield from _trackables([value.__self__, value.__func__], seen)
    elif isinstance(value, functools.partial):
        yield from _trackables([value.func, *value.args, value.keywords], seen)
    elif isinstance(value, types.FunctionType):
        yield from _trackables(list(_referenced(value)), seen)
    elif isinstance(value, Mapping):
        yield from _trackables(list(value.values()), seen)
    elif isinstance(value, (list, tuple)):
        for item in value:
            yield from _trackables(item, seen)
    elif dataclasses.is_dataclass(value) and not isinstance(value, type):
        fields = [getattr(value, field.name) for field in dataclasses.fields(value)]
        yield from _trackables(fields, seen)


def _referenced(function: types.FunctionType) -> Iterator[Any]:
    """Yields the objects in a function's closure, and the globals that it names."""
    for cell in function.__closure__ or ():
        with contextlib.suppress(ValueError):  # Not assigned yet.
            yield cell.cell_contents
    codes = [function.__code__]
    while codes:
        code = codes.pop()
        for name in code.co_names:
            if name in function.__globals__:
                yield function.__globals__[name]
        codes += [c for c in code.co_consts if isinstance(c, types.CodeType)]
