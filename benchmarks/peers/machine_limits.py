"""The machine's limits: copies between buffers that no cache holds, plain gathers."""

from __future__ import annotations

import concurrent.futures
import ctypes
import functools
import itertools
import os
import pathlib
import subprocess
import tempfile
from collections.abc import Callable
from typing import Any

import numpy as np

from benchmarks.scenarios import Scenario
from benchmarks.timing import timed

RULE = "numpy.copyto and gather.c, a thread for each core"

BYTES = 1 << 29  # Read and written by one copy, all threads together.


def prepare(scenario: Scenario, optimizer: str) -> dict[str, Callable[[], float]]:
    """Makes the buffers, and tables of ones if bags have one size."""
    del optimizer
    threads = len(os.sched_getaffinity(0))
    pairs = [(_buffer(threads), _buffer(threads)) for _ in range(threads)]
    pool = concurrent.futures.ThreadPoolExecutor(threads)

    def on_all(run: Callable[[int], Any]) -> None:
        for done in [pool.submit(run, thread) for thread in range(threads)]:
            done.result()

    functions = {"copy": timed(lambda: on_all(lambda t: np.copyto(*pairs[t])))}
    if not scenario.most_ids:
        gathers = itertools.cycle(_gathers(scenario, threads))
        functions["gather"] = timed(lambda: on_all(next(gathers)))
    return functions


def _gathers(scenario: Scenario, threads: int) -> list[Callable[[int], None]]:
    """Returns for each batch a function in which a thread sums its samples' rows."""
    tables = [np.ones([rows, scenario.dim], np.float32) for rows in scenario.rows]
    sums = np.empty([len(tables), scenario.batch_size, scenario.dim], np.float32)

    def gather_batch(batch: list[np.ndarray], thread: int) -> None:
        for table, ids, found in zip(tables, batch, sums, strict=True):
            own, to = (np.array_split(each, threads)[thread] for each in (ids, found))
            gather(table, own, to)

    return [functools.partial(gather_batch, batch) for batch in scenario.batches(4)]


def gather(table: np.ndarray, ids: np.ndarray, sums: np.ndarray) -> None:
    """Sums the rows [rows, dim] of ids [samples, ids] into [samples, dim]."""
    at = [ctypes.c_void_p(each.ctypes.data) for each in (table, ids, sums)]
    dim, samples, size = map(ctypes.c_int64, (table.shape[1], *ids.shape))
    _compiled().gather(at[0], dim, at[1], samples, size, at[2])


@functools.cache
def _compiled() -> ctypes.CDLL:
    source = pathlib.Path(__file__).parents[1] / "gather.c"
    with tempfile.TemporaryDirectory() as folder:
        library = os.path.join(folder, "gather.so")
        options = ["-O3", "-march=native", "-shared", "-fPIC", "-o", library]
        subprocess.run([os.environ.get("CC", "cc"), *options, str(source)], check=True)
        return ctypes.CDLL(library)


def _buffer(threads: int) -> np.ndarray:
    return np.ones(BYTES // (2 * threads), np.uint8)
