"""The wording of the errors of checkpoints that the removed software wrote.

As in `tpu_embedding.errors`: each function returns the exception.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any


def _names(names: Iterable[object]) -> str:
    return ", ".join(repr(name) for name in names)


def no_checkpoint(path: str) -> ValueError:
    """No checkpoint at a path."""
    return ValueError(
        f"There is no checkpoint at {path!r}. Pass the prefix of one (without .index), "
        "or the folder of a model, in which a file `checkpoint` names the latest."
    )


def damaged_checkpoint(path: str, reason: object) -> ValueError:
    """A checkpoint's file that is cut off, lost or changed."""
    return ValueError(
        f"The checkpoint {path!r} cannot be read: {reason}. Copy its .index and all of "
        "its .data files again."
    )


def no_variable(
    key: str, found: Sequence[str], names: Iterable[str], path: str
) -> ValueError:
    """No variable for a table or slot, or several."""
    matches = (
        f"{len(found)} match: {_names(sorted(found))}" if found else "none matches"
    )
    return ValueError(
        f"Exactly one variable of the checkpoint {path!r} must belong to {key!r}, and "
        f"{matches}. The checkpoint has {_names(sorted(names))}. Name the right one "
        f"with name_map={{{key!r}: ...}}."
    )


def unknown_name(key: str, known: Iterable[str]) -> ValueError:
    """A key of name_map that names no table or slot."""
    return ValueError(
        f"`name_map` has the key {key!r}, but the spec has {_names(sorted(known))}."
    )


def imported_shape(
    table: str,
    part: str,
    name: str,
    shape: Sequence[int],
    expected: Sequence[int],
) -> ValueError:
    """A variable of another shape than the spec says."""
    return ValueError(
        f"Table {table!r}, {part}: the checkpoint's variable {name!r} has shape "
        f"{tuple(shape)}, and by the spec it would be {tuple(expected)}. Correct the "
        "spec, or name another variable with `name_map`."
    )


def other_tables(imported: Iterable[str], ours: Iterable[str]) -> ValueError:
    """An embedding with other tables than the imported ones."""
    return ValueError(
        f"The imported tables are {_names(sorted(imported))}, and those of the "
        f"embedding are {_names(sorted(ours))}. Make it with "
        "`spec.to_tpu_embedding()`, or give its TableConfigs these names."
    )


def other_slots(table: str, slot: str, ours: Iterable[str]) -> ValueError:
    """A slot that the embedding's optimizer does not have."""
    return ValueError(
        f"Table {table!r}: the imported slot {slot!r} has no counterpart among "
        f"{_names(ours)} of the embedding. Give the table the optimizer of the spec."
    )


def assigned_shape(
    table: str, part: str, shape: Sequence[Any], expected: Sequence[Any]
) -> ValueError:
    """An imported array that does not fit the embedding's variable."""
    return ValueError(
        f"Table {table!r}, {part}: the imported array has shape {tuple(shape)}, the "
        f"embedding's variable {tuple(expected)}."
    )
