"""The cost of te.Telemetry: steps with and without it, interleaved.

    python -m benchmarks.telemetry [--every 100] [--rounds 25]

The step is enqueue, dequeue and apply_gradients in a loop of a tf.function, without a
dense model, so the share of telemetry is the largest possible. Each round runs 100
steps of both; the fastest of all rounds counts, because other work on the machine only
adds time. `--every 1` measures what counting one update costs, a hundred times as
precisely.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable

import tensorflow as tf

import tpu_embedding as te
from benchmarks.peers import tpu_embedding
from benchmarks.scenarios import SCENARIOS, Scenario

STEPS = 100  # of a round


def make_steps(scenario: Scenario, every: int, *, counted: bool) -> Callable[[], float]:
    """Returns a function that trains a round and returns its seconds."""
    embedding = te.TPUEmbedding(tpu_embedding.features(scenario), te.Adagrad(0.01))
    embedding.build()
    batches = [
        [tf.constant(ids) for ids in batch] for batch in scenario.batches(1, seed=1)
    ]
    if counted:
        te.Telemetry(embedding, every=every)

    @tf.function
    def steps():
        for _ in tf.range(STEPS):
            embedding.enqueue(batches[0])
            embedding.apply_gradients(embedding.dequeue())

    def run() -> float:
        start = time.perf_counter()
        steps()
        return time.perf_counter() - start

    run()  # Traces, and moves the tables into memory.
    return run


def main() -> None:
    """Prints a line for each scenario."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--every", type=int, default=100)
    parser.add_argument("--rounds", type=int, default=25)
    parser.add_argument("--scenarios", nargs="*", default=["small_tables", "one_hot"])
    arguments = parser.parse_args()
    for name in arguments.scenarios:
        scenario = SCENARIOS[name]
        both = [
            make_steps(scenario, arguments.every, counted=counted)
            for counted in (False, True)
        ]
        least = [float("inf")] * 2
        for number in range(arguments.rounds):
            for i in (0, 1) if number % 2 else (1, 0):
                least[i] = min(least[i], both[i]())
        off, on = (1e3 * seconds / STEPS for seconds in least)
        print(
            f"{name}: {off:.4f} ms for a step, {on:.4f} ms with every="
            f"{arguments.every}: {on / off - 1:+.2%}"
        )


if __name__ == "__main__":
    main()
