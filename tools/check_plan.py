"""Compares the plan's memory with that of the host engine: `make check-plan`.

Each configuration is created and trained for three steps in a process of its own.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from typing import Any

import numpy as np
import tensorflow as tf

import tpu_embedding as te

LIMIT = 0.05
# Tables as (rows, dim, optimizer); samples of a batch; ids of a sample; dtype.
CONFIGURATIONS: tuple[tuple[list[tuple[int, int, str]], int, int, str], ...] = (
    ([(4_200_000, 64, "SGD")], 4096, 1, "float32"),
    ([(2_200_000, 64, "Adagrad")], 4096, 1, "float32"),
    ([(1_500_000, 64, "Adam")], 4096, 1, "float32"),
    ([(1_500_000, 64, "FTRL")], 4096, 4, "float32"),
    ([(4_300_000, 64, "RowwiseAdagrad")], 4096, 1, "float32"),
    ([(3_000_000, 64, "Adagrad")], 4096, 1, "bfloat16"),
    ([(16_000_000, 16, "SGD")], 1024, 8, "float32"),
    ([(600_000, 512, "SGD")], 1024, 1, "float32"),
    ([(300_000, 64, "Adagrad")] * 8, 2048, 2, "float32"),
    ([(100_000, 32, "Adam")] * 30, 2048, 1, "float32"),
    ([(1_000_000, 96, "Adagrad"), (3_000_000, 32, "SGD")], 16384, 4, "float32"),
    ([(2_000_000, 128, "SGD"), (500_000, 128, "Adam")], 8192, 2, "float32"),
)


def configure(index: int) -> tuple[dict[str, te.FeatureConfig], int, int]:
    """Returns the features, the samples of a batch and the ids of a sample."""
    tables, samples, valency, dtype = CONFIGURATIONS[index]
    features = {
        f"t{i}": te.FeatureConfig(
            te.TableConfig(
                rows, dim, name=f"t{i}", dtype=dtype, optimizer=getattr(te, rule)(0.1)
            ),
            name=f"f{i}",
        )
        for i, (rows, dim, rule) in enumerate(tables)
    }
    return features, samples, valency


def memory(field: str) -> int:
    """Returns a field of /proc/self/status in bytes."""
    with open("/proc/self/status", encoding="utf-8") as status:
        (line,) = [line for line in status if line.startswith(field)]
    return int(line.split()[1]) * 1024


def train(features: Any, samples: int, valency: int, steps: int) -> None:
    """Creates the tables and trains them."""
    embedding = te.TPUEmbedding(features, te.SGD(0.1))
    rng = np.random.default_rng(0)
    for _ in range(steps):
        embedding.enqueue(
            {
                name: tf.constant(
                    rng.integers(0, own.table.vocabulary_size, (samples, valency))
                )
                for name, own in features.items()
            }
        )
        activations = embedding.dequeue()
        embedding.apply_gradients({n: tf.ones_like(a) for n, a in activations.items()})


def measure(index: int) -> None:
    """Prints the plan's bytes and the measured ones of one configuration."""
    small = {"w": te.FeatureConfig(te.TableConfig(8, 8, name="w"), name="w")}
    train(small, 4, 1, 1)  # Loads the library.
    features, samples, valency = configure(index)
    batch = {
        n: np.arange(samples * valency).reshape(samples, valency) for n in features
    }
    report = te.plan(
        features,
        batch_size=samples,
        sample=[batch],
        processes=[],
        topologies=[],
    )
    before = memory("VmRSS")
    train(features, samples, valency, 3)
    measured = memory("VmHWM") - before
    print(json.dumps([report.placements[0].peak_bytes, measured]))


def main() -> int:
    """Measures all; returns 1 if one differs by more than the limit."""
    if len(sys.argv) > 1:
        measure(int(sys.argv[1]))
        return 0
    failed = False
    print(f"{'configuration':<42}  planned  measured  planned/measured, MiB")
    for index, (tables, samples, valency, dtype) in enumerate(CONFIGURATIONS):
        found = subprocess.run(
            [sys.executable, __file__, str(index)],
            env={**os.environ, "TF_CPP_MIN_LOG_LEVEL": "3"},
            stdout=subprocess.PIPE,
            check=True,
        )
        planned, measured = json.loads(found.stdout.splitlines()[-1])
        rows, dim, rule = tables[0]
        name = f"{len(tables)} x {rows} x {dim} {rule} {dtype}, {samples} x {valency}"
        ratio = planned / measured
        failed |= abs(ratio - 1) > LIMIT
        print(
            f"{name:<42} {planned / 2**20:8.0f}   {measured / 2**20:8.0f}  {ratio:.3f}",
            flush=True,
        )
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
