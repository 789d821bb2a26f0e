"""Tables that a served model maps from files of its folder, instead of loading them.

TensorFlow's op ImmutableConst maps a file, whose path is an attribute of the node. So
an export names its final place, and `place` rewrites it in an export that was moved.
"""

from __future__ import annotations

import argparse
import math
import os
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import tensorflow as tf
from tensorflow.core.framework import attr_value_pb2
from tensorflow.core.protobuf import saved_model_pb2
from tensorflow.python.saved_model import fingerprinting_utils

from tpu_embedding.checkpoint.writing import Piece, one_writer

FOLDER = "mapped"
_OP, _PATH = "ImmutableConst", "memory_region_name"
_UNFINISHED = ".unfinished"


class MappedPart:
    """A part of a table in a file, with what forms of tables read of a variable.

    Attributes:
      file: Name of the file in the folder of an export.
      shape: [V, C].
      dtype: Dtype of the values.
    """

    def __init__(
        self, export: str, file: str, shape: Sequence[int], dtype: tf.DType
    ) -> None:
        """Takes the final place of the export."""
        self.file, self.shape, self.dtype = file, tuple(shape), dtype
        self._path = os.path.join(os.path.abspath(export), file)

    def read_value(self) -> tf.Tensor:
        """The part as a tensor, in a graph."""
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
        """Rows of the part; tf.gather calls it."""
        return tf.gather(self.read_value(), rows, name=name)


def write_files(model: str, pieces: Iterable[Piece]) -> None:
    """Writes the parts of tables, by file in their order, into a model's folder."""
    tf.io.gfile.makedirs(f"{model}/{FOLDER}")
    for piece in pieces:
        with open(f"{model}/{piece.key}", "ab") as file:
            file.write(piece.values.tobytes())


def place(path: str | os.PathLike[str]) -> list[str]:
    """Tells an export with `mapped` where it is, after its folder was moved.

    Args:
      path: The export. Its saved_model.pb is replaced when all files were found.

    Returns:
      The files of its tables.

    Raises:
      ValueError: If it maps no tables.
      tf.errors.DataLossError: If a file is missing or has another size.
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
            _require_size(found[-1], node)
            node.attr[_PATH].s = found[-1].encode()
        if not found:
            raise ValueError(
                f"{export} maps no tables. Export it with te.serving.export(..., "
                "mapped=True)."
            )
        with open(name + _UNFINISHED, "wb") as file:
            file.write(model.SerializeToString(deterministic=True))
        os.replace(name + _UNFINISHED, name)
        fingerprinting_utils.write_fingerprint(export)
    return sorted(set(found))


def _mapping_nodes(model: Any) -> Iterator[Any]:
    for graph in model.meta_graphs:
        definition = graph.graph_def
        yield from (node for node in definition.node if node.op == _OP)
        for function in definition.library.function:
            yield from (node for node in function.node_def if node.op == _OP)


def _require_size(path: str, node: Any) -> None:
    shape = [axis.size for axis in node.attr["shape"].shape.dim]
    expected = math.prod(shape) * tf.as_dtype(node.attr["dtype"].type).size
    size = os.path.getsize(path) if os.path.exists(path) else -1
    if size != expected:
        state = "is missing" if size < 0 else f"has {size} bytes"
        raise tf.errors.DataLossError(
            None, None, f"{path} {state}, and its table has {expected} bytes."
        )


def run(arguments: argparse.Namespace) -> int:
    """Runs `place`."""
    for file in place(arguments.path):
        print(file)
    return 0
