"""Stacks as TensorFlow's own stacker makes them, over random sets of tables."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import pytest
import tensorflow as tf
from hypothesis import given
from hypothesis import strategies as st
from tensorflow.core.tpu.kernels import sparse_core_layout_pb2
from tensorflow.python.tpu import _pywrap_sparse_core_layout as stock
from tensorflow.python.tpu import tpu_embedding_v3

import tpu_embedding as te
from tpu_embedding.config import SparseCoreEmbeddingConfig
from tpu_embedding.layout.csr import check_optimizers, make_partitioning
from tpu_embedding.layout.output_shapes import OutputShapes
from tpu_embedding.layout.plan import Plan, make_plan
from tpu_embedding.layout.stacking import (
    Layout,
    Shape,
    StackingOptions,
    TableLayout,
    make_layout,
)

OPTIMIZERS = (te.SGD(0.1), te.SGD(0.2), te.Adagrad(0.1))


def plan_of(tables: list[te.TableConfig], owners: list[int], shapes: Any) -> Plan:
    features = [
        te.FeatureConfig(tables[owner], output_shape=shape)
        for owner, shape in zip(owners, shapes, strict=True)
    ]
    paths = [f"f{i}" for i in range(len(features))]
    keys = {table: table for table in tables}
    return make_plan(paths, features, keys, te.SGD(0.5))


@st.composite
def plans(draw: st.DrawFn) -> tuple[Plan, list[Shape]]:
    count = draw(st.integers(1, 7))
    names = draw(st.permutations([f"t{i}" for i in range(count)]))
    tables = [
        te.TableConfig(
            draw(st.integers(1, 300)),
            draw(st.integers(1, 20)),
            optimizer=draw(st.sampled_from(OPTIMIZERS)),
            name=name,
        )
        for name in names
    ]
    owners = [*range(count), *draw(st.lists(st.integers(0, count - 1), max_size=4))]
    shape = st.lists(st.integers(1, 16), min_size=1, max_size=2).map(tuple)
    shapes = [draw(shape) for _ in owners]
    return plan_of(tables, owners, shapes), shapes


options_ = st.builds(
    StackingOptions,
    num_devices=st.sampled_from([1, 2, 3, 8]),
    sparse_cores_per_device=st.sampled_from([1, 2, 4]),
    disable_table_stacking=st.booleans(),
    activation_bytes_limit=st.sampled_from([1, 200, 1000, 4096, 2**21]),
    shard_bytes_limit=st.sampled_from([1, 1000, 10000, 2**16, 2**31]),
)


def stock_layouts(plan: Plan, shapes: list[Shape], options: StackingOptions) -> Any:
    """What TensorFlow's stacker says, called with every feature counted."""
    stacker = stock.SparseCoreLayoutStacker(
        num_partitions=options.num_devices,
        sparse_cores_per_partition=options.sparse_cores_per_device,
        disable_table_stacking=options.disable_table_stacking,
    )
    stacker.SetActivationMemoryBytesLimit(options.activation_bytes_limit)
    stacker.SetVariableShardBytesLimit(options.shard_bytes_limit)
    for spec in sorted(plan.tables, key=lambda spec: spec.name):
        assert spec.optimizer is not None
        stacker.AddTable(
            table_name=spec.name,
            table_height=spec.config.vocabulary_size,
            table_width=spec.config.dim,
            group=repr(spec.optimizer),
            output_samples=sum(math.prod(shapes[f]) for f in spec.features),
            num_features=len(spec.features),
        )
    return {layout.table_name: layout for layout in stacker.GetLayouts().tables}


def assert_same_layouts(layout: Layout, protos: Any) -> None:
    assert {la.table_name for la in layout.tables} == protos.keys()
    for own in layout.tables:
        proto = protos[own.table_name]
        for field in dataclasses.fields(TableLayout):
            expected = getattr(proto, field.name)
            if field.name.endswith("shape"):
                expected = tuple(expected)
            assert getattr(own, field.name) == expected, (own, field.name)


@given(case=plans(), options=options_)
def test_layouts_are_those_of_tensorflow(
    case: tuple[Plan, list[Shape]], options: StackingOptions
) -> None:
    plan, shapes = case
    layout = make_layout(plan, shapes, options)
    assert_same_layouts(layout, stock_layouts(plan, shapes, options))
    for stack in layout.stacks:
        end = 0
        for feature in stack.features:
            assert layout.sample_offsets[feature] == end
            end += math.prod(shapes[feature])
        assert stack.samples == end
        tables = {plan.features[f].table for f in stack.features}
        assert tables == set(stack.tables)


@pytest.mark.parametrize("table", ["table", "shared"])
def test_limits_of_tensorflow_by_default(table: str) -> None:
    # At 2 MiB of activations, or 2 GiB of a shard, a stack is full. No row is made.
    options = StackingOptions(1, 1)
    limits = {"table": (2**15, 8), "shared": (8, 2**25)}
    for short in (0, 1):
        samples, rows = limits[table]
        samples -= short * (table == "table")
        rows -= 8 * short * (table == "shared")
        tables = [te.TableConfig(rows, 8, name=n) for n in "ab"]
        plan = plan_of(tables, [0, 1], [(samples,)] * 2)
        layout = make_layout(plan, [(samples,)] * 2, options)
        assert len(layout.stacks) == (1 if short else 2)
        assert_same_layouts(layout, stock_layouts(plan, [(samples,)] * 2, options))


def stock_call(features: list[Any], tables: list[Any], devices: int, cores: int) -> Any:
    """TensorFlow's caller of the stacker, with the slip in its count."""
    return tpu_embedding_v3._stack_tables_with_same_table_dim_and_optimizer(
        tables,
        [(f"f{i}", feature) for i, feature in enumerate(features)],
        devices,
        cores,
        None,
    )


def test_stock_feature_counts_are_those_of_the_stock_caller() -> None:
    experimental = tf.tpu.experimental.embedding
    optimizer = experimental.SGD(0.5)
    shapes = [(200_000,), (200_000,), (32,)]
    tables = [
        experimental.TableConfig(64, 8, optimizer=optimizer, name=name)
        for name in ("a", "b")
    ]
    features = [
        experimental.FeatureConfig(tables[owner], output_shape=shape)
        for owner, shape in zip([0, 1, 0], shapes, strict=True)
    ]
    expected = stock_call(features, tables, 2, 4).table_to_layout
    own = [te.TableConfig(64, 8, name=name) for name in ("a", "b")]
    plan = plan_of(own, [0, 1, 0], shapes)
    options = StackingOptions(2, 4, stock_feature_counts=True)
    layout = make_layout(plan, shapes, options)
    assert_same_layouts(layout, expected)
    assert [stack.name for stack in layout.stacks] == ["a_b"]
    right = make_layout(
        plan, shapes, dataclasses.replace(options, stock_feature_counts=False)
    )
    assert [stack.name for stack in right.stacks] == ["a", "b"]
    assert right.tables[0].num_features == 2


def given_plan(layout: Any, **table: Any) -> Plan:
    arguments: dict[str, Any] = {"vocabulary_size": 10, "dim": 3, "name": "a"}
    tables = [
        te.TableConfig(**{**arguments, **table}, layout=layout),
        te.TableConfig(20, 8, name="b"),
    ]
    return plan_of(tables, [0, 1], [(8,)] * 2)


def given_layout(**fields: Any) -> Any:
    values = {
        "table_name": "a",
        "stacked_table_name": "mine",
        "num_sparse_cores": 4,
        "num_partitions": 2,
        "total_rows_per_sparse_core_shard": 24,
        "unsharded_shape": [10, 3],
        "unsharded_padded_shape": [32, 8],
        "sparse_core_shard_row_offset": 16,
        "sparse_core_shard_rotation": 3,
        **fields,
    }
    return sparse_core_layout_pb2.SparseCoreTableLayout(**values)


OPTIONS = StackingOptions(2, 2)


def test_a_layout_of_the_user_is_kept() -> None:
    layout = make_layout(given_plan(given_layout()), [(8,)] * 2, OPTIONS)
    assert [stack.name for stack in layout.stacks] == ["mine", "b"]
    assert_same_layouts(
        dataclasses.replace(layout, tables=layout.tables[:1]), {"a": given_layout()}
    )
    assert layout.stacks[0].rows_per_shard == 24
    again = make_layout(given_plan(layout.tables[0]), [(8,)] * 2, OPTIONS)
    assert again == layout


def test_a_layout_of_the_user_may_share_a_stack() -> None:
    joined = given_layout(stacked_table_name="b", sparse_core_shard_row_offset=8)
    layout = make_layout(given_plan(joined), [(8,)] * 2, OPTIONS)
    (stack,) = layout.stacks
    assert stack.rows_per_shard == 24
    assert [la.table_name for la in stack.layouts] == ["a", "b"]


@pytest.mark.parametrize(
    ("layout", "text"),
    [
        (3, "Table 'a': layout must be None, a TableLayout or a SparseCoreTableLayout"),
        (given_layout(table_name="c"), "table_name of its layout is 'c', but here it"),
        (given_layout(num_sparse_cores=8), "num_sparse_cores of its layout is 8, but"),
        (given_layout(num_partitions=4), "num_partitions of its layout is 4, but here"),
        (
            given_layout(unsharded_shape=[9, 3]),
            r"unsharded_shape of its layout is \(9, 3\), but here it is \(10, 3\)",
        ),
        (
            given_layout(unsharded_padded_shape=[30, 8]),
            r"unsharded_padded_shape of its layout is \(30, 8\); it needs two axes",
        ),
        (
            given_layout(unsharded_padded_shape=[8, 8]),
            "neither smaller than the table's",
        ),
        (given_layout(unsharded_padded_shape=[32]), "it needs two axes"),
        (
            given_layout(stacked_table_name="b", sparse_core_shard_row_offset=0),
            "Tables 'a' and 'b' overlap in stack 'b'",
        ),
        (
            given_layout(stacked_table_name="b", unsharded_padded_shape=[32, 16]),
            "Tables 'a' and 'b' are both in stack 'b', but tables of one stack must",
        ),
    ],
)
def test_layouts_that_do_not_fit_are_refused(layout: Any, text: str) -> None:
    with pytest.raises(ValueError, match=text):
        make_layout(given_plan(layout), [(8,)] * 2, OPTIONS)


def test_two_stacks_of_one_name_are_refused() -> None:
    tables = [
        te.TableConfig(8, dim, name=n)
        for n, dim in zip(("a", "b", "a_b"), (8, 8, 16), strict=True)
    ]
    plan = plan_of(tables, [0, 1, 2], [(8,)] * 3)
    with pytest.raises(ValueError, match="'a' and 'a_b' are both in stack 'a_b'"):
        make_layout(plan, [(8,)] * 3, OPTIONS)


def test_a_partitioning_places_every_feature() -> None:
    shapes = [(8,), (4, 4), (16,)]
    tables = [te.TableConfig(10, 3, name="a"), te.TableConfig(100, 8, name="b")]
    plan = plan_of(tables, [1, 0, 1], shapes)
    assert OutputShapes(plan.features).full() == shapes
    layout = make_layout(plan, shapes, OPTIONS)
    config = SparseCoreEmbeddingConfig(
        max_ids_per_table={"a_b": 7}, max_ids_per_chip_per_sample=5
    )
    parts = make_partitioning(plan, layout, OPTIONS, config)
    assert (parts.sparse_cores_per_device, parts.num_replicas) == (2, 2)
    assert (parts.max_ids_per_chip_per_sample, parts.allow_id_dropping) == (5, False)
    (stack,) = parts.stacks
    assert (stack.name, stack.rows, stack.samples) == ("a_b", 160, 40)
    assert stack.features == (0, 1, 2)
    assert (stack.max_ids_per_partition, stack.max_unique_ids_per_partition) == (7, 256)
    places = [(f.sample_offset, f.row_offset, f.rotation) for f in parts.features]
    assert places == [(0, 32, 2), (8, 0, 0), (24, 32, 2)]
    feature = parts.features[1]
    assert (feature.path, feature.table, feature.vocabulary_size) == ("f1", "a", 10)
    assert (feature.combiner, feature.invalid_ids) == ("mean", "error")
    assert (feature.output_shape, feature.samples) == ((4, 4), 16)


@pytest.mark.parametrize(
    ("shape", "config", "text"),
    [
        (
            None,
            {},
            r"Feature f0: a TPU must know the output shape .* but \(None,\) is not",
        ),
        ((None, 2), {}, r"\(None, 2\) is not fully known"),
        (
            (3,),
            {},
            "Feature f0: its output_shape has 3 samples per replica, which is not",
        ),
        (
            (8,),
            {"max_unique_ids_per_table": {"b": 3}},
            "max_unique_ids_per_table names b, but the stacked tables are a. Limits",
        ),
    ],
)
def test_what_sparse_cores_cannot_take_is_refused(
    shape: Any, config: dict[str, Any], text: str
) -> None:
    plan = plan_of([te.TableConfig(10, 3, name="a")], [0], [shape])

    def partition() -> None:
        layout = make_layout(plan, OutputShapes(plan.features).full(), OPTIONS)
        make_partitioning(plan, layout, OPTIONS, SparseCoreEmbeddingConfig(**config))

    with pytest.raises(ValueError, match=text):
        partition()


REFUSED = (
    (te.SGD(0.1, weight_decay_factor=0.5), "weight_decay_factor=0.5"),
    (te.Adagrad(0.1, clipvalue=1.0), "clipvalue=1.0"),
    (te.AdagradMomentum(0.1, clipvalue=(None, 1.0)), r"clipvalue=\(None, 1.0\)"),
    (te.Adam(0.1, lazy_adam=False), "lazy_adam=False"),
    (te.FTRL(0.1, allow_zero_accumulator=True), "allow_zero_accumulator=True"),
    (te.RowwiseAdagrad(0.1), "SparseCores have no op for RowwiseAdagrad"),
)
CARRIED = (
    te.SGD(0.1, clip_weight_min=-1.0),
    te.Adagrad(lambda: 0.1),
    te.AdagradMomentum(0.1, use_nesterov=True),
    te.Adam(0.1, sum_inside_sqrt=False),
    te.FTRL(0.1, multiply_linear_by_learning_rate=True),
    None,
)


@pytest.mark.parametrize(
    ("optimizer", "text"), REFUSED, ids=lambda optimizer: type(optimizer).__name__
)
def test_optimizers_that_sparse_cores_lack_are_refused(
    optimizer: te.SGD, text: str
) -> None:
    plan = plan_of([te.TableConfig(8, 2, optimizer=optimizer, name="a")], [0], [(8,)])
    with pytest.raises(NotImplementedError, match=f"Table 'a': .*{text}"):
        check_optimizers(plan)


@pytest.mark.parametrize(
    "optimizer", CARRIED, ids=lambda optimizer: type(optimizer).__name__
)
def test_optimizers_that_sparse_cores_have_are_carried(optimizer: Any) -> None:
    check_optimizers(plan_of([te.TableConfig(8, 2, optimizer=optimizer)], [0], [(8,)]))
