"""The clock of all peers."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any


def timed(function: Callable[[], Any], repeats: int = 1) -> Callable[[], float]:
    """A function that runs `function` some times; gives the seconds of one run."""

    def run() -> float:
        start = time.perf_counter()
        for _ in range(repeats):
            function()
        return (time.perf_counter() - start) / repeats

    return run


def timed_both(
    name: str, function: Callable[[], Any]
) -> dict[str, Callable[[], float]]:
    """`name` gives the seconds of one run, "<name>_cpu" those of all its threads.

    The second says more on a machine that others use too.
    """

    def cpu() -> float:
        start = time.process_time()
        function()
        return time.process_time() - start

    return {name: timed(function), f"{name}_cpu": cpu}
