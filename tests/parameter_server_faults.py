"""Faults of a job of parameter servers: `make test-servers`, about five minutes.

Two servers and two workers are processes of their own, this one is the coordinator.

    python tests/parameter_server_faults.py            # all of them
    python tests/parameter_server_faults.py workers    # one of FAULTS
"""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping
from typing import Any

import pytest
import tensorflow as tf

import tpu_embedding as te

CLOSURES, KILLS = 300, 5
STOCK = [
    sys.executable,
    "-c",
    "import tensorflow as tf; r = tf.distribute.cluster_resolver."
    "TFConfigClusterResolver(); tf.distribute.Server(r.cluster_spec(), "
    "job_name=r.task_type, task_index=r.task_id).join()",
]


def make(strategy: Any) -> tuple[Any, Any, tf.Variable]:
    """Tables whose row k counts the pushes of closure k, and the closure.

    The rows of table c are divided over the servers: k and k + rows are on two.
    """
    rows = CLOSURES + 11
    sizes = {"a": (rows, "whole"), "b": (rows, "whole"), "c": (2 * rows, "rows")}
    configs = {
        name: te.FeatureConfig(
            te.TableConfig(
                size,
                4,
                initializer=tf.zeros_initializer(),
                name=name,
                combiner="sum",
                placement=placement,
            )
        )
        for name, (size, placement) in sizes.items()
    }
    with strategy.scope():
        embedding = te.TPUEmbedding(configs, te.SGD(1.0))
        finished = tf.Variable(tf.zeros([rows]), trainable=False)
    embedding.build()

    def work(number: int) -> tf.Tensor:
        a = tf.random.normal([500, 500])
        for _ in range(number):
            a = tf.linalg.matmul(a, a) * 1e-3
        return a

    @tf.function
    def train(ids: Any) -> tf.Tensor:
        both = tf.stack([ids, ids + rows], 1)
        embedding.enqueue({"a": ids, "b": ids, "c": both})
        activations = embedding.dequeue()
        gradients = {name: -tf.ones_like(value) for name, value in activations.items()}
        with tf.control_dependencies([work(3)]):
            embedding.apply_gradients(gradients)
            finished.scatter_add(tf.IndexedSlices(tf.ones([1]), ids))
        return tf.identity(ids)

    @tf.function
    def closure(k: Any) -> tf.Tensor:
        with tf.control_dependencies([train(tf.reshape(k, [1]))]):
            late = work(20)  # A worker that is killed here has pushed.
        with tf.control_dependencies([late]):
            return tf.identity(k)

    return embedding, closure, finished


def workers() -> None:
    """Workers are killed and started again while functions run."""
    with te.testing.LocalServers(2, 2) as job:
        strategy = tf.distribute.ParameterServerStrategy(job.resolver())
        coordinator = te.ClusterCoordinator(strategy)
        embedding, closure, finished = make(strategy)
        coordinator.schedule(closure, args=(tf.constant(CLOSURES),))
        coordinator.join()
        print("started", flush=True)
        for k in range(CLOSURES):
            coordinator.schedule(closure, args=(tf.constant(k),))

        def progress() -> float:
            try:
                return float(tf.reduce_sum(finished))
            except tf.errors.OpError:  # Of the worker that was killed just now.
                return 0.0

        killed: list[tuple[str, int]] = []

        def kill() -> None:
            for number in range(KILLS):
                goal = (number + 0.5) * CLOSURES / (KILLS + 1)
                while progress() < goal:
                    time.sleep(0.05)
                task = ("worker", number % 2)
                job.processes[task].kill()
                job.processes[task].wait()
                job.start(*task)
                killed.append(task)
                print(f"killed {task} at {progress():.0f}", flush=True)

        killer = threading.Thread(target=kill, daemon=True)
        killer.start()
        coordinator.join()
        killer.join()
        assert len(killed) == KILLS, killed
        pushed = finished.numpy()[:CLOSURES]
        for name, table in embedding.core.tables().items():
            counts = table.values()["parameters"].numpy()[:, 0]
            counts = counts.reshape(-1, CLOSURES + 11)[:, :CLOSURES]
            lost, twice = int((counts < 1).sum()), int((counts > 1).sum())
            print(f"table {name}: {lost} lost, {twice} applied twice")
            assert not lost
            assert not twice
        print(f"functions that pushed more than once: {int((pushed > 1).sum())}")


def repeated() -> None:
    """Runs of one number in a worker process change a server process once."""
    with te.testing.LocalServers(1, 1) as job:
        strategy = tf.distribute.ParameterServerStrategy(job.resolver())
        coordinator = te.ClusterCoordinator(strategy)
        embedding, closure, _ = make(strategy)
        numbered = coordinator._with_number(closure)
        with tf.device("/job:worker/replica:0/task:0"):
            for number in (1, 2, 1, 2):
                numbered(tf.constant([7, number], tf.int64), tf.constant(number))
        coordinator.schedule(closure, args=(tf.constant(3),))
        coordinator.join()
        for table in embedding.core.tables().values():
            counts = table.values()["parameters"].numpy()[:5, 0].tolist()
            assert counts == [0, 1, 1, 1, 0], counts


def two_clusters() -> None:
    """A program that leaves a cluster for another makes its first values again."""
    for _ in range(2):
        with te.testing.LocalServers(1, 1) as job:
            strategy = tf.distribute.ParameterServerStrategy(job.resolver())
            with strategy.scope():
                feature = te.FeatureConfig(te.TableConfig(10, 4, name="films"))
                embedding = te.TPUEmbedding(feature, te.SGD(0.1))
            embedding.build()
            table = embedding.core.tables()["films"].values()["parameters"]
            assert tf.reduce_all(table != 0)


def lost(task: tuple[str, int], how: int, seconds: float) -> None:
    """A task is killed or stopped while functions run; join names it."""
    with te.testing.LocalServers(2, 2) as job:
        strategy = tf.distribute.ParameterServerStrategy(job.resolver())
        coordinator = te.ClusterCoordinator(strategy, task_timeout=10)
        _, closure, _ = make(strategy)
        coordinator.schedule(closure, args=(tf.constant(CLOSURES),))
        coordinator.join()
        for k in range(CLOSURES):
            coordinator.schedule(closure, args=(tf.constant(k),))
        time.sleep(1)
        begun = time.monotonic()
        job.processes[task].send_signal(how)
        with pytest.raises(tf.errors.UnavailableError) as caught:
            coordinator.join()
        took, text = time.monotonic() - begun, caught.value.message
        print(f"{task} {signal.Signals(how).name}: {took:.1f} s: {text}")
        assert f"/job:{task[0]}/replica:0/task:{task[1]}" in text[:60]
        assert took < seconds


def restart_server() -> None:
    """A server that was started again has lost its tables; join names it."""
    with te.testing.LocalServers(2, 2) as job:
        strategy = tf.distribute.ParameterServerStrategy(job.resolver())
        coordinator = te.ClusterCoordinator(strategy)
        _, closure, _ = make(strategy)
        coordinator.schedule(closure, args=(tf.constant(0),))
        coordinator.join()
        job.processes["ps", 1].kill()
        job.processes["ps", 1].wait()
        job.start("ps", 1)
        address = job.cluster["ps"][1].split(":")
        while True:  # Until it listens.
            try:
                socket.create_connection((address[0], int(address[1]))).close()
                break
            except OSError:
                time.sleep(0.2)
        time.sleep(3)

        def run() -> None:
            coordinator.schedule(closure, args=(tf.constant(1),))
            coordinator.join()

        with pytest.raises(tf.errors.UnavailableError) as caught:
            run()
        print(caught.value.message[:200])
        assert caught.value.message.startswith("/job:ps/replica:0/task:1")


def no_library() -> None:
    """Servers and workers without the library are named."""
    for which in ("ps", "worker"):
        with te.testing.LocalServers(2, 2, {which: STOCK}) as job:
            strategy = tf.distribute.ParameterServerStrategy(job.resolver())
            coordinator = te.ClusterCoordinator(strategy)

            def run(strategy: Any, coordinator: Any) -> None:
                _, closure, _ = make(strategy)
                coordinator.schedule(closure, args=(tf.constant(0),))
                coordinator.join()

            with pytest.raises(tf.errors.NotFoundError, match="has not loaded") as it:
                run(strategy, coordinator)
            print(f"{which}: {it.value.message[:300]}")


FAULTS: dict[str, Callable[[], None]] = {
    "repeated": repeated,
    "two_clusters": two_clusters,
    "workers": workers,
    "kill_server": lambda: lost(("ps", 1), signal.SIGKILL, 30),
    "stop_server": lambda: lost(("ps", 0), signal.SIGSTOP, 30),
    "restart_server": restart_server,
    "stop_worker": lambda: lost(("worker", 1), signal.SIGSTOP, 30),
    "no_library": no_library,
}


def run_each(scenarios: Mapping[str, Callable[[], None]], timeout: int) -> None:
    """Runs the scenarios that the command line names, or all."""
    file, *names = sys.argv
    if len(names) == 1:
        scenarios[names[0]]()
        print(f"{names[0]}: passed", flush=True)
        os._exit(0)  # Threads of TensorFlow may wait for a task that is gone.
    for name in names or scenarios:  # Each with an eager context of its own.
        subprocess.run([sys.executable, file, name], check=True, timeout=timeout)


if __name__ == "__main__":
    run_each(FAULTS, timeout=400)
