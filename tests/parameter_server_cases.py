"""The cases of test_parameter_servers.py, which need an eager context of their own.

Two parameter servers, two workers and the coordinator live in this process; each case
is a function without arguments. Prints for each case "" or its traceback, as JSON.
"""

from __future__ import annotations

import itertools
import json
import pathlib
import socket
import subprocess
import sys
import tempfile
import traceback
import types
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any
from unittest import mock

import numpy as np
import pytest
import tensorflow as tf

import tpu_embedding as te
from tpu_embedding.checkpoint.command_line import TextProgress
from tpu_embedding.checkpoint.statistics import table_reports
from tpu_embedding.layout.placement import ALL_PROCESSES, place_on_servers
from tpu_embedding.ops import library
from tpu_embedding.tables import variables

V, D, B, H = 50, 8, 16, 3
FEATURES = "abcd"
START = np.random.default_rng(0).standard_normal((4, V, D)).astype(np.float32)
OPTIMIZERS: dict[str, Callable[[], Any]] = {
    "SGD": lambda: te.SGD(0.1),
    "Adagrad": lambda: te.Adagrad(0.1),
    "RowwiseAdagrad": lambda: te.RowwiseAdagrad(0.1),
    "FTRL": lambda: te.FTRL(0.1, l1_regularization_strength=0.01),
    "Adam": lambda: te.Adam(0.1, lazy_adam=False),
    "schedule": lambda: te.SGD(
        tf.keras.optimizers.schedules.ExponentialDecay(1, 2, 0.5)
    ),
}
CASES: dict[str, Callable[[], None]] = {}
JOB: Any = types.SimpleNamespace()  # The strategy and its coordinator.


def case(function: Callable[[], None]) -> Callable[[], None]:
    CASES[function.__name__] = function
    return function


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


ROWS = {"distributed_options": te.DistributedOptions(placement="rows")}
# Of the tables of `features`: two on all servers, one on one of them.
MIXED = ("rows", "rows", "whole")


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

    def queued(step: Any) -> tf.Tensor:
        embedding.enqueue(batch(step))
        activations = embedding.dequeue()
        embedding.apply_gradients(gradients(activations))
        return total(activations)

    def handed_out(step: Any) -> tf.Tensor:
        activations, preserved = embedding(batch(step))
        embedding.apply_gradients(gradients(activations), preserved)
        return total(activations)

    return handed_out if isinstance(embedding, te.TPUEmbeddingV2) else queued


def values(embedding: Any) -> dict[str, np.ndarray]:
    return {
        f"{name}/{array}": variable.numpy()
        for name, table in embedding.tables().items()
        for array, variable in table.values().items()
    }


def require_same(one: Any, other: Any) -> None:
    expected, found = values(one), values(other)
    assert expected.keys() == found.keys()
    for name, value in expected.items():
        np.testing.assert_array_equal(found[name], value, err_msg=name)


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


def classes() -> Iterator[tuple[Any, dict[str, Any]]]:
    for pipelined in (False, True):
        yield te.TPUEmbedding, {"pipeline_execution_with_tensor_core": pipelined}
        yield te.TPUEmbeddingV2, {"pipeline_execution_with_tensor_core": pipelined}


def require_bits_of_one_process(kind: Any, configs: Any, **options: Any) -> None:
    one, served = make(kind, configs, te.Adagrad(0.1), **options)
    step, expected = tf.function(step_of(served)), step_of(one)
    assert schedule(step, range(3)) == [float(expected(k)) for k in range(3)]
    for k in (3, 4):  # From the coordinator: as a function, and eagerly.
        assert float(step(tf.constant(k))) == float(expected(k))
    assert float(step_of(served)(5)) == float(expected(5))
    one.flush()
    served.flush()
    require_same(one, served)


@case
def one_worker_has_the_bits_of_one_process() -> None:
    for kind, options in classes():
        require_bits_of_one_process(kind, features(), **options)


@case
def tables_divided_by_rows_have_the_bits_of_one_process() -> None:
    for kind, options in classes():
        require_bits_of_one_process(kind, features(placements=MIXED), **options)
    quantized = te.QuantizationConfig(16, -1.0, 1.0)
    configs = features("bfloat16", MIXED, quantization_config=quantized)
    require_bits_of_one_process(te.TPUEmbedding, configs)


@case
def random_batches_have_the_bits_of_one_process() -> None:
    rng = np.random.default_rng(11)
    for round_ in range(8):
        policy = rng.choice(["drop", "mod"])
        tables = [
            te.TableConfig(
                int(rows),
                D,
                initializer=tf.constant_initializer(START[0][: int(rows)]),
                combiner=str(rng.choice(["sum", "mean", "sqrtn"])),
                dtype=str(rng.choice(["float32", "bfloat16"])),
                placement=str(rng.choice(["rows", "rows", "whole"])),
                invalid_ids=str(policy),
                optimizer=OPTIMIZERS[str(rng.choice(["SGD", "Adagrad", "FTRL"]))](),
                name=f"t{k}",
            )
            for k, rows in enumerate(rng.choice([1, 2, 3, V], 2))
        ]
        configs = {
            name: te.FeatureConfig(tables[k // 2], max_sequence_length=length)
            for k, (name, length) in enumerate(zip(FEATURES, (0, 0, 0, 3), strict=True))
        }
        kind = te.TPUEmbeddingV2 if round_ % 2 else te.TPUEmbedding
        if kind is te.TPUEmbeddingV2:
            configs = {name: te.FeatureConfig(c.table) for name, c in configs.items()}
        one, served = make(kind, configs, None)
        for _ in range(3):
            ids, weights = random_ids(rng)
            gradient = rng.standard_normal(D).astype(np.float32)
            without = rng.choice([*FEATURES, ""])
            for embedding in (one, served):
                push(embedding, ids, weights, gradient, str(without))
        require_same(one, served)


def random_ids(rng: np.random.Generator) -> tuple[dict[str, Any], dict[str, Any]]:
    """Ragged ids of any number of samples, some out of range, and weights."""
    ids, weights = {}, {}
    for name in FEATURES:
        lengths = rng.integers(0, 4, rng.choice([0, 1, B]))
        number = int(lengths.sum())
        values = rng.integers(-2, V + 2, number)
        ids[name] = tf.RaggedTensor.from_row_lengths(values, lengths)
        weights[name] = None
        if rng.random() < 0.5 and name != "d":
            weights[name] = ids[name].with_values(
                tf.constant(rng.random(number), tf.float32)
            )
    return ids, weights


def push(
    embedding: Any, ids: Any, weights: Any, gradient: np.ndarray, without: str
) -> None:
    """One step; the feature `without` has no gradient."""

    def of(activations: Mapping[str, tf.Tensor]) -> dict[str, Any]:
        return {
            name: None if name == without else tf.sin(3 * value) * gradient
            for name, value in activations.items()
        }

    if isinstance(embedding, te.TPUEmbeddingV2):
        activations, preserved = embedding(ids, weights)
        embedding.apply_gradients(of(activations), preserved)
    else:
        embedding.enqueue(ids, weights)
        embedding.apply_gradients(of(embedding.dequeue()))


@case
def tables_without_an_optimizer_are_looked_up() -> None:
    one, served = make(te.TPUEmbedding, features(placements=MIXED), None)
    for embedding in (one, served):
        embedding.enqueue(batch(0), training=False)
    expected, found = one.dequeue(), served.dequeue()
    for name, value in expected.items():
        np.testing.assert_array_equal(found[name], value)


@case
def fit_of_keras_3_is_an_error_of_tensorflow() -> None:
    with JOB.strategy.scope():
        layer = te.keras.TPUEmbedding(features()["b"], te.Adagrad(0.1))
        ids = tf.keras.Input([H], dtype="int64")
        model = tf.keras.Model(ids, tf.keras.layers.Dense(1)(layer(ids)))
        model.compile("sgd", "mse")
    with pytest.raises(ValueError, match="create_per_worker_dataset"):
        model.fit(tf.zeros([B, H], tf.int64), tf.zeros([B, 1]), verbose=0)
    (table,) = layer.embedding_tables.values()
    np.testing.assert_array_equal(table.numpy(), START[1])


@case
def every_optimizer_and_dtype_has_the_bits_of_one_process() -> None:
    for (name, optimizer), options in itertools.product(OPTIMIZERS.items(), ({}, ROWS)):
        one, served = make(te.TPUEmbedding, features(), optimizer(), **options)
        step, expected = tf.function(step_of(served)), tf.function(step_of(one))
        schedule(step, range(3))
        for k in range(3):
            expected(tf.constant(k))
        if name == "Adam":
            for array, value in values(one).items():
                np.testing.assert_allclose(values(served)[array], value, rtol=1e-6)
        else:
            require_same(one, served)
    for options in ({}, ROWS):
        one, served = make(
            te.TPUEmbedding, features("bfloat16"), te.Adagrad(0.1), **options
        )
        schedule(tf.function(step_of(served)), range(3))
        for k in range(3):
            step_of(one)(k)
        require_same(one, served)


@case
def tables_are_spread_by_load() -> None:
    _, served = make(te.TPUEmbedding, features(), te.SGD(0.1))
    devices = [t.values()["parameters"].device for t in served.tables().values()]
    assert devices[0] != devices[1] == devices[2]
    assert place_on_servers(served.plan, 1, "rows").owners == (0, 0, 0)
    assert len(set(place_on_servers(served.plan, 3).owners)) == 3
    assert place_on_servers(served.plan, 51, "rows").owners == (0, 1, 2)


def large(*rows: int) -> Any:
    """The plan of tables with so many rows of 4 KiB, and an accumulator."""
    configs = [
        te.FeatureConfig(te.TableConfig(n, 1024, name=f"t{k}"))
        for k, n in enumerate(rows)
    ]
    return te.TPUEmbedding(configs, te.SGD(0.1)).plan


@case
def large_tables_are_divided() -> None:
    everywhere = ALL_PROCESSES
    assert place_on_servers(large(9000, 9000), 2).owners == (0, 1)
    assert place_on_servers(large(9000, 3000), 2).owners == (everywhere, 0)
    assert place_on_servers(large(900, 500), 2).owners == (0, 1)
    assert place_on_servers(large(9000, 9000, 9000), 2).owners.count(everywhere) == 1
    assert place_on_servers(large(9000, 500), 2, "whole").owners == (0, 1)


@case
def random_initial_values_are_those_of_one_process() -> None:
    with mock.patch.object(variables, "_BLOCK_BYTES", 256):
        for placements in ((None, None, None), MIXED):
            require_equal_starts(placements)


def require_equal_starts(placements: Any) -> None:
    configs = features(placements=placements)
    for config in configs.values():
        object.__setattr__(config.table, "initializer", None)
    tf.random.set_seed(7)
    one = te.TPUEmbedding(configs, te.Adagrad(0.1))
    one.build()
    tf.random.set_seed(7)
    with JOB.strategy.scope():
        served = te.TPUEmbedding(configs, te.Adagrad(0.1))
        served.build()
    require_same(one, served)


@case
def each_server_makes_its_own_rows() -> None:
    wanted = np.random.default_rng(3).standard_normal((V + 1, D)).astype(np.float32)
    asked = []

    class FromFile:
        def __call__(self, shape: Any, dtype: Any = tf.float32) -> Any:
            raise AssertionError(shape)

        def by_rows(self, shape: Any, dtype: Any = tf.float32) -> Any:
            assert shape == wanted.shape

            def read(start: int, stop: int) -> tf.Tensor:
                asked.append(stop - start)
                return tf.constant(wanted[start:stop], dtype)

            return read

    table = te.TableConfig(V + 1, D, FromFile(), placement="rows", name="films")
    with (
        mock.patch.object(variables, "_BLOCK_BYTES", 256),
        JOB.strategy.scope(),
    ):
        served = te.TPUEmbedding({"film": te.FeatureConfig(table)}, te.Adagrad(0.1))
        served.build()
    assert max(asked) * D * 4 <= 256
    np.testing.assert_array_equal(served.embedding_tables[table].numpy(), wanted)


@case
def a_push_that_is_repeated_is_dropped() -> None:
    for configs in (features(), features(placements=MIXED)):
        check_repeated_pushes(configs)


def check_repeated_pushes(configs: Any) -> None:
    one, served = make(te.TPUEmbedding, configs, te.Adagrad(0.1))
    step, expected = tf.function(step_of(served)), step_of(one)

    @tf.function
    def twice(first: Any) -> None:  # Two pushes, one of them in a loop.
        step(first)
        for offset in tf.range(1, 2):
            step(first + offset)

    numbered = JOB.coordinator._with_number(twice)
    for number in (1, 2, 1, 2, 3, 3):
        numbered(tf.constant([7, number], tf.int64), tf.constant(2 * number))
    for k in range(2, 8):
        expected(k)
    require_same(one, served)
    step(tf.constant(9))  # Without a number, though traced with one.
    step(tf.constant(9))
    expected(9)
    expected(9)
    require_same(one, served)


@case
def a_push_that_reached_one_server_is_completed() -> None:
    one, served = make(
        te.TPUEmbedding, features(placements=("rows",) * 3), te.Adagrad(0.1)
    )
    step = tf.function(step_of(served))
    _, second = served._engine._divided.engines

    def fail(*_: Any, **__: Any) -> None:
        raise ConnectionError

    served._engine._current_push = lambda: tf.constant([7, 1, 1], tf.int64)
    second.hand_in, hand_in = fail, second.hand_in
    with pytest.raises(ConnectionError):  # As if the worker had died here.
        step_of(served)(0)
    second.hand_in = hand_in
    del served._engine._current_push
    served.reset()
    after = values(served)["t0/parameters"]
    assert (after[0::2] != START[0][0::2]).any()
    np.testing.assert_array_equal(after[1::2], START[0][1::2])
    numbered = JOB.coordinator._with_number(step)
    numbered(tf.constant([7, 1], tf.int64), tf.constant(0))
    found = values(served)
    step_of(one)(0)
    expected = values(one)
    for name, value in found.items():
        np.testing.assert_array_equal(value[0::2], expected[name][0::2], err_msg=name)
    numbered(tf.constant([7, 1], tf.int64), tf.constant(0))
    require_unchanged(found, served)


def require_unchanged(before: Mapping[str, np.ndarray], embedding: Any) -> None:
    for name, value in values(embedding).items():
        np.testing.assert_array_equal(value, before[name], err_msg=name)


@case
def a_check_before_the_push_keeps_all_servers() -> None:
    _, served = make(te.TPUEmbedding, features(placements=MIXED), te.Adagrad(0.1))
    before = values(served)

    @tf.function
    def step(limit: Any) -> None:
        served.enqueue(batch(0))
        activations = served.dequeue()
        with tf.control_dependencies([tf.debugging.assert_less(0.0, limit)]):
            served.apply_gradients(gradients(activations))

    for _ in range(5):
        JOB.coordinator.schedule(step, args=(tf.constant(-1.0),))
        with pytest.raises(tf.errors.InvalidArgumentError, match="assertion failed"):
            JOB.coordinator.join()
    require_unchanged(before, served)


@case
def a_refused_step_changes_no_server() -> None:
    for configs in (features(), features(placements=MIXED)):
        check_refused_steps(configs)


def check_refused_steps(configs: Any) -> None:
    one, served = make(te.TPUEmbedding, configs, te.Adagrad(0.1), check_numerics=True)

    @tf.function
    def bad(ids: Any, gradient: Any) -> None:
        values = batch(0)
        values["a"] = tf.concat([values["a"][:, 1:], ids], 1)
        served.enqueue(values)
        activations = served.dequeue()
        found = gradients(activations)
        found["b"] += gradient
        served.apply_gradients(found)

    ids = tf.zeros([B, 1], tf.int64)
    for arguments, text in (
        ((ids + V, 0.0), "Feature a, table t0: sample 0 has id 50"),
        ((ids, np.nan), "Feature b: the gradient of sample 0 is not finite"),
    ):
        JOB.coordinator.schedule(bad, args=arguments)
        with pytest.raises(tf.errors.InvalidArgumentError, match=text):
            JOB.coordinator.join()
    with pytest.raises(tf.errors.InvalidArgumentError, match="has id 50"):
        served.enqueue({**batch(0), "a": ids + V})
    require_same(one, served)
    schedule(tf.function(step_of(served)), range(1))
    step_of(one)(0)
    require_same(one, served)


@case
def a_refused_evaluation_in_a_function_leaves_what_is_pending() -> None:
    for configs in (features(), features(placements=MIXED)):
        options = {"pipeline_execution_with_tensor_core": True}
        one, served = make(te.TPUEmbedding, configs, te.Adagrad(0.1), **options)
        step, expected = tf.function(step_of(served)), step_of(one)

        @tf.function
        def evaluate(ids: Any, served: Any = served) -> None:
            served.enqueue({**batch(0), "a": ids}, training=False)
            served.dequeue()

        assert schedule(step, range(1)) == [float(expected(0))]
        for _ in range(5):
            JOB.coordinator.schedule(evaluate, args=(batch(0)["a"] + V,))
            with pytest.raises(tf.errors.InvalidArgumentError, match="has id"):
                JOB.coordinator.join()
        # The lookup is one update old, as that update is pending.
        assert schedule(step, range(1, 2)) == [float(expected(1))]


@case
def what_servers_refuse_of_divided_tables_changes_none() -> None:
    configs = features(placements=MIXED)
    _, served = make(te.TPUEmbedding, configs, te.Adagrad(0.1))
    before = values(served)
    served.enqueue(batch(0))
    found = gradients(served.dequeue())
    found["b"] = found["b"][1:]
    with pytest.raises(tf.errors.InvalidArgumentError, match=r"b.*shape \[15,8\]"):
        served.apply_gradients(found)
    require_unchanged(before, served)
    del configs["d"]
    _, served = make(te.TPUEmbeddingV2, configs, te.Adagrad(0.1))
    before = values(served)
    activations, preserved = served({n: batch(0)[n] for n in configs})
    ids = preserved["t0"].sorted_token_ids
    preserved["t0"] = preserved["t0"]._replace(sorted_token_ids=ids + 1000)
    with pytest.raises(tf.errors.InvalidArgumentError, match="has token id 1"):
        served.apply_gradients(gradients(activations), preserved)
    require_unchanged(before, served)


@case
def workers_preprocess_in_their_data_sets() -> None:
    configs = features(placements=MIXED)
    del configs["d"]
    one, served = make(te.TPUEmbeddingV2, configs, te.Adagrad(0.1))

    def batches(embedding: Any) -> tf.data.Dataset:
        made = tf.data.Dataset.range(1)
        made = made.map(lambda k: {n: batch(tf.cast(k, tf.int32))[n] for n in configs})
        return made.map(embedding.preprocess_features)

    @tf.function
    def step(iterator: Any) -> None:
        activations, preserved = served(next(iterator))
        served.apply_gradients(gradients(activations), preserved)

    made = JOB.coordinator.create_per_worker_dataset(lambda: batches(served))
    JOB.coordinator.schedule(step, args=(iter(made),))
    JOB.coordinator.join()
    for features_ in batches(one):
        activations, preserved = one(features_)
        one.apply_gradients(gradients(activations), preserved)
    require_same(one, served)


@case
def calls_in_the_wrong_order_are_errors() -> None:
    _, served = make(te.TPUEmbedding, features(), te.SGD(0.1))
    order = tf.errors.FailedPreconditionError
    with pytest.raises(order, match="in the same function"):
        served.dequeue()
    served.enqueue(batch(0))
    with pytest.raises(order, match="no batch is enqueued"):
        tf.function(served.dequeue)()
    with pytest.raises(order, match="was not dequeued"):
        served.apply_gradients(dict.fromkeys(FEATURES))
    served.dequeue()
    served.enqueue(batch(1))
    with pytest.raises(order, match="still owes its gradients"):
        served.dequeue()
    served.apply_gradients(dict.fromkeys(FEATURES))
    served.reset()
    served.enqueue(batch(2), training=False)
    served.dequeue()
    with pytest.raises(order, match="training=False"):
        served.apply_gradients(dict.fromkeys(FEATURES))


@case
def what_is_not_carried_is_refused_by_name() -> None:
    custom = te.CustomOptimizer(lambda g, table, *_: table - g, learning_rate=0.1)
    combiner = te.CustomCombiner(lambda n, v: v[0], max_valency=3)
    with JOB.strategy.scope():
        with pytest.raises(NotImplementedError, match=r"t0.*CustomOptimizer"):
            te.TPUEmbeddingV2(features(), custom)
        for kind, (option, value) in itertools.product(
            (te.TPUEmbedding, te.TPUEmbeddingV2),
            (("wire_dtype", "bfloat16"), ("timeout_seconds", 9)),
        ):
            given = te.DistributedOptions(**{option: value})
            with pytest.raises(NotImplementedError, match=option):
                kind(features(), te.SGD(0.1), distributed_options=given)
        table = te.TableConfig(V, D, combiner=combiner)
        with pytest.raises(NotImplementedError, match="CustomCombiner"):
            te.TPUEmbeddingV2(te.FeatureConfig(table), te.SGD(0.1))
        served = te.TPUEmbedding(features(), te.SGD(0.1))
        served.build()
    with pytest.raises(NotImplementedError, match=r"(?i)telemetry"):
        te.Telemetry(served)


@case
def the_keras_layer_trains_in_a_loop_of_ones_own() -> None:
    def make_layer() -> Any:
        layer = te.keras.TPUEmbedding(features(), te.Adagrad(0.1))
        layer.build({name: value.shape for name, value in batch(0).items()})
        return layer

    def step_with(layer: Any) -> Callable[[Any], tf.Tensor]:
        def step(number: Any) -> tf.Tensor:
            with tf.GradientTape() as tape:
                activations = layer(batch(number))
                loss = tf.add_n(
                    [tf.reduce_sum(tf.cos(3 * a)) for a in activations.values()]
                )
            tape.gradient(loss, layer.trainable_variables)
            return loss

        return step

    one = make_layer()
    with JOB.strategy.scope():
        served = make_layer()
    step, expected = tf.function(step_with(served)), tf.function(step_with(one))
    found = schedule(step, range(3))
    assert found == [float(expected(tf.constant(k))) for k in range(3)]
    pairs = zip(
        one.embedding_tables.values(), served.embedding_tables.values(), strict=True
    )
    for value, other in pairs:
        np.testing.assert_array_equal(other.numpy(), value.numpy())


@case
def the_coordinator_is_ours() -> None:
    assert isinstance(JOB.coordinator, te.ClusterCoordinator)
    assert te.ClusterCoordinator(JOB.strategy) is JOB.coordinator
    with pytest.raises(TypeError, match=r"only accepts a `tf\.function`"):
        JOB.coordinator.schedule(lambda: None)


@case
def checkpoints_restore_here_and_there() -> None:
    for placements in ((None, None, None), MIXED):
        check_checkpoints(features("bfloat16", placements))


def check_checkpoints(configs: Any) -> None:
    optimizer = OPTIMIZERS["schedule"]
    one, served = make(te.TPUEmbedding, configs, optimizer())
    schedule(tf.function(step_of(served)), range(3))
    folder = pathlib.Path(tempfile.mkdtemp())
    paths = {
        "tf": tf.train.Checkpoint(embedding=served).write(str(folder / "tf")),
        "te": te.checkpoint.save(served, str(folder / "te")),
    }
    for name, path in paths.items():
        fresh, again = make(te.TPUEmbedding, configs, optimizer())
        if name == "tf":
            for each in (fresh, again):
                status = tf.train.Checkpoint(embedding=each).read(path)
                status.assert_consumed().expect_partial()
        else:
            te.checkpoint.restore(fresh, path)
            te.checkpoint.restore(again, path)
        require_same(served, fresh)
        require_same(served, again)
        schedule(tf.function(step_of(again)), range(3, 5))
        for k in range(3, 5):  # The count of updates is restored on each server.
            step_of(fresh)(k)
        require_same(fresh, again)
        back = te.checkpoint.save(fresh, str(folder / f"back_{name}"))
        te.checkpoint.restore(served, back)
        require_same(fresh, served)
        te.checkpoint.restore(served, paths["te"])
    del one


def contents(path: str) -> dict[str, np.ndarray]:
    """All that a checkpoint has: tables, slots, counters and objects."""
    reader = tf.train.load_checkpoint(path)
    names = reader.get_variable_to_shape_map()
    return {n: np.asarray(reader.get_tensor(n)) for n in names}


@case
def a_checkpoint_of_servers_is_that_of_one_machine() -> None:
    folder = pathlib.Path(tempfile.mkdtemp())
    one, served = make(
        te.TPUEmbedding, features("bfloat16", MIXED), OPTIMIZERS["schedule"]()
    )
    for embedding in (one, served):
        for k in range(3):
            step_of(embedding)(k)
    paths = {
        "served": te.checkpoint.save(served, str(folder / "served")),
        "one": te.checkpoint.save(one, str(folder / "one")),
    }
    found, expected = contents(paths["served"]), contents(paths["one"])
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        assert found[name].dtype == value.dtype, name
        assert found[name].tobytes() == value.tobytes(), name
    # What `python -m tpu_embedding report` shows, also of files of TensorFlow.
    paths["tf"] = tf.train.Checkpoint(embedding=served).write(str(folder / "tf"))
    own, *others = (
        {t.name: t for t in table_reports(te.checkpoint.read(p), TextProgress())}
        for p in paths.values()
    )
    assert all(other == own for other in others)


@case
def tpus_restore_checkpoints_of_servers_and_servers_theirs() -> None:
    folder = pathlib.Path(tempfile.mkdtemp())
    for generation in ("v4", "v6e"):
        tables = [
            te.TableConfig(
                rows, D, name=name, combiner="sum", placement=placement, initializer=i
            )
            for rows, name, placement, i in (
                (V, "t0", "rows", tf.constant_initializer(START[0])),
                (V + 1, "t1", "whole", tf.zeros_initializer()),
            )
        ]
        configs = {
            "a": te.FeatureConfig(tables[0], output_shape=[B]),
            "b": te.FeatureConfig(tables[1], output_shape=[B]),
        }
        ids = {name: tf.random.uniform([B, H], 0, V, tf.int32, 3) for name in configs}

        def train(embedding: Any, ids: Any = ids) -> None:
            embedding.enqueue(ids)
            embedding.apply_gradients(gradients(embedding.dequeue()))

        with JOB.strategy.scope():
            served = te.TPUEmbedding(configs, te.Adagrad(0.1))
            served.build()
        train(served)
        path = te.checkpoint.save(served, str(folder / f"served_{generation}"))
        strategy = te.testing.SoftwareTPUStrategy(generation, 1)
        with strategy.scope():
            tpu = te.TPUEmbedding(configs, te.Adagrad(0.1))
            tpu.build()
        te.checkpoint.restore(tpu, path)
        back = te.checkpoint.save(tpu, str(folder / f"back_{generation}"))
        require_same_tables(path, back)

        @tf.function
        def step(strategy: Any = strategy, tpu: Any = tpu, ids: Any = ids) -> None:
            tpu.enqueue(ids)
            strategy.run(lambda: tpu.apply_gradients(gradients(tpu.dequeue())))

        step()
        further = te.checkpoint.save(tpu, str(folder / f"tpu_{generation}"))
        te.checkpoint.restore(served, further)
        again = te.checkpoint.save(served, str(folder / f"again_{generation}"))
        require_same_tables(further, again)


@case
def the_coordinator_exports() -> None:
    folder = pathlib.Path(tempfile.mkdtemp())
    one, served = make(te.TPUEmbedding, features(placements=MIXED), te.Adagrad(0.1))
    kernels = [tf.Variable(tf.ones([D, 2]))]
    with JOB.strategy.scope():
        kernels.append(tf.Variable(tf.ones([D, 2])))
    paths = []
    for storage in ("float32", "int8"):
        for embedding, kernel in zip((one, served), kernels, strict=True):
            step_of(embedding)(0)
            paths.append(str(folder / str(len(paths))))

            def dense(activations: Any, kernel: Any = kernel) -> dict[str, Any]:
                return {name: tf.cos(x) @ kernel for name, x in activations.items()}

            te.serving.export(
                embedding, paths[-1], dense, signatures=["dense"], storage=storage
            )
    code = (
        "import sys, tensorflow as tf\n"
        "ids = tf.constant([1, 49], tf.int64)\n"
        "ids = {**dict.fromkeys('abc', ids), 'd': ids[:, None]}\n"
        "load = lambda path: tf.saved_model.load(path).signatures['dense'](**ids)\n"
        "a, b, c, d = [load(path) for path in sys.argv[1:]]\n"
        "for x, y in ((a, b), (c, d)):\n"
        "    assert all((x[n].numpy() == y[n].numpy()).all() for n in x)\n"
    )
    subprocess.run([sys.executable, "-c", code, *paths], check=True, timeout=100)


def require_same_tables(path: str, other: str) -> None:
    one, two = te.checkpoint.read(path), te.checkpoint.read(other)
    assert one.keys() == two.keys()
    for name, table in one.items():
        for value, same in (
            (table.parameters, two[name].parameters),
            (table.slots["accumulators"], two[name].slots["accumulators"]),
        ):
            assert value.numpy().tobytes() == same.numpy().tobytes(), name


def main(names: list[str]) -> None:
    library.load()
    cluster, servers = start_cluster()
    resolver = tf.distribute.cluster_resolver.SimpleClusterResolver(
        cluster, rpc_layer="grpc"
    )
    JOB.strategy = tf.distribute.ParameterServerStrategy(resolver)
    with JOB.strategy.scope():  # Creates TensorFlow's coordinator.
        te.TPUEmbedding(features(), te.SGD(0.1))
    JOB.coordinator = tf.distribute.coordinator.ClusterCoordinator(JOB.strategy)
    found = {}
    for name in names or CASES:
        try:
            CASES[name]()
            found[name] = ""
        except Exception:
            found[name] = traceback.format_exc()
            print(found[name], file=sys.stderr)
    print(json.dumps(found))
    sys.stdout.flush()
    del servers


if __name__ == "__main__":
    main(sys.argv[1:])
