"""A program that trains growing tables, and saves them; to be killed at any moment."""

from __future__ import annotations

import sys

import numpy as np
import tensorflow as tf

import tpu_embedding as te

STEPS = 60


def main(folder: str, pipelined: bool) -> None:
    """Trains `STEPS` steps, from the last checkpoint on; prints the tables at the end.

    Each step prints a line when it begins, so that its reader can kill this.
    """
    vocabulary = te.GrowingVocabulary(
        300, min_count=2, eviction="lru", unknown="shared_row", when_full="shared_row"
    )
    dtype = "int8" if pipelined else "float32"
    films = te.TableConfig(vocabulary, 16, name="films", dtype=dtype)
    embedding = te.TPUEmbedding(
        {"film": te.FeatureConfig(films)}, te.Adagrad(0.1), pipelined
    )
    embedding.build()
    step = tf.Variable(0, dtype=tf.int64)
    checkpoint = tf.train.Checkpoint(tables=embedding, step=step)
    manager = tf.train.CheckpointManager(checkpoint, folder, max_to_keep=2)
    checkpoint.restore(manager.latest_checkpoint)
    while int(step) < STEPS:
        number = int(step)
        print(f"train {number}", flush=True)
        ids = np.random.default_rng(number).zipf(1.2, (200, 3)) % 2000
        embedding.enqueue({"film": tf.constant(ids)})
        activations = embedding.dequeue()
        embedding.apply_gradients({"film": tf.sin(3 * activations["film"])})
        if number % 10 == 5:
            print(f"evict {number}", flush=True)
            embedding.evict(films)
        step.assign_add(1)
        if number % 3 == 2:
            print(f"save {number}", flush=True)
            manager.save()
    state = embedding.core.growing()["films"].read()
    # A restored vocabulary has its candidates in order, from the oldest on.
    numbers = state["state"].copy()
    oldest, numbers[6] = int(numbers[6]), 0
    state["state"] = numbers
    for name in ("candidates", "candidate_hits"):
        state[name] = np.roll(state[name], -oldest)
    for name, value in sorted(state.items()):
        print(f"{name} {np.asarray(value).tobytes().hex()}")


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2] == "pipelined")
