"""Checks of the arguments of `save` and `restore`."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

from tpu_embedding import errors
from tpu_embedding.layout.stacking import TableLayout


def check_tables(tables: object) -> None:
    """Raises TypeError unless `tables` is None or a collection of names, and no str."""
    if tables is None:
        return
    if isinstance(tables, str) or not isinstance(tables, Collection):
        raise errors.argument_type("tables", tables, "a collection of str, or None")


def check_rename(rename: object) -> None:
    """Raises TypeError unless `rename` is None or a dict of names by name."""
    if rename is None:
        return
    if not isinstance(rename, Mapping) or not all(
        isinstance(name, str) for pair in rename.items() for name in pair
    ):
        raise errors.argument_type("rename", rename, "a dict of str by str, or None")


def check_layouts(layouts: object) -> None:
    """Raises TypeError unless `layouts` is None or a sequence of TableLayouts."""
    if layouts is None:
        return
    if not isinstance(layouts, Sequence) or not all(
        isinstance(layout, TableLayout) for layout in layouts
    ):
        raise errors.argument_type(
            "layouts", layouts, "a sequence of TableLayout, or None"
        )
