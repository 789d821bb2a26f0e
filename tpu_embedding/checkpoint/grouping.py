"""Which of an object's variables are tables, and which are slots of them."""

from __future__ import annotations

from collections.abc import Collection, Mapping

from tpu_embedding.checkpoint.checkpoint_view import LogicalTable
from tpu_embedding.layout.table_arrays import PARAMETERS, Rows

_SUFFIX = f"/{PARAMETERS}"


def group_tables(
    matrices: Mapping[str, Rows], tables: Collection[str] = ()
) -> dict[str, LogicalTable]:
    """Tables with their slots, from matrices called `<table>` and `<table>/<slot>`.

    `<table>/parameters` is a table too, of that very name where `<table>` is another or
    where it has slots of its own.
    A name with a slash is a table of its own unless what stands before it is a table
    with as many rows.

    Args:
      matrices: By name.
      tables: Names known to be tables.
    """
    holders = {name.rpartition("/")[0] for name in matrices}

    def plain_name(name: str) -> str:
        table = name.removesuffix(_SUFFIX)
        own = name in tables or name in holders or table in matrices
        return name if own else table

    plain = {plain_name(name): rows for name, rows in matrices.items()}
    owners = {name: _owner(name, plain, tables) for name in plain}
    grouped: dict[str, LogicalTable] = {}
    for name, owner in owners.items():
        if owner is None:
            slots = {
                other[len(name) + 1 :]: plain[other]
                for other, its in owners.items()
                if its == name
            }
            grouped[name] = LogicalTable(name, plain[name], slots)
    return grouped


def _owner(
    name: str, matrices: Mapping[str, Rows], tables: Collection[str]
) -> str | None:
    """The table that `name` is a slot of, or None if it is a table."""
    before, slash, _ = name.rpartition("/")
    is_table = name in tables or name.endswith(_SUFFIX)
    if is_table or not slash or before not in matrices:
        return None
    same_rows = matrices[before].shape[0] == matrices[name].shape[0]
    return before if before in tables or same_rows else None
