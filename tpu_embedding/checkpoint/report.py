"""What is in a checkpoint, and how two differ, as records and as text."""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np

from tpu_embedding.checkpoint.checkpoint_view import LogicalCheckpoint
from tpu_embedding.checkpoint.progress import Progress
from tpu_embedding.layout.table_arrays import Rows

SAME = "same"


@dataclasses.dataclass(frozen=True)
class ArrayReport:
    """One table or slot.

    Attributes:
      table: Its table.
      array: "parameters" or the slot.
      shape: Without padding.
      dtype: Of the stored values.
      bytes: Its size.
      norm: The square root of the sum of the squares of its values.
    """

    table: str
    array: str
    shape: tuple[int, int]
    dtype: str
    bytes: int
    norm: float


@dataclasses.dataclass(frozen=True)
class Difference:
    """How one table or slot differs between two checkpoints.

    Attributes:
      table: Its table.
      array: "parameters" or the slot.
      state: "same", "only in the first", "only in the second", "shape", "values".
      first: Its shape in the first, or None.
      second: Its shape in the second, or None.
      rows: How many rows differ, where the shapes are the same.
      largest: The largest difference of two values.
    """

    table: str
    array: str
    state: str
    first: tuple[int, int] | None = None
    second: tuple[int, int] | None = None
    rows: int = 0
    largest: float = 0.0


def json_text(value: Any) -> str:
    """JSON as others read it: NaN and infinity, which it lacks, are null.

    >>> json_text({"norm": float("nan"), "rows": [1]}).split()
    ['{', '"norm":', 'null,', '"rows":', '[', '1', ']', '}']
    """
    return json.dumps(_finite(value), indent=2, allow_nan=False)


def inspect(checkpoint: LogicalCheckpoint, progress: Progress) -> list[ArrayReport]:
    """Reads all of a checkpoint once, and checks it.

    Raises:
      tf.errors.DataLossError: If a file is truncated or damaged.
    """
    arrays = _arrays(checkpoint)
    progress.start("Reading", sum(rows.nbytes for _, _, rows in arrays))
    reports = []
    for table, array, rows in arrays:
        rows.verify()
        squares = 0.0
        for start, stop in rows.slices():
            squares += float(np.sum(np.square(_read(rows, start, stop))))
            progress.advance((stop - start) * rows.row_bytes)
        reports.append(
            ArrayReport(
                table, array, rows.shape, rows.dtype.name, rows.nbytes, squares**0.5
            )
        )
    return reports


def diff(
    first: LogicalCheckpoint, second: LogicalCheckpoint, progress: Progress
) -> list[Difference]:
    """Compares all tables and slots of two checkpoints of any kinds."""
    left, right = (
        {(table, array): rows for table, array, rows in _arrays(checkpoint)}
        for checkpoint in (first, second)
    )
    shared = [key for key in left if key in right]
    progress.start("Comparing", sum(left[key].nbytes for key in shared))
    differences = []
    for key in dict.fromkeys([*left, *right]):
        if key not in right:
            state = Difference(*key, "only in the first", first=left[key].shape)
        elif key not in left:
            state = Difference(*key, "only in the second", second=right[key].shape)
        else:
            state = _compare(key, left[key], right[key], progress)
        differences.append(state)
    return differences


def table_text(header: Sequence[str], lines: Iterable[Sequence[Any]]) -> str:
    """Lines of equal columns; numbers stand at the right.

    >>> print(table_text(["name", "size"], [["a", 5], ["long", 100]]))
    name  size
    a        5
    long   100
    """
    rows = [list(header), *([_text(cell) for cell in line] for line in lines)]
    numbers = [all(_is_number(row[c]) for row in rows[1:]) for c in range(len(header))]
    widths = [max(len(row[c]) for row in rows) for c in range(len(header))]
    return "\n".join(
        "  ".join(
            cell.rjust(width) if number else cell.ljust(width)
            for cell, width, number in zip(row, widths, numbers, strict=True)
        ).rstrip()
        for row in rows
    )


def _arrays(checkpoint: LogicalCheckpoint) -> list[tuple[str, str, Rows]]:
    return [
        (name, array, rows)
        for name, table in checkpoint.items()
        for array, rows in table.arrays.items()
    ]


def _compare(
    key: tuple[str, str], left: Rows, right: Rows, progress: Progress
) -> Difference:
    if left.shape != right.shape:
        progress.advance(left.nbytes)
        return Difference(*key, "shape", left.shape, right.shape)
    for rows in (left, right):
        rows.verify()
    differing, largest = 0, 0.0
    for start, stop in left.slices():
        one, other = _read(left, start, stop), _read(right, start, stop)
        same = (one == other) | (np.isnan(one) & np.isnan(other))
        with np.errstate(invalid="ignore"):  # Of infinity on both sides.
            distance = np.where(same, 0.0, np.abs(one - other))
        differing += int(np.sum(~same.all(axis=1)))
        largest = max(largest, float(np.max(distance)))
        progress.advance((stop - start) * left.row_bytes)
    state = "values" if differing else SAME
    return Difference(*key, state, left.shape, right.shape, differing, largest)


def _read(rows: Rows, start: int, stop: int) -> np.ndarray:
    return rows.read(start, stop).astype(np.float64)


def _text(cell: Any) -> str:
    if isinstance(cell, tuple):
        return " x ".join(str(axis) for axis in cell)
    return f"{cell:.6g}" if isinstance(cell, float) else str(cell)


def _finite(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _finite(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_finite(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def _is_number(text: str) -> bool:
    try:
        float(text)
    except ValueError:
        return False
    return True
