"""Exports a trained table of 192 MiB, once for each storage.

python measure_export.py FOLDER STORAGE...

Prints for each the bytes of the table as float32, and the peak above the start.
"""

from __future__ import annotations

import pathlib
import sys
import threading
from collections.abc import Callable
from typing import Any

import tensorflow as tf

import tpu_embedding as te

ROWS, DIM = 3 * 2**18, 64


def resident() -> int:
    """Bytes of this process that are in memory."""
    pages = int(pathlib.Path("/proc/self/statm").read_text().split()[1])
    return 4096 * pages


def peak_above_start(call: Callable[[], Any]) -> int:
    """The most that `call` adds to `resident`."""
    start = peak = resident()
    done = threading.Event()

    def watch() -> None:
        nonlocal peak
        while not done.wait(0.001):
            peak = max(peak, resident())

    watcher = threading.Thread(target=watch)
    watcher.start()
    call()
    done.set()
    watcher.join()
    return peak - start


def train(rows: int) -> te.TPUEmbedding:
    """A table with slots, in which an update was made in place."""
    films = te.TableConfig(rows, DIM, tf.zeros_initializer(), name="films")
    embedding = te.TPUEmbedding({"film": te.FeatureConfig(films)}, te.Adagrad(0.1))
    embedding.enqueue({"film": tf.constant([3, 5])})
    embedding.apply_gradients(embedding.dequeue())
    return embedding


def main(folder: str, *storages: str) -> None:
    """Measures, after a first export of little has loaded what is loaded once."""
    small, large = train(8), train(ROWS)

    def export(embedding: te.TPUEmbedding, storage: str, name: str) -> None:
        te.serving.export(
            embedding, f"{folder}/{name}", signatures=["dense"], storage=storage
        )

    for storage in storages:
        export(small, storage, f"{storage}-small")
        peak = peak_above_start(lambda s=storage: export(large, s, s))
        print(4 * ROWS * DIM, peak)


if __name__ == "__main__":
    main(*sys.argv[1:])
