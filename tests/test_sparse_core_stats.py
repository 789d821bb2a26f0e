"""compute_sparse_core_stats: exact, and enough for the batch and for no larger one."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import pytest
import tensorflow as tf

import tpu_embedding as te
from tpu_embedding import preprocessing
from tpu_embedding.inputs import to_id_batch
from tpu_embedding.layout.output_shapes import OutputShapes
from tpu_embedding.layout.plan import Plan, make_plan
from tpu_embedding.layout.stacking import StackingOptions, make_layout
from tpu_embedding.preprocessing import HOST_OPS_VARIABLE, partition
from tpu_embedding.testing import library as software_tpu
from tpu_embedding.tf_configs import convert_features, convert_optimizer

STOCK = tf.tpu.experimental.embedding
CHIPS, CORES = 2, 4
BATCH = 32
# By feature its table and how many ids each sample has at most.
FEATURES = {"a": ("films", 9), "b": ("users", 1), "c": ("films", 3), "d": ("tags", 5)}
ROWS = {"films": 300, "users": 40, "tags": 7}


def configure(module: Any) -> dict[str, Any]:
    """The features in the classes of `module`, ours or TensorFlow's."""
    tables = {
        name: module.TableConfig(rows, 16 if name == "tags" else 8, name=name)
        for name, rows in ROWS.items()
    }
    return {
        name: module.FeatureConfig(tables[table], output_shape=[BATCH], name=name)
        for name, (table, _) in FEATURES.items()
    }


@pytest.fixture(scope="module")
def batch() -> dict[str, tf.RaggedTensor]:
    random = np.random.default_rng(3)
    features = {}
    for name, (table, most) in FEATURES.items():
        lengths = random.integers(0, most + 1, BATCH)
        ids = random.zipf(1.3, lengths.sum()) % ROWS[table]
        features[name] = tf.RaggedTensor.from_row_lengths(ids, lengths)
    return features


def counted(batch: Any, layouts: dict[str, Any]) -> dict[str, dict[tuple, dict]]:
    """By stack, (asking core, asked shard) and row: the samples that name it."""
    found: dict[str, dict[tuple, dict]] = {}
    shards = CHIPS * CORES
    for feature, (table, _) in FEATURES.items():
        layout = layouts[table]
        cells = found.setdefault(layout.stacked_table_name, {})
        for sample, ids in enumerate(batch[feature].to_list()):
            core = sample // (BATCH // CORES)
            for i in ids:
                shard = (i + layout.sparse_core_shard_rotation) % shards
                rows = cells.setdefault((core, shard), {})
                rows.setdefault((table, i), set()).add((feature, sample))
    return found


def plan_of(configuration: dict[str, Any]) -> Plan:
    converted = convert_features(configuration, None)
    return make_plan(
        converted.paths, converted.features, converted.keys, convert_optimizer(te.SGD())
    )


def layouts_of(configuration: dict[str, Any]) -> dict[str, Any]:
    plan = plan_of(configuration)
    layout = make_layout(
        plan, OutputShapes(plan.features).full(), StackingOptions(CHIPS, CORES)
    )
    return {table.table_name: table for table in layout.tables}


def ints(values: dict[str, tf.Tensor]) -> dict[str, int]:
    assert all(value.dtype == tf.int32 for value in values.values())
    return {name: int(value) for name, value in values.items()}


def test_what_numpy_counts(batch: Any):
    configuration = configure(te)
    needs = te.TPUEmbeddingV2.compute_sparse_core_requirements(
        batch, configuration, CHIPS, CORES, te.SGD()
    )
    expected = counted(batch, layouts_of(configuration))
    assert len(expected) == 2
    sizes = {
        stack: {cell: sum(map(len, rows.values())) for cell, rows in cells.items()}
        for stack, cells in expected.items()
    }
    assert ints(needs.max_ids) == {s: max(c.values()) for s, c in sizes.items()}
    assert ints(needs.max_unique_ids) == {
        stack: max(map(len, cells.values())) for stack, cells in expected.items()
    }
    assert ints(needs.required_ids) == {
        stack: sum(-(-size // 8) * 8 for size in cells.values())
        for stack, cells in sizes.items()
    }


def test_what_tensorflows_own_class_says(batch: Any, monkeypatch: pytest.MonkeyPatch):
    """Its method runs the stock ops, here on the software TPU's kernels.

    It counts the samples of one feature only.
    """
    software_tpu.load()
    stock = STOCK.TPUEmbeddingV2.compute_sparse_core_stats(
        batch, configure(STOCK), CHIPS, CORES, STOCK.SGD()
    )

    def check(module: Any) -> None:
        config = te.SparseCoreEmbeddingConfig(stock_feature_counts=True)
        ours = te.TPUEmbeddingV2.compute_sparse_core_stats(
            batch, configure(module), CHIPS, CORES, module.SGD(), config
        )
        assert list(map(ints, ours)) == list(map(ints, stock))

    check(te)
    check(STOCK)
    monkeypatch.setenv(HOST_OPS_VARIABLE, "stock")
    check(te)


def test_tables_are_rotated_by_their_loads() -> None:
    features = {
        name: te.FeatureConfig(
            te.TableConfig(64, 8, name=name), output_shape=[4], name=name
        )
        for name in "ab"
    }
    ids = {"a": tf.constant([[0, 2]] * 4), "b": tf.constant([[1, 3]] * 4)}
    needs = []
    for loads in (None, {"a": [1.0, 0.0], "b": [1.0, 0.0]}):
        config = te.SparseCoreEmbeddingConfig(shard_loads=loads)
        stats = te.TPUEmbeddingV2.compute_sparse_core_stats
        found, _ = stats(ids, features, 1, 2, te.SGD(), config)
        needs.append(int(found["a_b"]))
    # The loads turn table b by one shard, so that the ids of both are on one.
    assert needs == [4, 8]


@pytest.mark.parametrize("number", [0, -1, True, "2", None])
@pytest.mark.parametrize("argument", ["num_tpu_chips", "num_sc_per_chip"])
def test_hardware_is_counted_from_one(argument: str, number: Any) -> None:
    counts: dict[str, Any] = {"num_tpu_chips": 2, argument: number}
    with pytest.raises(ValueError, match=f"`{argument}` must be an int >= 1"):
        te.TPUEmbeddingV2.compute_sparse_core_stats({}, configure(te), **counts)


def test_the_limits_are_enough_and_no_more(batch: Any):
    configuration = configure(te)
    needs = te.TPUEmbeddingV2.compute_sparse_core_requirements(
        batch, configuration, CHIPS, CORES, te.SGD()
    )
    whole = preprocessing._unlimited(
        plan_of(configuration),
        preprocessing.Hardware(CHIPS, CORES),
        te.SparseCoreEmbeddingConfig(),
    )
    batches = [to_id_batch(name, batch[name], None) for name in sorted(FEATURES)]

    def run(ids: int = 0, unique: int = 0, buffer: int = 0) -> None:
        limits = [
            dataclasses.replace(
                stack,
                max_ids_per_partition=int(needs.max_ids[stack.name]) + ids,
                max_unique_ids_per_partition=int(needs.max_unique_ids[stack.name])
                + unique,
            )
            for stack in whole.stacks
        ]
        per_sample = int(needs.max_ids_per_chip_per_sample) + buffer
        partition(
            batches,
            dataclasses.replace(
                whole,
                stacks=tuple(limits),
                max_ids_per_chip_per_sample=per_sample,
                allow_id_dropping=False,
            ),
        )

    run()
    for less, text in [("ids", "ids"), ("unique", "unique ids"), ("buffer", "buffer")]:
        with pytest.raises(tf.errors.InvalidArgumentError, match=text):
            run(**{less: -1})


def test_without_output_shape(batch: Any):
    feature = te.FeatureConfig(te.TableConfig(8, 8, name="films"), name="film")
    with pytest.raises(ValueError, match="output_shape"):
        te.TPUEmbeddingV2.compute_sparse_core_stats(tf.constant([1]), feature, 1)
