"""The clock of all peers."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any


def timed(function: Callable[[], Any], repeats: int = 1) -> Callable[[], float]:
    """Returns a function that runs `function` several times and returns seconds."""

    def run() -> float:
        start = time.perf_counter()
        for _ in range(repeats):
            function()
        return (time.perf_counter() - start) / repeats

    return run


def burst(function: Callable[[], float]) -> tuple[float, list[float]]:
    """Seconds of a first, cold run, and of four runs after two that do not count.

    When another process has had its turn, its data fill the caches, its threads still
    spin and ours sleep: a loop that trains meets none of that. A run of over a second
    counts at once, for the same reason.
    """
    first = function()
    if first > 1:
        return first, [first]
    function()
    return first, [function() for _ in range(4)]


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
