"""Storage that fails, and kills, while a job of parameter servers saves and restores.

The last part of `make test-servers`; servers and workers are processes of their own.

    python tests/parameter_server_storage.py           # all of them, three minutes
    python tests/parameter_server_storage.py storage   # one of ATTACKS
"""

from __future__ import annotations

import contextlib
import functools
import json
import os
import pathlib
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import numpy as np
import pytest
import tensorflow as tf
from linux import small_files
from multi_process.storage import At
from parameter_server_faults import run_each
from steps import train_on

import tpu_embedding as te
from tpu_embedding.checkpoint import writing

ROWS, DIM = 3000, 8
UNFINISHED = (writing.SCRATCH, "_temp", ".tempstate")  # Ours, and TensorFlow's.

LOST = r"/job:ps/.*/task:1"  # How TensorFlow names server 1.


def make(strategy: Any) -> Any:
    """A whole table on each of two servers, and one whose rows are on both."""
    with strategy.scope():
        embedding = te.TPUEmbedding(
            {
                name: te.FeatureConfig(
                    te.TableConfig(ROWS, DIM, name=name, placement=placement)
                )
                for name, placement in (("a", "whole"), ("b", "whole"), ("c", "rows"))
            },
            te.Adagrad(0.1),
        )
    embedding.build()
    return embedding


def connect(cluster: Any) -> Any:
    """The strategy of a coordinator."""
    strategy = tf.distribute.ParameterServerStrategy(
        tf.distribute.cluster_resolver.SimpleClusterResolver(
            tf.train.ClusterSpec(cluster), rpc_layer="grpc"
        )
    )
    te.ClusterCoordinator(strategy)
    return strategy


def train(embedding: Any) -> None:
    train_on(embedding, dict.fromkeys("abc", tf.range(ROWS // 2)), tf.cos)


def values(embedding: Any) -> dict[str, np.ndarray]:
    return {
        f"{table}/{array}": rows.numpy()
        for table, arrays in embedding.core.checkpoint_rows().items()
        for array, rows in arrays.items()
    }


def stored(path: str) -> dict[str, np.ndarray]:
    """What `values` was when a checkpoint was saved."""
    return {
        f"{table}/{array}": rows.numpy()
        for table, found in te.checkpoint.read(path).items()
        for array, rows in found.arrays.items()
    }


def require_same(found: dict[str, np.ndarray], expected: dict[str, np.ndarray]) -> None:
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        np.testing.assert_array_equal(found[name], value, err_msg=name)


def save(way: str, embedding: Any, path: str) -> None:
    if way == "tf":
        tf.train.Checkpoint(embedding=embedding).write(path)
    else:
        te.checkpoint.save(embedding, path)


def restore(way: str, embedding: Any, path: str) -> None:
    if way == "tf":
        tf.train.Checkpoint(embedding=embedding).read(path)
    else:
        te.checkpoint.restore(embedding, path)


def unfinished(folder: str) -> list[str]:
    """Files that are no part of a checkpoint."""
    names = [path.name for path in pathlib.Path(folder).rglob("*")]
    return sorted(n for n in names if any(end in n for end in UNFINISHED))


def storage() -> None:
    """Storage fails at the coordinator, or at one server only."""
    with te.testing.LocalServers(2, 1) as job, tempfile.TemporaryDirectory() as folder:
        embedding = make(connect(job.cluster))
        train(embedding)
        first, before = f"{folder}/first", values(embedding)
        pids = {"coordinator": os.getpid(), "server": job.processes["ps", 1].pid}
        te.checkpoint.save(embedding, first)
        tf.train.Checkpoint(embedding=embedding).write(f"{folder}/first_tf")
        train(embedding)
        after = values(embedding)
        full = {
            ("te", "coordinator"): True,
            ("te", "server"): False,  # te.checkpoint has no files there.
            ("tf", "server"): True,
        }
        for number, ((way, who), fails) in enumerate(full.items()):
            path = f"{folder}/{number}"
            if fails:
                with (
                    pytest.raises(tf.errors.OutOfRangeError) as caught,
                    small_files(pid=pids[who]),
                ):
                    save(way, embedding, path)
                assert folder in str(caught.value), caught.value
                assert not pathlib.Path(f"{path}.index").exists()
                assert bool(unfinished(folder)) == (way == "tf")
                save(way, embedding, path)
            else:
                with small_files(pid=pids[who]):
                    save(way, embedding, path)
            assert not unfinished(folder)
            require_same(stored(path), after)
        require_same(values(embedding), after)
        require_same(stored(first), before)
        damage(embedding, folder, before)
        # Workers have no part in it.
        job.processes["worker", 0].kill()
        job.processes["worker", 0].wait()
        ends = time.monotonic() + 3  # The coordinator asks it every second.
        while time.monotonic() < ends:
            require_same(values(embedding), after)
        te.checkpoint.save(embedding, f"{folder}/without_worker")
        te.checkpoint.restore(embedding, first)
        require_same(values(embedding), before)
        job.processes["ps", 1].kill()
        job.processes["ps", 1].wait()
        with pytest.raises(tf.errors.UnavailableError, match=LOST):
            te.checkpoint.save(embedding, f"{folder}/lost")
        assert not unfinished(folder)


def damage(embedding: Any, folder: str, before: dict[str, np.ndarray]) -> None:
    """Files that cannot be read."""
    changed = values(embedding)
    copy = pathlib.Path(folder, "copy")
    for what in ("truncated", "missing"):
        copy.mkdir()
        for path in pathlib.Path(folder).glob("first_tf.*"):
            shutil.copy(path, copy)
        part = sorted(copy.glob("*.data*"))[1]
        if what == "missing":
            part.unlink()
        else:
            os.truncate(part, part.stat().st_size // 2)
        with pytest.raises(tf.errors.DataLossError, match=f"{copy}/first_tf"):
            te.checkpoint.restore(embedding, f"{copy}/first_tf")
        require_same(values(embedding), changed)
        kinds = (tf.errors.OutOfRangeError, tf.errors.NotFoundError)
        with pytest.raises(kinds):
            restore("tf", embedding, f"{copy}/first_tf")
        shutil.rmtree(copy)
        te.checkpoint.restore(embedding, f"{folder}/0")
        require_same(values(embedding), changed)
    restore("tf", embedding, f"{folder}/first_tf")
    require_same(values(embedding), before)
    te.checkpoint.restore(embedding, f"{folder}/0")


def small_parts() -> Any:
    """A part for each slice, so that a save writes several."""
    return mock.patch.object(writing, "_MIN_PART_BYTES", 1)


@contextlib.contextmanager
def at_merge(moment: str, act: Callable[[], None]) -> Iterator[None]:
    """Acts before the parts become one checkpoint, or at once after that."""
    merge = writing.merge

    def merged(parts: Any, path: str) -> None:
        if moment == "merge":
            act()
        merge(parts, path)
        if moment == "merged":
            act()

    with mock.patch.object(writing, "merge", merged):
        yield


def lose_server(call: str, moment: str) -> None:
    """A server is killed in a save or restore."""
    with (
        te.testing.LocalServers(2, 1) as job,
        tempfile.TemporaryDirectory() as folder,
        small_parts(),
    ):
        embedding = make(connect(job.cluster))
        before = values(embedding)
        te.checkpoint.save(embedding, f"{folder}/first")

        def kill() -> None:
            job.processes["ps", 1].kill()
            job.processes["ps", 1].wait()

        def run() -> None:
            if call == "save":
                with at_merge(moment, kill):
                    te.checkpoint.save(
                        embedding, f"{folder}/second", progress=At(moment, kill)
                    )
            else:
                te.checkpoint.restore(
                    embedding, f"{folder}/first", progress=At(moment, kill)
                )

        begun = time.monotonic()
        if moment == "merge":  # All rows were read.
            run()
            require_same(stored(f"{folder}/second"), before)
        else:
            with pytest.raises(tf.errors.UnavailableError, match=LOST):
                run()
            assert not list(pathlib.Path(folder).glob("second*"))
        took = time.monotonic() - begun
        print(f"{call}, killed at {moment}: {took:.1f} s")
        assert took < 30
        assert not unfinished(folder)
        require_same(stored(f"{folder}/first"), before)


def stop_server() -> None:
    """A save or restore waits for a server that is stopped, but not for ever."""
    with te.testing.LocalServers(2, 1) as job, tempfile.TemporaryDirectory() as folder:
        strategy = connect(job.cluster)
        embedding = make(strategy)
        train(embedding)
        before = values(embedding)
        server = job.processes["ps", 1]

        def stop() -> None:
            server.send_signal(signal.SIGSTOP)

        def go_on() -> None:
            server.send_signal(signal.SIGCONT)

        stop()
        threading.Timer(3, go_on).start()
        te.checkpoint.save(embedding, f"{folder}/first")
        require_same(stored(f"{folder}/first"), before)
        coordinator = te.ClusterCoordinator(strategy)
        calls: dict[str, Callable[[], Any]] = {
            "save": lambda: te.checkpoint.save(embedding, f"{folder}/second"),
            "save, stopped while it writes": lambda: te.checkpoint.save(
                embedding, f"{folder}/second", progress=At("Writing", stop)
            ),
            "restore, stopped while it writes": lambda: te.checkpoint.restore(
                embedding, f"{folder}/first", progress=At("Restoring", stop)
            ),
        }

        @contextlib.contextmanager
        def silent() -> Iterator[None]:
            te.ClusterCoordinator(strategy, task_timeout=3)
            try:
                with pytest.raises(
                    tf.errors.UnavailableError, match=f"^{LOST} has not .*End that"
                ):
                    yield
            finally:
                te.ClusterCoordinator(strategy, task_timeout=60)

        for name, call in calls.items():
            if name == "save":
                stop()
            begun = time.monotonic()
            with small_parts(), silent():
                call()
            took = time.monotonic() - begun
            print(f"{name}: {took:.1f} s")
            assert took < 15
            assert not list(pathlib.Path(folder).glob("second*"))
            assert not unfinished(folder)
            go_on()
            restore("te", embedding, f"{folder}/first")
            require_same(values(embedding), before)
        with tf.device("/job:ps/task:1"):
            variable = tf.Variable(3.0)
        assert coordinator.wait_for(variable.numpy) == 3
        with pytest.raises(ZeroDivisionError):
            coordinator.wait_for(lambda: 1 / 0)
        with pytest.raises(RuntimeError, match="wait_for runs its call"):
            tf.function(lambda: coordinator.wait_for(variable.read_value))()
        stop()
        for call in (variable.numpy, lambda: save("tf", embedding, f"{folder}/third")):
            with silent():
                coordinator.wait_for(call)
        go_on()
        stop()
        threading.Timer(2, server.kill).start()
        with pytest.raises(tf.errors.UnavailableError, match=f"^The .* {LOST} is lost"):
            te.checkpoint.save(embedding, f"{folder}/second")
        assert not unfinished(folder)
        require_same(stored(f"{folder}/first"), before)


def coordinate(cluster: str, moment: str, folder: str) -> None:
    """Saves twice, each time other numbers, and kills itself in the second save."""
    embedding = make(connect(json.loads(cluster)))

    def kill() -> None:
        os.kill(os.getpid(), signal.SIGKILL)

    def kill_at(path: pathlib.Path) -> None:
        while not path.exists():
            time.sleep(0.001)
        kill()

    for number in range(2):
        for arrays in embedding.core.checkpoint_rows().values():
            for rows in arrays.values():
                rows.write(0, np.full(rows.shape, number, rows.dtype))
        path = f"{folder}/{number}"
        if moment == "tf":
            if number:
                temporary = pathlib.Path(f"{path}_temp")
                threading.Thread(target=kill_at, args=(temporary,)).start()
            save("tf", embedding, path)
            continue
        now = moment if number else ""
        with at_merge(now, kill), small_parts():
            te.checkpoint.save(embedding, path, progress=At(now or "never", kill))
    time.sleep(60)  # Killed at the latest here.


def lose_coordinator(moment: str) -> None:
    """The coordinator is killed in a save."""
    with te.testing.LocalServers(2, 1) as job, tempfile.TemporaryDirectory() as folder:
        arguments = ["coordinate", json.dumps(job.cluster), moment, folder]
        done = subprocess.run(
            [sys.executable, "-P", __file__, *arguments], check=False, timeout=200
        )
        assert done.returncode == -signal.SIGKILL
        found = sorted(int(p.stem) for p in pathlib.Path(folder).glob("*.index"))
        print(f"killed at {moment}: checkpoints {found}, left {unfinished(folder)}")
        if moment != "tf":  # There the kill may come a moment later.
            assert found == ([0, 1] if moment == "merged" else [0])
        one = make(tf.distribute.get_strategy())
        for number in found:
            te.checkpoint.restore(one, f"{folder}/{number}")
            assert all((array == number).all() for array in values(one).values())
        if found == [0]:  # Over what is left.
            save("tf" if moment == "tf" else "te", one, f"{folder}/1")
            require_same(stored(f"{folder}/1"), values(one))
            assert moment == "tf" or not unfinished(folder)


SERVER_LOST = [
    ("save", "Writing"),
    ("save", "Writing on"),
    ("save", "merge"),
    ("restore", "Checking"),
    ("restore", "Restoring"),
    ("restore", "Restoring on"),
]
COORDINATOR_LOST = ("Writing", "Writing on", "merge", "merged", "tf")
ATTACKS: dict[str, Callable[[], None]] = {
    "storage": storage,
    "stop_server": stop_server,
    **{
        f"server_{call}_{moment}".replace(" ", "_"): functools.partial(
            lose_server, call, moment
        )
        for call, moment in SERVER_LOST
    },
    **{
        f"coordinator_{moment}".replace(" ", "_"): functools.partial(
            lose_coordinator, moment
        )
        for moment in COORDINATOR_LOST
    },
}


if __name__ == "__main__":
    if sys.argv[1:2] == ["coordinate"]:
        coordinate(*sys.argv[2:])
    run_each(ATTACKS, timeout=400)
