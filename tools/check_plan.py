"""Compares the plan's memory with that of jobs: `make check-plan`.

Each configuration is created and trained for three steps in processes of its own: on
one machine, by processes that train together, and on parameter servers.
"""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from typing import Any

import numpy as np
import tensorflow as tf

import tpu_embedding as te
from tpu_embedding.ops import library

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


# Jobs: processes, the placement of their tables, and whether tf.random.normal fills
# them; each with tables of 512 MiB and 128 MiB.
JOBS = ((2, "rows", False), (2, "auto", True), (3, "whole", False))


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


def memory(field: str, process: int | str = "self") -> int:
    """Returns a field of /proc/PROCESS/status in bytes."""
    with open(f"/proc/{process}/status", encoding="utf-8") as status:
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


def job_features(index: int) -> Any:
    """Returns the features of a job."""
    _, _, normal = JOBS[index]
    initializer = tf.random.normal if normal else None
    return {
        name: te.FeatureConfig(te.TableConfig(rows, 64, initializer, name=name))
        for name, rows in (("large", 2_097_152), ("small", 524_288))
    }


def step_of(strategy: Any, features: Any) -> Any:
    """Makes the tables, and returns a function that trains a batch."""
    with strategy.scope():
        embedding = te.TPUEmbedding(
            features, te.SGD(0.1), distributed_options=strategy.options
        )
    embedding.build()

    @tf.function
    def step() -> None:
        embedding.enqueue({name: tf.range(1024) for name in features})
        activations = embedding.dequeue()
        embedding.apply_gradients({n: tf.sin(a) for n, a in activations.items()})

    return step


def run_process(index: int) -> None:
    """Prints the memory of this process of a synchronous job."""
    library.load()
    strategy: Any = tf.distribute.MultiWorkerMirroredStrategy()
    strategy.options = te.DistributedOptions(JOBS[index][1])
    before = memory("VmRSS")
    step = step_of(strategy, job_features(index))
    for _ in range(3):
        strategy.run(step)
    print(memory("VmHWM") - before)


def measure_processes(index: int) -> list[int]:
    """Measures the memory of each process of a synchronous job."""
    sockets = [socket.create_server(("127.0.0.1", 0)) for _ in range(JOBS[index][0])]
    hosts = [f"127.0.0.1:{own.getsockname()[1]}" for own in sockets]
    for own in sockets:
        own.close()
    processes = []
    for number in range(len(hosts)):
        task = {"type": "worker", "index": number}
        config = json.dumps({"cluster": {"worker": hosts}, "task": task})
        command = [sys.executable, __file__, "--process", str(index)]
        environment = {**os.environ, "TF_CONFIG": config, "TF_CPP_MIN_LOG_LEVEL": "3"}
        processes.append(
            subprocess.Popen(command, env=environment, stdout=subprocess.PIPE)
        )
    answers = [process.communicate(timeout=600)[0] for process in processes]
    return [int(answer.splitlines()[-1]) for answer in answers]


def run_servers(index: int) -> None:
    """Prints the memory of each server."""
    count, placement, _ = JOBS[index]
    with te.testing.LocalServers(count, 1) as job:
        strategy: Any = tf.distribute.ParameterServerStrategy(job.resolver())
        strategy.options = te.DistributedOptions(placement)
        coordinator = te.ClusterCoordinator(strategy)
        servers = [job.processes["ps", k].pid for k in range(count)]
        before = [memory("VmRSS", server) for server in servers]
        step = step_of(strategy, job_features(index))
        for _ in range(3):
            coordinator.schedule(step)
        coordinator.join()
        after = [memory("VmHWM", server) for server in servers]
    print(*(most - first for most, first in zip(after, before, strict=True)))


def measure_servers(index: int) -> list[int]:
    """Measures each server's memory, with a coordinator in a process of its own."""
    found = subprocess.run(
        [sys.executable, __file__, "--servers", str(index)],
        env={**os.environ, "TF_CPP_MIN_LOG_LEVEL": "3"},
        stdout=subprocess.PIPE,
        check=True,
    )
    return [int(size) for size in found.stdout.splitlines()[-1].split()]


def compare_jobs() -> bool:
    """Prints each process of each job; returns whether one differs by too much."""
    failed = False
    for index, (count, placement, normal) in enumerate(JOBS):
        report = te.plan(
            job_features(index),
            te.SGD(0.1),
            batch_size=1024,
            processes=[count],
            topologies=[],
            distributed_options=te.DistributedOptions(placement),
        )
        for kind, measured in (
            ("synchronous", measure_processes(index)),
            ("parameter_servers", measure_servers(index)),
        ):
            (place,) = [p for p in report.placements if p.kind == kind]
            for planned, found in zip(place.device_bytes, measured, strict=True):
                # What an engine without tables needs differs by some MiB.
                failed |= abs(planned - found) > LIMIT * max(planned, 2**27)
                name = f"{count} {kind}, {placement}{', normal' * normal}"
                print(
                    f"{name:<42} {planned / 2**20:8.0f}   {found / 2**20:8.0f}  "
                    f"{planned / found:.3f}",
                    flush=True,
                )
    return failed


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
    if sys.argv[1:2] == ["--process"]:
        run_process(int(sys.argv[2]))
        return 0
    if sys.argv[1:2] == ["--servers"]:
        run_servers(int(sys.argv[2]))
        return 0
    if sys.argv[1:] == ["--jobs"]:
        return int(compare_jobs())
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
    return int(compare_jobs() or failed)


if __name__ == "__main__":
    sys.exit(main())
