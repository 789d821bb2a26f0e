"""The stacks in which tables are stored, and the place of each table in its stack.

A stack holds tables of one padded width, one optimizer and one quantization. The
stacking rule is that of TensorFlow's SparseCoreLayoutStacker, so that stacks and
checkpoints agree: tables are taken in the order of their names, and each goes into the
first stack of its kind that has room.

Each table is sharded by row, modulo the number of SparseCores of all devices (the
*shards*), and rotated so that the first rows of all tables are not on one SparseCore.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Mapping, Sequence
from typing import Any

from tpu_embedding.config import SparseCoreEmbeddingConfig
from tpu_embedding.layout.partition import TableLayout
from tpu_embedding.layout.plan import FeatureSpec, Plan, TableSpec, stacking_kind

# TensorFlow's limits. A stack stays below each of them.
ACTIVATION_BYTES_LIMIT = 2**21  # for the activations on one SparseCore
SHARD_BYTES_LIMIT = 2**31  # for the part of a stack on one device
_FLOAT_BYTES = 4

Shape = tuple[int, ...]


@dataclasses.dataclass(frozen=True)
class StackingOptions:
    """The hardware and the limits that tables are stacked for.

    Attributes:
      num_devices: Devices that share the tables; TensorFlow's "partitions".
      sparse_cores_per_device: SparseCores of each device.
      width_multiple: The width of a stack is a multiple of it.
      row_multiple: The number of rows of a table in one shard is a multiple of it.
      disable_table_stacking: Give each table a stack of its own.
      stock_feature_counts: Count only the samples of the first of all features, as
        the caller of TensorFlow's stacker does. This matters for checkpoints that
        TensorFlow wrote, if the activations are near their limit.
      shard_loads: Load of each shard by table name, measured without rotation. Tables
        without a load are rotated as in TensorFlow.
      activation_bytes_limit: A stack's activations on one SparseCore stay below it.
      shard_bytes_limit: The part of a stack on one device stays below it.
    """

    num_devices: int
    sparse_cores_per_device: int
    width_multiple: int = 8
    row_multiple: int = 8
    disable_table_stacking: bool = False
    stock_feature_counts: bool = False
    shard_loads: Mapping[str, Sequence[float]] = dataclasses.field(default_factory=dict)
    activation_bytes_limit: int = ACTIVATION_BYTES_LIMIT
    shard_bytes_limit: int = SHARD_BYTES_LIMIT

    @property
    def num_shards(self) -> int:
        """The number of SparseCores of all devices."""
        return self.num_devices * self.sparse_cores_per_device


@dataclasses.dataclass(frozen=True)
class Stack:
    """Tables that are stored as one.

    Attributes:
      name: Names of the tables, joined by "_".
      tables: Indices into `Plan.tables`, sorted by table name.
      layouts: The place of each table.
      features: Indices of the features that look the tables up, ascending.
      samples: Samples per replica of all these features; the stacked batch.
      rows_per_shard: Rows of each shard.
      width: Columns, with padding.
    """

    name: str
    tables: tuple[int, ...]
    layouts: tuple[TableLayout, ...]
    features: tuple[int, ...]
    samples: int
    rows_per_shard: int
    width: int

    @property
    def num_devices(self) -> int:
        """The number of devices that hold the shards."""
        return self.layouts[0].num_partitions

    @property
    def rows(self) -> int:
        """The number of rows of all shards."""
        return self.rows_per_shard * self.layouts[0].num_sparse_cores

    @property
    def rows_per_device(self) -> int:
        """The number of rows of the shards of one device."""
        return self.rows // self.num_devices


@dataclasses.dataclass(frozen=True)
class Layout:
    """All stacks of a plan.

    Attributes:
      stacks: The stacks, ordered by the first table name of each.
      tables: The place of each table of the plan.
      sample_offsets: For each feature, its first sample in the stacked batch.
      samples: For each feature, its samples per replica.
      feature_stacks: For each feature, the index of its stack.
      row_offsets: For each feature, the first row of its table in the stack.
      output_shapes: For each feature, the shape that the layout was made for, as
        `make_layout` takes it.
    """

    stacks: tuple[Stack, ...]
    tables: tuple[TableLayout, ...]
    sample_offsets: tuple[int, ...]
    samples: tuple[int, ...]
    feature_stacks: tuple[int, ...]
    row_offsets: tuple[int, ...]
    output_shapes: tuple[Shape | None, ...]


def lay_out_whole(plan: Plan, config: SparseCoreEmbeddingConfig) -> Layout:
    """Returns the stacks of tables that are not cut: one shard, no padding."""
    return make_layout(
        plan,
        [full_shape(spec) for spec in plan.features],
        StackingOptions(
            num_devices=1,
            sparse_cores_per_device=1,
            width_multiple=1,
            row_multiple=1,
            disable_table_stacking=config.disable_table_stacking,
            stock_feature_counts=config.stock_feature_counts,
        ),
    )


def full_shape(spec: FeatureSpec) -> Shape | None:
    """Returns the output shape of a FeatureConfig, or None if an axis is open."""
    shape = spec.config.output_shape
    if shape is None:
        return None
    known = tuple(axis for axis in shape if axis is not None)
    return known if len(known) == len(shape) else None


def make_layout(
    plan: Plan, output_shapes: Sequence[Shape | None], options: StackingOptions
) -> Layout:
    """Stacks the tables of a plan, keeping the `layout` of tables that have one.

    `output_shapes` has the shape of each feature's activations per replica, without
    the embedding axis; None counts as no samples.
    """
    _check_loads([s.name for s in plan.tables], options)
    samples = tuple(0 if s is None else math.prod(s) for s in output_shapes)
    by_name = sorted(plan.tables, key=lambda spec: spec.name)
    layouts = {
        spec.index: _given_layout(spec, options)
        for spec in by_name
        if spec.config.layout is not None
    }
    for stack in _fill_stacks(plan, by_name, samples, options):
        layouts.update(stack.layouts(options))
    stacks = _collect(plan, [s.index for s in by_name], layouts, samples)
    offsets: dict[int, int] = {}
    owners: dict[int, int] = {}
    for index, stack in enumerate(stacks):
        total = 0
        for feature in stack.features:
            offsets[feature] = total
            owners[feature] = index
            total += samples[feature]
    places = [layouts[spec.table] for spec in plan.features]
    return Layout(
        stacks=tuple(stacks),
        tables=tuple(layouts[i] for i in range(len(plan.tables))),
        sample_offsets=tuple(offsets[i] for i in range(len(samples))),
        samples=samples,
        feature_stacks=tuple(owners[i] for i in range(len(samples))),
        row_offsets=tuple(
            place.sparse_core_shard_row_offset * place.num_sparse_cores
            for place in places
        ),
        output_shapes=tuple(output_shapes),
    )


def rotations(
    tables: Sequence[str],
    devices: int,
    sparse_cores_per_device: int,
    loads: Mapping[str, Sequence[float]],
) -> list[int]:
    """Returns the shard of id 0 for each table of a stack.

    TensorFlow rotates each table by one device more than the table before it. Tables
    with a known load are placed greedily (Graham, 1969): the heaviest first, each at
    the rotation that keeps the load of the fullest shard smallest. Ties go to
    TensorFlow's rotation, then to the smallest.

    >>> rotations(["a", "b"], 2, 1, {"a": [3, 1], "b": [1, 2]})
    [0, 0]
    >>> rotations(["a", "b"], 2, 1, {})
    [0, 1]

    Args:
      tables: Table names, in the order of the stack.
      devices: Devices that share the tables.
      sparse_cores_per_device: SparseCores of each device.
      loads: Load of each shard by table name, measured without rotation.
    """
    shards = devices * sparse_cores_per_device
    turns = itertools.cycle(range(0, shards, sparse_cores_per_device))
    found = list(itertools.islice(turns, len(tables)))
    total = [0.0] * shards

    def stacked(rotation: int, load: Sequence[float]) -> list[float]:
        """Returns the loads after adding a table's, from the shard of its id 0 on."""
        before = [*total[rotation:], *total[:rotation]]
        return [own + other for own, other in zip(before, load, strict=True)]

    known = [i for i, table in enumerate(tables) if table in loads]
    for i in sorted(known, key=lambda i: -sum(loads[tables[i]])):
        load = loads[tables[i]]
        heights = {r: max(stacked(r, load)) for r in (found[i], *range(shards))}
        found[i] = min(heights, key=lambda rotation: heights[rotation])
        total = stacked(found[i], load)
        total = [*total[shards - found[i] :], *total[: shards - found[i]]]
    return found


@dataclasses.dataclass
class _OpenStack:
    """A stack to which tables are still added."""

    kind: Any
    tables: list[TableSpec] = dataclasses.field(default_factory=list)
    samples: list[int] = dataclasses.field(default_factory=list)
    num_features: list[int] = dataclasses.field(default_factory=list)
    activation_bytes: int = 0
    shard_bytes: int = 0

    def layouts(self, options: StackingOptions) -> dict[int, TableLayout]:
        """Returns the place of each table, by its index in the plan."""
        shapes = [_padded(spec, options) for spec in self.tables]
        heights = (rows // options.num_shards for rows, _ in shapes)
        *offsets, height = itertools.accumulate(heights, initial=0)
        names = [spec.name for spec in self.tables]
        stack_name = "_".join(names)
        rotation = rotations(
            names,
            options.num_devices,
            options.sparse_cores_per_device,
            options.shard_loads,
        )
        return {
            spec.index: TableLayout(
                table_name=spec.name,
                stacked_table_name=stack_name,
                num_sparse_cores=options.num_shards,
                num_partitions=options.num_devices,
                total_rows_per_sparse_core_shard=height,
                unsharded_shape=(spec.config.max_rows, spec.config.dim),
                unsharded_padded_shape=shapes[i],
                sparse_core_shard_row_offset=offsets[i],
                sparse_core_shard_rotation=rotation[i],
                per_sparse_core_batch_size=(
                    self.samples[i] // options.sparse_cores_per_device
                ),
                num_features=self.num_features[i],
            )
            for i, spec in enumerate(self.tables)
        }


def _fill_stacks(
    plan: Plan,
    by_name: Sequence[TableSpec],
    samples: Sequence[int],
    options: StackingOptions,
) -> list[_OpenStack]:
    """Puts each table without a layout into the first stack that has room."""
    stacks: list[_OpenStack] = []
    counted = range(1 if options.stock_feature_counts else len(plan.features))
    for spec in by_name:
        if spec.config.layout is not None:
            continue
        features = [f for f in spec.features if f in counted]
        own = sum(samples[f] for f in features)
        rows, width = _padded(spec, options)
        row_bytes = width * _FLOAT_BYTES
        activations = row_bytes * (own // options.sparse_cores_per_device)
        shard = row_bytes * rows // options.num_devices
        kind = (width, *stacking_kind(spec))
        for stack in [] if options.disable_table_stacking else stacks:
            if (
                stack.kind == kind
                and stack.activation_bytes + activations
                < options.activation_bytes_limit
                and stack.shard_bytes + shard < options.shard_bytes_limit
            ):
                break
        else:
            stack = _OpenStack(kind)
            stacks.append(stack)
        stack.tables.append(spec)
        stack.samples.append(own)
        stack.num_features.append(len(features))
        stack.activation_bytes += activations
        stack.shard_bytes += shard
    return stacks


def _padded(spec: TableSpec, options: StackingOptions) -> tuple[int, int]:
    row_multiple = options.num_shards * options.row_multiple
    return (
        -(-spec.config.max_rows // row_multiple) * row_multiple,
        -(-spec.config.dim // options.width_multiple) * options.width_multiple,
    )


def _given_layout(spec: TableSpec, options: StackingOptions) -> TableLayout:
    """Checks the user's layout: a TableLayout, or TensorFlow's proto of its fields."""
    given = spec.config.layout
    fields = dataclasses.fields(TableLayout)
    # The proto of TensorFlow 2.18 lacks the fields that have defaults.
    if not all(hasattr(given, f.name) or f.default == 0 for f in fields):
        raise ValueError(
            f"Table {spec.name!r}: layout must be None, a TableLayout or a "
            f"SparseCoreTableLayout proto. Received: {given!r}."
        )
    values = {f.name: getattr(given, f.name) for f in fields if hasattr(given, f.name)}
    for shape in ("unsharded_shape", "unsharded_padded_shape"):
        values[shape] = tuple(values[shape])
    expected = {
        "table_name": spec.name,
        "num_sparse_cores": options.num_shards,
        "num_partitions": options.num_devices,
        "unsharded_shape": (spec.config.max_rows, spec.config.dim),
    }
    for name, value in expected.items():
        if values[name] != value:
            raise ValueError(
                f"Table {spec.name!r}: {name} of its layout is {values[name]!r}, but "
                f"here it is {value!r}. Use the layout of an embedding of this table "
                "on this hardware, or set layout=None."
            )
    layout = TableLayout(**values)
    padded = layout.unsharded_padded_shape
    if (
        len(padded) != 2
        or any(p < s for p, s in zip(padded, layout.unsharded_shape, strict=True))
        or padded[0] % options.num_shards
    ):
        raise ValueError(
            f"Table {spec.name!r}: unsharded_padded_shape of its layout is {padded}; "
            "it needs two axes, neither smaller than the table's, and a number of rows "
            f"that is a multiple of the {options.num_shards} SparseCores."
        )
    return layout


def _collect(
    plan: Plan,
    by_name: Sequence[int],
    layouts: dict[int, TableLayout],
    samples: Sequence[int],
) -> list[Stack]:
    members: dict[str, list[int]] = {}
    for index in by_name:
        members.setdefault(layouts[index].stacked_table_name, []).append(index)
    stacks = []
    for name, tables in members.items():
        own = tuple(layouts[index] for index in tables)
        _check_stack(plan, name, tables, own)
        features = sorted(f for index in tables for f in plan.tables[index].features)
        stacks.append(
            Stack(
                name=name,
                tables=tuple(tables),
                layouts=own,
                features=tuple(features),
                samples=sum(samples[f] for f in features),
                rows_per_shard=max(
                    max(la.end, la.total_rows_per_sparse_core_shard) for la in own
                ),
                width=own[0].unsharded_padded_shape[1],
            )
        )
    return stacks


def _check_stack(
    plan: Plan, name: str, tables: Sequence[int], layouts: Sequence[TableLayout]
) -> None:
    """Checks that the tables of a stack are of one kind and do not overlap."""
    specs = [plan.tables[index] for index in tables]
    kinds = [
        (layout.unsharded_padded_shape[1], *stacking_kind(spec))
        for spec, layout in zip(specs, layouts, strict=True)
    ]
    for spec, kind in zip(specs, kinds, strict=True):
        if kind != kinds[0]:
            raise ValueError(
                f"Tables {specs[0].name!r} and {spec.name!r} are both in stack "
                f"{name!r}, but tables of one stack must have the same padded width, "
                "optimizer and quantization_config. Rename a table or give it another "
                "stacked_table_name in its layout."
            )
    ordered = sorted(layouts, key=lambda la: la.sparse_core_shard_row_offset)
    for before, after in itertools.pairwise(ordered):
        if after.sparse_core_shard_row_offset < before.end:
            raise ValueError(
                f"Tables {before.table_name!r} and {after.table_name!r} overlap in "
                f"stack {name!r}. Give them layouts that do not overlap, or rename a "
                'table: a stack is named after its tables, joined by "_".'
            )


def _check_loads(tables: Sequence[str], options: StackingOptions) -> None:
    for table, load in options.shard_loads.items():
        if table not in tables:
            raise ValueError(
                f"`shard_loads` names the table {table!r}, but the tables are "
                f"{', '.join(tables)}. Leave it out, or name the tables as in the "
                "profile."
            )
        if len(load) != options.num_shards:
            raise ValueError(
                f"Table {table!r}: `shard_loads` has {len(load)} numbers, but there "
                f"are {options.num_shards} SparseCores. Create a profile with that "
                "many shards."
            )
