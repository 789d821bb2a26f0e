"""Stacked and sharded tables, against TensorFlow's own stacker and unshuffling."""

from __future__ import annotations

import functools
import pathlib
from typing import Any

import numpy as np
import pytest
import tensorflow as tf
from checkpoint import models
from checkpoint.stock_stacks import (
    SIZES,
    by_stack,
    layout_of,
    stock_layouts,
    stock_stack,
    write_as_stock,
)
from replica_values import mirrored
from tensorflow.core.tpu.kernels import sparse_core_layout_pb2
from tensorflow.python.tpu import (
    tpu_embedding_v3_checkpoint_adapter,
    tpu_embedding_v3_utils,
)

import tpu_embedding as te
from tpu_embedding import checkpoint
from tpu_embedding.checkpoint import TableLayout
from tpu_embedding.checkpoint.sparse_core_format import LAYOUTS, LayoutRecord
from tpu_embedding.keras import TPUEmbedding
from tpu_embedding.tables.rows import joined, unstacked
from tpu_embedding.tables.variables import VariableRows

GRIDS = pytest.mark.parametrize(("devices", "cores"), [(1, 4), (2, 4), (4, 2)])


@GRIDS
def test_sharded_to_plain(
    devices: int, cores: int, rng: np.random.Generator, tmp_path: pathlib.Path
) -> None:
    source, target = (models.make(te.Adagrad(0.1), SIZES) for _ in range(2))
    models.scramble(source, rng)
    values, protos = models.values(source), stock_layouts(devices, cores)
    assert len(by_stack(protos)) < len(SIZES)  # Some are stacked.
    path = write_as_stock(tmp_path / "sharded", values, protos)
    assert checkpoint.read(path).format == "TensorFlow, SparseCore"
    checkpoint.restore(target, path)
    models.assert_same(models.values(target), values)
    models.scramble(target, rng)
    status = tf.train.Checkpoint(embedding=target).read(path)
    status.assert_consumed()
    models.assert_same(models.values(target), values)


@pytest.mark.parametrize("stacked", [True, False])
@pytest.mark.parametrize(
    "kind", ["serving", "v0", "mirrored v0", "v2", "layer", "trainable layer"]
)
def test_other_classes_restore_stacks(
    kind: str, stacked: bool, rng: np.random.Generator, tmp_path: pathlib.Path
) -> None:
    """64 rows of dim 8 need no padding: a stack has the shape of the table."""
    sizes = {"films": (64, 8), "users": (128, 8)} if stacked else {"films": (64, 8)}
    source = models.make(te.Adagrad(0.1), sizes)
    models.scramble(source, rng)
    values = models.values(source)
    rows = 24 if stacked else 8
    layouts = [
        TableLayout(
            table_name=name,
            stacked_table_name="both" if stacked else "films",
            num_sparse_cores=8,
            num_partitions=2,
            total_rows_per_sparse_core_shard=rows,
            unsharded_shape=size,
            unsharded_padded_shape=size,
            sparse_core_shard_row_offset=8 if name == "users" else 0,
            sparse_core_shard_rotation=3 if name == "users" else 0,
        )
        for name, size in sizes.items()
    ]
    path = checkpoint.save(source, tmp_path / "saved", layouts=layouts)
    configs = {name: te.TableConfig(*size, name=name) for name, size in sizes.items()}
    features = {name: te.FeatureConfig(table) for name, table in configs.items()}
    target: Any
    if kind == "mirrored v0":
        with mirrored(2).scope():
            target = te.TPUEmbeddingV0(features, te.Adagrad(0.1))
    else:
        make = {
            "serving": te.TPUEmbeddingForServing,
            "v0": te.TPUEmbeddingV0,
            "v2": te.TPUEmbeddingV2,
            "layer": TPUEmbedding,
            "trainable layer": functools.partial(TPUEmbedding, trainable_tables=True),
        }[kind]
        target = make(features, None if "trainable" in kind else te.Adagrad(0.1))
    status = tf.train.Checkpoint(embedding=target).read(path)
    if kind == "trainable layer":
        for name, config in configs.items():
            table = target.embedding_tables[config]
            np.testing.assert_array_equal(table, values[name]["parameters"])
        return
    status.assert_consumed()
    status.assert_existing_objects_matched()
    if kind == "layer":
        found = {v.name: v.numpy() for v in target.state_of_tables}
        assert len(found) == 2 * len(sizes)
        for name, arrays in values.items():
            np.testing.assert_array_equal(found[name], arrays["parameters"])
        return
    for name, config in configs.items():
        for array, variable in target.variables[config].items():
            for copy in getattr(variable, "values", [variable]):
                np.testing.assert_array_equal(copy.numpy(), values[name][array])
    other = features | {"more": te.FeatureConfig(te.TableConfig(3, 2, name="more"))}
    lacking = te.TPUEmbeddingForServing(other, None)
    with pytest.raises(KeyError, match="no table called more"):
        tf.train.Checkpoint(embedding=lacking).read(path)


def test_several_objects_with_stacks_are_refused(tmp_path: pathlib.Path) -> None:
    """TensorFlow does not say which object of a checkpoint is restored."""
    layout = TableLayout(
        table_name="films",
        stacked_table_name="films",
        num_sparse_cores=2,
        num_partitions=1,
        total_rows_per_sparse_core_shard=8,
        unsharded_shape=(16, 8),
        unsharded_padded_shape=(16, 8),
        sparse_core_shard_row_offset=0,
        sparse_core_shard_rotation=0,
    )
    source = models.make(te.SGD(0.1), {"films": (16, 8)})

    def stacks() -> Any:
        trackable: Any = tf.__internal__.tracking.AutoTrackable()
        trackable._track_trackable(LayoutRecord([layout]), LAYOUTS)
        trackable._track_trackable(tf.Variable(tf.zeros([16, 8])), "films")
        return trackable

    both = tf.train.Checkpoint(one=stacks(), two=stacks())
    path = both.write(str(tmp_path / "both"))
    before = models.values(source)
    with pytest.raises(ValueError, match=r"Several objects in .*'one', 'two'"):
        tf.train.Checkpoint(one=source).read(path)
    mixed = tf.train.Checkpoint(one=stacks(), two=source)
    path = mixed.write(str(tmp_path / "mixed"))
    with pytest.raises(ValueError, match="holds these tables twice"):
        tf.train.Checkpoint(one=source).read(path)
    models.assert_same(models.values(source), before)


@GRIDS
def test_plain_to_sharded(
    devices: int, cores: int, rng: np.random.Generator, tmp_path: pathlib.Path
) -> None:
    source, target = (models.make(te.Adagrad(0.1), SIZES) for _ in range(2))
    models.scramble(source, rng)
    values, protos = models.values(source), stock_layouts(devices, cores)
    like = write_as_stock(tmp_path / "like", values, protos)
    path = checkpoint.save(
        source, tmp_path / "sharded", layouts=checkpoint.read_layouts(like)
    )
    # The very tensors that TensorFlow's own code makes.
    theirs, ours = (tf.train.load_checkpoint(p) for p in (like, path))
    for key in theirs.get_variable_to_dtype_map():
        if "OBJECT_GRAPH" not in key and "layouts" not in key:
            np.testing.assert_array_equal(ours.get_tensor(key), theirs.get_tensor(key))
    adapter = tpu_embedding_v3_checkpoint_adapter.TpuEmbeddingV3CheckpointAdapter
    found: Any = adapter.create_from_checkpoint(path)
    assert found.is_layouts_same({proto.table_name: proto for proto in protos})
    checkpoint.restore(target, path)
    models.assert_same(models.values(target), values)


def test_resharding(rng: np.random.Generator, tmp_path: pathlib.Path) -> None:
    source, middle, target = (models.make(te.Adam(0.1), SIZES) for _ in range(3))
    models.scramble(source, rng)
    paths = []
    for number, (embedding, grid) in enumerate([(source, (1, 4)), (middle, (4, 2))]):
        layouts = [layout_of(proto) for proto in stock_layouts(*grid)]
        path = checkpoint.save(embedding, tmp_path / f"{number}", layouts=layouts)
        checkpoint.restore([middle, target][number], path)
        paths.append(path)
    models.assert_same(models.values(target), models.values(source))


def test_slots_of_one_column(rng: np.random.Generator, tmp_path: pathlib.Path) -> None:
    source, target = (models.make(te.RowwiseAdagrad(0.1), SIZES) for _ in range(2))
    models.scramble(source, rng)
    layouts = [layout_of(proto) for proto in stock_layouts(2, 2)]
    path = checkpoint.save(source, tmp_path / "rowwise", layouts=layouts)
    checkpoint.restore(target, path)
    models.assert_same(models.values(target), models.values(source))


def test_stacks_in_use(rng: np.random.Generator) -> None:
    """Reads and writes tables whose stack is held in parts, one for each device."""
    protos = by_stack(stock_layouts(2, 4))
    (members,) = [members for members in protos.values() if len(members) > 1]
    tables = [
        rng.standard_normal(tuple(proto.unsharded_shape)).astype(np.float32)
        for proto in members
    ]
    stacked = stock_stack(tables, members)
    parts = [tf.Variable(tf.zeros_like(part)) for part in np.split(stacked, 2)]
    stack = joined([VariableRows(part, 0.0) for part in parts], 0.0)
    for proto, table in zip(members, tables, strict=True):
        rows = unstacked(stack, layout_of(proto), 0.0)
        for start in range(0, len(table), 3):
            rows.write(start, table[start : start + 3])
        np.testing.assert_array_equal(rows.numpy(), table)
        np.testing.assert_array_equal(rows.read(2, 5), table[2:5])
    np.testing.assert_array_equal(np.concatenate([p.numpy() for p in parts]), stacked)


def test_refusals(tmp_path: pathlib.Path) -> None:
    layouts = [layout_of(proto) for proto in stock_layouts(1, 4)]
    embedding = models.make(te.Adagrad(0.1), SIZES)
    with pytest.raises(ValueError, match=r"Tables without a layout: users\. Layouts w"):
        checkpoint.save(embedding, tmp_path / "x", layouts=layouts[1:])
    other = models.make(te.Adagrad(0.1), {**SIZES, "films": (36, 3)})
    with pytest.raises(ValueError, match=r"films has shape \[36, 3\], but its layout"):
        checkpoint.save(other, tmp_path / "x", layouts=layouts)
    plain = checkpoint.save(embedding, tmp_path / "plain")
    with pytest.raises(ValueError, match="has no SparseCore layout record"):
        checkpoint.read_layouts(plain)


def test_tables_with_other_slots_in_one_stack(tmp_path: pathlib.Path) -> None:
    layouts = [layout_of(proto) for proto in stock_layouts(1, 4)]
    optimizers = {"films": te.SGD(0.1), "genres": te.Adagrad(0.1), "users": None}
    features = {
        name: te.FeatureConfig(
            te.TableConfig(*size, name=name, optimizer=optimizers[name])
        )
        for name, size in SIZES.items()
    }
    embedding = te.TPUEmbedding(features, te.SGD(0.1))
    with pytest.raises(ValueError, match="must have the same slots"):
        checkpoint.save(embedding, tmp_path / "x", layouts=layouts)
    path = checkpoint.save(embedding, tmp_path / "x", layouts=layouts, slots=False)
    checkpoint.read(path).verify()


@pytest.mark.parametrize("damage", ["record", "stack", "size"])
def test_records_that_do_not_fit(damage: str, tmp_path: pathlib.Path) -> None:
    protos = stock_layouts(1, 4)
    tracked: Any = tf.__internal__.tracking.AutoTrackable()
    record = sparse_core_layout_pb2.SparseCoreTableLayouts(tables=protos)
    content = b"\xff" if damage == "record" else record.SerializeToString()
    tracked._track_trackable(
        tpu_embedding_v3_utils.SparseCoreLayoutsTrackable(tf.constant(content)),
        tpu_embedding_v3_utils.SPARSECORE_LAYOUTS_CHECKPOINT_KEY,
    )
    for stack in by_stack(protos) if damage == "size" else ["other"]:
        tracked._track_trackable(tf.Variable(tf.zeros([4, 8])), stack)
    path = tf.train.Checkpoint(embedding=tracked).write(tmp_path / "x")
    words = {
        "record": "its layout record cannot be parsed",
        "stack": "it lacks the stack",
        "size": r"has shape \[4, 8\], but its layout record says",
    }
    with pytest.raises(tf.errors.DataLossError, match=words[damage]):
        checkpoint.read(path)
