"""`python -m tpu_embedding checkpoint | delta | place`: files that hold tables."""

from __future__ import annotations

import argparse
import dataclasses
import json
import math
import sys
import time
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, TextIO

import numpy as np

from tpu_embedding.checkpoint.checkpoint_view import (
    LogicalCheckpoint,
    LogicalTable,
    Vector,
)
from tpu_embedding.checkpoint.hashings import hashing_arrays
from tpu_embedding.checkpoint.numpy_format import write_numpy
from tpu_embedding.checkpoint.saving import DEFAULT_ROOT, read, read_layouts
from tpu_embedding.checkpoint.writing import Progress, write_tensorflow
from tpu_embedding.serving.delta_files import Header, apply_to_export, read_header
from tpu_embedding.serving.mapping import place
from tpu_embedding.tables.rows import by_checkpoint_name
from tpu_embedding.text import aligned

_SPARSE_CORE = "sparse-core"
_BAR_WIDTH = 30
_SECONDS_BETWEEN = 0.1


def inspect(arguments: argparse.Namespace) -> int:
    """Runs `checkpoint inspect`."""
    checkpoint = read(arguments.path, root=arguments.root)
    arrays = _read_norms(checkpoint, TextProgress())
    if arguments.json:
        facts = {
            "path": checkpoint.path,
            "format": checkpoint.format,
            "updates": checkpoint.updates,
        }
        print(_json_text({**facts, "arrays": [dataclasses.asdict(a) for a in arrays]}))
        return 0
    updates = "" if checkpoint.updates is None else f", {checkpoint.updates} updates"
    print(f"{printable(checkpoint.path)} ({checkpoint.format}{updates})")
    header = [field.name for field in dataclasses.fields(_ArrayReport)]
    print(_table_text(header, [[getattr(a, name) for name in header] for a in arrays]))
    return 0


def convert(arguments: argparse.Namespace) -> int:
    """Runs `checkpoint convert`."""
    if arguments.to == "numpy" and arguments.new_root is not None:
        raise ValueError(
            "`--new-root` has no effect with `--to numpy`, because arrays belong to no "
            "object. Leave it out."
        )
    if arguments.to != _SPARSE_CORE and arguments.like is not None:
        raise ValueError(
            f"`--like` needs `--to sparse-core`. Received: `--to {arguments.to}`. Add "
            "`--to sparse-core`, or leave `--like` out."
        )
    if arguments.to == _SPARSE_CORE and not arguments.like:
        raise ValueError(
            "`--to sparse-core` needs `--like CHECKPOINT`, whose layout record holds "
            "the place of each table. Without such a checkpoint, call "
            "tpu_embedding.checkpoint.save(layouts=...)."
        )
    checkpoint = read(arguments.path, root=arguments.root)
    tables = _renamed(checkpoint, arguments.rename)
    if arguments.no_slots:
        tables = {n: dataclasses.replace(t, slots={}) for n, t in tables.items()}
    checkpoint.verify()
    updates = None if arguments.no_slots else checkpoint.updates
    path, progress = arguments.destination, TextProgress()
    if arguments.to == "numpy":
        if updates is not None:
            print(
                f"NumPy files do not store the number of updates, {updates}.",
                file=sys.stderr,
            )
        arrays = by_checkpoint_name({n: t.arrays for n, t in tables.items()})
        hashings = hashing_arrays({n: t.hashing for n, t in tables.items()})
        vectors = {n: Vector(len(v), lambda v=v: v) for n, v in hashings.items()}
        vectors |= by_checkpoint_name({n: t.vocabulary for n, t in tables.items()})
        write_numpy(path, arrays, vectors, progress)
    else:
        write_tensorflow(
            path,
            tables,
            DEFAULT_ROOT if arguments.new_root is None else arguments.new_root,
            layouts=read_layouts(arguments.like) if arguments.like else None,
            updates=updates,
            progress=progress,
        )
    if arguments.json:
        print(_json_text({"path": path, "tables": list(tables)}))
    else:
        print(f"Wrote to {path}: {', '.join(map(printable, tables))}")
    return 0


def _renamed(
    tables: Mapping[str, LogicalTable], renames: Sequence[str]
) -> dict[str, LogicalTable]:
    names: dict[str, str] = {}
    for rename in renames:
        old, _, new = rename.partition("=")
        if old not in tables or not new:
            raise _rename_error(rename, tables)
        if old in names:
            raise ValueError(
                f"`--rename` gives table {old} two names, {names[old]} and {new}. "
                "Keep one."
            )
        names[old] = new
    renamed = {
        names.get(name, name): dataclasses.replace(table, name=names.get(name, name))
        for name, table in tables.items()
    }
    if len(renamed) < len(tables):
        raise _rename_error(", ".join(renames), tables)
    return renamed


def _rename_error(rename: str, tables: Iterable[str]) -> ValueError:
    return ValueError(
        "`--rename` must be OLD=NEW: a table of the checkpoint, and a name that no "
        f"other table has. Received: {rename}. Tables: {', '.join(tables)}."
    )


@dataclasses.dataclass(frozen=True)
class _ArrayReport:
    """A table, a slot, or an array about the ids of a growing table.

    Attributes:
      table: Name of the table.
      array: "parameters", the slot, or e.g. "ids".
      shape: Shape without padding.
      dtype: Dtype of the stored values.
      bytes: Size of the array.
      norm: The root of the sum of the squares of the values; None for integers.
    """

    table: str
    array: str
    shape: tuple[int, ...]
    dtype: str
    bytes: int
    norm: float | None


def _read_norms(
    checkpoint: LogicalCheckpoint, progress: Progress
) -> list[_ArrayReport]:
    """Reads all of a checkpoint once, and checks it.

    Raises:
      tf.errors.DataLossError: If a file is truncated or damaged.
    """
    arrays = [
        (name, array, rows)
        for name, table in checkpoint.items()
        for array, rows in table.arrays.items()
    ]
    progress.start("Reading", sum(rows.nbytes for _, _, rows in arrays))
    reports: list[_ArrayReport] = []
    for table, array, rows in arrays:
        rows.verify()
        squares = 0.0
        for start, stop in rows.slices():
            values = rows.read(start, stop).astype(np.float64)
            squares += float(np.sum(np.square(values)))
            progress.advance((stop - start) * rows.row_bytes)
        size = rows.nbytes
        reports.append(
            _ArrayReport(
                table, array, rows.shape, rows.stored_dtype, size, squares**0.5
            )
        )
    for name, table in checkpoint.items():
        for part, vector in table.vocabulary.items():
            shape, size = vector.read().shape, vector.nbytes
            reports.append(_ArrayReport(name, part, shape, "int64", size, None))
    return sorted(reports, key=lambda report: list(checkpoint).index(report.table))


def _json_text(value: Any) -> str:
    """Returns JSON that every reader accepts: NaN and infinity become null.

    >>> _json_text({"norm": float("nan"), "rows": [1]}).split()
    ['{', '"norm":', 'null,', '"rows":', '[', '1', ']', '}']
    """

    def finite(item: Any) -> Any:
        if isinstance(item, dict):
            return {key: finite(value) for key, value in item.items()}
        if isinstance(item, (list, tuple)):
            return [finite(value) for value in item]
        return None if isinstance(item, float) and not math.isfinite(item) else item

    return json.dumps(finite(value), indent=2, allow_nan=False)


def _table_text(header: Sequence[str], lines: Sequence[Sequence[Any]]) -> str:
    """Formats lines under a header; columns of numbers are aligned to the right."""
    numbers = [
        all(isinstance(cell, (int, float, type(None))) for cell in column)
        for column in zip(*lines, strict=True)
    ]
    cells = [[_cell_text(cell) for cell in line] for line in lines]
    left = [index for index, number in enumerate(numbers) if not number]
    return aligned([header, *cells], left)


def _cell_text(cell: Any) -> str:
    if isinstance(cell, tuple):
        return " x ".join(map(str, cell))
    if cell is None:
        return ""
    return f"{cell:.6g}" if isinstance(cell, float) else printable(str(cell))


def printable(text: str) -> str:
    r"""Returns a name from a file with unprintable characters escaped.

    >>> print(printable("films\n"), printable("\u202esmlif"))
    films\n \u202esmlif
    """
    return "".join(c if c.isprintable() else ascii(c)[1:-1] for c in text)


class TextProgress:
    """A progress bar of plain text, on a terminal only.

    Args:
      stream: The terminal; None for sys.stderr.
    """

    def __init__(self, stream: TextIO | None = None) -> None:
        self._stream = sys.stderr if stream is None else stream
        self._task, self._total, self._done = "", 0, 0
        self._next = 0.0

    def start(self, task: str, total: int) -> None:
        self._task, self._total, self._done = task, total, 0
        self._next = time.monotonic() + _SECONDS_BETWEEN  # Short tasks show nothing.

    def advance(self, count: int) -> None:
        self._done += count
        now = time.monotonic()
        finished = self._done >= self._total
        if not self._stream.isatty() or (now < self._next and not finished):
            return
        self._next = now + _SECONDS_BETWEEN
        share = self._done / max(1, self._total)
        bar = "#" * round(share * _BAR_WIDTH)
        mebibytes = f"{self._done >> 20}/{self._total >> 20} MiB"
        end = "\n" if finished else ""
        self._stream.write(
            f"\r{self._task} [{bar:<{_BAR_WIDTH}}] {share:4.0%} {mebibytes}{end}"
        )
        self._stream.flush()


def run_place(arguments: argparse.Namespace) -> int:
    """Runs `place`."""
    for file in place(arguments.path, verify=not arguments.no_verify):
        print(file)
    return 0


def inspect_delta(arguments: argparse.Namespace) -> int:
    """Runs `delta inspect`."""
    print(_described(read_header(arguments.path)))
    return 0


def _described(header: Header) -> str:
    lines = [("table", "dim", "storage", "changed", "deleted")]
    for table, (upserts, deletions) in zip(
        header.base.tables, header.counts, strict=True
    ):
        numbers = f"{upserts:,}", f"{deletions:,}"
        lines.append((table.name, str(table.dim), table.storage, *numbers))
    return "\n".join(
        [
            f"delta {header.sequence} of export {header.base.id}",
            f"written by run {header.run}, after run {header.follows}",
            aligned(lines, left=(0,)),
        ]
    )


def apply_deltas(arguments: argparse.Namespace) -> int:
    """Runs `delta apply`."""
    sequence = apply_to_export(arguments.path, arguments.deltas, arguments.to)
    print(f"Wrote to {arguments.to}: the export after delta {sequence}")
    return 0
