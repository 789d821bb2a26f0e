"""One training function on every engine: the losses, and how far the tables differ.

    python examples/08_everywhere.py --on host portable mirrored:2 v4:2 v6e:2 v5p:1

`train` is the same for all: a queue of batches, a model, gradients. Only the strategy
differs, and with it the engine: this package's kernels, TensorFlow's ops, two replicas
that share their tables, or an emulated TPU of two devices (of TPU v4, with its
embedding engine; of TPU v6e, with SparseCores). `workers:2` starts two processes, which
divide the tables and each batch. `parameter-servers:2`, which runs last, has the tables
on two servers and one worker, all within this process: a coordinator schedules the
step. The largest difference between the tables after training is a few roundings of
float32.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import socket
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from typing import Any

# TensorFlow reads both variables when it starts. oneDNN rounds differently per CPU.
os.environ.setdefault("TF_ENABLE_ONEDNN_OPTS", "0")
os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")

import numpy as np
import tensorflow as tf

import tpu_embedding as te
from tpu_embedding.testing import SoftwareTPUStrategy

BATCH, FILMS, USERS, DIM = 64, 200, 100, 8
PLACES = [
    *("host", "portable", "mirrored:2", "v4:2", "v6e:2", "v5p:1", "workers:2"),
    "parameter-servers:2",
]


class Place:
    """A strategy, how its batches come, and who runs a step."""

    def __init__(self, strategy: tf.distribute.Strategy) -> None:
        self.strategy = strategy

    def distribute(self, samples: tf.data.Dataset) -> Iterator[Any]:
        """Returns an iterator over the batches of all replicas."""
        on_host = tf.distribute.InputOptions(experimental_fetch_to_device=False)
        return iter(self.strategy.experimental_distribute_dataset(samples, on_host))

    def run(self, step: Callable[..., Any], *arguments: Any) -> Any:
        """Calls a tf.function."""
        return step(*arguments)


class ParameterServers(Place):
    """Servers and a worker, which are processes of their own in a real job."""

    def __init__(self, number: int) -> None:
        addresses = free_addresses(number + 1)
        jobs = {"ps": addresses[1:], "worker": addresses[:1]}
        cluster = tf.train.ClusterSpec(jobs)
        # All tasks share the threads of this process, and each waits for others.
        config = tf.compat.v1.ConfigProto(inter_op_parallelism_threads=16)
        self.servers = [
            tf.distribute.Server(cluster, job, task, config=config)
            for job, tasks in jobs.items()
            for task in range(len(tasks))
        ]
        resolver = tf.distribute.cluster_resolver.SimpleClusterResolver(
            cluster, rpc_layer="grpc"
        )
        super().__init__(tf.distribute.ParameterServerStrategy(resolver))
        self.coordinator = te.ClusterCoordinator(self.strategy)

    def distribute(self, samples: tf.data.Dataset) -> Iterator[Any]:
        """Returns an iterator over batches, which are sent with each step."""
        return iter(samples)

    def run(self, step: Callable[..., Any], *arguments: Any) -> Any:
        """Calls a tf.function on the worker."""
        result = self.coordinator.schedule(step, args=arguments)
        self.coordinator.join()
        return result.fetch()


def train(
    place: Place, samples: tf.data.Dataset, steps: int
) -> tuple[te.TPUEmbedding, list[float]]:
    """Trains on every engine; returns the embedding and the loss of each step."""
    strategy = place.strategy
    with strategy.scope():
        embedding = te.TPUEmbedding(feature_config(), te.Adagrad(0.1))
    batches = place.distribute(samples)

    def replica_step(ratings: tf.Tensor) -> tf.Tensor:
        with tf.GradientTape() as tape:
            rows = embedding.dequeue()
            tape.watch(rows)
            predicted = tf.reduce_sum(rows["seen"] * rows["user"], -1)
            loss = tf.reduce_sum((predicted - ratings) ** 2) / BATCH
        embedding.apply_gradients(tape.gradient(loss, rows))
        return loss

    @tf.function
    def step(ids: Any, ratings: Any) -> tf.Tensor:
        embedding.enqueue(ids)
        return strategy.reduce("SUM", strategy.run(replica_step, (ratings,)), None)

    return embedding, [float(place.run(step, *next(batches))) for _ in range(steps)]


def feature_config() -> dict[str, te.FeatureConfig]:
    """Returns two features: the films that a user has seen, and the user."""

    def uniform(shape: Any, dtype: Any) -> tf.Tensor:
        return tf.random.stateless_uniform(shape, [1, 2], -0.5, 0.5, dtype)

    films = te.TableConfig(FILMS, DIM, uniform, combiner="mean", name="films")
    users = te.TableConfig(USERS, DIM, uniform, name="users")
    return {"seen": te.FeatureConfig(films), "user": te.FeatureConfig(users)}


def make_samples() -> tf.data.Dataset:
    """Makes batches of ids and ratings, the same in each run."""
    random = np.random.default_rng(0)
    ids = {
        "seen": random.integers(FILMS, size=[10 * BATCH, 3]),
        "user": random.integers(USERS, size=10 * BATCH),
    }
    ratings = random.uniform(-1, 1, 10 * BATCH).astype(np.float32)
    samples = tf.data.Dataset.from_tensor_slices((ids, ratings)).repeat()
    return samples.batch(BATCH, drop_remainder=True)


@contextlib.contextmanager
def cpu_engine(name: str) -> Iterator[Place]:
    """Yields the default strategy, with the environment set to the engine `name`."""
    os.environ["TPU_EMBEDDING_ENGINE"] = name
    yield Place(tf.distribute.get_strategy())
    del os.environ["TPU_EMBEDDING_ENGINE"]


def mirrored(devices: int) -> tf.distribute.Strategy:
    """Makes a strategy with replicas on logical CPU devices."""
    return tf.distribute.MirroredStrategy([f"CPU:{d}" for d in range(devices)])


def find_place(text: str) -> contextlib.AbstractContextManager[Place]:
    """Returns a context whose value is a place such as v6e:2."""
    name, _, number = text.partition(":")
    makers: dict[str, Callable[[int], Any]] = {
        "host": lambda _: cpu_engine("host"),
        "portable": lambda _: cpu_engine("portable"),
        "mirrored": lambda n: contextlib.nullcontext(Place(mirrored(n))),
        # This is one process of several: TF_CONFIG lists the others.
        "worker": lambda _: contextlib.nullcontext(
            Place(tf.distribute.MultiWorkerMirroredStrategy())
        ),
        "parameter-servers": lambda n: contextlib.nullcontext(ParameterServers(n)),
    }

    def software_tpu(devices: int) -> Any:
        return contextlib.nullcontext(Place(SoftwareTPUStrategy(name, devices)))

    return makers.get(name, software_tpu)(int(number or 1))


def free_addresses(number: int) -> list[str]:
    """Returns addresses of this machine that no process listens to."""
    sockets = [socket.create_server(("127.0.0.1", 0)) for _ in range(number)]
    addresses = [f"127.0.0.1:{each.getsockname()[1]}" for each in sockets]
    for each in sockets:
        each.close()
    return addresses


def train_in(name: str, steps: int, folder: str) -> None:
    """Trains in one place; writes the losses and a checkpoint into a folder."""
    with find_place(name) as place:
        embedding, losses = train(place, make_samples(), steps)
        np.save(f"{folder}/losses.npy", losses)
        te.checkpoint.save(embedding, f"{folder}/saved")


def train_in_workers(number: int, steps: int, folder: str) -> None:
    """Starts processes, each of which does what `train_in` does, and waits for them."""
    addresses = free_addresses(number)
    processes = []
    for index in range(number):
        task = {"type": "worker", "index": index}
        config = {"cluster": {"worker": addresses}, "task": task}
        command = [sys.executable, __file__, "--worker", folder, str(steps)]
        environment = {**os.environ, "TF_CONFIG": json.dumps(config)}
        processes.append(subprocess.Popen(command, env=environment))
    codes = [process.wait() for process in processes]
    if any(codes):
        raise SystemExit("A worker failed; see above.")


def main() -> None:
    """Trains in every place that --on lists, and compares the tables."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--on", nargs="+", default=PLACES, help=" ".join(PLACES))
    parser.add_argument("--quick", action="store_true", help="Three steps, for tests.")
    parser.add_argument("--worker", nargs=2, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.worker:
        folder, steps = options.worker
        train_in("worker", int(steps), folder)
        return
    tf.config.set_logical_device_configuration(
        tf.config.list_physical_devices("CPU")[0],
        [tf.config.LogicalDeviceConfiguration()] * 4,
    )
    found = []
    for name in sorted(options.on, key=lambda name: name.startswith("parameter-")):
        kind, _, number = name.partition(":")
        steps = 3 if options.quick else 20
        with tempfile.TemporaryDirectory() as folder:
            if kind == "workers":
                train_in_workers(int(number), steps, folder)
            else:
                train_in(name, steps, folder)
            saved = te.checkpoint.read(f"{folder}/saved")
            found.append({n: saved[n].parameters.numpy() for n in ("films", "users")})
            losses = np.load(f"{folder}/losses.npy")
        print(f"{name:>19}: " + " ".join(f"{loss:.6f}" for loss in losses[:6]))
    largest = max(
        float(np.abs(tables[name] - found[0][name]).max())
        for tables in found
        for name in tables
    )
    print(f"The tables differ by at most {largest:.1e}.")


if __name__ == "__main__":
    main()
