"""Tables move between the host engine and SparseCores, whatever their number."""

from __future__ import annotations

import pathlib
from collections.abc import Mapping
from typing import Any

import numpy as np
import pytest
import tensorflow as tf
from software_tpu.calls import strategy_of

import tpu_embedding as te
from tpu_embedding import checkpoint
from tpu_embedding.tables.rows import MutableTableRows

SIZES = {"films": (37, 3), "genres": (5, 8), "users": (70, 6)}
WHERE: list[Any] = [None, ("v5p", 1), ("v6e", 2), ("v6e", 4)]
Arrays = Mapping[str, Mapping[str, MutableTableRows]]


def make(system: tuple[str, int] | None, *, stacked: bool = True) -> Any:
    features = {
        name: te.FeatureConfig(
            te.TableConfig(*size, name=name), output_shape=[4], name=name
        )
        for name, size in SIZES.items()
    }
    config = te.SparseCoreEmbeddingConfig(disable_table_stacking=not stacked)
    strategy = strategy_of(*system) if system else tf.distribute.get_strategy()
    with strategy.scope():
        embedding = te.TPUEmbeddingV2(
            features,
            te.Adam(lambda step: 0.1 * tf.cast(step, tf.float32)),
            sparse_core_embedding_config=config,
        )
    embedding.build()
    return embedding


def scramble(embedding: Any, rng: np.random.Generator) -> dict[str, np.ndarray]:
    """Gives every row of every table and slot a value of its own."""
    values = {}
    for table, arrays in embedding.core.checkpoint_rows().items():
        for name, rows in arrays.items():
            value = rng.uniform(0.1, 1.0, rows.shape).astype(np.float32)
            rows.write(0, value)
            values[f"{table}/{name}"] = value
    embedding.core.checkpoint_updates().assign(7)
    return values


def check(embedding: Any, expected: Mapping[str, np.ndarray]) -> None:
    assert int(embedding.core.checkpoint_updates().numpy()) == 7
    found = {
        f"{key.name}/{name}": value.numpy()
        for key, arrays in embedding.variables.items()
        for name, value in arrays.items()
    }
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        np.testing.assert_array_equal(found[name], value, err_msg=name)


def test_between_engines(rng: np.random.Generator, tmp_path: pathlib.Path) -> None:
    """From each to the next, stacked or not, and back to the first."""
    places = [(where, stacked) for where in WHERE for stacked in (True, False)]
    embedding = make(*places[0][:1])
    values = scramble(embedding, rng)
    for number, (where, stacked) in enumerate([*places[1:], places[0]]):
        path = checkpoint.save(embedding, tmp_path / f"{number}")
        assert checkpoint.read(path).format == "TensorFlow"
        embedding = make(where, stacked=stacked)
        checkpoint.restore(embedding, path)
        check(embedding, values)


@pytest.mark.parametrize("system", WHERE[1:3], ids=str)
def test_the_format_of_tensorflow(
    system: tuple[str, int], rng: np.random.Generator, tmp_path: pathlib.Path
) -> None:
    """What tf.train.Checkpoint writes is what TensorFlow's own class would."""
    embedding = make(system)
    values = scramble(embedding, rng)
    path = tf.train.Checkpoint(embedding=embedding).write(str(tmp_path / "sharded"))
    stacks = {layout.stacked_table_name for layout in checkpoint.read_layouts(path)}
    assert stacks == set(embedding.stacked_tables)
    assert len(stacks) == 1
    assert checkpoint.read(path).format == "TensorFlow, SparseCore"
    # By TensorFlow: the parts of all devices are one tensor.
    (stack,) = stacks
    stored = tf.train.load_checkpoint(path)
    np.testing.assert_array_equal(
        stored.get_tensor(f"embedding/{stack}/.ATTRIBUTES/VARIABLE_VALUE"),
        np.concatenate([part.numpy() for part in embedding.stacked_tables[stack]]),
    )
    host = make(None)
    checkpoint.restore(host, path)
    check(host, values)
    other = make(system)
    tf.train.Checkpoint(embedding=other).read(path).assert_consumed()
    check(other, values)
    # Before the tables are there, and by a checkpoint of ours with the same record.
    own = checkpoint.save(host, tmp_path / "own", layouts=checkpoint.read_layouts(path))
    late = make(system)
    tf.train.Checkpoint(embedding=late).read(own).assert_consumed()
    check(late, values)


def test_checkpoints_of_another_layout_are_converted(
    rng: np.random.Generator, tmp_path: pathlib.Path
) -> None:
    source = make(("v6e", 2))
    values = scramble(source, rng)
    sharded = tf.train.Checkpoint(embedding=source).write(str(tmp_path / "sharded"))
    host = make(None)
    tf.train.Checkpoint(embedding=host).read(sharded).assert_consumed()
    check(host, values)
    plain = tf.train.Checkpoint(embedding=host).write(str(tmp_path / "plain"))
    for system, path in ((("v6e", 4), sharded), (("v6e", 2), plain)):
        target = make(system)
        tf.train.Checkpoint(embedding=target).read(path).assert_consumed()
        check(target, values)


def test_a_checkpoint_without_the_tables_is_refused(tmp_path: pathlib.Path) -> None:
    target = make(("v6e", 2))
    other = tf.train.Checkpoint(step=tf.Variable(1))
    path = tf.train.Checkpoint(embedding=other).write(str(tmp_path / "other"))
    before = target.embedding_tables
    with pytest.raises(ValueError, match=r"tpu_embedding.checkpoint.restore\("):
        tf.train.Checkpoint(embedding=target).read(path)
    for key, value in target.embedding_tables.items():
        np.testing.assert_array_equal(value, before[key])


@pytest.mark.parametrize("whole", [True, False])
def test_a_restore_after_construction_makes_no_first_values(
    whole: bool, tmp_path: pathlib.Path
) -> None:
    """Unless it fails; a save makes them, too."""
    called = []

    def make_ones(shape: Any, dtype: Any) -> tf.Tensor:
        called.append(shape)
        return tf.ones(shape, dtype)

    def make_unbuilt() -> tuple[Any, tf.train.Checkpoint]:
        features = {
            name: te.FeatureConfig(
                te.TableConfig(*size, make_ones, name=name), output_shape=[4], name=name
            )
            for name, size in SIZES.items()
        }
        with strategy_of("v6e", 2).scope():
            embedding = te.TPUEmbeddingV2(features, te.Adagrad(0.1))
        return embedding, tf.train.Checkpoint(model=embedding)

    def mean(embedding: Any) -> set[float]:
        return {float(tf.reduce_mean(t)) for t in embedding.embedding_tables.values()}

    source, saver = make_unbuilt()
    saver.save(tmp_path / "first")
    assert mean(source) == {1.0}
    for arrays in source.core.checkpoint_rows().values():
        arrays["parameters"].write(0, np.full(arrays["parameters"].shape, 2.0, "f"))
    path = saver.save(tmp_path / "saved")
    called.clear()
    embedding, saver = make_unbuilt()
    if whole:
        saver.restore(path).assert_consumed()
        embedding.build()
        assert mean(embedding) == {2.0}
        assert not called
        return
    data = pathlib.Path(f"{path}.data-00000-of-00001")
    content = bytearray(data.read_bytes())
    content[50] ^= 1  # Of a table or slot.
    data.write_bytes(content)
    with pytest.raises(tf.errors.DataLossError):
        saver.restore(path)
    assert mean(embedding) <= {1.0, 2.0}
    assert called
