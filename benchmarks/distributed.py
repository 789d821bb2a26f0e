"""CPU time of a step in several processes that divide the tables.

    python -m benchmarks.distributed [--processes 2] [--wire bfloat16]

26 tables of 80,000 x 64; each process trains on 2,048 samples of 10 IDs for each table.
Prints a line of JSON: CPU microseconds of all processes per sample, wall milliseconds
of a step, and the megabytes that a process sends in a step. There is no dense model:
the gradients are the activations.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import resource
import socket
import statistics
import subprocess
import sys
import time
from typing import Any

TABLES, DIM, SAMPLES, IDS = 26, 64, 2048, 10


class Options(argparse.Namespace):
    """The command line."""

    processes: int
    optimizer: str
    wire: str
    placement: str
    rows: int
    steps: int


def parse_options() -> Options:
    """Reads the command line."""
    parser = argparse.ArgumentParser()
    add = parser.add_argument
    add("--processes", type=int, default=2)
    add("--optimizer", choices=["adagrad", "rowwise", "sgd"], default="adagrad")
    add("--wire", choices=["float32", "bfloat16"], default="float32")
    add("--placement", choices=["auto", "rows", "whole"], default="auto")
    add("--rows", type=int, default=80_000)
    add("--steps", type=int, default=20)
    return parser.parse_args(namespace=Options())


def cpu_seconds() -> float:
    """Of this process, all threads."""
    used = resource.getrusage(resource.RUSAGE_SELF)
    return used.ru_utime + used.ru_stime


def train(options: Options) -> dict[str, Any]:
    """Trains in this process; what its steps took."""
    import numpy as np
    import tensorflow as tf

    import tpu_embedding as te

    strategy = tf.distribute.MultiWorkerMirroredStrategy()
    rank = strategy.cluster_resolver.task_id or 0
    optimizers = {"adagrad": te.Adagrad, "rowwise": te.RowwiseAdagrad, "sgd": te.SGD}
    zeros = tf.zeros_initializer()
    features = [
        te.FeatureConfig(
            te.TableConfig(options.rows, DIM, zeros, combiner="sum", name=f"table{t}")
        )
        for t in range(TABLES)
    ]
    with strategy.scope():
        embedding = te.TPUEmbedding(
            features,
            optimizers[options.optimizer](0.01),
            distributed_options=te.DistributedOptions(options.placement, options.wire),
        )

    @tf.function
    def step(ids: list[tf.Tensor]) -> None:
        embedding.enqueue(ids)
        embedding.apply_gradients(embedding.dequeue())

    random = np.random.default_rng(rank)
    batches = [
        [
            tf.constant(random.integers(0, options.rows, (SAMPLES, IDS)), tf.int32)
            for _ in range(TABLES)
        ]
        for _ in range(3)
    ]
    for number in range(5):
        step(batches[number % 3])
    walls, begin = [], cpu_seconds()
    for number in range(options.steps):
        start = time.perf_counter()
        step(batches[number % 3])
        walls.append(time.perf_counter() - start)
    cpu = cpu_seconds() - begin
    sent = 0
    if options.processes > 1:
        engine: Any = embedding._create_engine()
        numbers = engine.channel.statistics().values()
        sent = sum(count for _, count in numbers) / (options.steps + 5)
    return {"cpu": cpu, "wall": statistics.median(walls), "sent": sent}


def main() -> None:
    """Starts the processes and prints their sum."""
    options = parse_options()
    if "TF_CONFIG" in os.environ or options.processes == 1:
        found = train(options)
        print("RESULT", json.dumps(found), flush=True)
        if "TF_CONFIG" in os.environ:
            os._exit(0)
        return
    with contextlib.ExitStack() as stack:
        sockets = [
            stack.enter_context(socket.socket()) for _ in range(options.processes)
        ]
        for one in sockets:
            one.bind(("127.0.0.1", 0))
        addresses = [f"127.0.0.1:{one.getsockname()[1]}" for one in sockets]
    running = [
        subprocess.Popen(
            [sys.executable, "-m", "benchmarks.distributed", *sys.argv[1:]],
            env={
                **os.environ,
                "TF_CPP_MIN_LOG_LEVEL": "2",
                "TF_CONFIG": json.dumps(
                    {
                        "cluster": {"worker": addresses},
                        "task": {"type": "worker", "index": index},
                    }
                ),
            },
            stdout=subprocess.PIPE,
            text=True,
        )
        for index in range(options.processes)
    ]
    results = []
    for process in running:
        printed, _ = process.communicate()
        line = next(line for line in printed.splitlines() if line.startswith("RESULT"))
        results.append(json.loads(line.removeprefix("RESULT")))
    samples = options.processes * SAMPLES * options.steps
    report = {
        "cpu_us_per_sample": round(1e6 * sum(r["cpu"] for r in results) / samples, 1),
        "wall_ms_per_step": round(1e3 * max(r["wall"] for r in results), 1),
        "sent_mb_per_step": round(max(r["sent"] for r in results) / 1e6, 2),
    }
    print(json.dumps({**vars(options), **report}))


if __name__ == "__main__":
    main()
