"""Which tables are stored as one stack, and where in it.

A stack holds tables of one padded width, one optimizer and one quantization. The rule
is that of TensorFlow's SparseCoreLayoutStacker, so that stacks and checkpoints agree:
tables come in the order of their names, and each goes into the first stack of its
kind that has room.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Mapping, Sequence
from typing import Any

from tpu_embedding.layout import errors
from tpu_embedding.layout.plan import Plan, TableSpec, stacking_kind
from tpu_embedding.layout.rotation import check_loads, rotations
from tpu_embedding.layout.sharding import ModSharding

# TensorFlow's own limits: a stack stays below each of them.
ACTIVATION_BYTES_LIMIT = 2**21  # of one SparseCore
SHARD_BYTES_LIMIT = 2**31  # of one device
_FLOAT_BYTES = 4

Shape = tuple[int, ...]


@dataclasses.dataclass(frozen=True)
class StackingOptions:
    """What tables are stacked for.

    Attributes:
      num_devices: Devices that the tables are cut over, TensorFlow's "partitions".
      sparse_cores_per_device: SparseCores of each.
      width_multiple: A stack's width is a multiple of it.
      row_multiple: The rows that a table has in one shard are a multiple of it.
      disable_table_stacking: Each table is a stack of its own.
      stock_feature_counts: Count the samples of the first feature of all only, as
        the caller of TensorFlow's stacker does. It matters where the activations are
        near their limit, and then for checkpoints that TensorFlow wrote.
      shard_loads: By name of the table its load on each shard, were it not rotated;
        tables without one are rotated as TensorFlow does.
      activation_bytes_limit: Activations of a stack on one SparseCore stay below it.
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
        """SparseCores of all devices."""
        return self.num_devices * self.sparse_cores_per_device


@dataclasses.dataclass(frozen=True)
class TableLayout:
    """Where one table is; the fields of TensorFlow's SparseCoreTableLayout.

    Attributes:
      table_name: The table.
      stacked_table_name: Its stack.
      num_sparse_cores: Shards: the SparseCores of all devices.
      num_partitions: Devices.
      total_rows_per_sparse_core_shard: Rows of the whole stack in one shard.
      unsharded_shape: (V, D).
      unsharded_padded_shape: The same with padding.
      sparse_core_shard_row_offset: Rows of other tables before it in each shard.
      sparse_core_shard_rotation: The shard of id 0.
      per_sparse_core_batch_size: Its samples on one SparseCore.
      num_features: Features that look it up.
    """

    table_name: str
    stacked_table_name: str
    num_sparse_cores: int
    num_partitions: int
    total_rows_per_sparse_core_shard: int
    unsharded_shape: Shape
    unsharded_padded_shape: Shape
    sparse_core_shard_row_offset: int
    sparse_core_shard_rotation: int
    per_sparse_core_batch_size: int = 0
    num_features: int = 0

    @property
    def sharding(self) -> ModSharding:
        """Where the rows go."""
        return ModSharding(
            num_shards=self.num_sparse_cores,
            rotation=self.sparse_core_shard_rotation,
            row_offset=self.sparse_core_shard_row_offset,
        )

    @property
    def end(self) -> int:
        """The first row of each shard that is not the table's any more."""
        rows = self.unsharded_padded_shape[0] // self.num_sparse_cores
        return self.sparse_core_shard_row_offset + rows


@dataclasses.dataclass(frozen=True)
class Stack:
    """Tables that are stored as one.

    Attributes:
      name: Its name, that of the tables joined by "_".
      tables: Indices into `Plan.tables`, by name of the table.
      layouts: Where each of them is.
      features: Indices of the features that look them up, ascending.
      samples: Samples per replica of all of them; the stacked batch.
      rows_per_shard: Rows of each shard.
      width: Columns with padding.
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
        """Devices that hold the shards."""
        return self.layouts[0].num_partitions

    @property
    def rows(self) -> int:
        """Rows of all shards."""
        return self.rows_per_shard * self.layouts[0].num_sparse_cores

    @property
    def rows_per_device(self) -> int:
        """Rows of the shards of one device."""
        return self.rows // self.num_devices


@dataclasses.dataclass(frozen=True)
class Layout:
    """All stacks of a plan.

    Attributes:
      stacks: In the order in which their first tables come by name.
      tables: For each table of the plan its place.
      sample_offsets: For each feature its first sample in the stacked batch.
      samples: For each feature its samples per replica.
      feature_stacks: For each feature the index of its stack.
      first_tokens: For each feature the first row of the stack that is its table's.
    """

    stacks: tuple[Stack, ...]
    tables: tuple[TableLayout, ...]
    sample_offsets: tuple[int, ...]
    samples: tuple[int, ...]
    feature_stacks: tuple[int, ...]
    first_tokens: tuple[int, ...]


def make_layout(
    plan: Plan, output_shapes: Sequence[Shape | None], options: StackingOptions
) -> Layout:
    """Stacks the tables of a plan.

    Args:
      plan: Its tables may have layouts of their own, which are kept.
      output_shapes: For each feature the shape of its activations per replica,
        without the embedding axis; None counts as no samples.
      options: What they are stacked for.

    Raises:
      ValueError: If a table's layout or load does not fit, or two stacks have one name.
    """
    check_loads([s.name for s in plan.tables], options.shard_loads, options.num_shards)
    samples = tuple(0 if s is None else math.prod(s) for s in output_shapes)
    by_name = sorted(plan.tables, key=lambda spec: spec.name)
    own = [spec for spec in by_name if spec.config.layout is not None]
    layouts = {spec.index: _given(spec, options) for spec in own}
    for pile in _pile(plan, by_name, samples, options):
        layouts.update(pile.layouts(options))
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
        first_tokens=tuple(
            place.sparse_core_shard_row_offset * place.num_sparse_cores
            for place in places
        ),
    )


def layout_fields(layout: TableLayout) -> dict[str, Any]:
    """The fields as TensorFlow's SparseCoreTableLayout takes them."""
    return {f.name: getattr(layout, f.name) for f in dataclasses.fields(layout)}


@dataclasses.dataclass
class _Pile:
    """A stack that is being made."""

    kind: Any
    members: list[TableSpec] = dataclasses.field(default_factory=list)
    samples: list[int] = dataclasses.field(default_factory=list)
    counts: list[int] = dataclasses.field(default_factory=list)
    activation_bytes: int = 0
    shard_bytes: int = 0

    def layouts(self, options: StackingOptions) -> dict[int, TableLayout]:
        """The place of each member, by index of the table."""
        shapes = [_padded(spec, options) for spec in self.members]
        heights = [rows // options.num_shards for rows, _ in shapes]
        turns = rotations(
            [spec.name for spec in self.members],
            (options.num_devices, options.sparse_cores_per_device),
            options.shard_loads,
        )
        return {
            spec.index: TableLayout(
                table_name=spec.name,
                stacked_table_name="_".join(s.name for s in self.members),
                num_sparse_cores=options.num_shards,
                num_partitions=options.num_devices,
                total_rows_per_sparse_core_shard=sum(heights),
                unsharded_shape=(spec.config.vocabulary_size, spec.config.dim),
                unsharded_padded_shape=shapes[i],
                sparse_core_shard_row_offset=sum(heights[:i]),
                sparse_core_shard_rotation=turns[i],
                per_sparse_core_batch_size=(
                    self.samples[i] // options.sparse_cores_per_device
                ),
                num_features=self.counts[i],
            )
            for i, spec in enumerate(self.members)
        }


def _pile(
    plan: Plan,
    by_name: Sequence[TableSpec],
    samples: Sequence[int],
    options: StackingOptions,
) -> list[_Pile]:
    """Puts each table without a layout into the first stack that has room."""
    piles: list[_Pile] = []
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
        pile = None
        if not options.disable_table_stacking:
            pile = next(
                (
                    p
                    for p in piles
                    if p.kind == kind
                    and p.activation_bytes + activations
                    < options.activation_bytes_limit
                    and p.shard_bytes + shard < options.shard_bytes_limit
                ),
                None,
            )
        if pile is None:
            pile = _Pile(kind)
            piles.append(pile)
        pile.members.append(spec)
        pile.samples.append(own)
        pile.counts.append(len(features))
        pile.activation_bytes += activations
        pile.shard_bytes += shard
    return piles


def _padded(spec: TableSpec, options: StackingOptions) -> tuple[int, int]:
    rows_multiple = options.num_shards * options.row_multiple
    return (
        _round_up(spec.config.vocabulary_size, rows_multiple),
        _round_up(spec.config.dim, options.width_multiple),
    )


def _round_up(value: int, multiple: int) -> int:
    return -(-value // multiple) * multiple


def _given(spec: TableSpec, options: StackingOptions) -> TableLayout:
    """The layout that the user gave: ours, or TensorFlow's proto of the same fields."""
    given = spec.config.layout
    try:
        values = {
            f.name: getattr(given, f.name) for f in dataclasses.fields(TableLayout)
        }
    except AttributeError as error:
        raise errors.layout_kind(spec.name, given) from error
    for shape in ("unsharded_shape", "unsharded_padded_shape"):
        values[shape] = tuple(values[shape])
    layout = TableLayout(**values)
    for what, got, wanted in (
        ("table_name", layout.table_name, spec.name),
        ("num_sparse_cores", layout.num_sparse_cores, options.num_shards),
        ("num_partitions", layout.num_partitions, options.num_devices),
        (
            "unsharded_shape",
            layout.unsharded_shape,
            (spec.config.vocabulary_size, spec.config.dim),
        ),
    ):
        if got != wanted:
            raise errors.layout_field(spec.name, what, got, wanted)
    padded = layout.unsharded_padded_shape
    if (
        len(padded) != 2
        or any(p < s for p, s in zip(padded, layout.unsharded_shape, strict=True))
        or padded[0] % options.num_shards
    ):
        raise errors.layout_padding(spec.name, padded, options.num_shards)
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
    """That tables of one stack are of one kind and do not overlap."""
    specs = [plan.tables[index] for index in tables]
    first, width = specs[0], layouts[0].unsharded_padded_shape[1]
    for spec, layout in zip(specs, layouts, strict=True):
        same = layout.unsharded_padded_shape[1] == width and stacking_kind(
            spec
        ) == stacking_kind(first)
        if not same:
            raise errors.stack_of_two_kinds(name, first.name, spec.name)
    ordered = sorted(layouts, key=lambda la: la.sparse_core_shard_row_offset)
    for before, after in itertools.pairwise(ordered):
        if after.sparse_core_shard_row_offset < before.end:
            raise errors.stack_overlap(name, before.table_name, after.table_name)
