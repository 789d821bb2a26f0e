"""Checkpoints between the software TPU v4 and the host engine: the same bits."""

from __future__ import annotations

import pathlib
from typing import Any

import numpy as np
import pytest
import tensorflow as tf
from steps import train_on

import tpu_embedding as te
from tpu_embedding import checkpoint, tpu_generations
from tpu_embedding.distribution import SoftwareTPUSystem
from tpu_embedding.engines.tpu_v2_v4.engine import HostTable
from tpu_embedding.layout.plan import make_plan
from tpu_embedding.testing import SoftwareTPUStrategy

B = 4


def make(strategy: tf.distribute.Strategy, seed: int = 0) -> te.TPUEmbedding:
    """Two tables with slots of two rules; a rate that counts the updates."""
    with strategy.scope():
        embedding = te.TPUEmbedding(*configuration(seed))
        embedding.build(B)
    return embedding


def configuration(seed: int = 0) -> Any:
    """(features, optimizer)."""

    def initializer(shape: Any, dtype: Any) -> tf.Tensor:
        return tf.random.stateless_normal(shape, [seed, shape[0]], dtype=dtype)

    films = te.TableConfig(7, 3, initializer, te.Adam(0.1), name="films")
    words = te.TableConfig(5, 2, initializer, name="words", combiner="sum")
    rate = tf.keras.optimizers.schedules.ExponentialDecay(0.5, 1, 0.5)
    features = {
        "film": te.FeatureConfig(films, output_shape=[B], name="film"),
        "word": te.FeatureConfig(words, output_shape=[B], name="word"),
    }
    return features, te.FTRL(rate)


def train(embedding: te.TPUEmbedding, strategy: tf.distribute.Strategy) -> None:
    ids = tf.constant([1, 2, 2, 4])
    embedding.enqueue({"film": ids, "word": ids})

    def step() -> None:
        activations = embedding.dequeue()
        embedding.apply_gradients(activations)

    strategy.run(step)


def state(embedding: te.TPUEmbedding) -> dict[str, np.ndarray]:
    """All values; what counts the updates among them."""
    rows = embedding.core.checkpoint_rows()
    found = {f"{t}/{a}": r.numpy() for t, rs in rows.items() for a, r in rs.items()}
    updates = embedding.core.checkpoint_updates()
    assert updates is not None
    return {**found, "updates": updates.numpy()}


def assert_same_bits(actual: Any, expected: Any) -> None:
    assert actual.keys() == expected.keys()
    for name, values in expected.items():
        np.testing.assert_array_equal(actual[name], values, err_msg=name)


def whole(embedding: te.TPUEmbedding) -> tf.train.Checkpoint:
    return tf.train.Checkpoint(embedding=embedding)


@pytest.mark.parametrize("kind", ["tensorflow", "package"])
def test_both_ways(kind: str, tmp_path: pathlib.Path) -> None:
    """TPU, host, TPU again: each restores what the one before had, and trains on."""

    def save(embedding: te.TPUEmbedding, name: str) -> str:
        path = str(tmp_path / name)
        if kind == "tensorflow":
            return whole(embedding).write(path)
        return checkpoint.save(embedding, path)

    def restore(embedding: te.TPUEmbedding, path: str) -> None:
        if kind == "tensorflow":
            status = whole(embedding).read(path)
            status.assert_consumed()
        else:
            checkpoint.restore(embedding, path)

    tpu, host = SoftwareTPUStrategy("v4", 2), tf.distribute.OneDeviceStrategy("CPU:0")
    on_tpu = make(tpu)
    train(on_tpu, tpu)
    path = save(on_tpu, "tpu")
    expected = state(on_tpu)
    on_host = make(host, seed=1)
    restore(on_host, path)
    assert_same_bits(state(on_host), expected)
    train(on_host, host)
    path = save(on_host, "host")
    expected = state(on_host)
    restore(on_tpu, path)  # Over what has been trained.
    assert_same_bits(state(on_tpu), expected)
    tpu.initialize_tpu_system()
    again = make(tpu, seed=2)
    restore(again, path)
    assert_same_bits(state(again), expected)
    train(again, tpu)
    assert int(state(again)["updates"]) == 3


def test_to_sparse_cores_and_back(tmp_path: pathlib.Path) -> None:
    tpu = SoftwareTPUStrategy("v4", 2)
    on_tpu = make(tpu)
    train(on_tpu, tpu)
    expected = state(on_tpu)
    path = checkpoint.save(on_tpu, tmp_path / "tpu")
    with SoftwareTPUStrategy("v6e", 2).scope():
        on_cores: Any = te.TPUEmbeddingV2(*configuration(seed=1))
    on_cores.build()
    checkpoint.restore(on_cores, path)
    assert_same_bits(state(on_cores), expected)
    path = checkpoint.save(on_cores, tmp_path / "cores")
    train(on_tpu, tpu)
    checkpoint.restore(on_tpu, path)
    assert_same_bits(state(on_tpu), expected)


def test_shapes_come_before_a_checkpoint(tmp_path: pathlib.Path) -> None:
    """A TPU has no tables before it knows all shapes: to save is to build first."""
    embedding = not_built(SoftwareTPUStrategy("v4", 1))
    for call in (
        lambda: whole(embedding).write(str(tmp_path / "saved")),
        lambda: checkpoint.save(embedding, str(tmp_path / "saved")),
        embedding.core.checkpoint_rows,
    ):
        with pytest.raises(ValueError, match=r"TPUEmbedding\.build\(per_replica"):
            call()
    embedding.build(B)
    options = tf.train.CheckpointOptions(experimental_enable_async_checkpoint=True)
    with pytest.raises(RuntimeError, match="cannot be saved asynchronously"):
        whole(embedding).save(str(tmp_path / "later"), options)


def not_built(tpu: tf.distribute.Strategy) -> te.TPUEmbedding:
    with tpu.scope():
        table = te.TableConfig(7, 3, te.RowIdInitializer(), name="films")
        rate = tf.keras.optimizers.schedules.ExponentialDecay(0.5, 1, 0.5)
        return te.TPUEmbedding(te.FeatureConfig(table), te.Adagrad(rate))


def test_restored_before_shapes_are_known(tmp_path: pathlib.Path) -> None:
    """The first batch makes the tables, and they take what was restored before.

    Here inside of a program that was traced before, for another embedding.
    """
    tpu = SoftwareTPUStrategy("v4", 2)
    ids = tf.constant([1, 2, 2, 4])

    @tf.function
    def step(embedding: te.TPUEmbedding) -> Any:
        def replica_fn(ids: Any) -> Any:
            return train_on(embedding, ids, tf.identity)

        return tpu.run(replica_fn, args=(ids,))

    first = not_built(tpu)
    step(first)
    path = whole(first).write(str(tmp_path / "saved"))
    expected = state(first)
    tpu.initialize_tpu_system()
    second = not_built(tpu)
    status = whole(second).read(path).assert_existing_objects_matched()
    with pytest.raises(AssertionError):
        status.assert_consumed()
    assert second.core.engine is None
    found = step(second)
    status.assert_consumed()
    rows = expected["films/parameters"][ids.numpy()]
    for own in found.values:
        np.testing.assert_array_equal(own, rows)
    updates = second.core.checkpoint_updates()
    assert updates is not None
    assert updates.numpy() == 2
    tpu.initialize_tpu_system()
    third = not_built(tpu)
    whole(third).read(path)
    third.build(B)
    assert_same_bits(state(third), expected)


def test_one_engine_for_several_embeddings() -> None:
    tpu = SoftwareTPUStrategy("v4", 2)
    with tpu.scope(), pytest.raises(RuntimeError, match="but there is none"):
        shared(None).build(B)
    first = make(tpu)
    train(first, tpu)
    with pytest.raises(RuntimeError, match="already configured"):
        make(tpu)
    with tpu.scope():
        second = shared(first, te.FTRL(lambda: 0.5))
        second.build(B)
        with pytest.raises(NotImplementedError, match=r"number of up.*tf\.Variable"):
            shared(first, first.core.plan.tables[1].optimizer).build(B)
    assert second.core.checkpoint_updates() is None
    for table, arrays in first.core.checkpoint_rows().items():
        for name, rows in arrays.items():
            other = second.core.checkpoint_rows()[table][name]
            np.testing.assert_array_equal(other.numpy(), rows.numpy(), name)


def test_saved_models_are_refused(tmp_path: pathlib.Path) -> None:
    module = tf.Module()
    module.embedding = make(SoftwareTPUStrategy("v4", 1))
    with pytest.raises(NotImplementedError, match=r"cannot save .*checkpoint.*export"):
        tf.saved_model.save(module, str(tmp_path / "model"))


def shared(other: te.TPUEmbedding | None, words: Any = None) -> te.TPUEmbedding:
    """An embedding of the same configuration that does not configure the TPU."""
    if other is None:
        table = te.TableConfig(7, 3, name="films")
        features: Any = te.FeatureConfig(table)
        return te.TPUEmbedding(features, te.SGD(0.1), initialize_tpu_embedding=False)
    features = other.core.structure.pack(
        [spec.config for spec in other.core.plan.features]
    )
    return te.TPUEmbedding(features, words, initialize_tpu_embedding=False)


@pytest.mark.parametrize("rows", [1, 2, 7])
def test_rows_of_each_host(rows: int, tmp_path: pathlib.Path) -> None:
    """Tables cut by host, as on a pod: one tensor, in slices, in a checkpoint."""
    seen = []

    def initializer(shape: Any, dtype: Any, shard_info: Any = None) -> tf.Tensor:
        assert shard_info is not None
        seen.append((tuple(shape), shard_info.offset))
        first = shard_info.offset[0]
        return tf.range(first, first + shape[0], dtype=dtype)[:, tf.newaxis]

    config = te.TableConfig(rows, 1, initializer, name="films")
    feature = te.FeatureConfig(config)
    plan = make_plan(["f"], [feature], {config: config}, te.Adagrad(0.1))
    tpu = SoftwareTPUSystem(
        generation=tpu_generations.generation("v4"),
        devices=(("/device:CPU:0",), ("/device:CPU:1",), ("/device:CPU:2",)),
        hosts=tuple(f"/device:CPU:{host}" for host in range(3)),
        assigned=False,
    )
    restored: list[int] = []
    table = HostTable(plan.tables[0], tpu, lambda: restored.append(1))
    heights = {1: [1], 2: [1, 1], 7: [3, 2, 2]}[rows]
    offsets = [sum(heights[:shard]) for shard in range(len(heights))]
    assert seen == [((h, 1), (o, 0)) for h, o in zip(heights, offsets, strict=True)]
    whole = np.arange(rows, dtype=np.float32)[:, np.newaxis]
    parameters = table.arrays["parameters"]
    np.testing.assert_array_equal(parameters.rows().numpy(), whole)
    np.testing.assert_array_equal(
        table.arrays["accumulators"].rows().numpy()[:, 0], 0.1 + 0 * whole[:, 0]
    )

    path = tf.train.Checkpoint(table=parameters).write(str(tmp_path / "saved"))
    (name,) = [n for n, _ in tf.train.list_variables(path) if n.startswith("table/")]
    np.testing.assert_array_equal(tf.train.load_variable(path, name), whole)
    parameters.rows().write(0, -whole)
    tf.train.Checkpoint(table=parameters).read(path)
    np.testing.assert_array_equal(parameters.rows().numpy(), whole)
    assert restored
