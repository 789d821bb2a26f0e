"""Measures what deltas cost a trainer, and how soon a served model has new rows.

    python -m benchmarks.deltas [--only tracking] [--rounds 12]

`tracking` alternates steps without a consumer, with one and with four; the fastest of
all rounds counts. A step is enqueue, dequeue and apply_gradients without a dense model,
so the share of tracking is the largest possible. Consumers are new in every round, so
each row that the round changes is marked for the first time.

`publish` measures the time from export_delta in this process until a model that another
process serves answers with the new rows. It gets the blocks over the loopback
interface, each after the answer to the previous one.
"""

from __future__ import annotations

import argparse
import multiprocessing
import pathlib
import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from multiprocessing.connection import Client, Connection, Listener
from typing import Any

import numpy as np
import tensorflow as tf

import tpu_embedding as te
from benchmarks import options
from benchmarks.peers import tpu_embedding
from benchmarks.scenarios import SCENARIOS, Scenario

BATCHES, REPEATS = 8, 4  # of a round
ROWS, DIM, CHANGED = 1_000_000, 64, 100_000


def make_rounds(scenario: Scenario) -> Callable[[int], float]:
    """Returns a function that trains a round with consumers and returns its seconds."""
    configs = tpu_embedding.features(scenario)
    embedding = te.TPUEmbedding(configs, te.Adagrad(0.01))
    embedding.build()
    batches = [
        [tf.constant(ids) for ids in batch]
        for batch in scenario.batches(BATCHES, seed=1)
    ]

    @tf.function
    def steps():
        for _ in tf.range(REPEATS):
            for batch in batches:
                embedding.enqueue(batch)
                embedding.apply_gradients(embedding.dequeue())

    def run(consumers: int) -> float:
        tracked = [embedding.core.changes(str(k)) for k in range(consumers)]
        for changes in tracked:
            changes.mark([np.zeros([0], np.int64)] * len(configs))
        start = time.perf_counter()
        steps()
        seconds = time.perf_counter() - start
        for changes in tracked:
            changes.commit(end=True)
        return seconds

    run(0)  # Traces, and moves the tables into memory.
    return run


def measure_tracking(scenarios: list[str], rounds: int) -> None:
    """Prints a line for each scenario."""
    for name in scenarios:
        run = make_rounds(SCENARIOS[name])
        least = dict.fromkeys((0, 1, 4), float("inf"))
        for number in range(rounds):
            for consumers in sorted(least, reverse=bool(number % 2)):
                least[consumers] = min(least[consumers], run(consumers))
        step = 1e3 * least[0] / (BATCHES * REPEATS)
        print(
            f"{name}: {step:.3f} ms for a step; one consumer "
            f"{least[1] / least[0] - 1:+.2%}, four {least[4] / least[0] - 1:+.2%}",
            flush=True,
        )


def serve(path: str, told: Connection) -> None:
    """Serves a model: takes blocks of deltas, and answers lists of ids."""
    model: Any = tf.saved_model.load(path)
    with Listener(("localhost", 0)) as listener:
        told.send(listener.address)
        with listener.accept() as client:
            while True:
                try:
                    kind, content = client.recv()
                except EOFError:
                    return
                if kind == "block":
                    model.signatures["apply_delta"](block=tf.constant(content))
                    client.send(None)
                else:
                    found = model.signatures["dense"](row=tf.constant(content))
                    client.send(found["row"].numpy())


def measure_publishing(storage: str, rounds: int) -> None:
    """Prints how long rows take from the trainer to an answer of the served model."""
    table = te.TableConfig(ROWS, DIM, name="rows")
    embedding = te.TPUEmbedding({"row": te.FeatureConfig(table)}, te.SGD(0.1))
    rng = np.random.default_rng(0)
    seconds, size = [], 0
    with tempfile.TemporaryDirectory() as folder:
        base = f"{folder}/base"
        te.serving.export(
            embedding, base, signatures=["dense"], storage=storage, deltas=True
        )
        writer = te.serving.DeltaWriter(embedding, base, "replica")
        context = multiprocessing.get_context("spawn")
        heard, told = context.Pipe()
        server = context.Process(target=serve, args=[base, told])
        server.start()
        with Client(heard.recv()) as client:
            for number in range(rounds + 1):
                ids = np.sort(rng.choice(ROWS, CHANGED, replace=False))
                embedding.enqueue({"row": tf.constant(ids)})
                embedding.apply_gradients(embedding.dequeue())
                path = pathlib.Path(folder) / f"{number}.delta"
                start = time.perf_counter()
                writer.export_delta(path)
                for block in te.serving.delta_blocks(path):
                    client.send(("block", block))
                    client.recv()
                client.send(("ids", ids[:26]))
                found = client.recv()
                seconds.append(time.perf_counter() - start)
                size = path.stat().st_size
                if storage == "float32":
                    embedding.enqueue({"row": tf.constant(ids[:26])}, training=False)
                    assert (found == embedding.dequeue()["row"].numpy()).all()
        server.join()
    print(
        f"{storage}: {CHANGED:,} rows of dim {DIM}, {size:,} bytes: "
        f"{statistics.median(seconds[1:]):.3f} s, slowest {max(seconds[1:]):.3f} s",
        flush=True,
    )


def main(arguments: Sequence[str] | None = None) -> None:
    """Reads the arguments and measures."""
    parser = argparse.ArgumentParser(description=__doc__)
    parts = ["tracking", "publish"]
    parser.add_argument("--only", nargs="+", choices=parts, default=parts)
    parser.add_argument("--rounds", type=options.positive, default=12)
    parser.add_argument(
        "--scenarios", nargs="+", choices=list(SCENARIOS), default=["dlrm", "one_hot"]
    )
    flags = parser.parse_args(arguments)
    if "tracking" in flags.only:
        measure_tracking(flags.scenarios, flags.rounds)
    if "publish" in flags.only:
        for storage in ("float32", "int8"):
            measure_publishing(storage, flags.rounds)


if __name__ == "__main__":
    main()
