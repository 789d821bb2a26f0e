"""Exports a trained table in each storage, and measures what memory that takes.

python measure_export.py FOLDER MIB [STORAGE...]

MIB is the size of the table with its slot, which has the table's own size. A storage
may end in "+deltas". Prints as JSON the peaks in MiB above the start, when there was no
table yet, and the limit.
"""

from __future__ import annotations

import gc
import json
import pathlib
import shutil
import sys
import threading
from collections.abc import Callable
from typing import Any

import tensorflow as tf

import tpu_embedding as te
from tpu_embedding.serving.quantization import STORAGES

MIB, DIM = 1 << 20, 64


def resident() -> float:
    """MiB of this process that are in memory."""
    pages = int(pathlib.Path("/proc/self/statm").read_text().split()[1])
    return 4096 * pages / MIB


def peak_of(call: Callable[[], Any]) -> float:
    """The most that `resident` is during a call."""
    peak = resident()
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
    return peak


def train(rows: int) -> te.TPUEmbedding:
    """A table with a slot, in which an update was made in place."""
    films = te.TableConfig(rows, DIM, tf.zeros_initializer(), name="films")
    embedding = te.TPUEmbedding({"film": te.FeatureConfig(films)}, te.Adagrad(0.1))
    embedding.enqueue({"film": tf.constant([3, 5])})
    embedding.apply_gradients(embedding.dequeue())
    return embedding


def main(folder: str, size: str, *storages: str) -> None:
    """Measures, after a first export of little has loaded what is loaded once."""

    def export(embedding: te.TPUEmbedding, storage: str) -> None:
        path = f"{folder}/{storage}"
        form, _, deltas = storage.partition("+")
        te.serving.export(
            embedding, path, signatures=["dense"], storage=form, deltas=bool(deltas)
        )
        shutil.rmtree(path)
        gc.collect()  # The functions of an export refer to themselves.

    export(train(8), "int8")
    start = resident()
    large = train(int(size) * MIB // (2 * 4 * DIM))
    found = {"built": resident() - start}
    for storage in storages or (*STORAGES, "float32+deltas", "int8+deltas"):
        found[storage] = peak_of(lambda s=storage: export(large, s)) - start
    print(json.dumps({**found, "limit": 1.1 * int(size) + 64}))


if __name__ == "__main__":
    main(*sys.argv[1:])
