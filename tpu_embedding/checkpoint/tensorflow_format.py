"""TensorFlow's checkpoints: which object holds the tables, and as what."""

from __future__ import annotations

from collections.abc import Collection, Mapping

from tpu_embedding.checkpoint import errors
from tpu_embedding.checkpoint.bundle import Bundle
from tpu_embedding.checkpoint.grouping import group_tables
from tpu_embedding.checkpoint.logical import LogicalCheckpoint, LogicalTable
from tpu_embedding.checkpoint.object_graph import SavedObject, read_objects
from tpu_embedding.layout.rows import Rows
from tpu_embedding.layout.tables import UPDATES


def read_tensorflow(
    prefix: str, root: str | None, tables: Collection[str]
) -> LogicalCheckpoint:
    """See `formats.read`."""
    bundle = Bundle(prefix)
    objects = read_objects(bundle)
    holders = {
        path: found
        for path, node in objects.items()
        if (found := group_tables(_matrices(bundle, node), tables))
    }
    path = _choose(prefix, root, tables, holders)
    return LogicalCheckpoint(
        path=prefix,
        format="TensorFlow",
        tables=holders[path],
        updates=_updates(bundle, objects[path]),
    )


def _matrices(bundle: Bundle, node: SavedObject) -> dict[str, Rows]:
    return {
        name: bundle.rows(key)
        for name, key in node.values.items()
        if len(bundle.shape(key)) == 2 and bundle.dtype(key).is_floating
    }


def _updates(bundle: Bundle, node: SavedObject) -> int | None:
    key = node.values.get(UPDATES)
    return None if key is None else int(bundle.value(key))


def _choose(
    prefix: str,
    root: str | None,
    tables: Collection[str],
    holders: Mapping[str, Mapping[str, LogicalTable]],
) -> str:
    """The object that is meant: the one named, else the likeliest, if it is alone."""
    if not holders:
        raise errors.no_tables(prefix)
    if root is not None:
        if root not in holders:
            raise errors.no_such_root(prefix, root, map(repr, holders))
        return root
    with_names = [p for p, found in holders.items() if set(tables) & set(found)]
    with_slots = [
        p for p, found in holders.items() if any(t.slots for t in found.values())
    ]
    likeliest = with_names or with_slots or list(holders)
    if len(likeliest) > 1:
        raise errors.several_roots(prefix, map(repr, likeliest))
    return likeliest[0]
