"""The machine's limit: copies between buffers that no cache holds."""

from __future__ import annotations

import concurrent.futures
import os
from collections.abc import Callable

import numpy as np

from benchmarks.scenarios import Scenario
from benchmarks.timing import timed

RULE = "numpy.copyto, a thread for each core"

BYTES = 1 << 29  # Read and written by one run, all threads together.


def prepare(scenario: Scenario, optimizer: str) -> dict[str, Callable[[], float]]:
    """Makes the buffers; neither scenario nor optimizer matters."""
    del scenario, optimizer
    threads = len(os.sched_getaffinity(0))
    pairs = [(_buffer(threads), _buffer(threads)) for _ in range(threads)]
    pool = concurrent.futures.ThreadPoolExecutor(threads)

    def copy() -> None:
        for done in [pool.submit(np.copyto, to, source) for to, source in pairs]:
            done.result()

    return {"copy": timed(copy)}


def _buffer(threads: int) -> np.ndarray:
    return np.ones(BYTES // (2 * threads), np.uint8)
