"""One training function on every engine: the losses, and how far the tables differ.

    python examples/08_everywhere.py --on host portable mirrored:2 v4:2 v6e:2 v5p:1

`train` is the same for all: a queue of batches, a model, gradients. Only the strategy
differs, and with it the engine: this package's kernels, TensorFlow's ops, two replicas
that share their tables, or an emulated TPU of two devices (of TPU v4, with its
embedding engine; of TPU v6e, with SparseCores). The largest difference between the
tables after training is a few roundings of float32.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import tempfile
from collections.abc import Callable, Iterator
from typing import Any

# TensorFlow reads both when it starts. oneDNN rounds differently from CPU to CPU.
os.environ.setdefault("TF_ENABLE_ONEDNN_OPTS", "0")
os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")

import numpy as np
import tensorflow as tf

import tpu_embedding as te
from tpu_embedding.testing import SoftwareTPUStrategy

BATCH, FILMS, USERS, DIM = 64, 200, 100, 8
PLACES = ["host", "portable", "mirrored:2", "v4:2", "v6e:2", "v5p:1"]


def train(
    strategy: tf.distribute.Strategy, samples: tf.data.Dataset, steps: int
) -> tuple[te.TPUEmbedding, list[float]]:
    """Trains on every engine; returns the embedding and the loss of each step."""
    with strategy.scope():
        embedding = te.TPUEmbedding(feature_config(), te.Adagrad(0.1))
    on_host = tf.distribute.InputOptions(experimental_fetch_to_device=False)
    batches = iter(strategy.experimental_distribute_dataset(samples, on_host))

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

    return embedding, [float(step(*next(batches))) for _ in range(steps)]


def feature_config() -> dict[str, te.FeatureConfig]:
    """Films that a user has seen, and the user."""

    def uniform(shape: Any, dtype: Any) -> tf.Tensor:
        return tf.random.stateless_uniform(shape, [1, 2], -0.5, 0.5, dtype)

    films = te.TableConfig(FILMS, DIM, uniform, combiner="mean", name="films")
    users = te.TableConfig(USERS, DIM, uniform, name="users")
    return {"seen": te.FeatureConfig(films), "user": te.FeatureConfig(users)}


def make_samples() -> tf.data.Dataset:
    """Batches of ids and ratings, the same in each run."""
    random = np.random.default_rng(0)
    ids = {
        "seen": random.integers(FILMS, size=[10 * BATCH, 3]),
        "user": random.integers(USERS, size=10 * BATCH),
    }
    ratings = random.uniform(-1, 1, 10 * BATCH).astype(np.float32)
    samples = tf.data.Dataset.from_tensor_slices((ids, ratings)).repeat()
    return samples.batch(BATCH, drop_remainder=True)


@contextlib.contextmanager
def cpu_engine(name: str) -> Iterator[tf.distribute.Strategy]:
    """The default strategy, and the engine that the environment asks for."""
    os.environ["TPU_EMBEDDING_ENGINE"] = name
    yield tf.distribute.get_strategy()
    del os.environ["TPU_EMBEDDING_ENGINE"]


def mirrored(devices: int) -> tf.distribute.Strategy:
    """Replicas on logical CPU devices."""
    return tf.distribute.MirroredStrategy([f"CPU:{d}" for d in range(devices)])


def strategy_on(place: str) -> contextlib.AbstractContextManager[Any]:
    """Returns a context whose value is the strategy of a place such as v6e:2."""
    name, _, number = place.partition(":")
    makers: dict[str, Callable[[int], Any]] = {
        "host": lambda _: cpu_engine("host"),
        "portable": lambda _: cpu_engine("portable"),
        "mirrored": lambda n: contextlib.nullcontext(mirrored(n)),
    }

    def software_tpu(devices: int) -> Any:
        return contextlib.nullcontext(SoftwareTPUStrategy(name, devices))

    return makers.get(name, software_tpu)(int(number or 1))


def tables_of(embedding: te.TPUEmbedding) -> dict[str, np.ndarray]:
    """The tables as arrays, also those in the memory of a TPU."""
    with tempfile.TemporaryDirectory() as folder:
        saved = te.checkpoint.read(te.checkpoint.save(embedding, f"{folder}/saved"))
        return {name: saved[name].parameters.numpy() for name in ("films", "users")}


def main() -> None:
    """Trains in every place that was asked for, and compares."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--on", nargs="+", default=PLACES, help=" ".join(PLACES))
    parser.add_argument("--quick", action="store_true", help="Three steps, for tests.")
    options = parser.parse_args()
    tf.config.set_logical_device_configuration(
        tf.config.list_physical_devices("CPU")[0],
        [tf.config.LogicalDeviceConfiguration()] * 4,
    )
    found = []
    for place in options.on:
        with strategy_on(place) as strategy:
            embedding, losses = train(
                strategy, make_samples(), 3 if options.quick else 20
            )
            found.append(tables_of(embedding))
        print(f"{place:>12}: " + " ".join(f"{loss:.6f}" for loss in losses[:6]))
    largest = max(
        float(np.abs(tables[name] - found[0][name]).max())
        for tables in found
        for name in tables
    )
    print(f"The tables differ by at most {largest:.1e}.")


if __name__ == "__main__":
    main()
