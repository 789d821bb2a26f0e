"""Tables that a served model maps from files of its folder, instead of loading them.

TensorFlow's op ImmutableConst maps a file, whose path is an attribute of the node. So
an export names its final place, and `place` rewrites it in an export that was moved.
In a program with this package `open_tables` looks rows up in the same files by an op of
the library, which asks the disk for all rows of a batch at once.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import json
import math
import os
import threading
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import tensorflow as tf
from tensorflow.core.framework import attr_value_pb2
from tensorflow.core.protobuf import saved_model_pb2
from tensorflow.python.saved_model import fingerprinting_utils

from tpu_embedding.checkpoint.errors import data_loss
from tpu_embedding.checkpoint.writing import Piece, completed, one_writer
from tpu_embedding.layout.plan import TableSpec
from tpu_embedding.ops import library
from tpu_embedding.serving.conversion import ConvertedTable
from tpu_embedding.serving.quantization import form_of_rows

FOLDER = "mapped"
_TABLES = f"{FOLDER}/tables.json"
_OP, _PATH = "ImmutableConst", "memory_region_name"
_BLOCK = 1 << 20  # Each block of so many bytes of a file has its own checksum.
# A record of TensorFlow: the length of the data, its checksum, the data, its checksum.
_BEFORE_DATA = 12
_MASK = 0xA282EAD8


class MappedPart:
    """A part of a table in a file, with the methods by which tables read a variable.

    Attributes:
      file: Name of the file in the folder of an export.
      shape: The shape of the part, [V, C].
      dtype: Dtype of the values.
    """

    def __init__(
        self, export: str, file: str, shape: Sequence[int], dtype: tf.DType
    ) -> None:
        """Takes the final place of the export."""
        self.file, self.shape, self.dtype = file, tuple(shape), dtype
        self._path = os.path.join(os.path.abspath(export), file)

    def read_value(self) -> tf.Tensor:
        """Returns the part as a tensor, in a graph."""
        mapped = tf.raw_ops.ImmutableConst(
            dtype=self.dtype, shape=self.shape, memory_region_name=self._path
        )
        # TensorFlow folds constants by computing them, and would read the whole file
        # in the first call. It leaves nodes with this attribute alone.
        value: Any = attr_value_pb2  # pyright's stubs lack its messages.
        empty = value.AttrValue(list=value.AttrValue.ListValue())
        mapped.op._set_attr("_scoped_allocator", empty)
        return mapped

    def sparse_read(self, rows: tf.Tensor, name: str | None = None) -> tf.Tensor:
        """Reads rows of the part; tf.gather calls it."""
        return tf.gather(self.read_value(), rows, name=name)


@dataclasses.dataclass(frozen=True)
class MappedTable:
    """A table of an export, as its file `mapped/tables.json` describes it.

    Attributes:
      checksums: By part, the CRC-32C of each `_BLOCK` of its file; empty in exports
        that were written before there were checksums.
    """

    name: str
    rows: int
    dim: int
    storage: str
    grows: bool = False
    checksums: Mapping[str, Sequence[int]] = dataclasses.field(default_factory=dict)

    def __post_init__(self) -> None:
        sums = [value for part in self.checksums.values() for value in part]
        if not all(type(value) is int for value in sums):
            raise TypeError(f"a checksum of table {self.name} is not an integer")


def file_of(table: int, part: str) -> str:
    """Returns the file of a part of the table with that index."""
    return f"{FOLDER}/{table}.{part}"


def write_files(
    model: str, tables: Sequence[MappedTable], pieces: Iterable[Piece]
) -> None:
    """Writes the parts of tables into a model's folder, in the order of `pieces`."""
    tf.io.gfile.makedirs(f"{model}/{FOLDER}")
    sums: dict[str, _Checksums] = {}
    for piece in pieces:
        octets = piece.values.tobytes()
        with open(f"{model}/{piece.key}", "ab") as file:
            file.write(octets)
        sums.setdefault(piece.key, _Checksums()).add(octets)
    described = []
    for number, table in enumerate(tables):
        prefix = file_of(number, "")
        parts = {
            key.removeprefix(prefix): own.finish()
            for key, own in sums.items()
            if key.startswith(prefix)
        }
        described.append(dataclasses.asdict(table) | {"checksums": parts})
    with open(f"{model}/{_TABLES}", "w", encoding="utf-8") as file:
        json.dump(described, file)


class _Checksums:
    """The checksums of a file that is written piece by piece."""

    def __init__(self) -> None:
        self._sums: list[int] = []
        self._rest = b""

    def add(self, octets: bytes) -> None:
        """Takes the next octets of the file."""
        octets = self._rest + octets
        whole = len(octets) - len(octets) % _BLOCK
        for begin in range(0, whole, _BLOCK):
            self._sums.append(crc32c(octets[begin : begin + _BLOCK]))
        self._rest = octets[whole:]

    def finish(self) -> list[int]:
        """Returns the checksums, including that of a shorter last block."""
        return [*self._sums, crc32c(self._rest)] if self._rest else self._sums


def crc32c(octets: bytes) -> int:
    """Returns the CRC-32C that TensorFlow writes behind the data of a record."""
    path = f"ram://tpu_embedding/{threading.get_ident()}"  # A file in memory.
    try:
        with tf.io.TFRecordWriter(path) as writer:
            writer.write(octets)
        with tf.io.gfile.GFile(path, "rb") as file:
            file.seek(_BEFORE_DATA + len(octets))
            masked = int.from_bytes(file.read(4), "little")
    finally:
        tf.io.gfile.remove(path)
    turned = (masked - _MASK) % 2**32
    return turned >> 17 | turned << 15 & 0xFFFFFFFF


def _verify(path: str, checksums: Sequence[int]) -> None:
    """Compares a file with its checksums."""
    with open(path, "rb") as file:
        blocks = iter(functools.partial(file.read, _BLOCK), b"")
        found = (crc32c(block) for block in blocks)
        pairs = itertools.zip_longest(found, checksums)
        bad = next((n for n, (own, told) in enumerate(pairs) if own != told), None)
    if bad is not None:
        raise data_loss(
            f"{path} is damaged: the checksum of MiB {bad} differs from that in "
            f"{_TABLES}. Copy or export it again; `verify=False` reads it without the "
            "check."
        )


class _OpenedPart:
    """A part of a table in a file that this process reads, for tf.gather."""

    def __init__(self, path: str, shape: Sequence[int], dtype: tf.DType) -> None:
        self.shape, self.dtype = tuple(shape), dtype
        self._file = {"dtype": dtype, "shape": self.shape, "path": path}
        _require_size(path, math.prod(shape) * dtype.size)

    def sparse_read(self, rows: tf.Tensor, name: str | None = None) -> tf.Tensor:
        """Reads rows of the part; tf.gather calls it."""
        ids = tf.cast(rows, tf.int64)
        return library.load().tpu_embedding_file_rows(ids, name=name, **self._file)


def open_tables(
    path: str | os.PathLike[str], specs: Sequence[TableSpec], *, verify: bool
) -> dict[int, ConvertedTable]:
    """Opens tables of a mapped export for lookups of this process, by index.

    With `verify` it compares their files with their checksums.

    Raises:
      ValueError: If the export maps no tables, or lacks one of them.
      NotImplementedError: If a table grows.
      RuntimeError: If the custom-op library cannot be loaded.
      tf.errors.DataLossError: If a file is missing, damaged or of another size.
    """
    library.load()
    export = os.path.abspath(os.fspath(path))
    known = _read_tables(export)

    def form(number: int, table: MappedTable) -> ConvertedTable:
        def make(part: str, shape: list[int], dtype: tf.DType) -> _OpenedPart:
            file = os.path.join(export, file_of(number, part))
            opened = _OpenedPart(file, shape, dtype)
            if verify and table.checksums:
                _verify(file, _checksums_of(export, table, part))
            return opened

        return form_of_rows(table.storage, table.rows, table.dim, make)

    return {spec.index: form(*_find_table(export, known, spec)) for spec in specs}


def _read_tables(export: str) -> dict[str, tuple[int, MappedTable]]:
    """Reads the tables by name, each with its number in the names of files."""
    path = os.path.join(export, _TABLES)
    try:
        with open(path, encoding="utf-8") as file:
            tables = [MappedTable(**table) for table in json.load(file)]
    except FileNotFoundError:
        raise _maps_nothing(export) from None
    except (AttributeError, TypeError, ValueError) as error:
        raise data_loss(f"{path} is damaged: {error}.") from None
    return {table.name: (number, table) for number, table in enumerate(tables)}


def _checksums_of(export: str, table: MappedTable, part: str) -> Sequence[int]:
    if part not in table.checksums:
        raise data_loss(
            f"{os.path.join(export, _TABLES)} lacks the checksums of part {part} of "
            f"table {table.name}."
        )
    return table.checksums[part]


def _find_table(
    export: str, known: Mapping[str, tuple[int, MappedTable]], spec: TableSpec
) -> tuple[int, MappedTable]:
    if spec.name not in known:
        raise ValueError(
            f"{export} lacks table {spec.name}. It has {', '.join(known)}."
        )
    number, table = known[spec.name]
    if table.grows or spec.config.vocabulary is not None:
        raise NotImplementedError(
            f"Table {spec.name} grows, but TPUEmbeddingForServing maps only tables of "
            "fixed vocabularies. Load the exported model, which maps growing tables, "
            "too."
        )
    shape = (spec.config.vocabulary_size, spec.config.dim)
    if (table.rows, table.dim) != shape:
        raise ValueError(
            f"Table {spec.name} has the shape {(table.rows, table.dim)} in {export}, "
            f"but {shape} in the configuration."
        )
    return number, table


def _maps_nothing(export: str) -> ValueError:
    return ValueError(
        f"{export} maps no tables. Export it with te.serving.export(..., mapped=True)."
    )


def place(path: str | os.PathLike[str], *, verify: bool = True) -> list[str]:
    """Tells an export with `mapped` where it is, after its folder was moved.

    Args:
      path: The export. Its saved_model.pb is replaced when all files were found.
      verify: Whether to compare the files with their checksums, which reads them.

    Returns:
      The names of the files of its tables.

    Raises:
      ValueError: If the export maps no tables.
      tf.errors.DataLossError: If a file is missing, damaged or has another size.
    """
    export = os.path.abspath(os.fspath(path))
    model = saved_model_pb2.SavedModel()
    name = os.path.join(export, "saved_model.pb")
    with one_writer(name):
        with open(name, "rb") as file:
            model.ParseFromString(file.read())
        found = []
        for node in _mapping_nodes(model):
            old = node.attr[_PATH].s.decode()
            part = os.path.join(FOLDER, os.path.basename(old))
            found.append(os.path.join(export, part))
            shape = [axis.size for axis in node.attr["shape"].shape.dim]
            dtype = tf.as_dtype(node.attr["dtype"].type)
            _require_size(found[-1], math.prod(shape) * dtype.size)
            node.attr[_PATH].s = found[-1].encode()
        if not found:
            raise _maps_nothing(export)
        if verify and os.path.exists(os.path.join(export, _TABLES)):
            _verify_all(export, {os.path.basename(file) for file in found})
        with (
            completed(name, overwrite=True) as unfinished,
            open(unfinished, "wb") as file,
        ):
            file.write(model.SerializeToString(deterministic=True))
        fingerprinting_utils.write_fingerprint(export)
    return sorted(set(found))


def _verify_all(export: str, names: Iterable[str]) -> None:
    """Compares files of an export with their checksums, if it has any."""
    tables = dict(_read_tables(export).values())
    for name in sorted(names):
        number, _, part = name.partition(".")
        table = tables.get(int(number))
        if table is None:
            lacking = f"has no table for the file {name}."
            raise data_loss(f"{os.path.join(export, _TABLES)} {lacking}")
        if table.checksums:
            file = os.path.join(export, FOLDER, name)
            _verify(file, _checksums_of(export, table, part))


def _mapping_nodes(model: Any) -> Iterator[Any]:
    for graph in model.meta_graphs:
        definition = graph.graph_def
        yield from (node for node in definition.node if node.op == _OP)
        for function in definition.library.function:
            yield from (node for node in function.node_def if node.op == _OP)


def _require_size(path: str, expected: int) -> None:
    size = os.path.getsize(path) if os.path.exists(path) else -1
    if size != expected:
        state = "is missing" if size < 0 else f"has {size} bytes"
        raise data_loss(f"{path} {state}, but its table has {expected} bytes.")
