"""Checkpoints and exports of tables on servers equal those of one machine."""

from __future__ import annotations

import pathlib
import subprocess
import sys
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import tensorflow as tf
from parameter_servers.cluster import (
    JOB,
    MIXED,
    OPTIMIZERS,
    ROUNDED,
    START,
    B,
    D,
    H,
    V,
    features,
    gradients,
    make,
    require_same,
    schedule,
    step_of,
)

import tpu_embedding as te
from tpu_embedding.checkpoint.statistics import table_reports
from tpu_embedding.commands.files import TextProgress

pytestmark = pytest.mark.second_tier


@pytest.mark.parametrize("dtype", ROUNDED)
@pytest.mark.parametrize("placements", [(None, None, None), MIXED])
def test_checkpoints_restore_here_and_there(
    placements: Sequence[str | None], dtype: str, tmp_path: pathlib.Path
) -> None:
    configs = features(dtype, placements)
    optimizer = OPTIMIZERS["schedule"]
    one, served = make(te.TPUEmbedding, configs, optimizer())
    schedule(tf.function(step_of(served)), range(3))
    paths = {
        "tf": tf.train.Checkpoint(embedding=served).write(str(tmp_path / "tf")),
        "te": te.checkpoint.save(served, str(tmp_path / "te")),
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
        back = te.checkpoint.save(fresh, str(tmp_path / f"back_{name}"))
        te.checkpoint.restore(served, back)
        require_same(fresh, served)
        te.checkpoint.restore(served, paths["te"])
    del one


def contents(path: str) -> dict[str, np.ndarray]:
    """All that a checkpoint has: tables, slots, counters and objects."""
    reader = tf.train.load_checkpoint(path)
    names = reader.get_variable_to_shape_map()
    return {n: np.asarray(reader.get_tensor(n)) for n in names}


@pytest.mark.parametrize("dtype", ROUNDED)
def test_a_checkpoint_of_servers_is_that_of_one_machine(
    dtype: str, tmp_path: pathlib.Path
) -> None:
    one, served = make(
        te.TPUEmbedding, features(dtype, MIXED), OPTIMIZERS["schedule"]()
    )
    for embedding in (one, served):
        for k in range(3):
            step_of(embedding)(k)
    paths = {
        "served": te.checkpoint.save(served, str(tmp_path / "served")),
        "one": te.checkpoint.save(one, str(tmp_path / "one")),
    }
    found, expected = contents(paths["served"]), contents(paths["one"])
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        assert found[name].dtype == value.dtype, name
        assert found[name].tobytes() == value.tobytes(), name
    # What `python -m tpu_embedding report` shows, also of files of TensorFlow.
    paths["tf"] = tf.train.Checkpoint(embedding=served).write(str(tmp_path / "tf"))
    own, *others = (
        {t.name: t for t in table_reports(te.checkpoint.read(p), TextProgress())}
        for p in paths.values()
    )
    assert all(other == own for other in others)
    for other in {"float32", *ROUNDED} - {dtype}:  # By value.
        pair = make(te.TPUEmbedding, features(other, MIXED), OPTIMIZERS["schedule"]())
        for each in pair:
            te.checkpoint.restore(each, paths["served"])
        require_same(*pair)


def test_tpus_restore_checkpoints_of_servers_and_servers_theirs(
    tmp_path: pathlib.Path,
) -> None:
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
        path = te.checkpoint.save(served, str(tmp_path / f"served_{generation}"))
        strategy = te.testing.SoftwareTPUStrategy(generation, 1)
        with strategy.scope():
            tpu = te.TPUEmbedding(configs, te.Adagrad(0.1))
            tpu.build()
        te.checkpoint.restore(tpu, path)
        back = te.checkpoint.save(tpu, str(tmp_path / f"back_{generation}"))
        require_same_tables(path, back)

        @tf.function
        def step(strategy: Any = strategy, tpu: Any = tpu, ids: Any = ids) -> None:
            tpu.enqueue(ids)
            strategy.run(lambda: tpu.apply_gradients(gradients(tpu.dequeue())))

        step()
        further = te.checkpoint.save(tpu, str(tmp_path / f"tpu_{generation}"))
        te.checkpoint.restore(served, further)
        again = te.checkpoint.save(served, str(tmp_path / f"again_{generation}"))
        require_same_tables(further, again)


def test_the_coordinator_exports(tmp_path: pathlib.Path) -> None:
    one, served = make(te.TPUEmbedding, features(placements=MIXED), te.Adagrad(0.1))
    kernels = [tf.Variable(tf.ones([D, 2]))]
    with JOB.strategy.scope():
        kernels.append(tf.Variable(tf.ones([D, 2])))
    paths = []
    for storage in ("float32", "int8"):
        for embedding, kernel in zip((one, served), kernels, strict=True):
            step_of(embedding)(0)
            paths.append(str(tmp_path / str(len(paths))))

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
