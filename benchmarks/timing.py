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
    """Returns the seconds of a first, cold run, and of four runs after a second one.

    After the turn of another process, its data fill the caches, its threads still spin
    and ours sleep, which does not happen in a training loop. A first run that takes
    over a second counts and is not repeated.
    """
    first = function()
    if first > 1:
        return first, [first]
    function()
    return first, [function() for _ in range(4)]


def timed_both(
    name: str, function: Callable[[], Any]
) -> dict[str, Callable[[], float]]:
    """Returns functions: `name` for a run's seconds, "<name>_cpu" for its CPU seconds.

    CPU seconds say more on a machine that others use too.
    """

    def cpu() -> float:
        start = time.process_time()
        function()
        return time.process_time() - start

    return {name: timed(function), f"{name}_cpu": cpu}
