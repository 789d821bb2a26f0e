"""What a job of parameter servers costs: the second part of `make test-servers`.

Servers and workers are processes of their own, this one is the coordinator.

    python tests/parameter_server_costs.py           # all of them, five minutes
    python tests/parameter_server_costs.py wire_rows # one of COSTS
"""

from __future__ import annotations

import collections
import os
import re
import subprocess
from collections.abc import Callable
from typing import Any

import numpy as np
import tensorflow as tf
from linux import status
from parameter_server_faults import run_each
from steps import train_on

import tpu_embedding as te

BATCH, IDS, DIM, ROWS = 2048, 10, 32, 100_000
STEPS = 10_000
AIM = 1.05  # Times the formula of docs/performance-notes.md.


def bytes_between(job: Any) -> dict[tuple[str, str], int]:
    """The bytes that TCP has carried from one kind of task to another.

    Both ends of a connection are on this machine, where `ss` shows the process and the
    bytes sent of each.
    """
    kinds = {process.pid: task[0] for task, process in job.processes.items()}
    printed = subprocess.run(
        ["ss", "-tinpOH"], capture_output=True, text=True, check=True
    ).stdout
    ends = []
    for line in printed.splitlines():
        _, _, _, own, peer, *_ = line.split()
        pid = re.search(r"pid=(\d+)", line)
        sent = re.search(r"bytes_sent:(\d+)", line)
        if pid and sent and int(pid[1]) in kinds:
            ends.append((own, peer, kinds[int(pid[1])], int(sent[1])))
    at = {
        own.rpartition("]:")[-1].rpartition(":")[-1]: kind for own, _, kind, _ in ends
    }
    found: dict[tuple[str, str], int] = collections.defaultdict(int)
    for _, peer, kind, sent in ends:
        other = at.get(peer.rpartition(":")[-1], "coordinator")
        found[kind, other] += sent
    return found


def make_step(embedding: Any) -> Any:
    @tf.function
    def step(number: tf.Tensor) -> tf.Tensor:
        ids = tf.random.stateless_uniform(
            [BATCH, IDS], tf.stack([number, 0]), 0, ROWS, tf.int64
        )
        activations = train_on(embedding, {"film": ids}, tf.sin)
        return tf.reduce_sum(activations["film"])

    return step


def make(
    strategy: Any, placement: str, rows: int = ROWS, initializer: Any = None
) -> Any:
    table = te.TableConfig(
        rows, DIM, initializer, combiner="sum", name="films", placement=placement
    )
    with strategy.scope():
        embedding = te.TPUEmbedding({"film": te.FeatureConfig(table)}, te.Adagrad(0.1))
    embedding.build()
    return embedding


def wire(placement: str) -> None:
    """The bytes between workers and servers."""
    warm_up, measured = 10, 30
    with te.testing.LocalServers(2, 1) as job:
        strategy = tf.distribute.ParameterServerStrategy(job.resolver())
        coordinator = te.ClusterCoordinator(strategy)
        step = make_step(make(strategy, placement))

        def run(numbers: range) -> dict[tuple[str, str], int]:
            for number in numbers:
                coordinator.schedule(step, args=(tf.constant(number),))
            coordinator.join()
            return bytes_between(job)

        before = run(range(warm_up))
        numbers = range(warm_up, warm_up + measured)
        after = run(numbers)
    for way, expected in formulas(numbers, placement).items():
        sent = after[way] - before[way]
        print(
            f"{placement}, {way[0]} to {way[1]}: {sent / measured:.0f} bytes a step, "
            f"{sent / expected:.4f} of the formula"
        )
        assert expected <= sent <= AIM * expected, (placement, way)


def formulas(numbers: range, placement: str) -> dict[tuple[str, str], int]:
    """docs/performance-notes.md, of some batches: to the servers and from them."""
    to_servers = to_worker = 0
    for number in numbers:
        if placement == "whole":
            to_servers += 4 * BATCH * IDS + 4 * BATCH * DIM
            to_worker += 4 * BATCH * DIM
            continue
        seeds = tf.stack([number, 0])
        ids = tf.random.stateless_uniform([BATCH, IDS], seeds, 0, ROWS, tf.int64)
        rows = len(np.unique(ids))
        samples = sum(int((ids.numpy() % 2 == k).any(axis=1).sum()) for k in range(2))
        to_servers += 4 * (rows + BATCH * IDS + samples) + 4 * DIM * samples
        to_worker += 4 * DIM * rows
    return {("worker", "ps"): to_servers, ("ps", "worker"): to_worker}


def steps() -> None:
    """Threads and memory of each task over many steps."""
    with te.testing.LocalServers(2, 2) as job:
        strategy = tf.distribute.ParameterServerStrategy(job.resolver())
        coordinator = te.ClusterCoordinator(strategy)
        tables = [
            te.TableConfig(1000, 16, name=name, placement=name)
            for name in ("whole", "rows")
        ]
        with strategy.scope():
            embedding = te.TPUEmbedding(
                {table.name: te.FeatureConfig(table) for table in tables},
                te.Adagrad(0.1),
            )
        embedding.build()

        @tf.function
        def step(number: tf.Tensor) -> tf.Tensor:
            seeds = tf.stack([number, 0])
            ids = tf.random.stateless_uniform([32, 4], seeds, 0, 1000, tf.int64)
            embedding.enqueue({"whole": ids, "rows": ids})
            activations = embedding.dequeue()
            gradients = {name: tf.sin(value) for name, value in activations.items()}
            embedding.apply_gradients(gradients)
            return tf.reduce_sum(activations["rows"])

        tasks = {f"{name} {k}": p.pid for (name, k), p in job.processes.items()}
        tasks["coordinator"] = os.getpid()
        first: dict[str, tuple[int, float]] = {}
        for number in range(STEPS + 1):
            coordinator.schedule(step, args=(tf.constant(number),))
            if number % (STEPS // 10):
                continue
            coordinator.join()
            for name, pid in tasks.items():
                threads, mib = status("Threads", pid), status("VmRSS", pid) / 2**20
                print(f"{number} steps, {name}: {threads} threads, {mib:.1f} MiB")
                if number == STEPS // 5:
                    first[name] = threads, mib
                if name in first:
                    assert threads <= first[name][0] + 2, name
                    assert mib <= first[name][1] + 16, name


def start(placement: str, aim: float, initializer: Any = None) -> None:
    """The most memory that each server has had once a table of 256 MiB is made."""
    with te.testing.LocalServers(2, 1) as job:
        strategy = tf.distribute.ParameterServerStrategy(job.resolver())
        te.ClusterCoordinator(strategy)
        make(strategy, placement, 1 << 15, initializer)
        pids = [job.processes["ps", k].pid for k in range(2)]
        small = [status("VmHWM", pid) for pid in pids]
        make(strategy, placement, 1 << 21, initializer)
        grown = [status("VmHWM", pid) for pid in pids]
        tables = [(b - a) / 2**28 for a, b in zip(small, grown, strict=True)]
        print(f"{placement}: " + ", ".join(f"{own:.2f} tables" for own in tables))
        assert max(tables) <= aim


COSTS: dict[str, Callable[[], None]] = {
    "wire_whole": lambda: wire("whole"),
    "wire_rows": lambda: wire("rows"),
    "start_whole": lambda: start("whole", 2.2),
    "start_rows": lambda: start("rows", 1.2),
    "start_own": lambda: start("rows", 4.5, tf.random_uniform_initializer()),
    "steps": steps,
}


if __name__ == "__main__":
    run_each(COSTS, timeout=600)
