"""Which object of a checkpoint is the embedding."""

from __future__ import annotations

from collections.abc import Collection, Mapping

from tpu_embedding.checkpoint import errors
from tpu_embedding.checkpoint.checkpoint_view import LogicalTable


def choose_root(
    path: str,
    root: str | None,
    tables: Collection[str],
    holders: Mapping[str, Mapping[str, LogicalTable]],
    mixed: Collection[str] = (),
) -> str:
    """The object that is meant: the one named, else the likeliest, if it is alone.

    Args:
      path: Of the checkpoint, for messages.
      root: The one named, or None.
      tables: Names that its tables may have.
      holders: The tables of each object.
      mixed: Objects that hold vectors too, as layers with a bias do.
    """
    if not holders:
        raise errors.no_tables(path)
    if root is not None:
        if root not in holders:
            raise errors.no_such_root(path, root, map(repr, holders))
        return root
    with_names = [p for p, found in holders.items() if set(tables) & set(found)]
    with_slots = [
        p
        for p, found in holders.items()
        if p not in mixed and any(t.slots for t in found.values())
    ]
    pure = [p for p in holders if p not in mixed]
    likeliest = with_names or with_slots or pure or list(holders)
    if len(likeliest) > 1:
        raise errors.several_roots(path, map(repr, likeliest))
    return likeliest[0]
