"""What tests of parameter servers share; JOB is the cluster of their process."""

from __future__ import annotations

import socket
import types
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import optimizer_cases
import tensorflow as tf
from multi_process import divided
from steps import train_on

import tpu_embedding as te
from tpu_embedding.tables.rows import PARAMETERS

V, D, B, H = 50, 16, 16, 3
FEATURES = "abcd"
START = np.random.default_rng(0).standard_normal((4, V, D)).astype(np.float32)
OPTIMIZERS: dict[str, Callable[[], Any]] = {
    "SGD": lambda: te.SGD(0.1),
    "Adagrad": lambda: te.Adagrad(0.1),
    "RowwiseAdagrad": lambda: te.RowwiseAdagrad(0.1, **optimizer_cases.ALL_OPTIONS),
    "FTRL": lambda: te.FTRL(0.1, l1_regularization_strength=0.01),
    "Adam": lambda: te.Adam(0.1, lazy_adam=False),
    "schedule": lambda: te.SGD(
        tf.keras.optimizers.schedules.ExponentialDecay(1, 2, 0.5)
    ),
}
JOB: Any = types.SimpleNamespace()  # The strategy and its coordinator.
ROWS = {"distributed_options": te.DistributedOptions(placement="rows")}
ROUNDED = ("bfloat16", "int8")  # The dtypes of tables that updates round to.
# Of the tables of `features`: two on all servers, one on one of them.
MIXED = ("rows", "rows", "whole")


def start_cluster(number: int = 2, workers: int = 2) -> tuple[Any, list[Any]]:
    """A cluster within this process, and its servers, which must be kept."""
    tasks = number + workers
    sockets = [socket.create_server(("127.0.0.1", 0)) for _ in range(tasks)]
    addresses = [f"127.0.0.1:{each.getsockname()[1]}" for each in sockets]
    for each in sockets:
        each.close()
    jobs = {"ps": addresses[:number], "worker": addresses[number:]}
    cluster = tf.train.ClusterSpec(jobs)
    # All tasks share the threads of this process, and each waits for others.
    config = tf.compat.v1.ConfigProto(inter_op_parallelism_threads=16)
    servers = [
        tf.distribute.Server(cluster, job, task, config=config)
        for job, tasks in jobs.items()
        for task in range(len(tasks))
    ]
    return cluster, servers


def features(
    dtype: str = "float32",
    placements: Sequence[str | None] = (None, None, None),
    **options: Any,
) -> dict[str, te.FeatureConfig]:
    tables = [
        te.TableConfig(
            V,
            D,
            initializer=tf.constant_initializer(START[index]),
            name=f"t{index}",
            combiner=combiner,
            dtype=dtype,
            placement=placements[index],
            **options,
        )
        for index, combiner in enumerate(("sum", "mean", "sqrtn"))
    ]
    return {
        "a": te.FeatureConfig(tables[0]),
        "b": te.FeatureConfig(tables[1]),
        "c": te.FeatureConfig(tables[2]),
        "d": te.FeatureConfig(tables[0], max_sequence_length=2),
    }


def batch(step: Any) -> dict[str, Any]:
    """Dense, sparse and ragged ids that follow from the number of the step."""

    def ids(feature: int, shape: list[int]) -> tf.Tensor:
        seed = tf.stack([step, feature])
        return tf.random.stateless_uniform(shape, seed, 0, V, tf.int64)

    splits = tf.concat([[0], tf.range(B) * 2, [2 * B]], 0)[: B + 1]
    return {
        "a": ids(0, [B, H]),
        "b": tf.sparse.from_dense(ids(1, [B, H])),
        "c": tf.RaggedTensor.from_row_splits(ids(2, [2 * (B - 1)]), splits),
        "d": tf.sparse.from_dense(ids(3, [B, H])),
    }


def gradients(activations: Mapping[str, tf.Tensor]) -> dict[str, tf.Tensor]:
    return {name: tf.sin(3 * value) for name, value in activations.items()}


def total(activations: Mapping[str, tf.Tensor]) -> tf.Tensor:
    return tf.add_n([tf.reduce_sum(value) for value in activations.values()])


def step_of(embedding: Any) -> Callable[[Any], tf.Tensor]:
    """One training step by the calls of the class."""

    def step(number: Any) -> tf.Tensor:
        return total(train_on(embedding, batch(number), lambda a: tf.sin(3 * a)))

    return step


def values(embedding: Any) -> dict[str, np.ndarray]:
    """Tables and slots; of static tables of int8 codes, scales and offsets."""

    def arrays(table: Any) -> dict[str, Any]:
        coded = table.rows[PARAMETERS].coded if table.rows else {}
        return {**table.values(), **coded}

    return {
        f"{name}/{array}": value.numpy()
        for name, table in embedding.core.tables().items()
        for array, value in arrays(table).items()
    }


def require_same(one: Any, other: Any) -> None:
    expected, found = values(one), values(other)
    assert expected.keys() == found.keys()
    for name, value in expected.items():
        np.testing.assert_array_equal(found[name], value, err_msg=name)


def require_unchanged(before: Mapping[str, np.ndarray], embedding: Any) -> None:
    for name, value in values(embedding).items():
        np.testing.assert_array_equal(value, before[name], err_msg=name)


def fuzz_divided(seeds: list[int], steps: int, folder: str, servers: int) -> None:
    """Divided growing tables, beside the reference of their parts."""
    full = [divided.fuzz(JOB.strategy, seed, steps, folder, servers) for seed in seeds]
    print(f"{servers} servers: {len(full)} x {steps} steps, {sum(full)} of them full")


def move_divided(source: str, target: str) -> Any:
    """See `divided.move`."""
    return divided.move(JOB.strategy, source, target, alone=True)


def make(kind: Any, *arguments: Any, **options: Any) -> tuple[Any, Any]:
    """The same embedding in this process and on the servers."""
    one = kind(*arguments, **options)
    with JOB.strategy.scope():
        served = kind(*arguments, **options)
    one.build()
    served.build()
    return one, served


def schedule(step: Any, steps: range) -> list[float]:
    found = []
    for number in steps:
        result = JOB.coordinator.schedule(step, args=(tf.constant(number),))
        JOB.coordinator.join()
        found.append(float(result.fetch()))
    return found
