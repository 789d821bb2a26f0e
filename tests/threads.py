"""Calls in threads of their own, whose errors are errors of the test."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor


def run_in_threads(call: Callable[[int], object], threads: int) -> None:
    """Calls with the numbers of so many threads at once, and waits for all."""
    ready = threading.Barrier(threads)

    def begin(thread: int) -> None:
        ready.wait(60)
        call(thread)

    with ThreadPoolExecutor(threads) as pool:
        for _ in pool.map(begin, range(threads)):
            pass


@contextlib.contextmanager
def repeated(call: Callable[[int], object], threads: int = 1) -> Iterator[None]:
    """Calls with the numbers of so many threads, again and again, in a block."""
    done = threading.Event()

    def repeat(thread: int) -> None:
        while not done.is_set():
            call(thread)

    pool = ThreadPoolExecutor(threads)
    repeats = [pool.submit(repeat, thread) for thread in range(threads)]
    try:
        yield
    finally:  # What fails must not leave threads behind that never end.
        done.set()
        pool.shutdown(wait=False)
    for each in repeats:
        each.result(timeout=60)
