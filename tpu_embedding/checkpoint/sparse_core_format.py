"""Checkpoints of tables that are stacked and sharded, as on SparseCores.

The format is that of tf.tpu.experimental.embedding.TPUEmbeddingV2: variables `<stack>`
and `<stack>/<slot>`, one shard after another with padding, and a string with a
SparseCoreTableLayouts proto, which gives the place of each table.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import tensorflow as tf
from google.protobuf import message
from tensorflow.core.tpu.kernels import sparse_core_layout_pb2
from tensorflow.python.trackable import base

from tpu_embedding.checkpoint import errors
from tpu_embedding.checkpoint.checkpoint_view import LogicalTable, Vector
from tpu_embedding.checkpoint.hashings import stored_hashing
from tpu_embedding.layout.partition import TableLayout
from tpu_embedding.tables.rows import (
    PARAMETERS,
    StackedRows,
    TableRows,
    checkpoint_name,
    unstacked,
)
from tpu_embedding.tables.trackable import VALUE_KEY

_protos: Any = sparse_core_layout_pb2  # pyright has no stubs of it.

# TensorFlow 2.18 lacks the numbers of samples and features, which no reader needs.
_FIELDS = [
    field.name
    for field in dataclasses.fields(TableLayout)
    if field.name in _protos.SparseCoreTableLayout.DESCRIPTOR.fields_by_name
]

LAYOUTS = "_sparse_core_table_layouts"  # The name of the record in checkpoints.


def parse_layouts(path: str, record: bytes) -> list[TableLayout]:
    """Parses the layout record of a checkpoint."""
    try:
        protos = _protos.SparseCoreTableLayouts.FromString(record)
    except message.DecodeError as error:
        raise errors.corrupted(path, "its layout record cannot be parsed") from error
    layouts = [_from_proto(proto) for proto in protos.tables]
    for layout in layouts:
        if not _is_possible(layout):
            raise errors.corrupted(
                path, f"its layout record is invalid for table {layout.table_name}"
            )
    return layouts


def to_proto(layout: TableLayout) -> Any:
    """Returns a layout as TensorFlow's SparseCoreTableLayout."""
    values = {name: getattr(layout, name) for name in _FIELDS}
    return _protos.SparseCoreTableLayout(**values)


def unstack(
    path: str,
    stacks: Mapping[str, TableRows],
    layouts: Sequence[TableLayout],
    vectors: Mapping[str, Vector],
) -> dict[str, LogicalTable]:
    """Reads tables from stacks with the names `<stack>` and `<stack>/<slot>`."""
    tables = {}
    for layout in layouts:
        stack = layout.stacked_table_name
        if stack not in stacks:
            raise errors.corrupted(
                path, f"it lacks the stack {stack}, which its layout record names"
            )
        found = {
            name[len(stack) + 1 :]: rows
            for name, rows in stacks.items()
            if name == stack or name.startswith(stack + "/")
        }
        for rows in found.values():
            _check_shape(path, rows.shape, layout)
        parameters = unstacked(found.pop(""), layout)
        slots = {name: unstacked(rows, layout) for name, rows in found.items()}
        name = layout.table_name
        hashing = stored_hashing(path, name, vectors)
        tables[name] = LogicalTable(name, parameters, slots, hashing=hashing)
    return tables


def stack(
    tables: Mapping[str, Mapping[str, TableRows]], layouts: Sequence[TableLayout]
) -> tuple[dict[str, TableRows], dict[str, Any]]:
    """Returns the stacks of tables and slots by name, and the record of layouts."""
    laid_out = {layout.table_name for layout in layouts}
    if laid_out != tables.keys():
        missing = ", ".join(sorted(tables.keys() - laid_out)) or "none"
        surplus = ", ".join(sorted(laid_out - tables.keys())) or "none"
        raise ValueError(
            "Each table needs one layout, and each layout a table. Tables without a "
            f"layout: {missing}. Layouts without a table: {surplus}."
        )
    by_stack: dict[str, list[TableLayout]] = {}
    for layout in layouts:
        table = tables[layout.table_name]
        if table[PARAMETERS].shape != layout.unsharded_shape:
            raise ValueError(
                f"Table {layout.table_name} has shape "
                f"{errors.shape_text(table[PARAMETERS].shape)}, but its layout is for "
                f"shape {errors.shape_text(layout.unsharded_shape)}."
            )
        by_stack.setdefault(layout.stacked_table_name, []).append(layout)
    matrices: dict[str, TableRows] = {}
    for name, members in by_stack.items():
        arrays = [tables[layout.table_name] for layout in members]
        if any(other.keys() != arrays[0].keys() for other in arrays):
            kinds = "; ".join(", ".join(names) for names in arrays)
            raise ValueError(
                f"The tables of stack {name} must have the same slots. Received: "
                f"{kinds}. Put them into different stacks, or leave the slots out with "
                "`slots=False`."
            )
        for array in arrays[0]:
            own = {la.table_name: tables[la.table_name][array] for la in members}
            matrices[checkpoint_name(name, array)] = StackedRows(own, members)
    return matrices, {LAYOUTS: tf.constant(_to_record(layouts))}


class LayoutRecord(base.Trackable):
    """The layout record in TensorFlow's checkpoints."""

    def __init__(self, layouts: Sequence[TableLayout]) -> None:
        """Stores the place of each table."""
        self._layouts = list(layouts)

    def _serialize_to_tensors(self) -> dict[str, tf.Tensor]:
        return {VALUE_KEY: tf.constant(_to_record(self._layouts))}

    def _restore_from_tensors(self, restored_tensors: Mapping[str, tf.Tensor]) -> None:
        # `RestoresLayouts` checked the records before anything was restored, but cannot
        # tell which of several records belongs to this object.
        record: Any = restored_tensors[VALUE_KEY].numpy()
        if not same_layouts(self._layouts, parse_layouts("the checkpoint", record)):
            raise other_stacks("the checkpoint")


def other_stacks(path: str) -> ValueError:
    """Makes the error of a checkpoint with other stacks than those of an embedding."""
    return ValueError(
        f"The tables in {path} are not stacked and sharded as this embedding on "
        "SparseCores needs: they are not stacked, or were saved with other tables, "
        "devices or SparseCores. Use tpu_embedding.checkpoint.restore(embedding, "
        "path), which converts the layout."
    )


def same_layouts(some: Sequence[TableLayout], others: Sequence[TableLayout]) -> bool:
    """Returns whether two records put every value at the same place."""

    def places(layouts: Sequence[TableLayout]) -> list[TableLayout]:
        # The place of a table does not depend on its number of samples.
        plain = [
            dataclasses.replace(la, per_sparse_core_batch_size=0, num_features=0)
            for la in layouts
        ]
        return sorted(plain, key=lambda layout: layout.table_name)

    return places(some) == places(others)


def _is_possible(layout: TableLayout) -> bool:
    """Returns whether the shards have room for a table at its offset."""
    shapes = (layout.unsharded_shape, layout.unsharded_padded_shape)
    if any(len(shape) != 2 for shape in shapes) or layout.num_sparse_cores < 1:
        return False
    (rows, columns), (_, padded) = shapes
    offset = layout.sparse_core_shard_row_offset
    end = offset + -(-rows // layout.num_sparse_cores)
    fits = end <= layout.total_rows_per_sparse_core_shard
    return fits and min(offset, rows) >= 0 and 0 <= columns <= padded


def _check_shape(path: str, shape: tuple[int, int], layout: TableLayout) -> None:
    stored, width = shape
    expected = layout.total_rows_per_sparse_core_shard * layout.num_sparse_cores
    widths = (1, layout.unsharded_padded_shape[1])
    if stored != expected or width not in widths:
        raise errors.corrupted(
            path,
            f"the stack {layout.stacked_table_name} has shape [{stored}, {width}], but "
            f"its layout record says [{expected}, {widths[1]}]",
        )


def _from_proto(proto: Any) -> TableLayout:
    values = {name: getattr(proto, name) for name in _FIELDS}
    for shape in ("unsharded_shape", "unsharded_padded_shape"):
        values[shape] = tuple(values[shape])
    return TableLayout(**values)


def _to_record(layouts: Sequence[TableLayout]) -> bytes:
    record = _protos.SparseCoreTableLayouts(tables=map(to_proto, layouts))
    return record.SerializeToString(deterministic=True)
