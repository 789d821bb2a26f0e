"""Reads weights that Keras saved, of the layers of this package and of keras-rs.

Keras stores the variables of a layer as `<path of the layer>/vars/<name>`. The names of
this package's layer are `<table>` and `<table>/<slot>`, quoted as in URLs. keras-rs
(0.4) has one layer for each table under `_default_device_embedding_layers`, with
numbered variables and the name of the table in the attribute `name` of `vars`. A
keras.layers.Embedding is stored likewise, as `embedding_<number>`; all such tables are
read as tables of the root, named after their layers. Keras numbers the slots of its
optimizers, so only the model to restore knows their tables (`NumberedSlots`).
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import io
import json
import os
import re
import urllib.parse
import zipfile
from collections.abc import Collection, Iterator, Sequence
from typing import Any

import numpy as np

from tpu_embedding.checkpoint import errors
from tpu_embedding.checkpoint.checkpoint_view import (
    LogicalCheckpoint,
    NumberedSlots,
    Vector,
    choose_root,
    group_tables,
    update_count,
    vector_owner,
)
from tpu_embedding.layout.plan import UPDATES
from tpu_embedding.tables.rows import TableRows

_FILE, _ARCHIVE = ".h5", ".keras"
_WEIGHTS = "model.weights.h5"  # The weights inside a `.keras` archive.
_CONFIG = "config.json"
_TF_KERAS = re.compile(r"layers/embedding(_\d+)?/vars/0")
_OPTIMIZER = re.compile(r"optimizer(/inner_optimizer)?/vars/(\d+)")
_PLAIN = ""  # The root, which gets the tables of all keras.layers.Embedding.
_EMBEDDING = re.compile(r"embedding(_\d+)?")  # Keras names folders after classes.
_TABLES = "/_default_device_embedding_layers/"


def is_keras(path: str) -> bool:
    """Returns whether a path is a file of Keras weights."""
    return path.endswith((_FILE, _ARCHIVE)) and not os.path.isdir(path)


def read_keras(
    path: str, root: str | None, tables: Collection[str]
) -> LogicalCheckpoint:
    """See `checkpoint.read`."""
    if not os.path.exists(path):
        raise errors.not_found(path)
    holders: dict[str, dict[str, TableRows]] = {}
    updates: dict[str, int] = {}
    vectors: dict[str, dict[str, Vector]] = {}
    weights = _Weights(path, _unpacked(path, _WEIGHTS))
    datasets = _datasets(weights)
    _named(path, datasets)
    for name, item in datasets:
        layer, table = _place(name, item)
        if table == UPDATES:
            updates[layer] = update_count(path, item.value)
        elif table and len(item.shape) == 2:
            rows = _DatasetRows(item, weights, name)
            holders.setdefault(layer, {})[table] = rows
        elif vector_owner(table) and len(item.shape) == 1:
            numbers = functools.partial(weights.numbers, name)
            vectors.setdefault(layer, {})[table] = Vector(item.shape[0], numbers)
    # A model may have such layers beside one whose tables are meant.
    plain = holders.pop(_PLAIN, {})
    if plain and (not holders or {*tables} & {*plain}):
        holders[_PLAIN] = plain
    if not holders:
        raise ValueError(
            f"{path} has no tables of tpu_embedding's Keras layer, of a "
            "keras.layers.Embedding or of a keras_rs.layers.DistributedEmbedding on a "
            "CPU or GPU. On SparseCores keras_rs stores stacked tables without "
            "recording their layout: save those with get_embedding_tables() and "
            "numpy.savez."
        )
    grouped = {
        layer: group_tables(path, rows, tables, vectors.get(layer))
        for layer, rows in holders.items()
    }
    layer = choose_root(path, root, tables, grouped)
    numbered = _numbered(weights, datasets) if layer == _PLAIN else None
    return LogicalCheckpoint(
        path, "Keras", grouped[layer], updates.get(layer), numbered
    )


@dataclasses.dataclass(frozen=True)
class _Weights:
    """A file of weights.

    Attributes:
      path: Path of the file.
      content: Content of the HDF5 file if it is in a `.keras` archive, else None.
    """

    path: str
    content: bytes | None

    @contextlib.contextmanager
    def opened(self) -> Iterator[Any]:
        """Opens the file with h5py; see `errors.parsing`."""
        import h5py  # Keras brings it; only these files need it.

        source = self.path if self.content is None else io.BytesIO(self.content)
        with errors.parsing(self.path), h5py.File(source, "r") as file:
            yield file

    def numbers(self, name: str) -> np.ndarray:
        """Reads a dataset of integers of rank 1 as int64."""
        with self.opened() as file:
            if file[name].dtype.kind not in "iu":
                raise errors.corrupted(self.path, f"{name} does not hold integers")
            return np.array(file[name], np.int64)


def _unpacked(path: str, member: str) -> bytes | None:
    if not path.endswith(_ARCHIVE):
        return None
    with errors.parsing(path), zipfile.ZipFile(path) as archive:
        return archive.read(member)


def _numbered(
    weights: _Weights, datasets: Sequence[tuple[str, _Dataset]]
) -> NumberedSlots | None:
    """Returns the variables of the optimizer, or of one in a LossScaleOptimizer."""
    found: dict[str, dict[int, tuple[str, _Dataset]]] = {}
    for name, item in datasets:
        if match := _OPTIMIZER.fullmatch(name):
            found.setdefault(match[1] or "", {})[int(match[2])] = name, item
    if not found:
        return None
    numbered = found[max(found)]
    items = [numbered[n] for n in sorted(numbered)]
    first = items[0][1]
    return NumberedSlots(
        _optimizer_of(weights.path) or plain_name(first.layer),
        [item.shape for _, item in items],
        {
            n: _DatasetRows(item, weights, name)
            for n, (name, item) in enumerate(items)
            if len(item.shape) == 2
        },
        int(first.value) if first.shape == () and first.dtype.kind in "iu" else None,
    )


def plain_name(name: str) -> str:
    """Returns an optimizer's name in small letters, without the number of Keras 3."""
    return re.sub(r"_\d+$", "", name.lower())


def _config(path: str) -> dict[str, Any]:
    """Reads the configuration of the model in a `.keras` file."""
    content = _unpacked(path, _CONFIG)
    with errors.parsing(path):
        return {} if content is None else json.loads(content)


def _named(path: str, datasets: list[tuple[str, _Dataset]]) -> None:
    """Gives tf_keras's tables the names of layers, which the files only number."""
    tables = {
        int((match[1] or "_0")[1:]): item
        for name, item in datasets
        if (match := _TF_KERAS.fullmatch(name)) and not item.layer
    }
    layers = _config(path).get("config", {}).get("layers", []) if tables else []
    names = [x["config"]["name"] for x in layers if x["class_name"] == "Embedding"]
    if len(names) == len(tables):
        for number, name in zip(sorted(tables), names, strict=True):
            tables[number].layer = name


def _optimizer_of(path: str) -> str:
    """Returns the optimizer class of a `.keras` file in small letters, or ""."""
    with errors.parsing(path):
        found = (_config(path).get("compile_config") or {}).get("optimizer")
        while isinstance(found, dict) and "inner_optimizer" in found["config"]:
            found = found["config"]["inner_optimizer"]
        name = found["class_name"] if isinstance(found, dict) else found
    return str(name or "").lower().removeprefix("rowsparse")


@dataclasses.dataclass
class _Dataset:
    """A dataset of a closed file.

    Attributes:
      shape: Shape of the dataset.
      dtype: Dtype of the dataset.
      layer: The attribute `name` of the group that holds the dataset.
      value: The value of a scalar dataset, else None.
    """

    shape: tuple[int, ...]
    dtype: np.dtype[Any]
    layer: str
    value: Any


def _datasets(weights: _Weights) -> list[tuple[str, _Dataset]]:
    """Returns all datasets of a file, with their paths in the file."""
    found: list[tuple[str, _Dataset]] = []

    def visit(name: str, item: Any) -> None:
        if hasattr(item, "shape"):
            if item.shape is None:
                raise errors.corrupted(weights.path, f"{name} has no shape")
            value = item[()] if item.shape == () else None
            layer = str(item.parent.attrs.get("name", ""))
            found.append((name, _Dataset(item.shape, item.dtype, layer, value)))

    with weights.opened() as file:
        file.visititems(visit)
    return found


def _place(name: str, item: _Dataset) -> tuple[str, str]:
    """Returns (path of the layer, name of the table or slot, or "" for others)."""
    owner, _, variable = name.rpartition("/vars/")
    layer, of_keras_rs, _ = f"/{owner}".partition(_TABLES)
    if of_keras_rs:
        return layer.removeprefix("/"), item.layer
    if _EMBEDDING.fullmatch(owner.rpartition("/")[2]) and variable == "0":
        return _PLAIN, item.layer
    if owner and not variable.isdigit():
        return owner, urllib.parse.unquote(variable)
    return owner, ""


class _DatasetRows(TableRows):
    """A dataset of an HDF5 file."""

    def __init__(self, item: _Dataset, weights: _Weights, name: str) -> None:
        super().__init__(item.shape, item.dtype)
        self._weights, self._name = weights, name

    def read(self, start: int, stop: int) -> np.ndarray:
        with self._weights.opened() as file:
            return file[self._name][start:stop]

    def verify(self) -> None:
        for start, stop in self.slices():
            self.read(start, stop)
