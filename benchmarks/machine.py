"""What figures depend on: the processor, its memory, the date and the versions."""

from __future__ import annotations

import concurrent.futures
import datetime
import functools
import importlib.metadata
import os
import pathlib
import re
import time

import numpy as np

_COPIED = 1 << 28  # Bytes of all threads together; no cache holds them.
_PACKAGES = ("tensorflow-cpu", "tensorflow", "keras", "tf-keras", "numpy")


@functools.cache
def describe() -> str:
    """Returns one line about this machine, for the top of tables."""
    threads = len(os.sched_getaffinity(0))
    facts = [
        _processor(),
        f"{threads} cores",
        f"L3 {_read('/sys/devices/system/cpu/cpu0/cache/index3/size') or 'unknown'}",
        f"a copy moves {_copy_bandwidth(threads):.1f} GB/s",
        datetime.date.today().isoformat(),
        *_versions(),
    ]
    return ", ".join(facts) + "."


def _processor() -> str:
    found = re.search(r"model name\s*:\s*(.+)", _read("/proc/cpuinfo"))
    return found[1] if found else os.uname().machine


def _read(path: str) -> str:
    file = pathlib.Path(path)
    return file.read_text().strip() if file.is_file() else ""


def _copy_bandwidth(threads: int) -> float:
    """Returns GB/s, read and written: the best of five copies by all threads."""
    size = _COPIED // threads // 8
    pairs = [(np.ones(size), np.ones(size)) for _ in range(threads)]
    with concurrent.futures.ThreadPoolExecutor(threads) as pool:

        def seconds() -> float:
            begin = time.perf_counter()
            list(pool.map(lambda pair: np.copyto(*pair), pairs))
            return time.perf_counter() - begin

        return 2 * 8 * size * threads / min(seconds() for _ in range(5)) / 1e9


def _versions() -> list[str]:
    installed = {d.metadata["Name"].lower() for d in importlib.metadata.distributions()}
    return [f"{p} {importlib.metadata.version(p)}" for p in _PACKAGES if p in installed]
