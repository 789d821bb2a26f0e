"""Weights that Keras saved of a keras-rs DistributedEmbedding.

Keras keeps a layer's variables as `<path of the layer>/vars/0, 1, ...`; keras-rs (0.4)
has one layer for each table under `_default_device_embedding_layers`, and the name of
the table in the attribute `name` of its `vars`. Keras 3 keeps the slots of its
optimizers by number alone, so that only the tables can be told.
"""

from __future__ import annotations

import dataclasses
import io
import os
import zipfile
from collections.abc import Collection
from typing import Any

import numpy as np

from tpu_embedding.checkpoint import errors
from tpu_embedding.checkpoint.logical import LogicalCheckpoint, LogicalTable
from tpu_embedding.checkpoint.roots import choose_root
from tpu_embedding.layout.rows import Rows

_SUFFIXES = (".h5", ".keras")
_WEIGHTS = "model.weights.h5"  # Of a `.keras` archive.
_TABLES = "/_default_device_embedding_layers/"


def is_keras(path: str) -> bool:
    """Whether a path is a file of Keras weights."""
    return path.endswith(_SUFFIXES) and not os.path.isdir(path)


def read_keras(
    path: str, root: str | None, tables: Collection[str]
) -> LogicalCheckpoint:
    """See `formats.read`."""
    if not os.path.exists(path):
        raise errors.not_found(path)
    holders: dict[str, dict[str, LogicalTable]] = {}
    with _opened(path) as file:
        variables: list[tuple[str, Any]] = []
        file.visititems(lambda name, item: variables.append((name, item)))
        for name, item in variables:
            layer, found, rest = f"/{name}".partition(_TABLES)
            if found and rest.endswith("/vars/0"):
                table = str(item.parent.attrs["name"])
                rows = _DatasetRows(path, name, item.shape, item.dtype)
                holder = holders.setdefault(layer.removeprefix("/"), {})
                holder[table] = LogicalTable(table, rows, {})
    if not holders:
        raise errors.no_keras_tables(path)
    return LogicalCheckpoint(
        path, "keras-rs", holders[choose_root(path, root, tables, holders)]
    )


@dataclasses.dataclass(frozen=True)
class _DatasetRows(Rows):
    path: str
    name: str
    whole: tuple[int, ...]
    kind: np.dtype[Any]

    @property
    def shape(self) -> tuple[int, int]:
        rows, columns = self.whole
        return rows, columns

    @property
    def dtype(self) -> np.dtype[Any]:
        return self.kind

    def read(self, start: int, stop: int) -> np.ndarray:
        with _opened(self.path) as file:
            try:
                return file[self.name][start:stop]
            except (OSError, RuntimeError, zipfile.BadZipFile) as error:
                raise errors.corrupted(self.path, str(error)) from error

    def verify(self) -> None:
        for start, stop in self.slices():
            self.read(start, stop)


def _opened(path: str) -> Any:
    import h5py  # Keras brings it; only these files need it.

    try:
        if path.endswith(".keras"):
            with zipfile.ZipFile(path) as archive:
                return h5py.File(io.BytesIO(archive.read(_WEIGHTS)), "r")
        return h5py.File(path, "r")
    except (OSError, KeyError, zipfile.BadZipFile) as error:
        raise errors.corrupted(path, str(error)) from error
