"""Faults of a job of parameter servers: `make test-servers`, about ten minutes.

Two servers and two workers are processes of their own, this one is the coordinator.

    python tests/parameter_server_faults.py            # all of them
    python tests/parameter_server_faults.py workers    # one of FAULTS
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import json
import os
import resource
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import numpy as np
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
        for name, table in embedding.tables().items():
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
        for table in embedding.tables().values():
            counts = table.values()["parameters"].numpy()[:5, 0].tolist()
            assert counts == [0, 1, 1, 1, 0], counts


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


WRITERS: dict[str, Callable[[Any, str], Any]] = {
    "te": te.checkpoint.save,
    "tf": lambda embedding, path: tf.train.Checkpoint(embedding=embedding).write(path),
}
READERS: dict[str, Callable[[Any, str], Any]] = {
    "te": te.checkpoint.restore,
    "tf": lambda embedding, path: tf.train.Checkpoint(embedding=embedding).read(path),
}


@contextlib.contextmanager
def saving_job() -> Iterator[tuple[te.testing.LocalServers, Any, Callable[[], None]]]:
    """Servers with 100 MB of tables and slots, and a step that changes all rows."""
    with te.testing.LocalServers(2, 1) as job:
        embedding, step = connect(job.resolver())
        step()
        yield job, embedding, step


def connect(resolver: Any) -> tuple[Any, Callable[[], None]]:
    """Tables on the servers of a job: one is whole, the rows of one are divided."""
    coordinator = te.ClusterCoordinator(
        tf.distribute.ParameterServerStrategy(resolver), task_timeout=10
    )
    rows = 100_000
    configs = {
        placement: te.FeatureConfig(
            te.TableConfig(
                rows,
                64,
                initializer=tf.zeros_initializer(),
                name=placement,
                placement=placement,
            )
        )
        for placement in ("whole", "rows")
    }
    with coordinator.strategy.scope():
        embedding = te.TPUEmbedding(configs, te.Adagrad(0.1))
        embedding.build()

    @tf.function
    def train() -> None:
        embedding.enqueue(dict.fromkeys(configs, tf.range(rows)[:, tf.newaxis]))
        activations = embedding.dequeue()
        embedding.apply_gradients(tf.nest.map_structure(tf.ones_like, activations))

    def step() -> None:
        coordinator.schedule(train)
        coordinator.join()

    return embedding, step


def contents(path: str) -> dict[str, bytes]:
    """Every array of a checkpoint, verified."""
    return {
        f"{table.name}/{name}": rows.numpy().tobytes()
        for table in te.checkpoint.read(path).values()
        for name, rows in table.arrays.items()
    }


def in_folder() -> str:
    return tempfile.mkdtemp(prefix="tpu_embedding_faults_")


def kill_server_in(kind: str, doing: str, share: float) -> None:
    """A server is killed while a checkpoint is saved or restored."""
    folder = in_folder()
    with saving_job() as (job, embedding, step):
        save, restore = WRITERS[kind], READERS[kind]
        before, after = f"{folder}/before", f"{folder}/after"
        save(embedding, before)
        expected = contents(before)
        step()
        act: Callable[[], Any] = {
            "save": lambda: save(embedding, after),
            "restore": lambda: restore(embedding, before),
        }[doing]
        begun = time.monotonic()
        if doing == "save":
            save(embedding, f"{folder}/timed")
        else:
            act()
        took = time.monotonic() - begun
        killer = threading.Timer(took * share, job.processes["ps", 1].kill)
        killer.start()
        begun = time.monotonic()
        try:
            act()
            outcome = "done"
        except tf.errors.UnavailableError as error:
            outcome = error.message[:100]
        seconds = time.monotonic() - begun
        killer.join()
        print(f"{kind} {doing}, killed at {share}: {seconds:.1f} s: {outcome}")
        assert seconds < took + 15
        assert contents(before) == expected
        if os.path.exists(f"{after}.index"):
            assert contents(after) == contents(f"{folder}/timed")
        else:
            assert outcome != "done" or doing == "restore"
    with te.testing.LocalServers(2, 1) as job:  # As the failure table says.
        embedding, _ = connect(job.resolver())
        READERS[kind](embedding, before)
        te.checkpoint.save(embedding, after + "_restored")
        assert contents(after + "_restored") == expected
    shutil.rmtree(folder)


def kill_coordinator(kind: str) -> None:
    """The coordinator is killed while it saves; the next job goes on from its files."""
    folder, random = in_folder(), np.random.default_rng(5)
    with te.testing.LocalServers(2, 1) as job:
        child = subprocess.Popen(
            [sys.executable, "-P", __file__, "save_for_ever"],
            env={**os.environ, _SAVING: json.dumps([job.cluster, kind, folder])},
            stdout=subprocess.PIPE,
            text=True,
        )
        assert child.stdout is not None
        saves = int(random.integers(2, 6))
        for line in child.stdout:
            if line.startswith(f"save {saves}"):
                break
        time.sleep(random.uniform(0, 0.3))
        child.kill()
        child.wait()
    found = sorted(name[:-6] for name in os.listdir(folder) if name.endswith(".index"))
    print(f"{kind}: killed in save {saves}: {found}")
    assert len(found) >= saves - 1
    for name in found:
        values = contents(f"{folder}/{name}")
        steps = int(name) + 1  # Each adds 1 to all accumulators, which start at 0.1.
        for array in ("whole/accumulators", "rows/accumulators"):
            sums = np.frombuffer(values[array], np.float32)
            np.testing.assert_allclose(sums, 0.1 + steps, rtol=1e-6)
    with te.testing.LocalServers(2, 1) as job:
        embedding, step = connect(job.resolver())
        READERS[kind](embedding, f"{folder}/{found[-1]}")
        step()
        # Over the files that the dead coordinator may have left.
        WRITERS[kind](embedding, f"{folder}/{len(found)}")
        accumulators = contents(f"{folder}/{len(found)}")["rows/accumulators"]
        sums = np.frombuffer(accumulators, np.float32)
        np.testing.assert_allclose(sums, 1.1 + len(found), rtol=1e-6)
        if kind == "te":  # TensorFlow leaves the folder of the dead coordinator.
            assert not any("unfinished" in name for name in os.listdir(folder))
    shutil.rmtree(folder)


def save_for_ever() -> None:
    """The coordinator of `kill_coordinator`."""
    cluster, kind, folder = json.loads(os.environ[_SAVING])
    resolver = tf.distribute.cluster_resolver.SimpleClusterResolver(
        tf.train.ClusterSpec(cluster), rpc_layer="grpc"
    )
    embedding, step = connect(resolver)
    for number in itertools.count():
        step()
        print(f"save {number}", flush=True)
        WRITERS[kind](embedding, f"{folder}/{number}")


def full_disk(kind: str) -> None:
    """A file cannot grow: of a server for TensorFlow's checkpoints, else here."""
    folder = in_folder()
    with saving_job() as (job, embedding, step):
        before, after = f"{folder}/before", f"{folder}/after"
        WRITERS[kind](embedding, before)
        expected = contents(before)
        step()
        writer = {"te": os.getpid(), "tf": job.processes["ps", 0].pid}[kind]
        limits = resource.prlimit(writer, resource.RLIMIT_FSIZE)
        resource.prlimit(writer, resource.RLIMIT_FSIZE, (1 << 20, limits[1]))
        with pytest.raises(tf.errors.OpError) as caught:
            WRITERS[kind](embedding, after)
        resource.prlimit(writer, resource.RLIMIT_FSIZE, limits)
        print(f"{kind}: {type(caught.value).__name__}: {caught.value.message[:200]}")
        assert folder in caught.value.message
        assert not os.path.exists(f"{after}.index")
        assert contents(before) == expected
        WRITERS[kind](embedding, after)
        assert contents(after) != expected
        assert not any("unfinished" in name for name in os.listdir(folder))
        found = contents(after)
        paths = [os.path.join(folder, name) for name in os.listdir(folder)]
        data = max((p for p in paths if ".data-" in p), key=os.path.getsize)
        os.truncate(data, os.path.getsize(data) // 2)
        damaged = data.partition(".data-")[0]
        with pytest.raises(tf.errors.DataLossError, match=folder):
            te.checkpoint.restore(embedding, damaged)
        te.checkpoint.save(embedding, f"{folder}/again")
        assert contents(f"{folder}/again") == found
    shutil.rmtree(folder)


_SAVING = "TPU_EMBEDDING_TEST_SAVING"  # The cluster, the writer and the folder.
FAULTS: dict[str, Callable[[], None]] = {
    "repeated": repeated,
    "workers": workers,
    "kill_server": lambda: lost(("ps", 1), signal.SIGKILL, 30),
    "stop_server": lambda: lost(("ps", 0), signal.SIGSTOP, 30),
    "restart_server": restart_server,
    "stop_worker": lambda: lost(("worker", 1), signal.SIGSTOP, 30),
    "no_library": no_library,
    **{
        f"kill_server_in_{doing}_{kind}_{share}": functools.partial(
            kill_server_in, kind, doing, share
        )
        for kind in WRITERS
        for doing, shares in (("save", (0.0, 0.4, 0.8)), ("restore", (0.4,)))
        for share in shares
    },
    **{
        f"kill_coordinator_{k}": functools.partial(kill_coordinator, k) for k in WRITERS
    },
    **{f"full_disk_{kind}": functools.partial(full_disk, kind) for kind in WRITERS},
}


def run_each(scenarios: Mapping[str, Callable[[], None]], timeout: int) -> None:
    """Runs the scenarios that the command line names, or all.

    Args:
      scenarios: By name.
      timeout: Seconds for each.
    """
    file, *names = sys.argv
    if names == ["save_for_ever"]:
        save_for_ever()
    if len(names) == 1:
        scenarios[names[0]]()
        print(f"{names[0]}: passed", flush=True)
        os._exit(0)  # Threads of TensorFlow may wait for a task that is gone.
    for name in names or scenarios:  # Each with an eager context of its own.
        subprocess.run([sys.executable, file, name], check=True, timeout=timeout)


if __name__ == "__main__":
    run_each(FAULTS, timeout=400)
