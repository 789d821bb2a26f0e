"""Reads TensorFlow's checkpoints by ranges of rows.

RestoreV2 reads and checks each stored slice as a whole. A tensor that was written in
slices, as by `writing`, is read a slice at a time; one that was written whole is held
in memory while it is read.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Collection, Iterable, Mapping
from typing import Any

import numpy as np
import tensorflow as tf

from tpu_embedding.checkpoint import errors
from tpu_embedding.checkpoint.checkpoint_view import (
    LogicalCheckpoint,
    LogicalTable,
    Vector,
    choose_root,
    group_tables,
    update_count,
    vector_owner,
)
from tpu_embedding.checkpoint.object_graph import (
    GRAPH_KEY,
    SavedObject,
    SavedSlot,
    read_objects,
)
from tpu_embedding.checkpoint.sparse_core_format import LAYOUTS, parse_layouts, unstack
from tpu_embedding.checkpoint.writing import slice_spec
from tpu_embedding.layout.partition import TableLayout
from tpu_embedding.layout.plan import UPDATES
from tpu_embedding.tables.rows import (
    PARAMETERS,
    SCALE_OFFSET,
    TableRows,
    checkpoint_name,
)

_PLAIN, _SPARSE_CORE = "TensorFlow", "TensorFlow, SparseCore"
# Stored slices that are kept because the next read may need another part of them: a
# table's rows lie in as many slices of a stack as there are SparseCores.
_KEPT_SLICES = 8

# The names of slots here, by their names in the optimizers of tf_keras, which also
# hold the slots for the layer of tensorflow-recommenders.
_OPTIMIZER_SLOTS = {
    "accumulator": "accumulators",
    "linear": "linears",
    "m": "momenta",
    "v": "velocities",
}


class Bundle:
    """The tensors of a TensorFlow checkpoint.

    Attributes:
      prefix: Path of the checkpoint without `.index`.
      shapes: The shape of each tensor by its key.
      dtypes: The dtype of each tensor by its key.
    """

    def __init__(self, prefix: str) -> None:
        """Reads the index.

        Raises:
          tf.errors.NotFoundError: If there is no index.
          tf.errors.DataLossError: If the index is damaged.
        """
        self.prefix = prefix
        self.index = prefix + ".index"
        self.verified: set[str] = set()  # keys
        self._kept: tuple[str, np.ndarray] | None = None
        if not tf.io.gfile.exists(self.index):
            raise errors.not_found(prefix)
        try:
            reader = tf.train.load_checkpoint(prefix)
            shapes = reader.get_variable_to_shape_map()
            self.shapes: dict[str, list[int]] = dict(sorted(shapes.items()))
            self.dtypes: dict[str, tf.DType] = reader.get_variable_to_dtype_map()
        except Exception as error:  # Its type varies: pybind11 translates the status.
            raise errors.corrupted(self.index, str(error)) from error

    def restore(self, key: str, spec: str = "") -> Any:
        """Reads a tensor, or a slice of one, which may not be changed.

        Raises:
          tf.errors.DataLossError: If a file is missing or damaged.
        """
        try:
            (value,) = tf.raw_ops.RestoreV2(
                prefix=self.prefix,
                tensor_names=[key],
                shape_and_slices=[spec],
                dtypes=[self.dtypes[key]],
            )
        except (tf.errors.OpError, UnicodeDecodeError) as error:
            reason = f"{key} cannot be read ({error})"
            raise errors.corrupted(self.prefix, reason) from error
        return np.asarray(value) if value.shape.rank else value.numpy()

    def record(self, key: str) -> bytes:
        """Reads a scalar string.

        Raises:
          tf.errors.DataLossError: If the tensor is not a string, or cannot be read.
        """
        value = self.restore(key)
        if not isinstance(value, bytes):
            raise errors.corrupted(self.index, f"{key} is not a string")
        return value

    def can_restore(self, key: str) -> bool:
        """Returns whether RestoreV2 can read a tensor of float16 whole."""
        try:
            self.restore(key)
        except tf.errors.DataLossError as error:
            return not isinstance(error.__cause__, tf.errors.InvalidArgumentError)
        return True

    @functools.cached_property
    def objects(self) -> dict[str, SavedObject]:
        """See `read_objects`."""
        record = self.record(GRAPH_KEY) if GRAPH_KEY in self.shapes else None
        return read_objects(self.index, record, self.shapes)

    @functools.cached_property
    def largest_file(self) -> int:
        """Size of the largest data file; a larger tensor is stored in slices."""
        folder, name = os.path.split(self.prefix)
        files = [
            file
            for file in tf.io.gfile.listdir(folder or ".")
            if file.startswith(f"{name}.data-")
        ]
        sizes = [tf.io.gfile.stat(os.path.join(folder, f)).length for f in files]
        return max(sizes, default=0)

    @functools.cached_property
    def kept_slices(self) -> Any:
        """The method `restore` with a cache of the last slices."""
        return functools.lru_cache(_KEPT_SLICES)(self.restore)

    def kept_tensor(self, key: str) -> np.ndarray:
        """Reads a tensor as `restore` does, and keeps the last one in memory."""
        if self._kept is None or self._kept[0] != key:
            self._kept = None  # Memory never holds two tensors.
            self._kept = key, self.restore(key)
        return self._kept[1]

    def release(self) -> None:
        """Frees the tensor and the slices that are kept."""
        self._kept = None
        self.kept_slices.cache_clear()


class _BundleRows(TableRows):
    """One tensor of rank 2 of a checkpoint; every read verifies the checksums."""

    def __init__(self, bundle: Bundle, key: str) -> None:
        dtype = np.dtype(bundle.dtypes[key].as_numpy_dtype)
        super().__init__(bundle.shapes[key], dtype)
        self._bundle, self.key = bundle, key

    def read(self, start: int, stop: int) -> np.ndarray:
        if self._is_whole:
            return self._bundle.kept_tensor(self.key)[start:stop].copy()
        rows, size = self.shape[0], self.slice_rows
        values = np.empty((stop - start, self.shape[1]), self.dtype)
        for first in range(start // size * size, stop, size):
            begin, end = max(start, first), min(stop, first + size)
            last = min(rows, first + size)
            partly = (begin, end) != (first, last)
            restore = self._bundle.kept_slices if partly else self._bundle.restore
            stored = restore(self.key, slice_spec(self.shape, first, last))
            values[begin - start : end - start] = stored[begin - first : end - first]
        return values

    def verify(self) -> None:
        if self.key in self._bundle.verified:
            return  # The read of another table of the stack verified it.
        for start, stop in [(0, self.shape[0])] if self._is_whole else self.slices():
            self._bundle.restore(self.key, slice_spec(self.shape, start, stop))
        self._bundle.verified.add(self.key)

    def release(self) -> None:
        self._bundle.release()

    @functools.cached_property
    def _is_whole(self) -> bool:
        """Whether the tensor may be stored whole; if so, each read reads all of it."""
        if self.nbytes > self._bundle.largest_file:
            return False
        if self.dtype == np.float16 and self.shape[0] > self.slice_rows:
            # RestoreV2 reads float16 in the pieces that are stored, or not at all.
            return self._bundle.can_restore(self.key)
        return True


def read_tensorflow(
    prefix: str, root: str | None, tables: Collection[str]
) -> LogicalCheckpoint:
    """See `checkpoint.read`."""
    bundle = Bundle(prefix)
    objects = bundle.objects
    slots = [slot for node in objects.values() for slot in node.slots]
    holders: dict[str, dict[str, LogicalTable]] = {}
    seen: set[str] = set()  # Keys of tensors: a variable may have several parents.
    for path, node in objects.items():
        matrices = _matrices(bundle, node, slots)
        keys = {rows.key for rows in matrices.values()}
        if keys <= seen:
            continue
        seen |= keys
        if LAYOUTS in node.values:
            record = parse_layouts(prefix, bundle.record(node.values[LAYOUTS]))
            holders[path] = unstack(prefix, matrices, record, _vectors(bundle, node))
        else:
            vectors = _vectors(bundle, node)
            holders[path] = group_tables(prefix, matrices, tables, vectors)
    mixed = [
        path
        for path in holders
        if any(
            len(bundle.shapes[key]) == 1 and not vector_owner(name)
            for name, key in objects[path].values.items()
        )
    ]
    path = choose_root(prefix, root, tables, holders, mixed)
    values, updates = objects[path].values, None
    if UPDATES in values:
        updates = update_count(prefix, bundle.restore(values[UPDATES]))
    return LogicalCheckpoint(
        path=prefix,
        format=_SPARSE_CORE if LAYOUTS in values else _PLAIN,
        tables=holders[path],
        updates=updates,
    )


def read_first_layouts(prefix: str) -> list[TableLayout] | None:
    """Returns the layout record of the first object that has one."""
    bundle = Bundle(prefix)
    for node in bundle.objects.values():
        if LAYOUTS in node.values:
            return parse_layouts(prefix, bundle.record(node.values[LAYOUTS]))
    return None


def _matrices(
    bundle: Bundle, node: SavedObject, slots: Iterable[SavedSlot]
) -> dict[str, _BundleRows]:
    """Returns the variables of rank 2 by name, slots as `<variable>/<slot>`."""
    names = {key: name for name, key in node.values.items()}
    keys = dict(node.values)
    for slot in slots:
        if slot.variable in names:
            name = _OPTIMIZER_SLOTS.get(slot.name, slot.name)
            keys[f"{names[slot.variable]}/{name}"] = slot.key
    for table, parts in node.parts.items():
        keys |= {f"{table}/{part}": key for part, key in parts.items()}
    return {
        name: _BundleRows(bundle, key)
        for name, key in keys.items()
        if len(bundle.shapes[key]) == 2
        and (bundle.dtypes[key].is_floating or _is_coded(bundle, keys, name))
    }


def _is_coded(bundle: Bundle, keys: Mapping[str, str], name: str) -> bool:
    """Returns whether a matrix holds the codes of an int8 table."""
    owners = name, name.removesuffix(f"/{PARAMETERS}")  # As a static or growing table.
    known = [keys.get(checkpoint_name(owner, SCALE_OFFSET), "") for owner in owners]
    beside = known[0] or known[1]
    rows = bundle.shapes[keys[name]][0]
    is_codes = bundle.dtypes[keys[name]] == tf.uint8
    return is_codes and bundle.shapes.get(beside) == [rows, 2]


def _vectors(bundle: Bundle, node: SavedObject) -> dict[str, Vector]:
    """Returns the vectors that are stored for growing and hashed tables, by name."""
    keys = {name: key for name, key in node.values.items() if vector_owner(name)}
    for table, parts in node.parts.items():
        keys |= {f"{table}/{part}": key for part, key in parts.items()}
    return {
        name: Vector(bundle.shapes[key][0], functools.partial(bundle.restore, key))
        for name, key in keys.items()
        if len(bundle.shapes[key]) == 1 and bundle.dtypes[key] == tf.int64
    }
