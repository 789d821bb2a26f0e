"""TensorFlow's checkpoints: which object holds the tables, and as what."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping

from tpu_embedding.checkpoint.bundle import Bundle, BundleRows
from tpu_embedding.checkpoint.checkpoint_view import LogicalCheckpoint, LogicalTable
from tpu_embedding.checkpoint.grouping import group_tables
from tpu_embedding.checkpoint.object_graph import (
    SavedObject,
    SavedSlot,
    read_objects,
)
from tpu_embedding.checkpoint.roots import choose_root
from tpu_embedding.checkpoint.sparse_core_format import (
    LAYOUTS,
    parse_layouts,
    unstack,
)
from tpu_embedding.layout.plan import UPDATES
from tpu_embedding.layout.stacking import TableLayout
from tpu_embedding.layout.table_arrays import Rows

_PLAIN, _SPARSE_CORE = "TensorFlow", "TensorFlow, SparseCore"

# What the optimizers of tf_keras call a slot, and the name of it here. The layer of
# tensorflow-recommenders leaves its slots to them.
_OPTIMIZER_SLOTS = {
    "accumulator": "accumulators",
    "linear": "linears",
    "m": "momenta",
    "v": "velocities",
}


def read_tensorflow(
    prefix: str, root: str | None, tables: Collection[str]
) -> LogicalCheckpoint:
    """See `formats.read`."""
    bundle = Bundle(prefix)
    objects = read_objects(bundle)
    slots = [slot for node in objects.values() for slot in node.slots]
    holders: dict[str, dict[str, LogicalTable]] = {}
    seen: set[str] = set()  # Keys of tensors: a variable may have several parents.
    for path, node in objects.items():
        matrices = _matrices(bundle, node, slots)
        keys = {rows.key for rows in matrices.values()}
        if not keys <= seen:
            seen |= keys
            holders[path] = _tables(bundle, node, matrices, tables)
    mixed = [path for path in holders if _has_vectors(bundle, objects[path])]
    path = choose_root(prefix, root, tables, holders, mixed)
    return LogicalCheckpoint(
        path=prefix,
        format=_SPARSE_CORE if LAYOUTS in objects[path].values else _PLAIN,
        tables=holders[path],
        updates=_updates(bundle, objects[path]),
    )


def read_all_layouts(prefix: str) -> Iterator[list[TableLayout]]:
    """The layout records of all objects of a checkpoint that have one."""
    bundle = Bundle(prefix)
    for node in read_objects(bundle).values():
        if LAYOUTS in node.values:
            yield parse_layouts(prefix, bundle.value(node.values[LAYOUTS]))


def _tables(
    bundle: Bundle,
    node: SavedObject,
    matrices: Mapping[str, Rows],
    tables: Collection[str],
) -> dict[str, LogicalTable]:
    if LAYOUTS not in node.values:
        return group_tables(matrices, tables)
    record = bundle.value(node.values[LAYOUTS])
    return unstack(bundle.prefix, matrices, parse_layouts(bundle.prefix, record))


def _has_vectors(bundle: Bundle, node: SavedObject) -> bool:
    return any(len(bundle.shape(key)) == 1 for key in node.values.values())


def _matrices(
    bundle: Bundle, node: SavedObject, slots: Iterable[SavedSlot]
) -> dict[str, BundleRows]:
    """The variables of rank 2 by name, slots as `<variable>/<slot>`."""
    names = {key: name for name, key in node.values.items()}
    keys = dict(node.values)
    for slot in slots:
        if slot.variable in names:
            name = _OPTIMIZER_SLOTS.get(slot.name, slot.name)
            keys[f"{names[slot.variable]}/{name}"] = slot.key
    return {
        name: bundle.rows(key)
        for name, key in keys.items()
        if len(bundle.shape(key)) == 2 and bundle.dtype(key).is_floating
    }


def _updates(bundle: Bundle, node: SavedObject) -> int | None:
    key = node.values.get(UPDATES)
    return None if key is None else int(bundle.value(key))
