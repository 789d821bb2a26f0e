"""How far a long read or write has come."""

from __future__ import annotations

import sys
import time
from typing import Protocol, TextIO

_BAR_WIDTH = 30
_SECONDS_BETWEEN = 0.1


class Progress(Protocol):
    """Is told of the bytes of a long task."""

    def start(self, task: str, total: int) -> None:
        """A task of `total` bytes begins."""
        ...

    def advance(self, count: int) -> None:
        """`count` more bytes are done."""
        ...


class NoProgress:
    """Says nothing."""

    def start(self, task: str, total: int) -> None:
        del task, total

    def advance(self, count: int) -> None:
        del count


class TextProgress:
    """A bar of plain text, on a terminal only.

    Args:
      stream: Where to, e.g. sys.stderr.
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
