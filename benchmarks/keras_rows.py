"""Measures CPU and wall time of `fit` with Keras's Embedding layers and by rows.

    python -m benchmarks.keras_rows --rows 1000 100000 1000000
    python -m benchmarks.keras_rows --rows 100000 --tables 26 --columns 64
    python -m benchmarks.keras_rows --draw docs/keras_embedding.md

By default a model has 8 tables of 16 columns and one dense layer; batches have 2,048
samples with Zipf-distributed ids. Each figure is from a process of its own; the
processes of one size take turns. A size is skipped for a process that would not fit
into memory, judged by its peak at the previous size.
With --draw nothing is measured: the picture of the README is drawn from the table of a
page, so that both have the same figures.
"""

from __future__ import annotations

import argparse
import json
import os
import pathlib
import resource
import statistics
import subprocess
import sys
import time
from collections.abc import Mapping
from typing import Any

from benchmarks import machine, picture

PICTURE = pathlib.Path("docs/images/keras_rows.svg")
BATCH = 2048
_BASE = 700.0  # MiB of a process without tables.
# For each label: TF_USE_LEGACY_KERAS, and what the process trains.
WAYS = {
    "Keras 3": ("0", "keras"),
    "Keras 3, rows": ("0", "rows"),
    "Keras 3, lazy rows": ("0", "lazy"),
    "tf_keras": ("1", "keras"),
    "tf_keras, rows": ("1", "rows"),
    "tf_keras, lazy rows": ("1", "lazy"),
}


def measure(arguments: argparse.Namespace) -> dict[str, Any]:
    """Trains in this process: an untimed `fit`, then a timed one of as many steps."""
    import numpy as np
    import tensorflow as tf

    import tpu_embedding as te

    keras: Any = tf.keras
    (rows,), steps = arguments.rows, arguments.steps
    by_rows, lazy = arguments.child != "keras", arguments.child == "lazy"
    names = [f"f{i}" for i in range(arguments.tables)]
    keras.utils.set_random_seed(1)
    inputs = {name: keras.Input((), dtype="int64", name=name) for name in names}
    layer = te.keras.Embedding if by_rows else keras.layers.Embedding
    looked_up = [layer(rows, arguments.columns)(ids) for ids in inputs.values()]
    hidden = keras.layers.Dense(64, "relu")(keras.layers.Concatenate()(looked_up))
    model = keras.Model(inputs, keras.layers.Dense(1)(hidden))
    chosen = getattr(keras.optimizers, arguments.optimizer)(0.05)
    if by_rows:
        chosen = te.keras.RowSparseOptimizer(chosen, lazy=lazy)
    model.compile(chosen, "mse")
    rng = np.random.default_rng(0)
    size = steps * BATCH
    ids = {name: np.minimum(rng.zipf(1.2, size) - 1, rows - 1) for name in inputs}
    labels = rng.random((size, 1), np.float32)

    def fit() -> Any:
        # A dataset of single samples would cost several times the step.
        return model.fit(ids, labels, BATCH, verbose=0, shuffle=False)

    fit()
    cpu, wall = time.process_time(), time.perf_counter()
    losses = fit().history["loss"]
    return {
        "cpu": (time.process_time() - cpu) / steps * 1e3,
        "wall": (time.perf_counter() - wall) / steps * 1e3,
        "peak": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**10,
        "loss": losses[-1],
    }


def _run(arguments: argparse.Namespace, rows: int, legacy: str, child: str) -> Any:
    command = [sys.executable, "-m", "benchmarks.keras_rows", "--rows", str(rows)]
    for name in ("optimizer", "steps", "tables", "columns"):
        command += [f"--{name}", str(getattr(arguments, name))]
    done = subprocess.run(
        [*command, "--child", child],
        env={**os.environ, "TF_USE_LEGACY_KERAS": legacy, "TF_CPP_MIN_LOG_LEVEL": "3"},
        stdout=subprocess.PIPE,
        text=True,
        check=True,
    )
    return json.loads(done.stdout.splitlines()[-1])


def _available() -> float:
    """Returns the MiB of memory that a process can use for its tables."""
    lines = pathlib.Path("/proc/meminfo").read_text().splitlines()
    found = dict(line.split(":") for line in lines)
    return int(found["MemAvailable"].split()[0]) / 2**10 - _BASE


def published(page: str) -> Mapping[str, Mapping[float, float]]:
    """Reads the CPU times of Adagrad from the text of a page, by way and rows."""
    rows = [
        [cell.strip().replace(",", "") for cell in line.split("|")[2:7]]
        for line in page.splitlines()
        if line.startswith("| Adagrad |")
    ]
    columns = {"Keras 3": 1, "tf_keras": 3, "tpu_embedding": 2}
    return {
        name: {
            float(row[0]): float(row[column])
            for row in rows
            if row[column].isdecimal()  # Sizes too large to measure have none.
        }
        for name, column in columns.items()
    }


def main() -> None:
    """Prints a table, draws one, or measures in this process."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rows", type=int, nargs="+", default=[1000, 100_000, 10**6])
    parser.add_argument("--optimizer", default="Adagrad")
    parser.add_argument("--tables", type=int, default=8)
    parser.add_argument("--columns", type=int, default=16)
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--ways", nargs="+", choices=WAYS, default=list(WAYS))
    parser.add_argument("--child", help=argparse.SUPPRESS)
    parser.add_argument("--draw", type=pathlib.Path, metavar="PAGE")
    arguments = parser.parse_args()
    if arguments.draw is not None:
        axes = ("rows of each of 8 tables", "CPU ms of a step")
        picture.curves(PICTURE, axes, published(arguments.draw.read_text()))
        return
    if arguments.child is not None:
        print(json.dumps(measure(arguments)))
        return
    print(machine.describe() + "\n")
    print("| rows | | CPU ms | wall ms | peak MiB | loss |\n|---|---|---|---|---|---|")
    for_a_row: dict[str, float] = {}  # MiB, at the size before.
    for rows in arguments.rows:
        found: dict[str, list[Any]] = {name: [] for name in arguments.ways}
        for _ in range(arguments.rounds):
            for name in arguments.ways:
                if rows * for_a_row.get(name, 0.0) < _available():
                    found[name].append(_run(arguments, rows, *WAYS[name]))
        for name, runs in found.items():
            if not runs:
                print(f"| {rows:,} | {name} | too large for the memory | | | |")
                continue
            cpu, wall, peak, loss = (
                statistics.median(run[key] for run in runs)
                for key in ("cpu", "wall", "peak", "loss")
            )
            for_a_row[name] = max(0.0, peak - _BASE) / rows
            print(
                f"| {rows:,} | {name} | {cpu:.1f} | {wall:.1f} | {peak:.0f} | "
                f"{loss:.5f} |",
                flush=True,
            )


if __name__ == "__main__":
    main()
