"""Trains 12 steps in any number of processes, which save every 3; a part may be killed.

    launched_program.py FOLDER [STEP:PROCESSES ...]

At STEP the last process of a job of PROCESSES kills itself. All numbers are small
integers times powers of two, so that their sums do not depend on the order.
"""

from __future__ import annotations

import os
import pathlib
import signal
import sys

import numpy as np
import tensorflow as tf

import tpu_embedding as te

STEPS, SAMPLES = 12, 12


def batch(step: int) -> tuple[np.ndarray, np.ndarray]:
    """Returns the ids and the gradients of all processes."""
    rng = np.random.default_rng(step)
    factors = rng.integers(9, size=(SAMPLES, 8))
    return rng.integers(50, size=SAMPLES), factors.astype(np.float32)


def main(folder: pathlib.Path, kills: set[str]) -> None:
    strategy = tf.distribute.MultiWorkerMirroredStrategy()
    context = strategy.cluster_resolver
    size, rank = strategy.num_replicas_in_sync, context.task_id
    ones = tf.keras.initializers.Ones()
    table = te.TableConfig(50, 8, initializer=ones, combiner="sum", name="films")
    with strategy.scope():
        embedding = te.TPUEmbedding({"film": te.FeatureConfig(table)}, te.SGD(0.25))
        embedding.build()
    telemetry = te.Telemetry(embedding, every=1)

    @tf.function
    def step(ids: tf.Tensor, factors: tf.Tensor) -> None:
        embedding.enqueue({"film": ids})
        activations = embedding.dequeue()["film"]
        embedding.apply_gradients({"film": factors + 0 * activations})

    saved = sorted(folder.glob("step_*.index"))
    done = 0
    if saved:
        te.checkpoint.restore(embedding, str(saved[-1].with_suffix("")))
        done = int(saved[-1].stem.rpartition("_")[2])
    print("begins at", done, "of", size)
    for number in range(done, STEPS):
        ids, factors = batch(number)
        part = slice(rank * SAMPLES // size, (rank + 1) * SAMPLES // size)
        strategy.run(step, args=(ids[part], factors[part]))
        telemetry.status()
        if f"{number}:{size}" in kills and rank == size - 1:
            os.kill(os.getpid(), signal.SIGKILL)
        if number % 3 == 2:
            te.checkpoint.save(embedding, str(folder / f"step_{number + 1:02}"))


if __name__ == "__main__":
    main(pathlib.Path(sys.argv[1]), set(sys.argv[2:]))
