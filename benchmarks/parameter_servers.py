"""A training step under ParameterServerStrategy: ours beside TensorFlow's.

    python -m benchmarks.parameter_servers [--servers 2] [--workers 2] [--rounds 5]

One job of servers and workers on this machine runs both in turns. TensorFlow's tables
are tf.Variables cut over the servers; its lookup is embedding_lookup_sparse, which
sends each distinct row once, and its update the sparse Adagrad op. Prints for each
round the CPU time of all processes and the wall time, in microseconds for each sample.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import tensorflow as tf

import tpu_embedding as te


def zipf(rng: np.random.Generator, rows: int, shape: tuple[int, ...]) -> np.ndarray:
    """Draws ids from a power law with exponent 1.05, spread over the table."""
    exponent = 1 - 1.05
    drawn = ((rows**exponent - 1) * rng.random(shape) + 1) ** (1 / exponent) - 1
    return np.minimum(drawn.astype(np.int64), rows - 1) * 2654435761 % rows


def data_set(options: argparse.Namespace) -> tf.data.Dataset:
    """Repeats four batches without end: for each table int64 [batch, ids]."""
    rng = np.random.default_rng(0)
    shape = (4, options.batch, options.ids)
    columns = tuple(zipf(rng, options.rows, shape) for _ in range(options.tables))
    return tf.data.Dataset.from_tensor_slices(columns).repeat().prefetch(2)


def our_step(options: argparse.Namespace, strategy: Any) -> Callable[[Any], tf.Tensor]:
    """Makes one step of te.TPUEmbedding on the next batch of an iterator."""
    optimizers = {"adagrad": te.Adagrad, "rowwise_adagrad": te.RowwiseAdagrad}
    features = tuple(
        te.FeatureConfig(
            te.TableConfig(options.rows, options.dim, combiner="sum", name=f"t{index}")
        )
        for index in range(options.tables)
    )
    placement = te.DistributedOptions(placement=options.placement)
    with strategy.scope():
        embedding = te.TPUEmbedding(
            features,
            optimizers[options.optimizer](0.01),
            distributed_options=placement,
        )
    embedding.build()

    @tf.function
    def step(iterator: Any) -> tf.Tensor:
        embedding.enqueue(next(iterator))
        activations = embedding.dequeue()
        embedding.apply_gradients(tuple(tf.ones_like(a) for a in activations))
        return tf.add_n([tf.reduce_sum(a) for a in activations])

    return step


def tensorflow_step(
    options: argparse.Namespace, strategy: Any
) -> Callable[[Any], tf.Tensor]:
    """Makes the same step of TensorFlow's variables, divided over the servers."""

    def variables(name: str, start: Callable[..., Any]) -> list[Any]:
        shape = (options.rows, options.dim)

        def initial(shape: Any = shape, dtype: Any = None, **_: Any) -> Any:
            return start(shape)

        return [
            tf.Variable(initial, shape=shape, dtype=tf.float32, name=f"{name}{index}")
            for index in range(options.tables)
        ]

    with strategy.scope():
        tables = variables("t", lambda shape: tf.random.uniform(shape, -0.01, 0.01))
        slots = variables("a", lambda shape: tf.fill(shape, 0.1))

    def parts(values: Sequence[Any]) -> list[Any]:
        return [part for value in values for part in value.variables]

    @tf.function
    def step(iterator: Any) -> tf.Tensor:
        batch = next(iterator)
        ragged: Any = tf.RaggedTensor
        with tf.GradientTape() as tape:
            activations = [
                tf.nn.embedding_lookup_sparse(
                    table, ragged.from_tensor(ids).to_sparse(), None, "sum"
                )
                for table, ids in zip(tables, batch, strict=True)
            ]
            loss = tf.add_n([tf.reduce_sum(a) for a in activations])
        gradients = tape.gradient(loss, parts(tables))
        for table, slot, gradient in zip(
            parts(tables), parts(slots), gradients, strict=True
        ):
            with tf.device(table.device):
                tf.raw_ops.ResourceSparseApplyAdagradV2(
                    var=table.handle,
                    accum=slot.handle,
                    lr=0.01,
                    epsilon=1e-7,
                    grad=gradient.values,
                    indices=gradient.indices,
                )
        return loss

    return step


def cpu_seconds(processes: Sequence[int]) -> float:
    """Returns the CPU seconds, user and system, of all threads of these processes."""
    ticks = 0
    for process in processes:
        with open(f"/proc/{process}/stat") as file:
            fields = file.read().rsplit(")", 1)[1].split()
        ticks += int(fields[11]) + int(fields[12])
    return ticks / os.sysconf("SC_CLK_TCK")


def main(arguments: Sequence[str] | None = None) -> None:
    """Runs both in turns and prints the medians of all rounds."""
    parser = argparse.ArgumentParser(description=__doc__)
    for name, default in (
        ("servers", 2),
        ("workers", 2),
        ("tables", 26),
        ("rows", 80_000),
        ("dim", 64),
        ("batch", 2048),
        ("ids", 10),
        ("rounds", 5),
        ("steps", 5),
    ):
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument(
        "--optimizer", choices=("adagrad", "rowwise_adagrad"), default="adagrad"
    )
    parser.add_argument(
        "--placement",
        choices=("auto", "rows", "whole"),
        default="auto",
        help="of our tables; TensorFlow's are always divided over the servers",
    )
    options = parser.parse_args(arguments)
    with te.testing.LocalServers(options.servers, options.workers) as job:
        cut = tf.distribute.experimental.partitioners.FixedShardsPartitioner(
            options.servers
        )
        strategy = tf.distribute.ParameterServerStrategy(
            job.resolver(), variable_partitioner=cut
        )
        coordinator = te.ClusterCoordinator(strategy)
        steps = {
            "tpu_embedding": our_step(options, strategy),
            "tensorflow": tensorflow_step(options, strategy),
        }
        made = coordinator.create_per_worker_dataset(lambda: data_set(options))
        iterator = iter(made)
        processes = [os.getpid(), *(p.pid for p in job.processes.values())]
        found: dict[str, list[tuple[float, float]]] = {name: [] for name in steps}

        def run(name: str, number: int) -> tuple[float, float]:
            start, used = time.perf_counter(), cpu_seconds(processes)
            for _ in range(number):
                coordinator.schedule(steps[name], args=(iterator,))
            coordinator.join()
            samples = number * options.batch / 1e6
            return (
                (cpu_seconds(processes) - used) / samples,
                (time.perf_counter() - start) / samples,
            )

        for name in steps:
            run(name, 2 * options.workers)  # Traces, and touches all pages.
        for _ in range(options.rounds):
            for name in steps:
                found[name].append(run(name, options.steps * options.workers))
                cpu, wall = found[name][-1]
                print(f"{name}: {cpu:.1f} us of CPU, {wall:.1f} us of wall time")
        medians = {
            name: [statistics.median(column) for column in zip(*rounds, strict=True)]
            for name, rounds in found.items()
        }
        print(json.dumps({"options": vars(options), "us_per_sample": medians}))


if __name__ == "__main__":
    main()
