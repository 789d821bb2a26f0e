"""Text that reports print: columns of equal width, and sizes."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence


def aligned(lines: Iterable[Sequence[str]], left: Collection[int] = (0,)) -> str:
    """Returns lines of cells, aligned to the right except in the columns `left`.

    >>> print(aligned([["name", "size"], ["a", "5"], ["long", "100"]]))
    name  size
    a        5
    long   100
    """
    rows = list(lines)
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return "\n".join(
        "  ".join(
            cell.ljust(width) if index in left else cell.rjust(width)
            for index, (cell, width) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
        for row in rows
    )


def size_text(count: float) -> str:
    """Returns a number of bytes as text.

    >>> size_text(20), size_text(1.5 * 2**20)
    ('20 B', '1.50 MiB')
    """
    if count < 1024:
        return f"{count:.0f} B"
    for unit in ("KiB", "MiB", "GiB"):
        count /= 1024
        if count < 1024:
            return f"{count:.2f} {unit}"
    return f"{count / 1024:.2f} TiB"
